"""Says which kernels may be chosen for a use, and why others may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import InconclusiveDimensionOperation

from rewriter.config import Config
from rewriter.ops.device import Device, attached, deterministic_xla
from rewriter.ops.kernel import Kernel, Spec
from rewriter.support.verdict import Verdict, no


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
    return decided(kernel.limits.supports, spec)


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
