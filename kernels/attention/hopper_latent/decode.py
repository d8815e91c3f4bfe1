"""Attention to a latent cache: prepares operands, runs pieces, and merges them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from rewriter.kernels.attention.empty_rows import AVERAGED, ZERO
from rewriter.kernels.attention.hopper.blocks import Mask
from rewriter.kernels.attention.hopper_latent.kernel import pieces
from rewriter.kernels.attention.hopper_latent.merge import completed
from rewriter.kernels.attention.hopper_latent.problem import Pages, Problem

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper_latent.config import Programs

EDGE = 8
"""Rows that tiles in shared memory are copied by: they are padded to a multiple."""


def attend(
    q: Array,
    q_rope: Array | None,
    latent: Array,
    k_rope: Array | None,
    config: Programs,
    *,
    table: Array | None = None,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
) -> Array:
    """Returns attention [b, t, n, c] to a latent cache, for supported uses.

    Args:
        q: [b, t, n, c], bfloat16 or float16: for the latent.
        q_rope: [b, t, n, r]: for the rotary keys; None if there are none.
        latent: [b, s, c]; [b, s, c + r] if the rotary keys lie behind it. With a
            table, [pages, z, ...].
        k_rope: [b, s, r]; None if they lie in `latent`.
        config: How the work is split.
        table: int32 [b, p], each within the pool; None if not in pages.
        kv_lengths: int [b|1].
        offset: int [b|1].
        scale: Multiplies scores; positive.
        window: As in `reference`, without a left end.
        shift: As in `reference`.
        empty_rows: As in `reference`.
        out_dtype: q's, or float32.
    """
    (b, t, n, c), size = q.shape, latent.shape[1]
    count = 1 if table is None else table.shape[1]
    seen = Mask(
        t, size * count, *window, shift, kv_lengths is not None, offset is not None,
        empty_rows in AVERAGED,
    )  # fmt: skip
    pages = Pages(size=size, count=count, axes="pzkh", listed=table is not None)
    r = 0 if q_rope is None else q_rope.shape[3]
    zero = empty_rows in ZERO and seen.may_be_empty
    dtype = jnp.dtype(out_dtype or q.dtype)
    p = Problem(b, n, c, r, seen, scale, pages, k_rope is None, config, zero, dtype)
    numbers = {
        name: jnp.broadcast_to(x.astype(jnp.int32), (b,))
        for name, x in (("lengths", kv_lengths), ("offsets", offset))
        if x is not None
    }
    rows = {
        "q": q.reshape(b, t * n, c), "latent": latent, "k_rope": k_rope,
        "q_rope": None if q_rope is None else q_rope.reshape(b, t * n, r),
    }  # fmt: skip
    named = {name: _even(x) for name, x in rows.items() if x is not None}
    named |= {"ends": _ends(p, numbers)} | ({} if table is None else {"table": table})
    made = completed(p, named["ends"], *pieces(p, named | numbers))
    return made[:, : t * n].reshape(b, t, n, c)


def _even(x: Array) -> Array:
    """Adds rows up to a multiple of `EDGE`."""
    more = -x.shape[1] % EDGE
    return jnp.pad(x, ((0, 0), (0, more), (0, 0))) if more else x


def _ends(p: Problem, numbers: dict[str, Array]) -> Array:
    """Returns the blocks of each sequence and of all before: int32 [b]."""
    counts = p.blocks(numbers.get("offsets"), numbers.get("lengths")).count
    if isinstance(counts, int):
        return jnp.asarray(np.arange(1, p.b + 1, dtype=np.int32) * counts)
    before = np.tri(p.b, dtype=np.int32)  # one fused sum, where cumsum takes several
    return (before * jnp.broadcast_to(counts, (p.b,))).sum(1).astype(jnp.int32)
