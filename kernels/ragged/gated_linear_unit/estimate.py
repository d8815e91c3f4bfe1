"""Estimates the time of a gated linear unit of experts on a TPU: whole, and by parts.

Shares of the peak come from the compiler's simulation with group sizes known at compile
time (``tests/bench/results/tpu_experts_cycles.json``; libtpu 0.0.50, bfloat16, four
groups, tiles of 512 rows). The first is the unit's, the second that of one ragged dot
of ours:

m k f              v5e            v5p            v6e
4096 4096 2048     0.97   0.95    0.97   0.96    0.88   0.85
4096 2048 1024     0.94   0.90    0.94           0.81   0.75

The unit saves joining the branches, which reads both from memory. On v5p ragged dots
count as slower than in the simulation, and so does the unit.
"""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.kernels.ragged.dot.tpu_estimate import LIKE
from rewriter.kernels.ragged.dot.tpu_estimate import estimate as of_dot
from rewriter.kernels.ragged.gated_linear_unit.by_parts import part_of
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import Unit, unit_of
from rewriter.ops import tpu
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec

SHARES = {"v5e": 0.95, "v5p": 0.85, "v6e": 0.85}
"""Shares of the peak with both branches in one pass."""

ALIKE = SHARES["v5p"]
"""The share of an unknown TPU."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, ``"by_parts"`` and ``"mosaic_tpu"``.

    By parts, each ragged dot is computed by XLA or by our kernel, whichever is faster.
    Joining the branches then reads them from memory. Gradients are those of the parts,
    from saved branches.
    """
    unit, part = unit_of(spec), part_of(spec)
    kept = unit.kept if passes != "forward" else 0
    made = dict.fromkeys(("xla", "by_parts", "mosaic_tpu"), 0.0)
    if passes != "vjp":
        xla, best = _of_dots(unit, part, device, "forward")
        joined = _moved(unit, device, 2 * unit.kept + unit.product.items[2])
        made = {"xla": xla + joined, "by_parts": best + joined,
                "mosaic_tpu": _whole(unit, device, kept)}  # fmt: skip
    if passes != "forward":
        xla, best = _of_dots(unit, part, device, "vjp")
        joined = _moved(unit, device, 4 * unit.kept + unit.product.items[2])
        for name in made:
            made[name] += joined + (xla if name == "xla" else best)
    return made


def _of_dots(
    unit: Unit, part: Spec, device: Device, passes: str
) -> tuple[float, float]:
    """Seconds of the ragged dots by XLA, and by the faster of both."""
    times, dots = of_dot(part, device, passes), 1 if unit.halves else 2
    return dots * times["xla"], dots * min(times.values())


def _moved(unit: Unit, device: Device, item: int) -> float:
    """Seconds of so many bytes for each number of a branch."""
    numbers = float(unit.product.m * unit.product.n)
    return seconds(device, 0.0, numbers * item, launches=0)


def _whole(unit: Unit, device: Device, kept: int) -> float:
    """Seconds of both branches in one pass, with some bytes saved for each."""
    name, p = tpu.generation(device).name, unit.product
    share = SHARES.get(LIKE.get(name, name), ALIKE)
    left, right, out = p.items
    matrices = 2 * min(p.m, p.groups) * p.k * p.n * right
    moved = p.m * p.k * left + matrices + p.m * p.n * (out + 2 * kept)
    flops, item = 4.0 * p.m * p.k * p.n, max(left, right)
    # As many launches as parts: their time on a TPU was not measured.
    starts = 1 if unit.halves else 2
    of_flops = seconds(device, flops, 0.0, compute=share, item=item, launches=starts)
    return max(of_flops, seconds(device, 0.0, float(moved), launches=starts))
