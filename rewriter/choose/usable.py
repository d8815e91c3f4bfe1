"""Says which kernels may be chosen for a use, and why others may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import InconclusiveDimensionOperation

from rewriter import _jax
from rewriter.config import Config
from rewriter.ops.device import Device, attached, deterministic_xla
from rewriter.ops.kernel import Kernel, Spec
from rewriter.support import promotion
from rewriter.support.threads import first_line
from rewriter.support.verdict import YES, Verdict, no


def usable(kernel: Kernel, spec: Spec, device: Device, config: Config) -> Verdict:
    """Returns whether a kernel may be chosen for a site on a device."""
    if config.exporting and not kernel.traits.exportable:
        return no("export", "JAX does not keep its call stable in exported programs")
    if device.platform not in kernel.platforms:
        names = ", ".join(kernel.platforms)
        return no("platform", f"runs on {names}, not {device.platform}")
    verdict = kernel.limits.runs_on(device)
    if verdict.ok and only_deterministic(config):
        verdict = kernel.limits.deterministic(None)
    return _supported(kernel, spec, device, config) if verdict.ok else verdict


def _supported(kernel: Kernel, spec: Spec, device: Device, config: Config) -> Verdict:
    """Whether a kernel takes the use: there if it is only asked, else here."""
    there = kernel.limits.supports_on
    if there is not None and config.explaining and device != attached():
        return decided(there, spec, device)
    verdict = decided(kernel.limits.supports, spec)
    return _traced(kernel, spec) if verdict.ok and spec.symbolic else verdict


def _traced(kernel: Kernel, spec: Spec) -> Verdict:
    """Whether a kernel's code takes symbolic sizes; its check may not know all of it.

    A kernel that does not would give way to the reference where it is lowered.
    """
    given = {
        n: jax.ShapeDtypeStruct(spec.shape(n), spec.dtype(n)) for n in spec.operands
    }
    how = dict(spec.params)

    def call(given: dict[str, jax.Array]) -> Any:
        if kernel.backward is None:
            return kernel.forward(**given, **how)
        out, saved = kernel.forward(**given, **how, residuals=True)
        if kernel.together is not None:
            kernel.together(**given, cotangent=out, **how)
        kept = out if kernel.traits.saves_out else None
        own = {"out": kept, "residuals": saved, "cotangent": out}
        return kernel.backward(**given, **own, **how)

    try:
        with _jax.on_one_device(), promotion.as_usual():
            jax.eval_shape(call, given)
    except Exception as why:  # a kernel may fail in any way on a size without a number
        return no("symbolic", f"it fails on symbolic sizes: {first_line(why)}")
    return YES


def decided(check: Callable[..., Verdict], spec: Spec, *args: Any) -> Verdict:
    """A kernel's check; no where it compares symbolic sizes that may be either."""
    try:
        return check(spec, *args)
    except InconclusiveDimensionOperation as why:
        if not spec.symbolic:
            raise
        return no("symbolic", str(why).partition("\n")[0])


def only_deterministic(config: Config) -> bool:
    """Whether results must have the same bits in every run."""
    return config.deterministic or deterministic_xla()


def reasons_of(verdict: Verdict) -> str:
    """The reasons of a verdict, as one text."""
    return "; ".join(r.text for r in verdict.reasons)


def pays(kernel: Kernel, spec: Spec, platform: str, differentiated: int) -> Verdict:
    """Whether a kernel is worth it by its rule of thumb."""
    if differentiated and kernel.speed.profitable_backward is not None:
        check = kernel.speed.profitable_backward
        return decided(check, spec, platform, differentiated)
    return decided(kernel.speed.profitable, spec, platform)
