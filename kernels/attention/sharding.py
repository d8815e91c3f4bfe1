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
    return Sharding(frozenset("btn"), follows={"k": "n"}, local=_local, ring=RING)


def _local(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """Sets the offset at which a part of the queries begins, for windows and ALiBi."""
    positions = params["window"] != (None, None) or "alibi" in operands
    if "t" not in parts or not positions:
        return operands, params
    start = jnp.asarray(parts["t"].index * operands["q"].shape[1], jnp.int32)
    offset = operands.get("offset", jnp.zeros(1, jnp.int32))
    return {**operands, "offset": offset + start.astype(offset.dtype)}, params
