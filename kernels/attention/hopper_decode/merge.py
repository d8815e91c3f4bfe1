"""Merges pieces of results, weighted by their log-sum-exps, row by row.

It is a kernel of its own. The reader that stores a pair's last piece could merge them
all, but on an H100 a step then took 0.93 to 1.42 of the time
(``tests/bench/results/attention_in_place_h100.json``). One warpgroup then waits
for memory where here one of each row does. Its counters must be made zero before, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper_decode.problem import Problem

LOG2E = math.log2(math.e)

AT_ONCE = 8
"""Pieces that are read at a time, independently of each other."""


def merged(
    p: Problem, ends: Array, parts: Array, lse: Array, zero: bool, dtype: Any
) -> Array:
    """Returns the result, [b * heads * queries, e].

    Args:
        p: The problem.
        ends: int32 [b], as `WorkQueue` has it.
        parts: float32 [pieces, rows, columns], from `kernel.pieces`.
        lse: float32 [pieces, 64].
        zero: Whether rows without keys are 0, and not NaN.
        dtype: The result's dtype.
    """
    columns, count = p.columns, p.b * p.heads * p.queries
    out = jax.ShapeDtypeStruct((count, p.e), dtype)

    def body(ends: Any, parts: Any, lse: Any, out: Any, line: Any) -> None:
        index = lax.axis_index(pallas.PROGRAM)
        pair = lax.div(index, jnp.int32(p.queries))
        row = index - pair * p.queries
        first, last = p.queue(ends).readers_of(pair)
        total = row_of(parts, lse, row, first + pair, last + pair, zero)
        if columns == p.e:
            out.at[index][...] = total.astype(dtype)
            return
        line[...] = total.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(line.at[pl.ds(0, p.e)], out.at[index])
        plgpu.wait_smem_to_gmem(0)

    line = {"line": plgpu.SMEM((columns,), dtype)}
    (made,) = pallas.kernel(body, "attention_merge", [out], line, count, 1)(
        ends, parts, lse
    )
    return made


def row_of(
    parts: Any, lse: Any, row: Any, first: Any, last: Any, zero: bool,
    at_once: int = AT_ONCE,
) -> Array:  # fmt: skip
    """Returns one row of the result, float32 [columns], from its pieces.

    Args:
        parts: A reference [pieces, rows, columns].
        lse: A reference [pieces, 64].
        row: The row.
        first: The first piece.
        last: The last piece.
        zero: Whether a row without keys is 0, and not NaN.
        at_once: Pieces that are read at a time.
    """
    layout = plgpu.Layout.WG_STRIDED((parts.shape[2],), vec_size=1)

    def some(i: Any, carry: Any) -> Any:
        total, top, norm = carry
        found = []
        for j in range(at_once):
            piece = first + i * at_once + j
            there = piece <= last
            piece = jnp.minimum(piece, last)
            mine = pallas.scalar(lse, piece, row)
            part = pallas.loaded(parts.at[piece, row], layout)
            found.append((there, jnp.where(there, mine, -jnp.inf), part))
        higher = top
        for _, mine, _ in found:
            higher = jnp.maximum(higher, mine)
        least = jnp.where(higher == -jnp.inf, 0.0, higher)
        fade = jnp.exp2((top - least) * LOG2E)
        total, norm = total * fade, norm * fade
        for there, mine, part in found:
            weight = jnp.exp2((mine - least) * LOG2E)
            norm = norm + weight
            total = total + jnp.where(there, part * weight, 0.0)
        return total, higher, norm

    count = lax.div(last - first + at_once, jnp.int32(at_once))
    nothing = plgpu.layout_cast(jnp.zeros(parts.shape[2:], jnp.float32), layout)
    start = nothing, jnp.float32(-jnp.inf), jnp.float32(0)
    total, _, norm = lax.fori_loop(0, count, some, start)
    inverse = 1.0 / norm
    if zero:
        inverse = jnp.where(norm == 0.0, 0.0, inverse)
    return total * inverse
