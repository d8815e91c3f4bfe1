"""Elementwise functions on a Hopper GPU, at the speed of memory.

A warpgroup reads some rows of 1024 columns, applies the function in registers by the
hardware's exponentials and quotients, and writes them. Where sums over rows are asked
for, it goes on to the next rows of its columns and adds up what it writes. A block
writes the sums of its rows, and XLA adds up those of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.activations.hopper import WARPGROUPS, WIDTH
from rewriter.kernels.shared import elementwise, pallas_gpu, pallas_gpu_rows
from rewriter.kernels.shared.elementwise_gpu import evaluate
from rewriter.ops.elementwise_program import ElementwiseProgram

if TYPE_CHECKING:
    from jax import Array

TOGETHER = (2, 1)
"""Rows that a warpgroup reads before it computes: the first that divides all."""

ROWS = (16, 8, 4, 2, 1)
"""Rows that a warpgroup adds up."""


def computed(program: ElementwiseProgram, arrays: Sequence[Array]) -> list[Array]:
    """Returns the function of arrays [m, d], and float32 sums [d] of it."""
    m, d = arrays[0].shape
    if program.sums:
        return _with_sums(program, arrays)
    rows = m * d // WIDTH
    groups = next(n for n in (WARPGROUPS, 2, 1) if rows % n == 0)
    together = next(n for n in TOGETHER if rows % (n * groups) == 0)

    def body(*references: Any) -> None:
        *given, out = references
        block = lax.axis_index(pallas_gpu.PROGRAM)
        first = (block * groups + lax.axis_index(pallas_gpu.WARPGROUP)) * together
        places = [(first + i, pl.ds(0, WIDTH)) for i in range(together)]
        _apply(program, given, out, places)

    out = jax.ShapeDtypeStruct((rows, WIDTH), program.out)
    blocks = rows // (groups * together)
    run = pallas_gpu.kernel(body, "activation", [out], {}, blocks, groups)
    (made,) = run(*(x.reshape(rows, WIDTH) for x in arrays))
    return [made.reshape(m, d)]


def _with_sums(program: ElementwiseProgram, arrays: Sequence[Array]) -> list[Array]:
    m, d = arrays[0].shape
    each = next(n for n in ROWS if m % (n * WARPGROUPS) == 0)
    together = next(n for n in TOGETHER if each % n == 0)
    chunks, blocks = d // WIDTH, m // (each * WARPGROUPS)

    def body(*references: Any, joined: Any) -> None:
        *given, out, sums = references
        program_ = lax.axis_index(pallas_gpu.PROGRAM)
        group = lax.axis_index(pallas_gpu.WARPGROUP)
        block, chunk = lax.div(program_, chunks), lax.rem(program_, chunks)
        columns = pl.ds(pl.multiple_of(chunk * WIDTH, WIDTH), WIDTH)
        first = (block * WARPGROUPS + group) * each

        def step(i: Any, total: Any) -> Any:
            start = first + i * together
            places = [(start + j, columns) for j in range(together)]
            for made in _apply(program, given, out, places):
                total = total + made.astype(jnp.float32)
            return total

        zeros = pallas_gpu_rows.zeros(WIDTH)
        total = lax.fori_loop(0, each // together, step, zeros)
        pallas_gpu_rows.store(joined.at[group], total)
        pallas_gpu_rows.wait_for_block()

        @pallas_gpu.when(group == 0)
        def _() -> None:
            parts = [pallas_gpu_rows.loaded(joined.at[i]) for i in range(WARPGROUPS)]
            pallas_gpu_rows.store(sums.at[block, columns], sum(parts[1:], parts[0]))

    outs = [
        jax.ShapeDtypeStruct((m, d), program.out),
        jax.ShapeDtypeStruct((blocks, d), jnp.float32),
    ]
    scratch = {"joined": plgpu.SMEM((WARPGROUPS, WIDTH), jnp.float32)}
    run = pallas_gpu.kernel(
        body, "activation_and_sums", outs, scratch, blocks * chunks, WARPGROUPS
    )
    made, parts = run(*arrays)
    return [made, parts.sum(0)]


def _apply(
    program: ElementwiseProgram, given: Sequence[Any], out: Any, places: Sequence[Any]
) -> list[Array]:
    """Writes the function at some places, and returns what it wrote."""
    tiles = [[pallas_gpu_rows.loaded(x.at[at]) for x in given] for at in places]
    made = []
    for at, own in zip(places, tiles, strict=True):
        made.append(applied(program.scalars, own).astype(program.out))
        pallas_gpu_rows.store(out.at[at], made[-1])
    return made


def applied(scalars: Any, tiles: Sequence[Array]) -> Array:
    """Returns a function of scalars for each number of some tiles [1024]."""
    layout, lines = pallas_gpu_rows.spread(WIDTH), elementwise.program(scalars)

    @plgpu.inline_mgpu(
        arg_types=(layout,) * len(tiles),
        return_type=plgpu.ShapeDtypeStruct((WIDTH,), jnp.float32, layout=layout),
    )
    def emit(context: Any, *given: Any) -> Any:
        del context
        (made,) = evaluate(lines, given, contract=True)
        return made

    return emit(*tiles)
