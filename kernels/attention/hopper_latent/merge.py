"""Completes results of sequences that several readers share, weighted row by row.

A sequence that one reader read whole is complete. Where kernels may write into their
inputs, its rows stay where they are. Else they are copied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.hopper_decode.merge import AT_ONCE, row_of
from rewriter.kernels.shared import work_stealing

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper_latent.problem import Problem

ROWS = 2
"""Rows of a block of threads."""

FEW = 2
"""The most readers of a sequence, on average, for which pieces are read by twos."""


def completed(p: Problem, ends: Array, whole: Array, parts: Array, lse: Array) -> Array:
    """Returns the result, [b, 64 groups, c].

    Args:
        p: The problem.
        ends: int32 [b], as `WorkQueue` has it.
        whole: The results of sequences that have one piece; others are not written.
        parts: float32 [pieces, 64 groups, c], from `kernel.pieces`.
        lse: float32 [pieces, 64 groups].
    """
    blocks = -(-p.queries // ROWS)
    given = {"ends": ends, "parts": parts, "lse": lse}
    in_place = work_stealing.AVAILABLE
    at_once = 2 if p.readers <= FEW * p.b else AT_ONCE
    given["whole"] = target = jax.new_ref(whole) if in_place else whole
    out = [] if in_place else [jax.ShapeDtypeStruct(whole.shape, whole.dtype)]

    def body(*references: Any) -> None:
        x = dict(zip((*given, "out"), references, strict=False))
        index = lax.axis_index(pallas.PROGRAM)
        sequence = lax.div(index, jnp.int32(blocks))
        begin = (index - sequence * blocks) * ROWS
        first, last = p.queue(x["ends"]).readers_of(sequence)
        for i in range(ROWS):
            row = jnp.minimum(begin + i, p.queries - 1)
            own = x.get("out", x["whole"]).at[sequence, row]

            def merge(row: Any = row, own: Any = own) -> None:
                pieces = first + sequence, last + sequence
                made = row_of(x["parts"], x["lse"], row, *pieces, p.zero, at_once)
                own[...] = made.astype(own.dtype)

            def copy(row: Any = row, own: Any = own) -> None:
                layout = plgpu.Layout.WG_STRIDED((p.c,), vec_size=1)
                own[...] = pallas.loaded(x["whole"].at[sequence, row], layout)

            pallas.when(first != last)(merge)
            if not in_place:
                pallas.when(first == last)(copy)

    made = pallas.kernel(body, "latent_attention_merge", out, {}, p.b * blocks, 1)(
        *given.values()
    )
    return target[...] if in_place else made[0]
