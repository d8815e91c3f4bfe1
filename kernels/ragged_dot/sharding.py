"""How ragged dots are spread over devices: rows, columns, and what is summed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.op import Part, Sharding

if TYPE_CHECKING:
    from jax import Array

DIMS = {
    "forward": {"lhs": "m k", "rhs": "g k n", "out": "m n"},
    "transposed": {"lhs": "m k", "rhs": "g n k", "out": "m n"},
    "contracting": {"lhs": "m k", "rhs": "m n", "out": "g k n"},
}
"""The axes by mode; group sizes are [g]."""


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be spread: every device has a part of all groups."""
    mode = params["mode"]
    contracting = mode == "contracting"
    return Sharding(
        along=frozenset("kn" if contracting else "mn"),
        sums=frozenset("m" if contracting else "k"),
        local=_local,
        dims={**DIMS[mode], "group_sizes": "g"},
    )


def _local(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """Of each group, only the rows that lie in this part count."""
    if "m" not in parts:
        return operands, params
    sizes, rows = operands["group_sizes"], operands["lhs"].shape[0]
    first = parts["m"].index * rows
    ends = jnp.cumsum(sizes)
    inside = [jnp.clip(x, first, first + rows) for x in (ends - sizes, ends)]
    own = (inside[1] - inside[0]).astype(sizes.dtype)
    return {**operands, "group_sizes": own}, params
