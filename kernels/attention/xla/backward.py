"""The backward pass: computes scores again, tile by tile, from the log-sum-exp."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.empty_rows import (
    AVERAGED,
    NAN,
    PASSES,
    PASSING,
    ZERO,
    complete_if_any_empty,
    passed,
)
from rewriter.kernels.attention.scored_form import ARRAYS, TABLES
from rewriter.kernels.attention.xla.forward import first_sums, kept_factors, running
from rewriter.kernels.attention.xla.function_weights import through_divisor
from rewriter.kernels.attention.xla.problem import Problem, problem_of
from rewriter.kernels.attention.xla.sizes import number
from rewriter.kernels.attention.xla.tile import Tile, is_float
from rewriter.kernels.attention.xla.tiles import Block, Step, over_steps
from rewriter.kernels.shared.contraction import contraction
from rewriter.kernels.shared.slices import part, with_part
from rewriter.ops.score import SOFTMAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from jax import Array


def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array,
    residuals: tuple[Array, ...],
    cotangent: Array,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangents of every float operand, in as little memory as `forward`.

    Scores are computed again tile by tile from lse. An operand [t, s], such as
    a full bias, has a cotangent of its own size.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        out: [b, t, n, e], from `forward`.
        residuals: From `forward`.
        cotangent: [b, t, n, e].
        **given: The other operands and parameters of `reference`, and `Blocks` as
            ``config``.
    """
    saved = dict(zip(("lse", "lse_rest"), residuals, strict=False))
    p = problem_of(q, k, v, {**given, **saved, "out": out, "cotangent": cotangent})
    wide = p.wide
    grads = {x: p.full(p.arrays[x].shape, wide) for x in _floats(p)}
    grads |= {x: p.full(p.arrays[x].shape, p.arrays[x].dtype) for x in "qkv"}
    grads = _over_rows(p, grads)
    grads |= _empty_backward(p, grads)
    return {name: g.astype(p.arrays[name].dtype) for name, g in grads.items()}


def with_passed(
    grads: Mapping[str, Array],
    operands: Mapping[str, Array | None],
    params: Mapping[str, Any],
    *,
    out: Array,
    lse: Array,
    cotangent: Array,
) -> dict[str, Array]:
    """Returns cotangents with the share that rows without keys pass to their scores.

    It serves kernels that compute the cotangents of other rows, and of v. It is meant
    for `complete_if_any_empty`: whether there is such a row, it does not ask.

    Args:
        grads: The cotangents to complete.
        operands: The op's operands.
        params: The op's parameters.
        out: [b, t, n, e], from the forward.
        lse: [b, n, t], -inf in rows without keys.
        cotangent: [b, t, n, e].
    """
    names = {n: x for n, x in operands.items() if x is not None}
    given = {**names, **params, "out": out, "lse": lse, "cotangent": cotangent}
    p = problem_of(*(given.pop(n) for n in "qkv"), given)
    if _by_tiles(p) and p.empty_rows == PASSING:
        made = _of_tiles(p, [n for n in grads if n != "v"])
    else:
        made = passed(names, params, lse == -jnp.inf, cotangent)
    return dict(grads) | {n: grads[n] + x for n, x in made.items() if n in grads}


def _of_tiles(p: Problem, names: Iterable[str]) -> dict[str, Array]:
    """Returns the share of rows without keys in cotangents, from all tiles."""
    none = {n: p.full(p.arrays[n].shape, p.wide) for n in _floats(p)}
    none |= {n: p.full(p.arrays[n].shape, p.wide) for n in "qkv"}
    made = _over_rows(p, none, averaged=True)
    return {n: made[n] for n in names}


_FLOATS = ("bias", "alibi", "sinks", "dropout", "scale_factor")


def _floats(p: Problem) -> list[str]:
    """The names of operands beside q, k and v that have a cotangent."""
    return [*(n for n in _FLOATS if n in p.arrays), *_read_by_score(p)]


def _read_by_score(p: Problem) -> list[str]:
    """The names of those that the function of scores reads."""
    own = (n for n in (*ARRAYS, *TABLES) if n in p.arrays)
    return [n for n in own if is_float(p.arrays[n])]


def _over_rows(
    p: Problem, grads: dict[str, Array], averaged: bool = False
) -> dict[str, Array]:
    """Adds the cotangents of all rows, or of averaged rows without keys."""

    def one_block(block: Block, carry: Any) -> Any:
        return _rows_backward(block, carry, averaged)

    def one_step(step: Step, grads: dict[str, Array]) -> dict[str, Array]:
        columns = step.columns(grads["k"]), step.columns(grads["v"])
        grads, columns = step.over_blocks(one_block, (grads, columns))
        for name, x in zip("kv", columns, strict=True):
            grads[name] = step.add_columns(grads[name], x)
        return grads

    return over_steps(p, one_step, grads)


@dataclass(frozen=True)
class _Rows:
    """Operands of the tiles of one block of rows; c is a key head, r a row.

    Attributes:
        idle: Which rows add nothing, bool [c, r, 1].
        again: Which rows the block before has computed, bool [c, r].
        top: The log-sum-exp or a row's maximum, infinite for idle rows, [c, r, 1].
        rest: What to subtract beside it.
        up: The cotangent of the sum of weighed values, [c, r, e].
        delta: What is taken off the weights' cotangents: the sum of the result times
            its cotangent, [c, r, 1].
        queries: As scores are made of them, [c, r, h].
        plain: The queries as given.
        up_t: `up` with its last axes swapped.
        queries_t: The scaled queries, with their last axes swapped.
    """

    idle: Array
    again: Array
    top: Array
    rest: Array
    up: Array
    delta: Array
    queries: Array
    plain: Array
    up_t: Array
    queries_t: Array


def _rows_of(block: Block, averaged: bool) -> _Rows:
    """The numbers and arrays of a block of rows, with a softmax."""
    p, wide = block.p, block.p.wide
    lse = block.lse()
    empty = lse == -jnp.inf
    again = block.each_row(block.t[:, 0]) < block.nominal
    top, rest = (lse, lse) if averaged else _lse_parts(block, lse)
    idle = ~empty if averaged else empty
    if p.sizes.rows_overlap:
        idle = idle | again
    top = jnp.where(idle, jnp.inf, top)
    if p.empty_rows in NAN and not averaged:
        # Where every score is -inf, by a bias or a function, weights are NaN as
        # written. So are gradients of the keys that such a row sees.
        top = jnp.where(empty & ~again, jnp.nan, top)
    top = top[..., None]
    rest, idle = rest[..., None], idle[..., None]
    up = jnp.where(idle, 0, block.rows("cotangent").astype(wide))
    delta = up * jnp.where(idle, 0, block.rows("out").astype(wide))
    delta = delta.sum(-1, keepdims=True)
    rows = _with_queries(block, idle, again, top, rest, up, delta)
    if p.empty_rows not in ZERO or averaged or "dropout" in p.arrays:
        return rows
    return replace(rows, delta=_delta_of_seen(block, rows))


def _delta_of_seen(block: Block, rows: _Rows) -> Array:
    """What is taken off the weights' cotangents [c, r, 1], without hidden keys.

    A program may choose 0 for their weights. Their values then make results NaN, and
    not gradients of scores, if they are not finite.
    """

    def again() -> Array:
        def body(tile: Tile, total: Array) -> Array:
            weights = jnp.exp(tile.scores(rows.queries)[0] - rows.top - rows.rest)
            d = contraction("cre,cse->crs", rows.up, tile.values())
            return total + tile.only_seen(weights * d).sum(-1, keepdims=True)

        return block.over_keys(body, jnp.zeros_like(rows.delta))

    bad = ~jnp.isfinite(rows.delta)
    return lax.cond(jnp.any(bad), again, lambda: rows.delta)


def _weighed_rows_of(block: Block) -> tuple[_Rows, dict[str, Array]]:
    """The same without a softmax, and cotangents of what the divisor reads."""
    again = block.each_row(block.t[:, 0]) < block.nominal
    again = jnp.broadcast_to(again, block.rows("cotangent").shape[:2])
    up, delta, others = through_divisor(block, again)
    none = jnp.zeros_like(delta)
    return _with_queries(block, again[..., None], again, none, none, up, delta), others


def _with_queries(block: Block, *numbers: Array) -> _Rows:
    """The rows of some numbers."""
    p, up = block.p, numbers[4]
    queries, plain = block.queries(), block.rows("q").astype(p.wide)
    # Transposed once here, since a dot over rows of a tile is slow on CPU.
    up_t = up.swapaxes(1, 2)
    queries_t = (plain * p.factor()).swapaxes(1, 2)
    return _Rows(*numbers, queries, plain, up_t, queries_t)


def _rows_backward(block: Block, carry: Any, averaged: bool) -> Any:
    """Adds one block of rows to the cotangents; those of k and v are separate.

    Args:
        block: The rows.
        carry: The cotangents, and those of k and v.
        averaged: Whether to add rows without keys instead, of equal weights.
    """
    p, (grads, (dk, dv)) = block.p, carry
    if p.normalisation == SOFTMAX:
        rows = _rows_of(block, averaged)
    else:
        rows, others = _weighed_rows_of(block)
        grads = grads | {n: block.add_part(n, grads[n], x) for n, x in others.items()}
    names = ("bias", "alibi", "dropout", *_read_by_score(p))
    inner = {x: grads[x] for x in names if x in grads}
    start = p.full(rows.queries.shape, p.wide), dk, dv, inner
    body = functools.partial(_add_tile, block, rows, averaged)
    dq, dk, dv, inner = block.over_keys(body, start, every=averaged)
    grads = {**grads, **inner}
    if "scale_factor" in p.arrays:
        change = (dq * rows.plain).sum() * p.scale
        grads["scale_factor"] = grads["scale_factor"] + change
    if "sinks" in p.arrays and not averaged:
        change = _sinks_backward(block, rows)
        grads["sinks"] = _add_heads(block.step, grads["sinks"], change)
    dq = dq * p.factor()
    if p.sizes.rows_overlap or averaged:
        starts, sizes = p.place("btnh", grads["q"].shape, block.here)
        old = block.merge(part(grads["q"], starts, sizes))
        stays = rows.idle if averaged else rows.again[:, None]
        dq = jnp.where(stays, old.astype(p.wide), dq)
    grads["q"] = block.store(grads["q"], dq)
    return grads, (dk, dv)


def _add_tile(block: Block, rows: _Rows, averaged: bool, tile: Tile, carry: Any) -> Any:
    """Adds one tile of scores to the cotangents of its rows and keys."""
    dq, dk, dv, grads = carry
    arrays, step, wide = block.p.arrays, block.step, block.p.wide
    x, bent = tile.scores(rows.queries)
    d = contraction("cre,cse->crs", rows.up, tile.values())
    if averaged:
        weights = jnp.where(rows.idle, 0, jnp.full_like(x, 1) / number(block.p.sizes.s))
        weights = tile.only_new_keys(weights)
        d = jnp.where(weights == 0, 0, d)  # of rows that add nothing
    elif block.p.normalisation == SOFTMAX:
        weights = jnp.exp(x - rows.top - rows.rest)
        if block.p.empty_rows in ZERO:  # chosen, also where a row is NaN
            weights = tile.only_seen(weights)
    else:
        weights = x
    used = weights
    if "dropout" in arrays:
        kept = tile.dropout()
        used = weights * kept
        dropped = tile.add("dropout", grads["dropout"], weights * d)
        grads = {**grads, "dropout": dropped}
        d = jnp.where(kept == 0, 0, d * kept)  # also if d is not finite
    dv = tile.add_columns(dv, contraction("cer,crs->ces", rows.up_t, used))
    d = d - rows.delta
    if block.p.normalisation == SOFTMAX:
        d = weights * d
    # For a hidden key d is 0 times a perhaps infinite number.
    d = d if averaged else tile.only_seen(d)
    if "bias" in arrays:
        grads = {**grads, "bias": tile.add("bias", grads["bias"], d)}
    if "alibi" in arrays:
        slope = (tile.by_head(d) * tile.relative().astype(wide)).sum((0, 3, 4))
        grads = {**grads, "alibi": _add_heads(step, grads["alibi"], slope)}
    if block.p.score is not None:
        d, others = tile.through_score(rows.queries, d)
        added = {n: tile.add_part(n, grads[n], x) for n, x in others.items()}
        grads = {**grads, **added}
    if bent is not None:
        d = d * (1 - bent * bent)
    keys = tile.keys().astype(wide)
    dq = dq + contraction("crs,csh->crh", d, keys)
    dk = tile.add_columns(dk, contraction("chr,crs->chs", rows.queries_t, d))
    return dq, dk, dv, grads


def _sinks_backward(block: Block, rows: _Rows) -> Array:
    """The cotangent of sinks from these rows, by key head and query head of it."""
    z = block.p.sizes
    sinks = block.per_row(block.step.per_head("sinks"))[..., None]
    share = jnp.exp(sinks - rows.top - rows.rest) * rows.delta
    return -share.reshape(z.some_b, z.some_heads, z.group, z.rows).sum((0, 3))


def _lse_parts(block: Block, lse: Array) -> tuple[Array, Array]:
    """Returns lse [c, r] as a sum of two terms, the second small.

    A bias or a fill of -1e9 on a whole row absorbs the digits of log(sum) when the
    maximum is added. Such rows get both terms from another loop over the keys.
    """
    p, both = block.p, "lse_rest" in block.p.arrays
    rest = block.lse("lse_rest") if both else jnp.zeros_like(lse)
    if "bias" not in p.arrays and p.score is None and (both or p.fill is None):
        return lse, rest

    def again() -> tuple[Array, Array]:
        queries = block.queries()
        top, total = first_sums(block)

        def body(tile: Tile, carry: Any) -> Any:
            return running(tile.scores(queries)[0], *carry)[:2]

        top, total = block.over_keys(body, (top, total))
        top = jnp.where(jnp.isnan(lse), lse, top)
        return top, jnp.where(total == 0, 0, jnp.log(total))  # NaN stays

    large = jnp.isfinite(lse) & (jnp.abs(lse) > 1000)
    return lax.cond(jnp.any(large), again, lambda: (lse, rest))


def _add_heads(step: Step, into: Array, x: Array) -> Array:
    """Returns `into` [n] plus x [k, g] at this step's heads."""
    (start, size) = step.here["n"]
    old = part(into, [start], [size])
    return with_part(into, old + x.reshape(size), [start])


def _empty_backward(p: Problem, grads: dict[str, Array]) -> dict[str, Array]:
    """Returns cotangents with the share of rows without keys, if any."""
    if "sinks" in p.arrays or not _may_be_empty(p):
        return {}
    empty = p.arrays["lse"] == -jnp.inf
    if p.empty_rows in ZERO and p.empty_rows not in PASSES:
        return {}
    return complete_if_any_empty(empty, grads, lambda given: _of_empty(p, given, empty))


def _of_empty(p: Problem, grads: dict[str, Array], empty: Array) -> dict[str, Array]:
    """Returns the cotangents that rows without keys change, with their share."""
    z, dv = p.sizes, grads["v"]
    if p.empty_rows == PASSING and _by_tiles(p):
        return _over_rows(p, grads, averaged=True)
    if "dropout" in p.arrays and p.empty_rows in AVERAGED:
        names = {"v": dv, "dropout": grads["dropout"]}
        return _dropped_mean_backward(p, names)
    made = {}
    if p.empty_rows in NAN:
        bad = empty.reshape(z.b, z.heads, -1).any(-1)[:, None, :, None]
        made = {"v": jnp.where(bad, jnp.nan, dv)}
    elif p.empty_rows in AVERAGED:
        up = p.arrays["cotangent"].astype(p.wide)
        up = jnp.where(empty.swapaxes(1, 2)[..., None], up, 0).sum(1) / number(z.s)
        made = {"v": dv + up.reshape(z.b, 1, z.heads, z.group, -1).sum(3)}
    return made | (_passed(p, grads, empty) if p.empty_rows in PASSES else {})


def _passed(p: Problem, grads: dict[str, Array], empty: Array) -> dict[str, Array]:
    """Returns the cotangents that rows without keys pass something to."""
    params = {"scale": p.scale, "empty_rows": p.empty_rows}
    more = passed(p.arrays, params, empty, p.arrays["cotangent"])
    return {n: grads[n] + x for n, x in more.items()}


def _by_tiles(p: Problem) -> bool:
    """Whether gradients of rows without keys need more than sums of operands."""
    bent = p.softcap is not None or p.score is not None
    return bent or "dropout" in p.arrays


def _may_be_empty(p: Problem) -> bool:
    if p.normalisation != SOFTMAX:
        return False
    masks = {"mask", "q_segments", "kv_lengths", "kv_positions", "bias"}
    hides = p.window != (None, None) or p.score is not None
    return hides or bool(masks & p.arrays.keys())


def _dropped_mean_backward(p: Problem, grads: dict[str, Array]) -> dict[str, Array]:
    """Returns grads of v and dropout plus those through `_dropped_mean`."""
    z, wide = p.sizes, p.wide

    def one_block(block: Block, carry: Any) -> Any:
        mine = block.lse() == -jnp.inf
        if z.rows_overlap:
            mine = mine & (block.each_row(block.t[:, 0]) >= block.nominal)
        up = jnp.where(
            mine[..., None], block.rows("cotangent").astype(wide), 0
        ) / number(z.s)

        def body(tile: Tile, carry: Any) -> Any:
            dv, dropout = carry
            kept = kept_factors(tile)
            dv = tile.add_columns(dv, contraction("cre,crs->ces", up, kept))
            d = contraction("cre,cse->crs", up, tile.values())
            for fresh in tile.fresh():
                d = jnp.where(fresh, d, 0)
            return dv, tile.add("dropout", dropout, d)

        return block.over_keys(body, carry, every=True)

    def one_step(step: Step, grads: dict[str, Array]) -> dict[str, Array]:
        dv = step.columns(grads["v"])
        dv, dropout = step.over_blocks(one_block, (dv, grads["dropout"]))
        dv = step.add_columns(grads["v"], dv)
        return {"v": dv, "dropout": dropout}

    return over_steps(p, one_step, grads)
