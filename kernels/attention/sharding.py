"""How attention is split over devices: batch, heads, and queries by position.

Keys that are split like queries are gathered, or go around a ring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.ring import RING
from rewriter.ops.op import Part, Sharding

if TYPE_CHECKING:
    from jax import Array


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split; every part of the queries sees all keys."""
    del params
    return Sharding(
        frozenset("btn"), follows={"k": "n"}, local=at_own_positions, ring=RING
    )


def at_own_positions(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """Returns operands and parameters of one part, as `Sharding.local` does.

    Where there are windows or ALiBi, the offset is that at which its queries begin.
    """
    positions = params["window"] != (None, None) or "alibi" in operands
    if "t" not in parts or not positions:
        return operands, params
    start = jnp.asarray(parts["t"].index * operands["q"].shape[1], jnp.int32)
    offset = operands.get("offset", jnp.zeros(1, jnp.int32))
    return {**operands, "offset": offset + start.astype(offset.dtype)}, params
