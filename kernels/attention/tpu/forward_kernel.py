"""Attention on a TPU: blocks of scores, and a running softmax.

A step of the grid (batch entry, query head, listed block) computes one block of scores.
Row maxima, sums and the result stay in VMEM from the first step of a block of queries
to its last. Sums are kept by lane, and added up over lanes at the end. Source: Dao et
al., "FlashAttention" (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.attention.empty_rows import NAN
from rewriter.kernels.attention.tpu import operands, schedule
from rewriter.kernels.attention.tpu.config import Blocks, vmem
from rewriter.kernels.attention.tpu.operands import Input, Place
from rewriter.kernels.attention.tpu.scores import LOG2E, Problem, Tile
from rewriter.kernels.shared import pallas_tpu
from rewriter.kernels.shared.pallas_tpu import LANES

if TYPE_CHECKING:
    from jax import Array

LEAST = float(jnp.finfo(jnp.float32).min)
"""The initial maximum: finite, so that a row without keys has weights of 0, not NaN."""


def forward(
    p: Problem, config: Blocks, arrays: Mapping[str, Array], out_dtype: Any, saves: bool
) -> tuple[Array, ...]:
    """Returns the result [b, n, t, e], and the residuals.

    Args:
        p: The use.
        config: Sizes of blocks; those of `p` are not read.
        arrays: q [b, n, t, h], k, v [b, heads, s, h|e], and the op's other operands.
        out_dtype: The result's dtype.
        saves: Whether to return the log-sum-exp of rows, float32 [b, n, 1, t], -inf for
            those without keys. With a bias they are the maxima and the logarithms of
            the rest, [b, n, 2, t], since large maxima absorb the digits of the sum.
    """
    p = p.blocks(config.rows, config.keys)
    hiding = {n: arrays[n] for n in p.names & schedule.HIDING}
    whole = p.cut.step == 1
    listed = schedule.steps(schedule.states(p.cut, hiding), whole=whole)
    scalars = operands.numbers(p, arrays)

    def at(b: Any, n: Any, step: Any, *tables: Any) -> Place:
        word = listed.at(tables[:1], b, step)
        return Place(b, n, schedule.major(word), schedule.minor(word))

    rows = p.cut.rows
    given = operands.inputs(p, arrays, at)
    if "sinks" in p.names:
        given["sinks"] = operands.per_head(arrays["sinks"], rows, at)
    if p.averages:
        given["mean"] = _mean(p, arrays, at)
    results = _results(p, arrays["q"], out_dtype, saves, at)
    scratch = {
        "top": pallas_tpu.VMEM((rows, LANES), jnp.float32),
        "total": pallas_tpu.VMEM((rows, LANES), jnp.float32),
        "sum": pallas_tpu.VMEM((rows, p.e), jnp.float32),
    }
    tables = listed.table
    names = [*tables, *scalars, *given, *results, *scratch]

    def body(*refs: Any) -> None:
        named = dict(zip(names, refs, strict=True))
        b, step = pl.program_id(0), pl.program_id(2)
        word = listed.at(refs[:1], b, step)
        _Step(p, config, named, scalars, listed, word).run(b)

    call = pallas_tpu.call(
        body,
        "attention",
        pallas_tpu.Grid((p.b, p.n, listed.count), 2),
        [x.block for x in given.values()],
        [spec for spec, _ in results.values()],
        [shape for _, shape in results.values()],
        list(scratch.values()),
        prefetched=len(tables) + len(scalars),
        vmem=vmem(config, p.h, p.e, arrays["q"].dtype.itemsize, operands.wide(arrays)),
    )
    made = call(*tables.values(), *scalars.values(), *(x.array for x in given.values()))
    return (made[0], *(x[..., : p.cut.t] for x in made[1:]))


def _results(
    p: Problem, q: Array, out_dtype: Any, saves: bool, at: operands.At
) -> dict[str, tuple[Any, Any]]:
    """The block and shape of the result and, on request, of what is saved of rows."""
    rows = p.cut.rows
    results = {
        "out": (
            operands.block((1, 1, rows, p.e), at, lambda i: (i.b, i.n, i.row, 0)),
            pallas_tpu.shaped((p.b, p.n, p.cut.t, p.e), out_dtype, q),
        )
    }
    if saves:
        kept = 2 if "bias" in p.names else 1
        results["kept"] = (
            operands.block((1, 1, kept, rows), at, lambda i: (i.b, i.n, 0, i.row)),
            pallas_tpu.shaped((p.b, p.n, kept, p.cut.blocks[0] * rows), jnp.float32, q),
        )
    return results


def _mean(p: Problem, arrays: Mapping[str, Array], at: operands.At) -> Input:
    """The mean of v over all keys of a head: the result of rows without keys."""
    v = arrays["v"].astype(jnp.float32)
    if p.cut.step == 1:
        mean, rows = v.mean(2, keepdims=True), 1
    else:
        mean = v.reshape(p.b, -1, p.cut.step, p.e).mean(1)
        mean = jnp.take(mean, arrays["row_heads"][0, :, 0], axis=1)[:, None]
        rows = p.cut.rows
    index = lambda i: (i.b, i.head(p.group), i.row if rows > 1 else 0, 0)
    return Input(mean, operands.block((1, 1, rows, p.e), at, index))


@dataclass(frozen=True)
class _Step:
    """One step of the kernel.

    Attributes:
        p: The use.
        config: Its blocks.
        refs: All references, by name.
        scalars: The names of scalars.
        listed: All steps.
        word: This one.
    """

    p: Problem
    config: Blocks
    refs: Mapping[str, Any]
    scalars: Any
    listed: schedule.Steps
    word: Any

    def run(self, b: Any) -> None:
        bits = self.word
        pl.when((bits & schedule.LATER) == 0)(self.start)
        numbers = operands.of_batch({n: self.refs[n] for n in self.scalars}, b)
        operands.update(self.listed, bits, functools.partial(self.update, numbers))
        pl.when((bits & schedule.MORE) == 0)(self.finish)

    def start(self) -> None:
        """Begins a block of queries."""
        x, shape = self.refs, self.refs["top"].shape
        x["sum"][...] = jnp.zeros_like(x["sum"])
        if "sinks" not in x:
            x["top"][...] = jnp.full(shape, LEAST)
            x["total"][...] = jnp.zeros(shape)
            return
        sink = x["sinks"][0] * self.p.unit
        top = jnp.maximum(sink, LEAST)
        first = lax.broadcasted_iota(jnp.int32, shape, 1) == 0
        x["top"][...] = jnp.broadcast_to(top, shape)
        weight = jnp.broadcast_to(self.p.power(sink - top), shape)
        x["total"][...] = jnp.where(first, weight, 0.0)

    def update(self, numbers: Mapping[str, Any], part: bool) -> None:
        """Adds one block of keys."""
        p, x = self.p, self.refs
        row, key = schedule.major(self.word), schedule.minor(self.word)
        for tile in Tile.of_block(p, x, numbers, row, key, self.config):
            queries = x["q"][0, 0, tile.row_slice, :]
            keys = x["k"][0, 0, tile.key_slice, :]
            product = pallas_tpu.dot(queries, keys, (1, 1), p.precision)
            scores, _ = tile.scores(product, part)
            self.add(tile, scores, part)

    def add(self, tile: Tile, scores: Array, part: bool) -> None:
        """Adds the values of keys with these scores."""
        p, x, rows = self.p, self.refs, tile.row_slice
        before = x["top"][rows]
        top = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = p.power(scores - across(top, tile.keys))
        fade = p.power(before - top)
        x["top"][rows] = top
        x["total"][rows] = x["total"][rows] * fade + by_lane(weights)
        if "dropout" in x:
            weights = weights * tile.dropout(part)
        values = x["v"][0, 0, tile.key_slice, :]
        if part and p.cut.s % p.cut.keys:
            values = rows_before(values, p.cut.s - tile.key - tile.start)
        weights = weights.astype(values.dtype)
        added = pallas_tpu.dot(weights, values, (1, 0), p.precision)
        kept = x["sum"][rows] * across(fade, p.e)
        x["sum"][rows] = kept + added
        if "row_heads" not in x:
            return

        @pl.when(is_broken(added))
        def by_head() -> None:
            key = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            heads = key & (p.cut.step - 1), x["row_heads"][0, rows]
            more = each_head(weights, values, *heads, p.cut.step, p.precision)
            x["sum"][rows] = kept + more

    def finish(self) -> None:
        """Writes a block of queries."""
        p, x = self.p, self.refs
        total = x["total"][...].sum(1, keepdims=True)
        out = x["sum"][...] / jnp.where(total == 0.0, 1.0, total)
        if p.may_be_empty:
            fill: Any = jnp.nan if p.empty_rows in NAN else 0.0
            if "mean" in x:
                fill = x["mean"][0, 0]
            out = jnp.where(total == 0.0, fill, out)
        x["out"][0, 0] = out.astype(x["out"].dtype)
        if "kept" not in x:
            return
        top, rest = x["top"][...], jnp.log(jnp.broadcast_to(total, x["top"].shape))
        if "bias" in p.names:
            x["kept"][0, 0, 0:1] = top.T[:1]
            x["kept"][0, 0, 1:2] = rest.T[:1]
        else:
            x["kept"][0, 0] = (top * (1 / LOG2E) + rest).T[:1]


def is_broken(x: Array) -> Any:
    """Returns whether any of some numbers is none, or infinite."""
    return jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0).max() > 0.0


def each_head(
    weights: Array, values: Array, keys: Array, rows: Array, heads: int, precision: Any
) -> Array:
    """Returns weights times values, each head's own.

    Together their weights are 0, and what is not finite is still not, times 0.

    Args:
        weights: [rows, keys], 0 for keys of other heads.
        values: [keys, e].
        keys: int32 [keys, e], the head of each value.
        rows: int32 [rows, 1], the head of each row.
        heads: How many there are.
        precision: Of the product.
    """
    wide = values.astype(jnp.float32)

    def one(head: Any, total: Array) -> Array:
        own = jnp.where(keys == head, wide, 0.0).astype(values.dtype)
        made = pallas_tpu.dot(weights, own, (1, 0), precision)
        return jnp.where(rows == head, made, total)

    start = jnp.zeros((weights.shape[0], values.shape[1]), jnp.float32)
    return lax.fori_loop(0, heads, one, start)


def across(x: Array, width: int) -> Array:
    """Returns [rows, 128], equal in all lanes, as [rows, width]."""
    if width > LANES:
        x = jnp.concatenate([x] * -(-width // LANES), axis=1)
    return x if x.shape[1] == width else x[:, :width]


def by_lane(x: Array) -> Array:
    """Returns [rows, keys] summed over keys of the same lane, [rows, 128]."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def rows_before(x: Array, end: Any) -> Array:
    """Returns x [rows, columns] with zeros from a row on."""
    inside = lax.broadcasted_iota(jnp.int32, x.shape, 0) < end
    return jnp.where(inside, x.astype(jnp.float32), 0.0).astype(x.dtype)
