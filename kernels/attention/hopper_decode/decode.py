"""Attention of few queries: operands made ready, pieces, and what they add up to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from rewriter.kernels.attention.hopper.blocks import Mask
from rewriter.kernels.attention.hopper_decode.config import Split
from rewriter.kernels.attention.hopper_decode.kernel import pieces
from rewriter.kernels.attention.hopper_decode.merge import merged
from rewriter.kernels.attention.hopper_decode.problem import Pages, Problem

if TYPE_CHECKING:
    from jax import Array

EDGE = 8
"""Keys that tiles in shared memory are copied by: s is padded to a multiple."""


def forward(
    *,
    q: Array,
    k: Array,
    v: Array,
    config: Split,
    **given: Any,
) -> Array:
    """Returns attention [b, t, n, e], as `reference` does, for what `supports` takes.

    Args:
        q: [b, t, n, h], bfloat16 or float16; t times n by key head is 64 at most.
        k: [b, s, k, h].
        v: [b, s, k, e].
        config: How the work is split.
        **given: Other operands and parameters; see `attend`.
    """
    s = k.shape[1]
    pages = Pages(size=s, count=1, axes="pzkh", listed=False)
    k, v = (_even(x) for x in (k, v))
    return attend(q, k, v, None, pages, s, k.shape[2], config, **given)


def _even(x: Array) -> Array:
    """Adds keys up to a multiple of `EDGE`."""
    more = -x.shape[1] % EDGE
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) if more else x


def attend(
    q: Array,
    k: Array,
    v: Array,
    table: Array | None,
    pages: Pages,
    s: int,
    heads: int,
    config: Split,
    *,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
) -> Array:
    """Returns attention [b, t, n, e] over keys that lie as `pages` says.

    Args:
        q: [b, t, n, h].
        k: Keys, four axes.
        v: Values, the same but for the last one.
        table: int32 [b, pages.count], each within the pool; None if not listed.
        pages: How they lie.
        s: Keys of a sequence.
        heads: Key heads.
        config: How the work is split.
        kv_lengths: int [b|1].
        offset: int [b|1].
        scale: Multiplies the scores; positive.
        window: As in `reference`.
        shift: As in `reference`.
        softcap: As in `reference`.
        empty_rows: As in `reference`.
        out_dtype: q's.
    """
    del out_dtype
    b, t, n, h = q.shape
    left, right = window
    mask = Mask(
        t, s, left, right, shift, kv_lengths is not None, offset is not None,
        empty_rows == "mean",
    )  # fmt: skip
    e = v.shape[3]
    p = Problem(b, n, heads, h, e, mask, scale, softcap, pages, config)
    numbers = {
        name: jnp.broadcast_to(x.astype(jnp.int32), (b,))
        for name, x in (("lengths", kv_lengths), ("offsets", offset))
        if x is not None
    }
    ends = _ends(p, numbers)
    if table is not None:
        numbers["table"] = table
    parts, lse = pieces(p, _by_pair(p, q), ends, k, v, numbers)
    zero = empty_rows == "zero" and mask.may_be_empty
    return merged(p, ends, parts, lse, zero, q.dtype)


def _by_pair(p: Problem, q: Array) -> Array:
    """Returns the queries of each pair, [b * heads, rows, h], filled up with zeros."""
    t, more = p.mask.t, p.rows - p.mask.t * p.group
    x = q.reshape(p.b, t, p.heads, p.group, p.h)
    x = x.transpose(0, 2, 1, 3, 4).reshape(p.b * p.heads, t * p.group, p.h)
    return jnp.pad(x, ((0, 0), (0, more), (0, 0))) if more else x


def _ends(p: Problem, numbers: dict[str, Array]) -> Array:
    """Returns the blocks of one head of each sequence and of all before: int32 [b]."""
    counts = p.blocks(numbers.get("offsets"), numbers.get("lengths")).count
    if isinstance(counts, int):
        return jnp.asarray(np.arange(1, p.b + 1, dtype=np.int32) * counts)
    before = np.tri(p.b, dtype=np.int32)  # one fused sum, where cumsum takes several
    return (before * jnp.broadcast_to(counts, (p.b,))).sum(1).astype(jnp.int32)
