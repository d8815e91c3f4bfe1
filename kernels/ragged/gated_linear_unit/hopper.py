"""The gated linear unit of experts on Hopper: both branches in one pass over the rows.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.ragged.dot import hopper as ragged_dot
from rewriter.kernels.ragged.dot.hopper.config import STEP, Tiles
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.gated_linear_unit.by_parts import (
    ByParts,
    part_of,
    refused_halves,
)
from rewriter.kernels.ragged.gated_linear_unit.hopper_estimate import (
    estimate,
    modelled,
)
from rewriter.kernels.ragged.gated_linear_unit.use import Use
from rewriter.kernels.shared import gated_tiles
from rewriter.kernels.shared.activations_hopper import ON_HOPPER
from rewriter.kernels.shared.hopper import by_estimate
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.kernel import Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

NAME = "ragged_gated_linear_unit"
"""The name of the kernel in profiles."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: 16 bits, k and f multiples of 64."""
    found = [supports_parts(spec)]
    if not found[0].ok:
        return found[0]
    found += refused_halves(spec, STEP)
    return all_of(*found, gated_tiles.computes(spec.param("activation")))


def supports_parts(spec: Spec) -> Verdict:
    """Returns whether kernels of ragged dots support the parts of a use."""
    if spec.symbolic:
        return SYMBOLIC
    found, dtype = [ragged_dot.supports(part_of(spec))], spec.dtype("x")
    others = {
        "w_up": dict(spec.dtypes).get("w_up"),
        "the result": spec.param("out_dtype"),
    }
    for name, other in others.items():
        if other not in (dtype, None):
            found.append(no("dtype", f"{name} is {other}, and x {dtype}"))
    return all_of(YES, *found)


def _mean(spec: Spec) -> int:
    """The rows of a group, on average."""
    return spec.shape("x")[0] // spec.shape("group_sizes")[0]


SPACE = gated_tiles.space(_mean)


def forward(
    *, residuals: bool = False, config: Tiles | None = None, **given: Any
) -> Any:
    """Returns the result, as `reference` does, for supported uses.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Args:
        residuals: Whether to return ``(result, (gate, up))``.
        config: The tiles; their columns are those of both branches.
        **given: The fields of `Use`.
    """
    return unit(NAME, Use(**given), residuals, config or Tiles())


def unit(
    name: str,
    use: Use,
    residuals: bool,
    config: Any,
    scales: tuple[Array | None, Array | None] = (None, None),
    **side: Any,
) -> Any:
    """Returns the result and, with `residuals`, both branches, by one kernel.

    Args:
        name: The name of the kernel in profiles.
        use: The use.
        residuals: Whether to return ``(result, (gate, up))``.
        config: The tiles.
        scales: [g, columns] for each array of matrices that is stored.
        **side: How matrices come into shared memory; see `combined`.
    """
    from rewriter.kernels.ragged.dot.hopper import widen
    from rewriter.kernels.ragged.dot.hopper.branches import Branch
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    f, w = use.f, (use.w, use.w_up)

    def branch(index: int, first: int = 0) -> Branch:
        scale = scales[index]
        within = () if scale is None else (widen.rows(scale[:, first : first + f]),)
        return Branch(w[index], first, within=within, of_groups=True)

    if use.halves:
        order = (0, f) if use.halves == "gate_up" else (f, 0)
        branches = [branch(0, first) for first in order]
    else:
        branches = [branch(0), branch(1)]
    act = ON_HOPPER[use.activation]
    results = [lambda gate, up: act(gate, use.beta) * up]
    if residuals:
        results += [lambda gate, up: gate, lambda gate, up: up]
    out, *kept = combined(
        name, use.x, branches, f, use.group_sizes, results, use.x.dtype, config, **side
    )
    return (out, tuple(kept)) if residuals else out


PARTS = ByParts.of(ragged_dot.KERNEL)

KERNEL = anywhere(
    HOPPER.kernel(
        "ragged_gated_linear_unit", forward, PARTS.backward, supports,
        Speed(by_estimate, estimate=estimate, modelled=modelled),
        SPACE, PARTS.space, saves=None,
    ),
    "x",
)  # fmt: skip
