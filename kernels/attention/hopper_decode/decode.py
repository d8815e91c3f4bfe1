"""Attention of few queries: prepares operands, runs pieces, and merges them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from rewriter.kernels.attention.empty_rows import AVERAGED, ZERO
from rewriter.kernels.attention.hopper.blocks import Mask
from rewriter.kernels.attention.hopper.dtypes import parts as parts_of
from rewriter.kernels.attention.hopper.use import Use
from rewriter.kernels.attention.hopper_decode.config import ROWS, Split, mask_columns
from rewriter.kernels.attention.hopper_decode.kernel import pieces
from rewriter.kernels.attention.hopper_decode.merge import merged
from rewriter.kernels.attention.hopper_decode.problem import Pages, Problem
from rewriter.kernels.attention.reference import visible

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
    swapped: tuple[str, ...] = (),
    **given: Any,
) -> Array:
    """Returns attention [b, t, n, e], as `reference` does, for supported uses.

    Args:
        q: [b, t, n, h], bfloat16 or float16; t times n by key head is 64 at most.
        k: [b, s, k, h].
        v: [b, s, k, e].
        config: How the work is split.
        swapped: Operands whose heads lie before positions in memory. Both k and v are
            read so if both are among them, without a copy.
        **given: The other fields of `Use`.
    """
    s, heads = k.shape[1:3]
    axes = "pkzh" if {"k", "v"} <= set(swapped) else "pzkh"
    if axes == "pkzh":
        k, v = (x.swapaxes(1, 2) for x in (k, v))
    pages = Pages(size=s, count=1, axes=axes, listed=False)
    k, v = (_even(x, axes.index("z")) for x in (k, v))
    return attend(Use(q, k, v, **given), None, pages, s, heads, config)


def _even(x: Array, axis: int) -> Array:
    """Adds keys up to a multiple of `EDGE`."""
    widths = [(0, -n % EDGE if k == axis else 0) for k, n in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(map(any, widths)) else x


def attend(
    use: Use, table: Array | None, pages: Pages, s: int, heads: int, config: Split
) -> Array:
    """Returns attention [b, t, n, e] over keys laid out by `pages`.

    Args:
        use: The use. Keys and values have four axes in the order of `pages`, and the
            mask is [b|1, 1, 1, s].
        table: int32 [b, pages.count], each within the pool; None if not listed.
        pages: The memory layout of keys and values.
        s: Keys of a sequence.
        heads: Key heads.
        config: How the work is split.
    """
    b, t, n, h = use.q.shape
    seen = Mask(
        t, s, *use.window, use.shift, use.kv_lengths is not None,
        use.offset is not None, use.empty_rows in AVERAGED, use.mask is not None,
    )  # fmt: skip
    e, count = use.widths[1], parts_of(use.weights)
    p = Problem(b, n, heads, h, e, seen, use.scale, use.softcap, pages, config, count)
    numbers = use.numbers()
    if use.mask is not None:
        numbers |= of_mask(p, use.mask, numbers)
    ends = _ends(p, numbers)
    numbers |= {} if table is None else {"table": table}
    parts, lse = pieces(p, _by_pair(p, use.q), ends, use.k, use.v, numbers)
    zero = use.empty_rows in ZERO and seen.may_be_empty
    made = merged(p, ends, parts, lse, zero, jnp.dtype(use.out_dtype or use.q.dtype))
    made = made.reshape(p.b, p.heads, p.mask.t, p.group, p.e)
    return _transposed(made, [0, 2, 1, 3, 4]).reshape(b, p.mask.t, n, e)


def _by_pair(p: Problem, q: Array) -> Array:
    """Returns the queries, [b, heads * t * group, h], those of each pair together.

    The kernel reads some of the next pair's behind them, whose results are not used.
    So rows are added only if there are fewer than it reads at a time. Nothing moves for
    one position, or where a program has its queries in this order.
    """
    x = q.reshape(p.b, p.mask.t, p.heads, p.group, p.h)
    x = _transposed(x, [0, 2, 1, 3, 4]).reshape(p.b, p.heads * p.queries, p.h)
    more = max(0, p.rows - x.shape[1])
    return jnp.pad(x, ((0, 0), (0, more), (0, 0))) if more else x


def _transposed(x: Array, order: list[int]) -> Array:
    """Transposes without axes of size 1, between which XLA cancels no transposes."""
    kept = [i for i in order if x.shape[i] != 1]
    place = {axis: i for i, axis in enumerate(sorted(kept))}
    made = x.reshape([x.shape[i] for i in sorted(kept)])
    made = made.transpose([place[i] for i in kept])
    return made.reshape([x.shape[i] for i in order])


def of_mask(p: Problem, mask: Array, numbers: dict[str, Array]) -> dict[str, Array]:
    """Returns the kernel's arrays for a mask of keys and for averaged rows.

    Args:
        p: The problem.
        mask: bool [b|1, 1, 1, s].
        numbers: int32 ``lengths`` [b] and ``offsets`` [b], if present.

    Returns:
        float32 ``mask`` [b|1, s in groups of 128 bytes], -inf where it hides. If rows
        may be averaged, also int32 ``empty_rows`` [b, 64], 1 for rows that see no key,
        and ``empty`` [b], 1 for sequences with such rows.
    """
    t, s = p.mask.t, p.mask.s
    shown = jnp.where(mask[:, 0, 0], 0.0, -jnp.inf).astype(jnp.float32)
    made = {"mask": jnp.pad(shown, ((0, 0), (0, mask_columns(s) - s)))}
    if not p.averages:
        return made
    seen = visible(
        t, s, mask=mask, kv_lengths=numbers.get("lengths"),
        offset=numbers.get("offsets"), window=(p.mask.left, p.mask.right),
        shift=p.mask.shift,
    )  # fmt: skip
    none = jnp.broadcast_to(~seen.any(-1)[:, 0], (p.b, t))
    rows = jnp.repeat(none, p.group, axis=1)  # rows of a query follow each other
    rows = jnp.pad(rows, ((0, 0), (0, ROWS - t * p.group)))
    made["empty_rows"] = rows.astype(jnp.int32)
    made["empty"] = none.any(1).astype(jnp.int32)
    return made


def _ends(p: Problem, numbers: dict[str, Array]) -> Array:
    """Returns the blocks of one head of each sequence and of all before: int32 [b]."""
    given = (numbers.get(name) for name in ("offsets", "lengths", "empty"))
    counts = p.blocks(*given).count
    if isinstance(counts, int):
        return jnp.asarray(np.arange(1, p.b + 1, dtype=np.int32) * counts)
    before = np.tri(p.b, dtype=np.int32)  # one fused sum, where cumsum takes several
    return (before * jnp.broadcast_to(counts, (p.b,))).sum(1).astype(jnp.int32)
