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

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.empty_rows import complete_if_any_empty
from rewriter.kernels.attention.hopper import pallas, short_kernel
from rewriter.kernels.attention.hopper.averaged_rows import (
    Averages,
    averages_of,
    spans_of,
)
from rewriter.kernels.attention.hopper.backward_config import (
    SUMS_STAGES,
    TABLE_BLOCK,
    BackwardTiles,
    sums_block,
    table_stages,
)
from rewriter.kernels.attention.hopper.backward_inputs import (
    Inputs,
    Side,
    inputs_of,
    with_reach,
    without_reach,
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
from rewriter.kernels.attention.hopper.extra_operands import Extra, extra_of
from rewriter.kernels.attention.hopper.use import Use
from rewriter.kernels.attention.hopper.widths import EDGE
from rewriter.kernels.shared import work_stealing
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
    config: BackwardTiles | None = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns cotangents of float operands, but of biases and slopes only if they fit.

    All are rounded to q's dtype, as the gradients of q, k and v are.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        out: [b, t, n, e], from the forward.
        residuals: ``(lse,)``, float32 [b, n, t].
        cotangent: [b, t, n, e].
        config: The tiles.
        **given: The other fields of `Use`.
    """
    use, (lse,) = Use(q, k, v, **given), residuals
    config = config or BackwardTiles()
    if config.short:
        return short_kernel.backward(use, out, lse, cotangent, config)
    x = inputs_of(use, out, lse, cotangent, config)
    grads = _of_qkv(use, x, config)
    if config.tables and use.bias is not None and 1 not in use.bias.shape[2:]:
        made = _of_tables(x.of_queries, config, use.extra)
        (t, s), dtype = use.lengths, use.bias.dtype
        grads |= {} if made is None else {"bias": made[..., :t, :s].astype(dtype)}
    grads |= _of_rows(use, lse, x)
    grads |= _of_sums(use, x, config)
    averages = averages_of(use, x.of_queries.problem.mask.may_be_empty)
    others = {n: grads[n] for n in ("bias", "alibi") if n in grads}
    if averages is None or not averages.passes or not others:
        return grads
    completed = lambda given: _with_empty_rows(given, use, out, lse, cotangent)
    return grads | complete_if_any_empty(x.empty, others, completed)


def _of_qkv(use: Use, x: Inputs, config: BackwardTiles) -> dict[str, Array]:
    """The cotangents of q, k and v, with the share of rows without keys."""
    (b, t, n, h), wide = use.q.shape, x.of_keys.problem.h
    averages = averages_of(use, x.of_queries.problem.mask.may_be_empty)
    of_keys = _averaging(x.of_keys, averages, x.empty)
    of = lambda *names: {f"d{name}": _type_of(getattr(use, name)) for name in names}
    if config.fused:
        total = jax.new_ref(jnp.zeros((b, -(-t // EDGE) * EDGE, n, wide), jnp.float32))
        dk, dv = _call(Fused, of_keys, of("k", "v"), dq=total)
        dq = (total[...][:, :t, :, :h] * use.scale).astype(use.q.dtype)
        passes = averages is not None and averages.passes
        if x.of_queries.problem.mask.may_be_empty and not passes:
            # Ignores values added to rows without keys.
            dq = jnp.where(x.empty.swapaxes(1, 2)[..., None], 0, dq)
        return {"q": dq, "k": dk, "v": dv}
    kind = Divided if config.divided else OfKeys
    passing = averages if averages is not None and averages.passes else None
    of_queries = _averaging(x.of_queries, passing, x.empty)
    parts = of_keys.problem.shared
    able = "q" not in use.joined or work_stealing.AVAILABLE
    if use.joined and able and (parts == 1 or not {"k", "v"} & set(use.joined)):
        return _joined(use, kind, of_keys, of_queries)
    types = {name: _in_parts(x, parts) for name, x in of("k", "v").items()}
    dk, dv = (_over_parts(x, parts) for x in _call(kind, of_keys, types))
    (dq,) = _call(OfQueries, of_queries, of("q"))
    return {"q": dq, "k": dk, "v": dv}


def _in_parts(x: jax.ShapeDtypeStruct, parts: int) -> jax.ShapeDtypeStruct:
    """The type of a cotangent of keys for each part of their query heads."""
    b, s, heads, width = x.shape
    return jax.ShapeDtypeStruct((b, s, heads * parts, width), x.dtype)


def _over_parts(x: Array, parts: int) -> Array:
    """A cotangent of keys, summed over the parts of their query heads."""
    if parts == 1:
        return x
    b, s, heads, width = x.shape
    apart = x.reshape(b, s, heads // parts, parts, width)
    return apart.astype(jnp.float32).sum(3).astype(x.dtype)


def _joined(
    use: Use, kind: type[OfKeys], of_keys: Side, of_queries: Side
) -> dict[str, Array]:
    """The cotangents, with those of `Use.joined` as one array by that name.

    The kernel for dk and dv makes the array, and that for dq writes into it too.
    """
    places = tuple(sorted(use.joined.items()))
    of_keys, of_queries = (
        replace(side, problem=replace(side.problem, joined=places))
        for side in (of_keys, of_queries)
    )
    name, at = places[-1]  # k or v
    b, t, _, h = getattr(use, name).shape
    out = {"joined": jax.ShapeDtypeStruct((b, t, at.all, h), use.q.dtype)}
    apart = [n for n in "kv" if n not in use.joined]
    out |= {f"d{n}": _type_of(getattr(use, n)) for n in apart}
    whole, *rest = _call(kind, of_keys, out)
    grads = dict(zip(apart, rest, strict=True))
    if "q" not in use.joined:
        (grads["q"],) = _call(OfQueries, of_queries, {"dq": _type_of(use.q)})
        return grads | {"joined": whole}
    reference = jax.new_ref(whole)
    _call(OfQueries, of_queries, {}, joined=reference)
    return grads | {"joined": reference[...]}


def _averaging(side: Side, averages: Averages | None, empty: Array) -> Side:
    """Returns the inputs of a kernel that adds the share of rows without keys."""
    if averages is None:
        return side
    problem = replace(side.problem, averages=averages)
    return replace(
        side, problem=problem, arrays=side.arrays | {"spans": spans_of(empty)}
    )


def _type_of(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _of_rows(use: Use, lse: Array, x: Inputs) -> dict[str, Array]:
    """The cotangents that are sums over all keys of a row: of sinks and rows' biases.

    A row's changes add up to its sink's share of `delta`, or to nothing.
    """
    grads, bias, delta = {}, use.bias, jnp.where(x.empty, 0.0, x.delta)
    share = 0.0 * delta  # not finite where delta is not
    if use.sinks is not None:
        sinks = use.sinks
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * delta
        share = jnp.where(x.empty, 0.0, share)
        grads["sinks"] = (-share.sum((0, 2))).astype(sinks.dtype)
    if bias is not None and bias.shape[3] == 1:
        grads["bias"] = _shared(share[..., None], bias)
    return grads


def _of_sums(use: Use, x: Inputs, config: BackwardTiles) -> dict[str, Array]:
    """The cotangents of biases of keys and of slopes, if the kernels of sums fit."""
    grads, bias, alibi = {}, use.bias, use.alibi
    if bias is not None and bias.shape[2] == 1 and bias.shape[3] != 1:
        extra = extra_of(use.extra).transposed
        made = _sums(OfColumns, x.of_keys, config, extra)
        grads |= {} if made is None else {"bias": _shared(made[:, :, None], bias)}
    if alibi is not None:
        made = _sums(OfSlopes, x.of_queries, config, extra_of(use.extra))
        grads |= {} if made is None else {"alibi": made.sum((0, 2)).astype(alibi.dtype)}
    return grads


def _with_empty_rows(
    grads: dict[str, Array], use: Use, out: Array, lse: Array, cotangent: Array
) -> dict[str, Array]:
    """The cotangents of scores' addends, with the share of rows without keys."""
    use = use.unpacked()
    params = {
        "scale": use.scale, "window": use.window, "shift": use.shift,
        "softcap": use.softcap, "empty_rows": use.empty_rows,
    }  # fmt: skip
    operands = {
        "q": use.q, "k": use.k, "v": use.v, **use.extra, "kv_lengths": use.kv_lengths,
        "offset": use.offset, "prefix": use.prefix,
    }  # fmt: skip
    return xla.with_passed(
        grads, operands, params, out=out, lse=lse, cotangent=cotangent
    )


def _shared(x: Array, like: Array) -> Array:
    """Returns x summed along the axes in which `like` has size 1."""
    axes = tuple(i for i, size in enumerate(like.shape) if size == 1)
    return x.sum(axes, keepdims=True).astype(like.dtype)


def _sums(
    kind: type[OfColumns | OfSlopes], side: Side, config: BackwardTiles, extra: Extra
) -> Array | None:
    """Returns a sum for each row and query head, [b, n, rows]; None without room.

    Args:
        kind: The kind of sum.
        side: The inputs of dk and dv, or of dq.
        config: The config of both.
        extra: The operands of their scores.
    """
    p = side.problem
    block = sums_block(config, p.h, p.e, extra)
    if not block or p.halves:
        return None
    n = p.heads * p.group
    whole = replace(
        p, heads=n, group=1, shared=p.group * p.shared, block=block,
        stages=SUMS_STAGES, values=SUMS_STAGES, divided=False, ahead=1,
    )  # fmt: skip
    single = with_reach(replace(side, problem=whole, arrays=without_reach(side)))
    size = (p.b, n, -(-p.mask.t // whole.rows) * whole.rows)
    (made,) = _call(kind, single, {"sums": jax.ShapeDtypeStruct(size, jnp.float32)})
    return made[:, :, : p.mask.t]


def _of_tables(
    side: Side, config: BackwardTiles, given: dict[str, Array]
) -> Array | None:
    """Returns the cotangent of a table of biases; None if it does not fit."""
    p, named = side.problem, without_reach(side)
    stages = table_stages(config, p.h, p.e, extra_of(given))
    if stages < 1 or p.halves:
        return None
    table = named["bias"]
    same = {x.name: getattr(p, x.name) for x in fields(p)}
    same |= {"block": TABLE_BLOCK, "stages": stages, "values": stages, "ahead": 1}
    whole = TableProblem(**same, entries=table.shape[:2])
    blocks = whole.down * whole.across * table.shape[0] * table.shape[1]
    parts = splits(blocks, whole.members, config.programs or PROCESSORS)
    dtype = "float32" if parts > 1 else str(table.dtype)
    whole = replace(whole, splits=parts, dtype=dtype)
    size = (table.shape[0] * table.shape[1] * parts, *table.shape[2:])
    whole_side = replace(side, problem=whole, arrays=named)
    (made,) = _call(OfTables, whole_side, {"dbias": jax.ShapeDtypeStruct(size, dtype)})
    made = made.reshape(*table.shape[:2], parts, *table.shape[2:])
    return made.sum(2) if parts > 1 else made[:, :, 0]


def _call(kind: Any, side: Side, out: Mapping[str, Any], **changed: Any) -> Any:
    """Runs one of the kernels; returns its results.

    Args:
        kind: The kernel.
        side: Its inputs.
        out: The types of its results by name.
        **changed: References to memory that it changes.
    """
    p = side.problem
    named = side.arrays | pallas.assigned_tiles(p.order) | changed
    scratch = kind.scratch(p, named["q"].dtype)

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, *out), references, strict=True))
        kind(p, given, memory).run()

    types = list(out.values())
    return pallas.kernel(
        body, kind.name, types, scratch, p.order.blocks, p.warpgroups + 1
    )(*named.values())
