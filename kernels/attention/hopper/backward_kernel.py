"""The gradients of attention on Hopper's tensor cores, in two kernels or more.

The weights are P = exp(scores - lse). With dP = dO vᵀ and delta = sum(dO · out) over a
row, dS = P · (dP - delta). Then dv = Pᵀ dO, dk = dSᵀ q and dq = dS k.

One kernel has tiles of keys, loops over blocks of queries and keeps dk and dv in
registers. Its scores are transposed, so that tensor cores take the weights as operands
directly. For wide heads its warpgroups share a tile, and each keeps one of the sums.
Another kernel has tiles of queries, and loops over blocks of keys for dq.

Other addends of scores have kernels of their own. One has tiles of a table of biases,
and loops over the batch entries and heads that share it. Two sum up dS, for biases of
keys and for slopes. Over all keys of a query, dS adds up to its sink's share, delta ·
exp(sink - lse), or to nothing: that is the cotangent of a bias of queries.

No sums meet in memory: results are the same in every run. Source: Dao,
"FlashAttention-2" (arXiv 2307.08691), section 3.1.2; Shah et al., "FlashAttention-3"
(arXiv 2407.08608), section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.empty import NAN, PASSES, ZERO
from rewriter.kernels.attention.hopper import block_masks, pallas
from rewriter.kernels.attention.hopper.backward_config import (
    SUMS_STAGES,
    TABLE_BLOCK,
    BackwardTiles,
    sums_block,
    table_stages,
)
from rewriter.kernels.attention.hopper.backward_of_keys import (
    Divided,
    Fused,
    OfKeys,
)
from rewriter.kernels.attention.hopper.backward_of_queries import OfQueries
from rewriter.kernels.attention.hopper.backward_of_sums import OfColumns, OfSlopes
from rewriter.kernels.attention.hopper.backward_of_tables import (
    OfTables,
    TableProblem,
    splits,
)
from rewriter.kernels.attention.hopper.backward_tiles import Problem
from rewriter.kernels.attention.hopper.blocks import Mask
from rewriter.kernels.attention.hopper.config import EDGE
from rewriter.kernels.attention.hopper.extra_operands import Extra, extra_of
from rewriter.kernels.attention.hopper.forward_kernel import (
    copied_by_rows,
    even,
    pair_of,
    row_sums,
)
from rewriter.kernels.attention.hopper.pallas import LOG2E
from rewriter.kernels.attention.hopper.terms import terms_of, transposed
from rewriter.kernels.shared.hopper import PROCESSORS

if TYPE_CHECKING:
    from jax import Array


def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array,
    residuals: tuple[Array, ...],
    cotangent: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    prefix: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
    config: BackwardTiles | None = None,
) -> dict[str, Array]:
    """Returns cotangents of float operands, but of biases and slopes only if they fit.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        out: [b, t, n, e], from the forward.
        residuals: ``(lse,)``, float32 [b, n, t].
        cotangent: [b, t, n, e].
        bias: As in the forward, like all that follow.
        mask: bool [b|1, n|1, t|1, s|1].
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s].
        kv_lengths: int [b|1].
        offset: int [b|1].
        prefix: int [b|1].
        alibi: float [n].
        sinks: float [n].
        scale: As in the forward.
        window: As in the forward.
        shift: As in the forward.
        softcap: As in the forward.
        empty_rows: As in the forward.
        out_dtype: q's, or float32; cotangents are rounded to q's all the same, as the
            gradients of q, k and v are.
        config: The tiles.
    """
    del out_dtype
    config = config or BackwardTiles()
    b, t, n, h = q.shape
    s, heads, e = k.shape[1], k.shape[2], v.shape[3]
    left, right = window
    lengths, offsets, prefixes = (
        None if x is None else jnp.broadcast_to(x.astype(jnp.int32), (b,))
        for x in (kv_lengths, offset, prefix)
    )
    (lse,) = residuals
    up = cotangent.astype(q.dtype)
    wide = up.astype(jnp.float32) * out.astype(jnp.float32)
    delta = wide.sum(-1).swapaxes(1, 2)  # one fused reduction, where no dot is one
    given = {
        "bias": bias, "mask": mask, "q_segments": q_segments,
        "kv_segments": kv_segments, "alibi": alibi, "sinks": sinks,
    }  # fmt: skip
    given = {name: x for name, x in given.items() if x is not None}
    terms, extra = terms_of(t, s, **given)
    extra.pop("sinks", None)
    empty = lse == -jnp.inf
    if empty_rows in ZERO:  # cotangents of padding are dropped
        up = jnp.where(empty.swapaxes(1, 2)[..., None], 0, up)
    unit, rest = (1.0 if terms.natural else LOG2E), None
    if terms.adding:
        again = functools.partial(
            row_sums, q, k, v, **given, kv_lengths=kv_lengths, offset=offset,
            prefix=prefix, scale=scale, window=window, shift=shift, softcap=softcap,
        )  # fmt: skip
        lse, rest = _split(lse, again)
    rows = {
        "lse": _padded(jnp.where(empty, jnp.inf, lse * unit), config, jnp.inf),
        "delta": _padded(jnp.where(empty, 0.0, delta), config, 0.0),
    }
    if rest is not None:
        rows["rest"] = _padded(rest * LOG2E, config, 0.0)
    blocks = [config.queries, config.keys, *_other_blocks(config, h, e, given)]
    by_rows = copied_by_rows((t, s), (h, e), blocks)
    common = {"b": b, "h": h, "e": e, "scale": scale, "softcap": softcap,
              "by_rows": by_rows,
              "programs": config.programs, "stages": config.stages,
              "warpgroups": config.warpgroups,
              "claimed": config.claimed}  # fmt: skip
    turned, extra_turned = transposed(terms, extra)
    if turned.whole_rows:  # of whole tiles, as `OfKeys.shown` reads it
        line = extra_turned["row_terms"]
        extra_turned["row_terms"] = _padded(line, config, 0.0)
    of_keys = Problem(
        heads=heads, group=n // heads, shared=1, block=config.queries,
        mask=Mask(
            s, t, right, left, -shift, False, offsets is not None,
            more=terms.hides, prefixes=prefixes is not None,
        ),
        terms=turned, values=config.stages, divided=config.divided, **common,
    )  # fmt: skip
    of_queries = Problem(
        heads=n, group=1, shared=n // heads, block=config.keys,
        mask=Mask(
            t, s, left, right, shift, lengths is not None, offsets is not None,
            more=terms.hides, prefixes=prefixes is not None,
        ),
        terms=terms, values=config.v_stages or config.stages, **common,
    )  # fmt: skip
    whole = (q, k, v, up) if by_rows else map(even, (q, k, v, up))
    named = dict(zip("qkvg", whole, strict=True)) | rows
    numbers = {"lengths": lengths, "offsets": offsets, "prefixes": prefixes}
    named |= {name: x for name, x in numbers.items() if x is not None}
    by_key, by_query = named | extra_turned, named | extra
    turned_mask = None if mask is None else mask.swapaxes(2, 3)
    pair = pair_of(q_segments, kv_segments)
    turned_pair = None if pair is None else pair[::-1]
    for p, arrays, hiding, segments in (
        (of_keys, by_key, turned_mask, turned_pair),
        (of_queries, by_query, mask, pair),
    ):
        found = block_masks.table(
            b, p.mask.t, p.mask.s, p.rows, p.block, hiding, segments, p.group
        )
        if found is not None:
            arrays["reach"] = found
    if config.fused:
        total = jax.new_ref(jnp.zeros((b, -(-t // EDGE) * EDGE, n, h), jnp.float32))
        dk, dv = _call(Fused, of_keys, by_key | {"dq": total})
        dq = (total[...] * scale).astype(q.dtype)
        if of_queries.mask.may_be_empty:  # ignores values added to rows without keys
            dq = jnp.where(_padded_rows(empty, dq), 0, dq)
    else:
        dk, dv = _call(Divided if config.divided else OfKeys, of_keys, by_key)
        (dq,) = _call(OfQueries, of_queries, by_query)
    dv = dv[:, :s]
    if of_queries.mask.may_be_empty:
        dv = _with_empty_rows(dv, empty, cotangent, empty_rows)
    grads = {"q": dq[:, :t], "k": dk[:, :s], "v": dv}
    if config.tables and bias is not None and 1 not in bias.shape[2:]:
        made = _of_tables(of_queries, config, given, {**named, **extra})
        grads |= {} if made is None else {"bias": made[..., :t, :s].astype(bias.dtype)}
    delta = jnp.where(empty, 0.0, delta)
    share = 0.0 * delta  # the sums of rows' changes, not finite where delta is not
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - residuals[0]) * delta
        share = jnp.where(empty, 0.0, share)
        grads["sinks"] = (-share.sum((0, 2))).astype(sinks.dtype)
    if bias is not None and bias.shape[3] == 1:
        grads["bias"] = _shared(share[..., None], bias)
    elif bias is not None and bias.shape[2] == 1:
        made = _sums(
            OfColumns, of_keys, config, extra_of(given).transposed, by_key,
            turned_mask, turned_pair,
        )  # fmt: skip
        grads |= {} if made is None else {"bias": _shared(made[:, :, None], bias)}
    if alibi is not None:
        made = _sums(
            OfSlopes, of_queries, config, extra_of(given), by_query, mask, pair,
        )  # fmt: skip
        grads |= {} if made is None else {"alibi": made.sum((0, 2)).astype(alibi.dtype)}
    if empty_rows in PASSES and sinks is None and of_queries.mask.may_be_empty:
        params = {
            "scale": scale, "window": window, "shift": shift, "softcap": softcap,
            "empty_rows": empty_rows,
        }  # fmt: skip
        numbers = {"kv_lengths": kv_lengths, "offset": offset, "prefix": prefix}
        operands = {"q": q, "k": k, "v": v, **given, **numbers}
        grads = xla.with_passed(
            grads, operands, params, out=out, lse=residuals[0], cotangent=cotangent
        )
    return grads


def _other_blocks(
    config: BackwardTiles, h: int, e: int, given: dict[str, Array]
) -> list[int]:
    """Returns the rows of blocks in kernels for cotangents of biases and slopes."""
    if not given.keys() & {"bias", "alibi"}:
        return []
    both = extra_of(given).transposed, extra_of(given)
    sums = [sums_block(config, h, e, extra) for extra in both]
    return [x for x in (*sums, TABLE_BLOCK) if x]


def _shared(x: Array, like: Array) -> Array:
    """Returns x summed along the axes in which `like` has size 1."""
    axes = tuple(i for i, size in enumerate(like.shape) if size == 1)
    return x.sum(axes, keepdims=True).astype(like.dtype)


def _sums(
    kind: type[OfColumns | OfSlopes],
    p: Problem,
    config: BackwardTiles,
    extra: Extra,
    named: dict[str, Any],
    mask: Array | None,
    segments: tuple[Array, Array] | None,
) -> Array | None:
    """Returns a sum for each row and query head, [b, n, rows]; None without room.

    Args:
        kind: The kind of sum.
        p: The problem of dk and dv, or of dq.
        config: Its config.
        extra: The operands of its scores.
        named: The kernel's arrays by name.
        mask: As its scores lie.
        segments: Those of rows and of columns.
    """
    block = sums_block(config, p.h, p.e, extra)
    if not block:
        return None
    n = p.heads * p.group
    whole = replace(
        p, heads=n, group=1, shared=p.group * p.shared, block=block,
        stages=SUMS_STAGES, values=SUMS_STAGES, divided=False,
    )  # fmt: skip
    rows, columns = p.mask.t, p.mask.s
    named = {name: x for name, x in named.items() if name != "reach"}
    reach = block_masks.table(p.b, rows, columns, whole.rows, block, mask, segments)
    if reach is not None:
        named["reach"] = reach
    size = (p.b, n, -(-rows // whole.rows) * whole.rows)
    (made,) = _call(kind, whole, named, [jax.ShapeDtypeStruct(size, jnp.float32)])
    return made[:, :, :rows]


def _of_tables(
    p: Problem, config: BackwardTiles, given: dict[str, Array], named: dict[str, Any]
) -> Array | None:
    """Returns the cotangent of a table of biases; None if it does not fit."""
    stages = table_stages(config, p.h, p.e, extra_of(given))
    if stages < 1:
        return None
    table = named["bias"]
    same = {x.name: getattr(p, x.name) for x in fields(p)}
    same |= {"block": TABLE_BLOCK, "stages": stages, "values": stages}
    whole = TableProblem(**same, entries=table.shape[:2])
    blocks = whole.down * whole.across * table.shape[0] * table.shape[1]
    parts = splits(blocks, whole.members, config.programs or PROCESSORS)
    dtype = "float32" if parts > 1 else str(table.dtype)
    whole = replace(whole, splits=parts, dtype=dtype)
    named.pop("reach", None)
    size = (table.shape[0] * table.shape[1] * parts, *table.shape[2:])
    (made,) = _call(OfTables, whole, named, [jax.ShapeDtypeStruct(size, dtype)])
    made = made.reshape(*table.shape[:2], parts, *table.shape[2:])
    return made.sum(2) if parts > 1 else made[:, :, 0]


LARGE = 1000.0
"""Larger log-sum-exps do not show the number of keys in a row: that of 4096 scores of
-1e9 is -1e9 itself in float32."""


def _split(lse: Array, again: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Returns log-sum-exps as two terms; the second one is small.

    A bias of -1e9 for a whole row absorbs the digits of the sum. The maxima and sums
    are then computed again, which costs another forward.
    """
    large = jnp.isfinite(lse) & (jnp.abs(lse) > LARGE)
    return lax.cond(jnp.any(large), again, lambda: (lse, jnp.zeros_like(lse)))


def _padded(x: Array, config: BackwardTiles, value: float) -> Array:
    """Returns [b, n, t] with whole blocks and tiles of t."""
    t = x.shape[2]
    most = max(-(-t // m) * m for m in (config.queries, 64 * config.warpgroups))
    return jnp.pad(x, ((0, 0), (0, 0), (0, most - t)), constant_values=value)


def _with_empty_rows(dv: Array, empty: Array, up: Array, empty_rows: str) -> Array:
    """Returns dv with the share of rows without keys: NaN, or that of their mean."""
    if empty_rows in ZERO:
        return dv
    (b, s, heads, e), n = dv.shape, empty.shape[1]
    if empty_rows in NAN:
        bad = empty.reshape(b, heads, -1).any(-1)[:, None, :, None]
        return jnp.where(bad, jnp.nan, dv)
    rows = jnp.where(empty.swapaxes(1, 2)[..., None], up.astype(jnp.float32), 0)
    share = (rows.sum(1) / s).reshape(b, 1, heads, n // heads, e).sum(3)
    return (dv.astype(jnp.float32) + share).astype(dv.dtype)


def _padded_rows(empty: Array, dq: Array) -> Array:
    """Returns bool [b, n, t] as [b, rows of dq, n, 1]."""
    more = dq.shape[1] - empty.shape[2]
    return jnp.pad(empty.swapaxes(1, 2), ((0, 0), (0, more), (0, 0)))[..., None]


def _call(kind: Any, p: Problem, named: dict[str, Any], out: Any = None) -> Any:
    """Runs one of the kernels on arrays by name, and returns its results.

    Results are of shapes `out`, or like arrays that the kernel names.
    A "dq" among them is a reference to memory that is added to.
    """
    q, dq = named["q"], named.pop("dq", None)
    named = named | pallas.dealt(p.order)
    if dq is not None:
        named["dq"] = dq
    like = [jax.ShapeDtypeStruct(named[x].shape, q.dtype) for x in kind.results]
    out = out or like
    scratch = kind.scratch(p, q.dtype)

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, *kind.outputs), references, strict=True))
        kind(p, given, memory).run()

    return pallas.kernel(
        body, kind.name, out, scratch, p.order.blocks, p.warpgroups + 1
    )(*named.values())
