"""The forward pass: a running softmax over the tiles of each block of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import AVERAGED, NAN
from rewriter.kernels.attention.xla.function_weights import weighed
from rewriter.kernels.attention.xla.problem import Problem, problem_of
from rewriter.kernels.attention.xla.sizes import number
from rewriter.kernels.attention.xla.tile import Tile
from rewriter.kernels.attention.xla.tiles import Block, Step, over_steps
from rewriter.kernels.shared.contraction import contraction
from rewriter.ops.score import SOFTMAX, SUM

if TYPE_CHECKING:
    from jax import Array


def forward(
    q: Array, k: Array, v: Array, *, residuals: bool = False, **given: Any
) -> Any:
    """Returns attention, as `reference` does, in memory that grows with t + s.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        residuals: Whether to return ``(result, (lse,))``, lse [b, n, t] in
            float32 (float64 for float64 inputs), -inf for rows without keys. With a
            fill it is two such arrays, whose sum that is. Weights that are no softmax
            have their sums there, if the result is divided by these, and else nothing.
        **given: The other operands and parameters of `reference`, and `Blocks` as
            ``config``.
    """
    p = problem_of(q, k, v, given)
    z, wide = p.sizes, p.wide
    n, e = q.shape[2], v.shape[3]
    if p.normalisation != SOFTMAX:
        out, totals = weighed(p, e)
        saved = (totals,) if p.normalisation == SUM else ()
        return (out, saved) if residuals else out

    def one_step(step: Step, carry: Any) -> Any:
        fill: Any = jnp.nan if p.empty_rows in NAN else 0
        fill = step.mean()[:, None] if p.empty_rows in AVERAGED else fill
        if p.fill is not None:  # a row without scores is as written, then
            fill = jnp.where(p.reaches, jnp.nan, fill)

        def one_block(block: Block, carry: Any) -> Any:
            out, *saved = carry
            top, total, acc = _rows_forward(block, e)
            empty = (total == 0)[..., None]
            result = acc / jnp.where(empty, 1, total[..., None])
            out = block.store(out, jnp.where(empty, fill, result))
            sums = zip(saved, _saved(p, top, total), strict=False)
            return out, *(block.store(into, x, "bnt") for into, x in sums)

        return step.over_blocks(one_block, carry)

    rows = [
        p.full((z.b, n, z.t), wide)
        for _ in range(2 if p.fill_given and residuals else 1)
    ]
    out, *saved = over_steps(
        p, one_step, (p.full((z.b, z.t, n, e), p.out_dtype), *rows)
    )
    if p.empty_rows in AVERAGED and "dropout" in p.arrays:
        fix = lambda: _dropped_mean(p, out, saved[0])
        out = lax.cond(jnp.any(saved[0] == -jnp.inf), fix, lambda: out)
    return (out, tuple(saved)) if residuals else out


def _saved(p: Problem, top: Array, total: Array) -> list[Array]:
    """Returns the log-sum-exp of rows [c, r], or two terms if there is a fill.

    One of -1e9 absorbs the digits of the second.
    """
    more = jnp.log(total)
    if not p.fill_given:
        return [top + more]
    if p.fill is None:
        return [top + more, jnp.zeros_like(more)]
    lost = jnp.where(total == 0, jnp.nan, top)  # NaN as written, and not empty
    return [
        jnp.where(p.reaches, lost, top + more),
        jnp.where(p.reaches, more, 0),
    ]


def _rows_forward(block: Block, e: int) -> tuple[Array, Array, Array]:
    """Returns a block's row maxima and sums [c, r], and p v [c, r, e]."""
    p = block.p
    queries = block.queries()

    def body(tile: Tile, carry: Any) -> Any:
        top, total, acc = carry
        x, _ = tile.scores(queries)
        top, total, weights, fade = running(x, top, total)
        if "dropout" in p.arrays:
            weights = weights * tile.dropout()
        new = contraction("crs,cse->cre", weights, tile.values())
        return top, total, acc * fade[..., None] + new

    top, total = first_sums(block)
    return block.over_keys(body, (top, total, p.full((*top.shape, e), p.wide)))


def first_sums(block: Block) -> tuple[Array, Array]:
    """Returns row maxima and sums [c, r] before the first key."""
    p, z = block.p, block.p.sizes
    shape = (z.some_b * z.some_heads, z.group * z.rows)
    # Finite, so that exp(x - top) is 0, not NaN, in a row without keys so far.
    top = p.full(shape, p.wide, float(jnp.finfo(p.wide).min))
    total = p.full(shape, p.wide)
    if "sinks" in p.arrays:
        top = jnp.maximum(top, block.per_row(block.step.per_head("sinks")))
        total = total + 1
    return top, total


def running(x: Array, top: Array, total: Array) -> tuple[Array, ...]:
    """Returns new maxima, sums, the tile's weights, and the factor of earlier sums."""
    higher = jnp.maximum(top, lax.reduce_max(x, (2,)))
    weights = jnp.exp(x - higher[..., None])
    fade = jnp.exp(top - higher)
    return higher, total * fade + lax.reduce_sum(weights, (2,)), weights, fade


def _dropped_mean(p: Problem, out: Array, lse: Array) -> Array:
    """Returns out with each empty row set to the mean over s of dropout · v."""
    p = replace(p, arrays={**p.arrays, "out": out, "lse": lse})

    def one_block(block: Block, out: Array) -> Array:
        def body(tile: Tile, acc: Array) -> Array:
            kept = kept_factors(tile)
            return acc + contraction("crs,cse->cre", kept, tile.values())

        old = block.rows("out")
        acc = p.full(old.shape, p.wide)
        acc = block.over_keys(body, acc, every=True) / number(p.sizes.s)
        new = jnp.where(block.lse()[..., None] == -jnp.inf, acc, old)
        return block.store(out, new)

    return over_steps(p, lambda step, c: step.over_blocks(one_block, c), out)


def kept_factors(tile: Tile) -> Array:
    """Returns the dropout factors [c, r, s], 0 for keys of the tile before."""
    kept = tile.dropout()
    for fresh in tile.fresh():
        kept = jnp.where(fresh, kept, 0)
    return kept
