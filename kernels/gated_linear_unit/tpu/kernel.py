"""Both branches of a gated linear unit in one pass over x, on a TPU.

Each step multiplies a block of x by a block of either weight. After the last block of
columns the forward combines the branches. The backward computes both branches'
cotangents from the result's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.gated_linear_unit.tpu.config import (
    Blocks,
    Sizes,
    Tiles,
    blocks,
    vmem,
)
from rewriter.kernels.shared import pallas_tpu

if TYPE_CHECKING:
    from jax import Array

Combine = Callable[..., Any]

SUMS = 8
"""Rows of sums over a block's rows: those of a register."""


def combined(
    operands: dict[str, Array],
    sizes: Sizes,
    dtype: Any,
    precision: str | None,
    tiles: Tiles,
    combine: Combine,
) -> Array:
    """Returns ``combine(gate, up)`` of both branches.

    Args:
        operands: x [m, k], weights [k, n] and, if present, biases [n].
        sizes: The use's sizes.
        dtype: The result's dtype.
        precision: As for `pallas_tpu.dot`.
        tiles: The config.
        combine: Of float32 blocks.

    Returns:
        [m, n].
    """

    def finish(gate: Any, up: Any, row: Any, read: Any, out: Any) -> None:
        del row, read
        out[...] = combine(gate, up).astype(out.dtype)

    like = pallas_tpu.shaped((sizes.m, sizes.n), dtype, operands["x"])
    (out,) = _call(
        "gated_linear_unit", operands, [], sizes, [like], precision, tiles, finish
    )
    return out


def cotangents_of_branches(
    operands: dict[str, Array],
    cotangent: Array,
    sizes: Sizes,
    dtype: Any,
    precision: str | None,
    tiles: Tiles,
    combine: Combine,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Returns the cotangents of both branches, and their sums over rows.

    Args:
        operands: As for `combined`.
        cotangent: Of the result, [m, n].
        sizes: The use's sizes.
        dtype: The dtype of the branches' cotangents, as products take them.
        precision: As for `pallas_tpu.dot`.
        tiles: The config.
        combine: Of float32 blocks.

    Returns:
        [m, n] twice; for each bias that there is float32 [n], else None.
    """
    x, b = operands["x"], blocks(sizes, tiles)
    biases = [name for name in ("b_gate", "b_up") if name in operands]
    shape = -(-sizes.m // b.m) * SUMS, sizes.n
    out = [pallas_tpu.shaped((sizes.m, sizes.n), dtype, x)] * 2
    out += [pallas_tpu.shaped(shape, jnp.float32, x) for _ in biases]

    def finish(gate: Any, up: Any, row: Any, read: Any, *out: Any) -> None:
        _, back = jax.vjp(combine, gate, up)
        both = back(read[...].astype(jnp.float32))
        sums = iter(out[2:])
        for name, made, ref in zip(("b_gate", "b_up"), both, out, strict=False):
            ref[...] = made.astype(ref.dtype)
            if name in biases:
                next(sums)[...] = _by_register(made, sizes.m - row * b.m)

    made = _call(
        "gated_linear_unit_backward", operands, [cotangent], sizes, out, precision,
        tiles, finish,
    )  # fmt: skip
    sums = dict(zip(biases, (s.sum(0) for s in made[2:]), strict=True))
    return made[0], made[1], sums.get("b_gate"), sums.get("b_up")


def _by_register(x: Array, rows: Any) -> Array:
    """Returns sums over the first `rows` rows: [m, n] to [SUMS, n]."""
    x = pallas_tpu.masked(x, 0, 0, rows)
    whole = x.shape[0] // SUMS * SUMS
    total = jnp.sum(x[:whole].reshape(-1, SUMS, x.shape[1]), axis=0) if whole else 0.0
    if whole == x.shape[0]:
        return total
    rest = jnp.sum(x[whole:], axis=0, keepdims=True)
    first = lax.broadcasted_iota(jnp.int32, (SUMS, x.shape[1]), 0) == 0
    return total + jnp.where(first, rest, 0.0)


def _call(
    name: str,
    operands: dict[str, Array],
    read: Sequence[Array],
    sizes: Sizes,
    out: Sequence[jax.ShapeDtypeStruct],
    precision: str | None,
    tiles: Tiles,
    finish: Callable[..., None],
) -> Sequence[Array]:
    """Runs ``finish(gate, up, row of blocks, read, *out)`` for each block."""
    b = blocks(sizes, tiles)
    parts = -(-sizes.k // b.k)
    biases = [n for n in ("b_gate", "b_up") if n in operands]
    result = pl.BlockSpec((b.m, b.n), lambda i, j, s: (i, j))
    weight = pl.BlockSpec((b.k, b.n), lambda i, j, s: (s, j))
    bias = pl.BlockSpec((1, b.n), lambda i, j, s: (0, j))
    sums = pl.BlockSpec((SUMS, b.n), lambda i, j, s: (i, j))
    inputs = [pl.BlockSpec((b.m, b.k), lambda i, j, s: (i, s)), weight, weight]
    inputs += [bias] * len(biases) + [result] * len(read)
    arrays = [operands[n] for n in ("x", "w_gate", "w_up")]
    arrays += [operands[n].reshape(1, -1) for n in biases] + list(read)

    def body(*refs: Any) -> None:
        x, gate, up = refs[:3]
        given = dict(zip(biases, refs[3:], strict=False))
        rest = refs[3 + len(biases) : len(inputs) + len(out)]
        part = 0 if parts == 1 else pl.program_id(2)
        row, taken = pl.program_id(0), rest[0] if read else None
        block = _Block(sizes, b, precision, part, parts, x)
        made = rest[len(read) :]
        block.run((gate, up), refs[len(inputs) + len(out) :], given, lambda *both:
                  finish(*both, row, taken, *made))  # fmt: skip

    several = parts > 1 or b.step < b.k
    return pallas_tpu.call(
        body,
        name,
        pallas_tpu.Grid((-(-sizes.m // b.m), -(-sizes.n // b.n), parts), 2),
        inputs,
        [result if o.shape[0] == sizes.m and i < 2 else sums
         for i, o in enumerate(out)],
        out,
        [pallas_tpu.VMEM((b.m, b.n), jnp.float32)] * 2 if several else [],
        vmem=vmem(sizes, tiles),
    )(*arrays)  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """One step: part of the sums of a block of both branches."""

    sizes: Sizes
    blocks: Blocks
    precision: str | None
    part: Any
    parts: int
    x: Any

    def run(
        self,
        weights: tuple[Any, Any],
        sums: Sequence[Any],
        biases: dict[str, Any],
        finish: Callable[..., None],
    ) -> None:
        size, step = self.blocks.k, self.blocks.step

        def finished(branches: Sequence[Array]) -> None:
            made = [
                y + biases[n][...].astype(jnp.float32) if n in biases else y
                for n, y in zip(("b_gate", "b_up"), branches, strict=True)
            ]
            finish(*made)

        if not sums:
            finished([self.product(w, pl.ds(0, size)) for w in weights])
            return

        @pl.when(self.part == 0)
        def _() -> None:
            for total in sums:
                total[...] = jnp.zeros_like(total)

        def add(columns: Any) -> None:
            for total, w in zip(sums, weights, strict=True):
                total[...] += self.product(w, columns)

        pallas_tpu.in_steps(size, step, add)

        @pl.when(self.part == self.parts - 1)
        def _() -> None:
            finished([total[...] for total in sums])

    def product(self, weight: Any, columns: Any) -> Array:
        """Returns the product over some of x's columns."""
        x, w = self.x[:, columns], weight[columns, :]
        if self.sizes.k % self.blocks.k:  # values beyond the edge are undefined
            rest = self.sizes.k - self.part * self.blocks.k - columns.start
            x = pallas_tpu.masked(x, 1, 0, rest)
            w = pallas_tpu.masked(w, 0, 0, rest)
        return pallas_tpu.dot(x, w, precision=self.precision)
