"""How sums of rows by their ids may be split over devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.ops.op import Part, Sharding


def of_sums(params: Mapping[str, Any]) -> Sharding:
    """Returns that each device may add up some of the rows, or some of their numbers.

    The result is the sum over the devices that have some of the rows.
    """
    del params
    return Sharding(frozenset({"...", "d"}), frozenset({"m"}), local=_local)


def _local(
    operands: Mapping[str, jax.Array],
    params: Mapping[str, Any],
    parts: Mapping[str, Part],
) -> tuple[Mapping[str, jax.Array], Mapping[str, Any]]:
    """Gives the table to the first part of the rows alone, and each row its id."""
    if "m" not in parts:
        return operands, params
    first, own = parts["m"].index, dict(operands)
    if "table" in own:
        own["table"] = jnp.where(first == 0, own["table"], 0)
    *lead, m, _ = own["rows"].shape
    if m % (params.get("across") or 1):
        params = {**params, "across": 0}
    period = params.get("period", 0)
    if "ids" in own or m % period == 0:
        return own, params
    place = lax.iota(jnp.int32, m) + jnp.asarray(first, jnp.int32) * jnp.int32(m)
    ids = lax.rem(place, jnp.int32(period)) + jnp.int32(params["start"])
    own["ids"] = jnp.broadcast_to(ids, (*lead, m))
    return own, {**params, "start": 0, "period": 0}
