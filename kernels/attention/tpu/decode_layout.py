"""Stacks few queries of many heads as further queries of fewer heads.

In decoding a head has one query or a few. The queries of all heads are stacked as
queries of one head. Its keys are those of all key heads as they lie in memory,
[s · heads, h]: a cache of keys is then read once, without a transpose. A query sees the
keys of its own head alone; the others' scores cost less than reading the keys.

Where that is not possible, the queries of a group of heads are stacked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.tpu.operands import TABLES

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.tpu.scores import Problem


def every_head(p: Problem, operands: dict[str, Any]) -> tuple[Problem, dict[str, Any]]:
    """Returns the same attention with one head of all queries and keys.

    Args:
        p: The use.
        operands: The op's operands.
    """
    t, heads = p.cut.t, p.heads
    rows = p.n * t
    made = _rows(p, {**operands, "q": operands["q"].swapaxes(1, 2)}, p.n, 1)
    for name in ("k", "v"):
        x = operands[name]
        made[name] = x.reshape(p.b, 1, -1, x.shape[3])
    for name in ("bias", "mask"):
        if name in operands and operands[name].shape[3] > 1:
            made[name] = jnp.repeat(operands[name], heads, axis=3)
    if "kv_segments" in operands:
        made["kv_segments"] = jnp.repeat(operands["kv_segments"], heads, axis=1)
    head = jnp.arange(rows, dtype=jnp.int32) // (p.group * t)
    made["row_heads"] = head.reshape(1, rows, 1)
    cut = replace(p.cut, t=rows, s=p.cut.s * heads, repeat=t, step=heads)
    names = p.names | ({"row_heads"} if heads > 1 else set())
    return replace(p, n=1, heads=1, cut=cut, names=names), made


def by_group(p: Problem, arrays: dict[str, Any]) -> tuple[Problem, dict[str, Any]]:
    """Returns the same attention with as many query heads as key heads.

    Args:
        p: The use.
        arrays: q [b, n, t, h], and the others as for `operands.inputs`.
    """
    group, t = p.group, p.cut.t
    made = _rows(p, arrays, group, p.heads)
    for name in TABLES:
        if name in arrays:
            made[name] = _table(arrays[name], p.heads, group, t)
    return replace(p, n=p.heads, cut=replace(p.cut, t=group * t, repeat=t)), made


def _rows(p: Problem, arrays: dict[str, Any], many: int, heads: int) -> dict[str, Any]:
    """Stacks the queries of several heads, [b, heads, rows, h]."""
    t, made = p.cut.t, dict(arrays)
    made["q"] = arrays["q"].reshape(p.b, heads, many * t, p.h)
    for name in ("sinks", "alibi"):
        if name in arrays:
            made[name] = jnp.repeat(arrays[name], t).reshape(heads, many * t, 1)
    if "q_segments" in arrays:
        made["q_segments"] = jnp.tile(arrays["q_segments"], (1, many))
    return made


def _table(x: Array, heads: int, group: int, t: int) -> Array:
    """[b|1, n|1, t|1, s|1] as [b|1, heads|1, rows|1, s|1]."""
    b, n, _, s = x.shape
    if n > 1:
        x = jnp.broadcast_to(x, (b, n, t, s))
        return x.reshape(b, heads, group * t, s)
    return x if x.shape[2] == 1 else jnp.tile(x, (1, 1, group, 1))
