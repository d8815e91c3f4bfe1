"""Weights that are no softmax: sums over tiles that need no running maximum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.normalisation import divided
from rewriter.kernels.attention.xla.problem import Problem
from rewriter.kernels.attention.xla.tile import Tile, is_float
from rewriter.kernels.attention.xla.tiles import Block, Step, over_steps
from rewriter.kernels.shared.contraction import contraction
from rewriter.ops.score import NONE, SUM

if TYPE_CHECKING:
    from jax import Array


def weighed(p: Problem, e: int) -> tuple[Array, Array]:
    """Returns the result [b, t, n, e], and the sums of weights [b, n, t].

    The sums are 0 where nothing is divided by them.

    Args:
        p: The problem.
        e: The width of values.
    """
    z = p.sizes
    n = z.heads * z.group

    def one_block(block: Block, carry: Any) -> Any:
        out, totals = carry
        total, acc = _rows_forward(block, e)
        if p.normalisation == SUM:
            acc = acc / _divisor(block, total, {})[..., None]
            totals = block.store(totals, total, "bnt")
        return block.store(out, acc), totals

    def one_step(step: Step, carry: Any) -> Any:
        return step.over_blocks(one_block, carry)

    start = p.full((z.b, z.t, n, e), p.out_dtype), p.full((z.b, n, z.t), p.wide)
    return over_steps(p, one_step, start)


def through_divisor(
    block: Block, again: Array
) -> tuple[Array, Array, dict[str, Array]]:
    """Returns cotangents of weighed values, and of the sums of weights negated.

    Args:
        block: Some rows.
        again: Which of them the block before has computed, bool [c, r]. They pass
            nothing.

    Returns:
        ``(up, delta, others)``: up [c, r, e] and delta [c, r, 1]; others are the
        cotangents of float arrays that the divisor reads, by name.
    """
    p, again = block.p, again[..., None]
    up = jnp.where(again, 0, block.rows("cotangent").astype(p.wide))
    if p.normalisation == NONE:
        return up, jnp.zeros_like(up[..., :1]), {}
    every = _read_by_divisor(block)
    floats = {n: x for n, x in every.items() if is_float(x)}
    by, back = jax.vjp(lambda x, more: _divisor(block, x, more), block.lse(), floats)
    up = jnp.where(again, 0, up / by[..., None])
    change = (up * block.rows("out").astype(p.wide)).sum(-1)
    total, others = back(jnp.where(again[..., 0], 0, -change))
    return up, -total[..., None], others


def _rows_forward(block: Block, e: int) -> tuple[Array, Array]:
    """Returns a block's sums of weights [c, r], and of weighed values [c, r, e]."""
    p, queries = block.p, block.queries()

    def body(tile: Tile, carry: Any) -> Any:
        total, acc = carry
        weights, _ = tile.scores(queries)
        if p.normalisation == SUM:
            total = total + weights.sum(-1)
        if "dropout" in p.arrays:
            weights = weights * tile.dropout()
        return total, acc + contraction("crs,cse->cre", weights, tile.values())

    start = p.full(queries.shape[:2], p.wide), p.full((*queries.shape[:2], e), p.wide)
    return block.over_keys(body, start)


def _divisor(block: Block, total: Array, moving: dict[str, Array]) -> Array:
    """Returns what rows are divided by, [c, r], from their sums of weights."""
    p, z = block.p, block.p.sizes
    arrays = {**_read_by_divisor(block), **moving}
    apart = total.reshape(z.some_b, z.some_heads, z.group, z.rows, 1)
    return divided(apart, block.t, p.divisor, arrays).reshape(total.shape)


def _read_by_divisor(block: Block) -> dict[str, Array]:
    """Returns these rows of what the divisor reads, by name."""
    divisor = block.p.divisor
    return {n: block.part(n) for n in (divisor.arrays if divisor else ())}
