"""How ragged dots are split over devices: rows, columns, groups, the summed axis.

A device with some of the groups computes their rows and leaves the others zero; the
devices' results are summed. So experts can be split without moving rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged.dot.rows import FIRST
from rewriter.ops.op import Part, Sharding

if TYPE_CHECKING:
    from jax import Array

DIMS = {
    "forward": {"lhs": "m k", "rhs": "g k n", "out": "m n"},
    "transposed": {"lhs": "m k", "rhs": "g n k", "out": "m n"},
    "contracting": {"lhs": "m k", "rhs": "m n", "out": "g k n"},
}
"""The axes by mode. Every device has all group sizes, so their axis is not listed."""


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split over devices."""
    mode = params["mode"]
    contracting = mode == "contracting"
    return Sharding(
        along=frozenset("kn" if contracting else "mn"),
        sums=frozenset("m" if contracting else "kg"),
        local=local,
        dims={**DIMS[mode], "group_sizes": "sizes"},
        unseen=frozenset({FIRST}),
    )


def local(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """Keeps the groups of this device, and of each the rows of this device."""
    sizes = _rows_here(operands, parts)
    changed = {**operands, "group_sizes": sizes}
    if "g" in parts:
        first, count = _groups_here(operands, parts["g"])
        own = jax.lax.dynamic_slice_in_dim(sizes, first, count)
        changed |= {"group_sizes": own, FIRST: _before(sizes, first)}
    return changed, params


def _rows_here(operands: Mapping[str, Array], parts: Mapping[str, Part]) -> Array:
    sizes, rows = operands["group_sizes"], operands["lhs"].shape[0]
    if "m" not in parts:
        return sizes
    first = parts["m"].index * rows
    ends = jnp.cumsum(sizes)
    inside = [jnp.clip(x, first, first + rows) for x in (ends - sizes, ends)]
    return (inside[1] - inside[0]).astype(sizes.dtype)


def _groups_here(operands: Mapping[str, Array], part: Part) -> tuple[Array, int]:
    count = operands["rhs"].shape[0]
    return part.index * count, count


def _before(sizes: Array, first: Array) -> Array:
    """The number of rows in the groups before one."""
    before = jnp.where(jnp.arange(sizes.shape[0]) < first, sizes, 0)
    return before.sum(dtype=jnp.int32)
