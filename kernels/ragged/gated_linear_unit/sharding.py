"""How gated linear units of experts are split over devices: like their ragged dots.

Rows, columns and groups may be split. The summed axis may not: the activation needs the
whole sum. Nor may columns where both branches are in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rewriter.kernels.ragged.dot.rows import FIRST
from rewriter.kernels.ragged.dot.sharding import local
from rewriter.ops.op import Part, Sharding

if TYPE_CHECKING:
    from jax import Array


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split over devices."""
    both = "g k both" if params["halves"] else "g k f"
    return Sharding(
        along=frozenset("m" if params["halves"] else "mf"),
        sums=frozenset("g"),
        local=_local,
        dims={"x": "m k", "w": both, "w_up": "g k f", "out": "m f",
              "group_sizes": "sizes"},
        unseen=frozenset({FIRST}),
    )  # fmt: skip


def _local(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """Keeps the groups of this device, and of each the rows of this device."""
    names = {"lhs": "x", "rhs": "w", "group_sizes": "group_sizes"}
    of_dot = {name: operands[own] for name, own in names.items()}
    changed, _ = local(of_dot, params, parts)
    made = {n: x for n, x in changed.items() if n not in ("lhs", "rhs")}
    return {**operands, **made}, params
