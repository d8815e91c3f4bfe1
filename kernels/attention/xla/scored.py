"""Attention with a function of scores in plain XLA: computed tile by tile.

The derivative of the function is JAX's own, for one tile at a time. No array
of all queries and keys is made, forward or backward, unless the function reads one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.empty import NAN_PASSING, ZERO_NAN_PASSING
from rewriter.kernels.attention.op import SCORED
from rewriter.kernels.attention.scored_form import as_attention
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Space, Speed, Traits
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    checks = []
    if spec.param("empty_rows") in (NAN_PASSING, ZERO_NAN_PASSING):
        checks.append(no("rows", "rows without keys pass NaN to a function of scores"))
    return all_of(xla.supports(as_attention(spec)), *checks)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns whether `forward` is likely to beat the program: as bounded attention."""
    return xla.profitable(as_attention(spec), platform)


def default(spec: Spec, device: Device) -> xla.Blocks:
    """Returns blocks for a device."""
    return xla.default(as_attention(spec), device)


def configs(spec: Spec, device: Device) -> list[xla.Blocks]:
    """Returns a few blocks worth measuring."""
    return xla.configs(as_attention(spec), device)


KERNEL = Kernel(
    name="memory_bounded",
    op=SCORED.name,
    platforms=PLATFORMS,
    version=1,
    forward=xla.forward,
    backward=xla.backward,
    limits=Limits(supports),
    speed=Speed(profitable),
    traits=Traits(memory_bounded=True, merges=True, saves=xla.KERNEL.traits.saves),
    space=Space(xla.Blocks, default, configs),
    backward_space=Space(xla.Blocks, default, configs),
)
