"""Few queries of many heads in, the heads of a group as queries of one head out.

In decoding a head has one query or a few. Those of all heads that read the same keys
are put below each other, so that the keys are read once, and registers are full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.tpu.config import FEW
from rewriter.kernels.attention.tpu.operands import TABLES

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.tpu.scores import Problem


def pays(p: Problem) -> bool:
    """Returns whether the heads of a group are put together."""
    return p.group > 1 and p.cut.t * p.group <= FEW


def packed(p: Problem, arrays: dict[str, Any]) -> tuple[Problem, dict[str, Any]]:
    """Returns the same attention with as many query heads as key heads.

    Args:
        p: The use.
        arrays: q [b, n, t, h], and the others as `operands.inputs` takes them.
    """
    group, t = p.group, p.cut.t
    rows = group * t
    made = dict(arrays)
    made["q"] = arrays["q"].reshape(p.b, p.heads, rows, p.h)
    for name in TABLES:
        if name in arrays:
            made[name] = _table(arrays[name], p.heads, group, t)
    for name in ("sinks", "alibi"):
        if name in arrays:
            made[name] = jnp.repeat(arrays[name], t).reshape(p.heads, rows, 1)
    if "q_segments" in arrays:
        made["q_segments"] = jnp.tile(arrays["q_segments"], (1, group))
    return replace(p, n=p.heads, cut=replace(p.cut, t=rows, repeat=t)), made


def _table(x: Array, heads: int, group: int, t: int) -> Array:
    """[b|1, n|1, t|1, s|1] as [b|1, heads|1, rows|1, s|1]."""
    b, n, _, s = x.shape
    if n > 1:
        x = jnp.broadcast_to(x, (b, n, t, s))
        return x.reshape(b, heads, group * t, s)
    return x if x.shape[2] == 1 else jnp.tile(x, (1, 1, group, 1))
