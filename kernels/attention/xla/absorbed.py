"""Attention to keys and values made of a latent, in plain XLA: absorbed weights."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.estimate import of_blocks, of_xla
from rewriter.kernels.attention.expanded_form import (
    absorbed,
    as_attention,
    as_latent,
    products,
)
from rewriter.kernels.attention.latent_form import as_attention as of_latent
from rewriter.kernels.attention.latent_form import attended
from rewriter.kernels.attention.op import EXPANDED
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.device import Device
from rewriter.ops.estimate import PRODUCTS, item, seconds
from rewriter.ops.kernel import Spec, Speed
from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

LESS = 2.0
"""How many times fewer operations it must take, where no time is estimated."""


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    return xla.supports(of_latent(as_latent(spec)))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes if it takes at most half of the program's operations."""
    del platform
    if spec.symbolic:
        return no("symbolic", "sizes must be known to tell whether it pays")
    (b, t, n, _), (_, s, c) = spec.shape("q"), spec.shape("latent")
    pairs, wide = 2.0 * b * t * s * n, as_attention(spec)
    before = products(spec)[0] + pairs * (wide.shape("k")[3] + wide.shape("v")[3])
    rotary = spec.shape("q_rope")[3] if spec.has("q_rope") else 0
    after = products(spec)[1] + pairs * (2 * c + rotary)
    if LESS * after <= before:
        return YES
    share = 100 * after / max(before, 1.0)
    return no("operations", f"absorbed weights take {share:.0f} % of the operations")


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"absorbed"``."""
    size = item(spec, "q")
    how = {"compute": PRODUCTS, "item": size}
    wide, after = as_attention(spec), of_latent(as_latent(spec))
    before, behind = products(spec)
    moved = 2.0 * sum(map(wide.nbytes, ("k", "v")))
    xla_s = seconds(device, before, moved, launches=2, **how)
    own = seconds(device, behind, 0.0, launches=2, **how)
    return {
        "xla": xla_s + of_xla(wide, device, passes),
        "absorbed": own + of_blocks(after, device, passes),
    }


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether the estimate holds: without gradients."""
    del spec, device
    if passes == "forward":
        return YES
    return no("gradients", "gradients make all keys and values, as the program does")


def profitable_backward(spec: Spec, platform: str, differentiated: int) -> Verdict:
    """Returns no: gradients make all keys and values."""
    del platform, differentiated
    return modelled(spec, Device("", ""), "vjp")


def forward(**given: Any) -> Array:
    """Returns the result, as `reference` does, with no keys or values of heads."""
    return absorbed(functools.partial(attended, xla.forward), **given)


KERNEL = XLA.kernel(
    EXPANDED.name, forward, None, supports,
    Speed(profitable, profitable_backward, estimate=estimate, modelled=modelled),
    name="absorbed",
)  # fmt: skip
