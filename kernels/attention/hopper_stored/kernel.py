"""Few queries against many keys of 8 bits on Hopper GPUs: each number is read once.

A block of threads has a part of the keys that one key head's queries see. Its last
warpgroup copies 64 or 128 keys and values at a time. The others take these in turns.
Each widens numbers in registers, from where tensor cores multiply them, and keeps a
running softmax of its own. Blocks of the same queries are a cluster: in the end they
add up the results of all. Sources: Dao et al., "Flash-Decoding for long-context
inference" (2023).

Scores are transposed, with a row for each key: so keys and values are the operands that
tensor cores take from registers.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.hopper_stored import instructions
from rewriter.kernels.attention.hopper_stored.config import KEYS, LINE, Tiles
from rewriter.kernels.quantized_dot.few_rows import instructions as stored
from rewriter.kernels.quantized_dot.few_rows import threads, totals
from rewriter.kernels.quantized_dot.few_rows.config import CHUNK
from rewriter.kernels.quantized_dot.few_rows.kernel import PART, Use
from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from jax import Array

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Problem:
    """One use of the kernel.

    Attributes:
        heads: Key heads.
        rows: Rows of a key head's queries that are stored.
        scale: The factor of scores.
        zero: Whether queries without keys give 0, and not NaN.
        axes: The letters of the axes of keys and values: p for sequences, z for
            positions and k for heads.
        keys: How keys are widened.
        values: How values are widened.
        factors: ``"k"`` if scales of keys multiply scores, and ``"v"`` if those of
            values multiply weights.
        beside: The names of scales of which those of all heads lie beside each other.
            They may be lines of `LINE` numbers.
        dtype: The result's dtype.
        config: The tiles.
        averaged: Whether a query without keys counts all of them the same.
        word: The numbers of a word of keys, if queries are put into their order.
    """

    heads: int
    rows: int
    scale: float
    zero: bool
    axes: str
    keys: Use
    values: Use
    factors: tuple[str, ...]
    beside: tuple[str, ...]
    dtype: str
    config: Tiles
    averaged: bool = False
    word: int = 0


def attention(p: Problem, named: dict[str, Array]) -> Array:
    """Returns attention [b * heads, rows, e], `Problem.dtype`.

    Args:
        p: The problem.
        named: ``q`` [b * heads, queries, h], in eights unless `Problem.word`. ``k`` and
            ``v`` are laid out by `Problem.axes`. ``k_scale`` and ``v_scale`` are
            [b * heads, s], if present, or [b, s, heads] if `Problem.beside` has them.
            The same numbers may be [b, s * heads / LINE, LINE].
            ``lengths`` are int32 [b], where all queries of a sequence see as many keys.
            Elsewhere there are ``limits``, int32 [b, 3 queries + 2]: for each query the
            first and the last key that it sees, and 1 if all keys count the same. Then
            follow the first block of keys, and the one behind the last.
    """
    pairs, queries, h = named["q"].shape
    queries = -(-queries // 8) * 8
    e, config = named["v"].shape[3], p.config
    stages = config.stages
    wide = {"k": h, "v": e}
    scratch: dict[str, Any] = {
        "q_tiles": pallas_gpu.tiles((h // CHUNK, queries, CHUNK), named["q"].dtype),
        "p_tiles": pallas_gpu.tiles(
            (config.turns * config.keys // KEYS, queries, KEYS), named["q"].dtype
        ),
        "reduced": plgpu.SMEM((config.turns, 2, 4, queries), jnp.float32),
        "partial": plgpu.SMEM((config.turns, queries, e), jnp.float32),
        "stats": plgpu.SMEM((config.turns, 2, queries), jnp.float32),
        "q_ready": pallas_gpu.barriers(1, 1 if p.word else h // CHUNK),
    }
    for x in "kv":
        own = f"{x}_scale"
        scratch[f"{x}_tiles"] = pallas_gpu.tiles(
            (stages, 1, config.keys, wide[x]), named[x].dtype
        )
        if own in named:
            shape = (1, config.keys)
            if own in p.beside:
                wide_of_scales = named[own].shape[2]
                shape = config.keys * p.heads // wide_of_scales, wide_of_scales
            scratch[own] = plgpu.SMEM((stages, *shape), named[own].dtype)
        scratch[f"{x}_ready"] = pallas_gpu.barriers(stages, 1 + (own in named))
        scratch[f"{x}_free"] = pallas_gpu.barriers(stages)
    out = [jax.ShapeDtypeStruct((pairs, p.rows, e), p.dtype)]
    parts = config.parts
    if parts > 1:
        out = [
            jax.ShapeDtypeStruct((pairs * parts, *x), jnp.float32)
            for x in ((p.rows, e), (p.rows,))
        ]

    def body(*references: Any, **memory: Any) -> None:
        names = (*named, "out", "lse")[: len(references)]
        _Block(p, dict(zip(names, references, strict=True)), memory).run()

    made, *lse = pallas_gpu.kernel(
        body, "attention_stored", out, scratch, pairs * parts, config.turns + 1,
        config.splits, PART,
    )(*named.values())  # fmt: skip
    if not lse:
        return made
    made, logs = (x.reshape(pairs, parts, *x.shape[1:]) for x in (made, *lse))
    return merged(made, logs, p.zero).astype(p.dtype)


def merged(made: Array, logs: Array, zero: bool) -> Array:
    """Returns results [pairs, rows, e] of all keys, of those of parts of the keys.

    Parts are added up one by one. XLA then needs one kernel: with reductions over 16
    parts it had one for maxima, one for sums and one for quotients.

    Args:
        made: float32 [pairs, parts, rows, e].
        logs: float32 [pairs, parts, rows], base-2 logarithms of sums of exponentials.
        zero: Whether queries without keys are 0, and not NaN.
    """
    each = range(made.shape[1])
    top = functools.reduce(jnp.maximum, [logs[:, i] for i in each])
    least = jnp.where(top == -jnp.inf, 0.0, top)
    weights = [jnp.exp2(logs[:, i] - least)[..., None] for i in each]
    count = functools.reduce(jnp.add, weights)
    # A part without keys is not finite.
    seen = [jnp.where(w > 0, made[:, i], 0.0) * w for i, w in enumerate(weights)]
    total = functools.reduce(jnp.add, seen) / count
    return jnp.where(count == 0, 0.0, total) if zero else total


class _Block:
    """The work of one block of threads."""

    def __init__(self, p: Problem, given: dict[str, Any], memory: dict[str, Any]):
        self.p, self.given, self.x = p, given, memory
        parts = jnp.int32(p.config.parts)
        self.program = lax.axis_index(pallas_gpu.PROGRAM)
        self.pair = lax.div(self.program, parts)
        self.sequence = lax.div(self.pair, jnp.int32(p.heads))
        self.head = self.pair - self.sequence * p.heads
        low, high = self.blocks()
        splits = p.config.splits
        part = (self.program - self.pair * parts) * splits
        part = part + lax.axis_index(PART) if splits > 1 else part
        count, splits = high - low, splits * p.config.parts
        self.first = low + lax.div(part * count, jnp.int32(splits))
        self.end = low + lax.div((part + 1) * count, jnp.int32(splits))

    def blocks(self) -> tuple[Any, Any]:
        """The first block of keys that a query sees, and the one behind the last."""
        if "limits" not in self.given:
            _, last, _ = self.of_length()
            keys = self.p.config.keys
            return jnp.int32(0), lax.div(last + keys, jnp.int32(keys))
        limits = self.given["limits"]
        end = limits.shape[1]
        low, high = (pallas.scalar(limits, self.sequence, end - i) for i in (2, 1))
        return low, high

    def of_length(self) -> tuple[Any, Any, Any]:
        """The first and the last key of a sequence, and from which all are the same."""
        s = self.given["v"].shape[self.p.axes.index("z")]
        end = jnp.minimum(pallas.scalar(self.given["lengths"], self.sequence), s)
        last = jnp.maximum(end, 0) - 1
        if not self.p.averaged:
            return jnp.int32(0), last, None
        same = jnp.where(last < 0, jnp.int32(0), jnp.int32(s))
        return jnp.int32(0), jnp.where(last < 0, jnp.int32(s - 1), last), same

    def limits(self, shape: tuple[int, int]) -> tuple[Any, Any, Any]:
        """The same as `of_length`, or for each of the queries."""
        if "limits" not in self.given:
            return self.of_length()
        count, limits = shape[1], self.given["limits"]
        first, last, same = (
            pallas.across(
                pallas.read(
                    limits.at[self.sequence, pl.ds(i * count, count)], pallas.COLUMNS
                ),
                shape,
            )
            for i in range(3)
        )
        return first, last, same

    def run(self) -> None:
        """Runs this warpgroup's part."""
        warpgroup = lax.axis_index(pallas_gpu.WARPGROUP)
        threads.divide(warpgroup, self.p.config.turns, self.compute, self.copy)
        instructions.combine(
            self.x["partial"], self.x["stats"], self.given["out"].at[self.program],
            self.given["lse"].at[self.program] if "lse" in self.given else None,
            self.p.config.splits, self.p.zero,
        )  # fmt: skip
        if self.p.config.splits > 1:
            threads.meet()  # no block ends while another one reads its results

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.p.config.stages))

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        x, keys = self.x, self.p.config.keys
        if self.p.word:
            source = self.given["q"].at[self.pair]
            for i in range(x["q_tiles"].shape[0]):
                tile = x["q_tiles"].at[i]
                instructions.store_queries(source, tile, CHUNK * i, self.p.word)
            plgpu.commit_smem()
            instructions.meet_warpgroup()
            plgpu.barrier_arrive(x["q_ready"].at[0])
        for i in range(0 if self.p.word else x["q_tiles"].shape[0]):
            plgpu.copy_gmem_to_smem(
                self.given["q"].at[self.pair, :, pl.ds(CHUNK * i, CHUNK)],
                x["q_tiles"].at[i], x["q_ready"].at[0],
            )  # fmt: skip

        def one(i: Any, _: Any) -> None:
            slot = self.slot(i)
            key = pl.multiple_of((self.first + i) * keys, keys)
            at = {"p": self.sequence, "k": self.head, "z": pl.ds(key, keys)}
            for name in "kv":
                ready = x[f"{name}_ready"].at[slot]
                plgpu.barrier_wait(x[f"{name}_free"].at[slot])
                plgpu.copy_gmem_to_smem(
                    self.given[name].at[tuple(at[a] for a in self.p.axes[:3])],
                    x[f"{name}_tiles"].at[slot, 0], ready,
                )  # fmt: skip
                if (own := f"{name}_scale") in self.given:
                    values, place = self.given[own], x[own].at[slot]
                    if own in self.p.beside:
                        count = place.shape[0]
                        first = key if count == keys else (self.first + i) * count
                        values = values.at[self.sequence, pl.ds(first, count)]
                    else:
                        values = values.at[self.pair, pl.ds(key, keys)]
                        place = place.at[0]
                    plgpu.copy_gmem_to_smem(values, place, ready)

        lax.fori_loop(0, self.end - self.first, one, None)

    # ---------------------------------------------------------------- computing
    def compute(self, turn: Any) -> None:
        """Computes every so manieth block of keys."""
        p, x = self.p, self.x
        turns, stages = p.config.turns, p.config.stages
        for slot in range(stages):
            mine = turn == slot % turns

            @pallas_gpu.when(mine)
            def _(slot: int = slot) -> None:
                for name in ("k_free", "v_free"):
                    plgpu.barrier_arrive(x[name].at[slot])

        plgpu.barrier_wait(x["q_ready"].at[0])
        queries, e = x["q_tiles"].shape[1], x["partial"].shape[2]
        shape = (KEYS, queries)
        limits = self.limits(shape)

        def one(i: Any, carry: Any) -> Any:
            return self.add(turn, turn + i * turns, i, limits, carry)

        zeros = [pallas_gpu.zeros((64, queries))] * (1 + e // 64)
        top = pallas.zeros(shape, -jnp.inf)
        own = self.end - self.first - turn + turns - 1
        count = lax.div(own, jnp.int32(turns))
        top, total, *out = lax.fori_loop(0, count, one, (top, *zeros))
        out = lax.optimization_barrier(out)
        total = instructions.over_keys(
            total, x["reduced"].at[turn, lax.rem(count, jnp.int32(2))], "add"
        )
        totals.store_sums(out, x["partial"].at[turn], p.values)
        for i, value in enumerate((top, total)):
            instructions.store_columns(value, x["stats"].at[turn, i])

    def add(self, turn: Any, step: Any, i: Any, limits: Any, carry: Any) -> Any:
        """Adds the values of a block of keys."""
        top, total, *out = carry
        p, x, slot = self.p, self.x, self.slot(step)
        shape, parts = top.shape, p.config.keys // KEYS
        scores = [
            self.seen(part, KEYS * (parts * (self.first + step) + at), limits)
            for at, part in enumerate(self.scores(slot, shape))
        ]
        highest = functools.reduce(jnp.maximum, scores)
        place = x["reduced"].at[turn, lax.rem(i, jnp.int32(2))]
        higher = jnp.maximum(top, instructions.over_keys(highest, place, "max"))
        least = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights = [jnp.exp2(x - least) for x in scores]
        fade = jnp.exp2(top - least)
        total = sum(weights, total * fade)
        plgpu.barrier_wait(x["v_ready"].at[slot])
        if "v" in p.factors:
            weights = [self.times("v", slot, at, x) for at, x in enumerate(weights)]
        tiles = [x["p_tiles"].at[turn * parts + at] for at in range(parts)]
        for part, tile in zip(weights, tiles, strict=True):
            instructions.store_weights(part, tile)
        plgpu.commit_smem()
        joined = self.joined("v", slot)
        out = stored.multiply(
            [o * fade for o in out], x["v_tiles"].at[slot], tiles,
            joined, [1] * len(joined), p.values,
        )  # fmt: skip
        plgpu.barrier_arrive(x["v_free"].at[slot])
        return higher, total, *out

    def scores(self, slot: Any, shape: tuple[int, int]) -> list[Any]:
        """Scores of a block of keys in units of log(2), 64 keys each."""
        p, x = self.p, self.x
        plgpu.barrier_wait(x["k_ready"].at[slot])
        tiles = [x["q_tiles"].at[c] for c in range(x["q_tiles"].shape[0])]
        parts, joined = p.config.keys // KEYS, self.joined("k", slot)
        scores = stored.multiply(
            [pallas_gpu.zeros(shape)] * parts, x["k_tiles"].at[slot], tiles,
            joined, [CHUNK * len(tiles)] * len(joined), p.keys,
        )  # fmt: skip
        scores = [x * (p.scale * LOG2E) for x in scores]
        if "k" in p.factors:
            scores = [self.times("k", slot, at, x) for at, x in enumerate(scores)]
        plgpu.barrier_arrive(x["k_free"].at[slot])
        return scores

    def seen(self, scores: Any, start: Any, limits: Any) -> Any:
        """Scores of 64 keys from `start` on, and -inf for those that are not seen."""
        first, last, same = limits
        shape = scores.shape
        key = pallas.along(pallas.row_positions(KEYS), shape) + start
        if "limits" in self.given:
            scores = jnp.where(same > 0, 0.0, scores)
        elif same is not None:
            scores = jnp.where(key >= same, 0.0, scores)
        return jnp.where((key >= first) & (key <= last), scores, -jnp.inf)

    def joined(self, name: str, slot: Any) -> list[Any]:
        """What is joined to numbers while they are widened."""
        own = f"{name}_scale"
        if own not in self.given or name in self.p.factors:
            return []
        return [self.x[own].at[slot]]

    def times(self, name: str, slot: Any, part: int, scores: Any) -> Any:
        """Numbers of 64 keys times the factor of each."""
        own, rows, heads = f"{name}_scale", pl.ds(KEYS * part, KEYS), self.p.heads
        x = self.x[own]
        if own in self.p.beside and x.shape[2] == LINE:
            place = x.at[slot]
            return instructions.times_rows(scores, place, self.head, heads, part)
        place = (rows, self.head) if own in self.p.beside else (0, rows)
        line = x.at[slot, *place]
        values = pallas_gpu.loaded(line, pallas.ROWS, optimized=False)
        return scores * pallas.along(values.astype(jnp.float32), scores.shape)
