"""Attention to keys and values of few bits in plain XLA: widened tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.op import STORED
from rewriter.kernels.attention.stored_form import STEPS, as_attention, widened
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    return xla.supports(as_attention(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns whether `forward` is likely to beat the program: on a CPU, as attention.

    There XLA writes keys and values in floats, and reads them again.
    """
    if platform != "cpu":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    return xla.profitable(as_attention(spec), platform)


def default(spec: Spec, device: Device) -> xla.Blocks:
    """Returns blocks for a device."""
    return xla.default(as_attention(spec), device)


def configs(spec: Spec, device: Device) -> list[xla.Blocks]:
    """Returns a few blocks worth measuring."""
    return xla.configs(as_attention(spec), device)


def backward(**given: Any) -> dict[str, Array]:
    """Returns the cotangents of float operands; the reference computes those of scales.

    Keys and values are widened as a whole.

    Args:
        **given: As for bounded attention, and operands and parameters of the form.
    """
    found = xla.backward(**widened(given))
    few = {name for name, param in STEPS.items() if given.get(param) is not None}
    return {name: x for name, x in found.items() if name not in few}


KERNEL = XLA.kernel(
    STORED.name, xla.forward, backward, supports,
    Speed(profitable), Space(xla.Blocks, default, configs),
    saves_out=True, merges=True,
    saves=lambda spec: xla.KERNEL.traits.saves(as_attention(spec)),
)  # fmt: skip
