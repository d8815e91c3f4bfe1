"""Attention to keys and values made of a latent on Hopper GPUs: absorbed weights."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import hopper_latent
from rewriter.kernels.attention.expanded_form import absorbed, as_latent, products
from rewriter.kernels.attention.hopper_latent import time_model
from rewriter.kernels.attention.op import EXPANDED
from rewriter.kernels.attention.xla import absorbed as plain
from rewriter.kernels.shared.hopper import by_estimate
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.estimate import PRODUCTS, item, seconds
from rewriter.ops.kernel import Space, Speed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec
    from rewriter.support.verdict import Verdict


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: those of attention to a latent."""
    return hopper_latent.supports(as_latent(spec))


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"hopper_absorbed"``."""
    xla, own = plain.estimate(spec, device, passes)["xla"], math.inf
    if modelled(spec, device, passes).ok:
        flops, size = products(spec)[1], item(spec, "q")
        own = time_model.estimate(as_latent(spec), device, passes)["hopper_latent"]
        own += seconds(device, flops, 0.0, compute=PRODUCTS, item=size, launches=2)
    return {"xla": xla, "hopper_absorbed": own}


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether attention to the latent was measured."""
    return time_model.modelled(as_latent(spec), device, passes)


def default(spec: Spec, device: Device) -> hopper_latent.Programs:
    """Returns the default config: that of attention to the latent."""
    return hopper_latent.default(as_latent(spec), device)


def configs(spec: Spec, device: Device) -> list[hopper_latent.Programs]:
    """Returns configs worth measuring, most promising first."""
    return list(hopper_latent.configs(as_latent(spec), device))


def fits(config: hopper_latent.Programs, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run."""
    return hopper_latent.fits(config, as_latent(spec), device)


def forward(*, config: hopper_latent.Programs | None = None, **given: Any) -> Array:
    """Returns the result, as `reference` does, with no keys or values of heads.

    Args:
        config: How the work is split; the default config if absent.
        **given: Operands and parameters of the form.
    """
    return absorbed(functools.partial(hopper_latent.forward, config=config), **given)


KERNEL = HOPPER.kernel(
    EXPANDED.name, forward, None, supports,
    Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
    Space(hopper_latent.Programs, default, configs, fits), name="hopper_absorbed",
)  # fmt: skip
