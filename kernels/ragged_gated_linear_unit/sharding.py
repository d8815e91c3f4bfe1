"""How gated linear units of experts are spread over devices: as their ragged dots.

Rows, columns and groups may be split. What is summed may not: the activation is of the
whole sum. Nor may columns where both branches are in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rewriter.kernels.ragged_dot.sharding import finish, local
from rewriter.op import Part, Sharding

if TYPE_CHECKING:
    from jax import Array


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be spread."""
    both = "g k both" if params["halves"] else "g k f"
    return Sharding(
        along=frozenset("m" if params["halves"] else "mf"),
        sums=frozenset("g"),
        local=_local,
        finish=_finish,
        dims={"x": "m k", "w": both, "w_up": "g k f", "out": "m f",
              "group_sizes": "sizes"},
    )  # fmt: skip


def _local(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """Of the groups those that are here, of each the rows that are here, to the top."""
    changed, _ = local(_of_dot(operands), params, parts)
    made = {"x": changed["lhs"], "group_sizes": changed["group_sizes"]}
    return {**operands, **made}, params


def _finish(
    out: Array,
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> Array:
    """The rows back to where they were; those of no group here are zero."""
    return finish(out, _of_dot(operands), params, parts)


def _of_dot(operands: Mapping[str, Array]) -> dict[str, Array]:
    names = {"lhs": "x", "rhs": "w", "group_sizes": "group_sizes"}
    return {name: operands[own] for name, own in names.items()}
