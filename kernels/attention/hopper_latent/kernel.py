"""Few queries of many heads against a latent cache on Hopper's tensor cores.

A cache of latent attention has one key for all heads, and its first columns are the
values. A block of threads copies 64 keys into shared memory once, and uses them as keys
and as values. Its 64 query rows are heads, or heads of several queries. More rows are
other blocks, which read the same keys at the same time, from the second-level cache.

The result [64, c] is too large for one warpgroup's registers, so each of two computes
half of its columns. Each also computes the scores of every other block of keys. It
writes the weights into shared memory for the other one, in place of the rotary columns,
which are no values. The maxima go back and forth: the first warpgroup's softmax runs
while the second multiplies, and the other way round. A third warpgroup copies, in parts
that are handed back as soon as they are read.

Three other forms took longer on an H200 (``tests/bench/results`` has them in
``latent_decode_tried_h200.json``). Blocks added in order by both warpgroups took 1.08
to 1.32 of the time. Keys fetched ahead into the second-level cache took 1.04 to 1.24.
Blocks of a cluster that copy keys for each other took 0.98 to 1.02.

The split over keys is that of `hopper_decode`. Sources: DeepSeek-AI,
"DeepSeek-V2" (2024), section 2.1; FlashMLA, "A deep-dive into the new Flash MLA kernel"
(2025), for the order in which two warpgroups take turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.hopper_latent.config import (
    KEYS,
    REGISTERS,
    ROWS,
    TILES,
)
from rewriter.kernels.attention.hopper_latent.problem import Problem
from rewriter.kernels.attention.visibility import Range
from rewriter.kernels.shared import warpgroups

if TYPE_CHECKING:
    from jax import Array

LOG2E = math.log2(math.e)

ORDER = (("early", 0), ("early", 1), ("late", 0), ("late", 1))
"""The halves of both blocks of a pair, in the order in which they are free. The early
half of a block is read last by the warpgroup that weighs the block, the late half by
the other one."""


def pieces(p: Problem, named: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Returns results of whole sequences, those of pieces, and their log-sum-exps.

    Args:
        p: The problem.
        named: ``q`` [b, rows, c] and ``q_rope`` [b, rows, r], rows in eights. ``ends``
            as `WorkQueue` has it. ``latent`` [sequences or pages, keys, c], and
            ``k_rope`` or the columns of both; keys in eights. If present, int32
            ``lengths`` [b], ``offsets`` [b] and ``table`` [b, pages].

    Returns:
        [b, 64 groups, c] of the problem's dtype, for sequences that have one piece.
        float32 [pieces, 64 groups, c] and [pieces, 64 groups], for those that have
        more. Others are not written.
    """
    count, rows = p.queue(named["ends"]).pieces, ROWS * p.groups
    out = [
        jax.ShapeDtypeStruct((p.b, rows, p.c), p.dtype),
        jax.ShapeDtypeStruct((count, rows, p.c), jnp.float32),
        jax.ShapeDtypeStruct((count, rows), jnp.float32),
    ]
    dtype = named["q"].dtype
    # One tile width for all that is multiplied; it divides the arrays that are copied.
    flat = pallas.swizzle(p.half, p.c + p.whole * p.r)
    rotary = p.r > 0
    scratch = {
        "q_tiles": pallas.tiles((2, ROWS, p.half), dtype, flat),
        "tiles": pallas.tiles((TILES, 2, KEYS, p.half), dtype, flat),
        "tops": pallas.lines((TILES, ROWS), jnp.float32),
        "sums": pallas.lines((TILES, ROWS), jnp.float32),
        "lse_rows": pallas.lines((ROWS,), jnp.float32),
        "q_ready": pallas.barriers(1, 2 + rotary),
        "early_ready": pallas.barriers(TILES, copies(p)),
        "late_ready": pallas.barriers(TILES, copies(p) * (1 + rotary)),
        "q_free": pallas.barriers(1, 2),
        **{
            name: pallas.barriers(TILES)
            for name in (
                "early_free", "late_free", "top_ready", "weights_ready", "sum_ready",
            )
        },
    }  # fmt: skip
    if rotary:
        wide = pallas.swizzle(p.r)
        scratch["q_rope_tile"] = pallas.tiles((ROWS, p.r), dtype, wide)
        scratch["rope_tiles"] = pallas.tiles((TILES, KEYS, p.r), dtype, wide)
    if p.r != KEYS:
        scratch["weights"] = pallas.tiles((TILES, ROWS, KEYS), dtype, flat)

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, "out", "parts", "lse"), references, strict=True))
        _Block(p, given, memory).run()

    programs = p.readers * p.groups
    return pallas.kernel(body, "latent_attention", out, scratch, programs, 3)(
        *named.values()
    )


def copies(p: Problem) -> int:
    """Returns the number of copies for a block of keys: one for each page in it."""
    return max(1, KEYS // p.pages.size) if p.pages.listed else 1


@dataclass(frozen=True)
class _Piece:
    """Blocks of a sequence that a reader takes: from `start` to `end` of its range."""

    sequence: Any
    range: Range
    offset: Any
    start: Any
    end: Any
    number: Any
    """The index of its results."""
    whole: Any
    """Whether it is the only one of its sequence."""

    @property
    def pairs(self) -> Any:
        """Pairs of blocks; the last one may be half empty."""
        return lax.div(self.end - self.start + 1, jnp.int32(2))

    @property
    def seen_whole(self) -> Any:
        """Pairs of blocks from the start on of which every row sees all keys."""
        blocks = jnp.minimum(self.range.part, self.end) - self.start
        return lax.div(jnp.maximum(blocks, 0), jnp.int32(2))


class _Block:
    """The work of three warpgroups: two compute, one copies."""

    def __init__(self, p: Problem, given: dict[str, Any], memory: dict[str, Any]):
        self.p, self.given, self.x = p, given, memory
        if "weights" not in memory:
            self.x = memory | {"weights": memory["rope_tiles"]}
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)
        program = lax.axis_index(pallas.PROGRAM)
        self.reader = lax.div(program, jnp.int32(p.groups))
        self.group = lax.rem(program, jnp.int32(p.groups))
        self.queue = p.queue(given["ends"])
        self.factor = p.scale * LOG2E

    def run(self) -> None:
        """Runs this warpgroup's part."""
        warpgroups.divide(self.warpgroup < 2, self.compute, self.copy, REGISTERS)

    def over_pieces(self, body: Any) -> None:
        """Runs ``body(piece)`` for this reader's pieces."""
        first, last = self.queue.share(self.reader)

        def one(carry: Any) -> Any:
            block, sequence = carry
            piece, following = self.piece(block, last, sequence)
            body(piece)
            return block + piece.end - piece.start, following

        start = (first, self.queue.sequence_of(first))
        lax.while_loop(lambda carry: carry[0] < last, one, start)

    def piece(self, block: Any, last: Any, sequence: Any) -> Any:
        """Returns the piece that begins at a block, and the next one's sequence."""
        p, queue = self.p, self.queue
        begin = queue.begin(sequence)
        count = queue.ends[sequence] - begin
        start = block - begin
        end = jnp.minimum(count, start + last - block)
        offset, length = (
            pallas.scalar(self.given[name], sequence) if name in self.given else None
            for name in ("offsets", "lengths")
        )
        r = p.blocks(offset, length)
        at = p.mask.shift if offset is None else p.mask.shift + offset
        made = _Piece(
            sequence, r, at, r.start + start, r.start + end, self.reader + sequence,
            (start == 0) & (end == count),
        )  # fmt: skip
        following = jnp.minimum(sequence + 1, p.b - 1)
        return made, jnp.where(end == count, following, sequence)

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x = self.p, self.x

        def one(piece: _Piece) -> None:
            plgpu.barrier_wait(x["q_free"].at[0])
            rows = pl.ds(self.group * ROWS, ROWS)
            for half in range(2):
                at = piece.sequence, rows, pl.ds(half * p.half, p.half)
                self.send("q", at, x["q_tiles"].at[half], x["q_ready"].at[0])
            if p.r:
                at = piece.sequence, rows, pl.ds(0, p.r)
                self.send("q_rope", at, x["q_rope_tile"], x["q_ready"].at[0])

            def pair(i: Any, _: Any) -> None:
                first = piece.start + 2 * i
                for name, w in ORDER:
                    plgpu.barrier_wait(x[f"{name}_free"].at[w])
                    ready, late = x[f"{name}_ready"].at[w], name == "late"
                    self.copy_half(piece, first + w, w, 1 - w if late else w, ready)
                    if p.r and late:
                        self.copy_rotary(piece, first + w, w, ready)

            lax.fori_loop(0, piece.pairs, pair, None)

        self.over_pieces(one)

    def send(self, name: str, at: tuple[Any, ...], target: Any, ready: Any) -> None:
        """Starts a copy of a part of an array."""
        plgpu.copy_gmem_to_smem(self.given[name].at[at], target, ready)

    def copy_half(
        self, piece: _Piece, block: Any, tile: int, half: int, ready: Any
    ) -> None:
        """Copies half of the latent's columns of a block of keys."""
        columns = pl.ds(half * self.p.half, self.p.half)
        for place, keys, rows in self.parts(piece, block):
            target = self.x["tiles"].at[tile, half, rows]
            self.send("latent", (place, keys, columns), target, ready)

    def copy_rotary(self, piece: _Piece, block: Any, tile: int, ready: Any) -> None:
        """Copies the rotary columns of a block of keys."""
        name, first = ("latent", self.p.c) if self.p.whole else ("k_rope", 0)
        columns = pl.ds(first, self.p.r)
        for place, keys, rows in self.parts(piece, block):
            target = self.x["rope_tiles"].at[tile, rows]
            self.send(name, (place, keys, columns), target, ready)

    def parts(self, piece: _Piece, block: Any) -> Any:
        """Yields the places of a block's keys, and their rows within the block."""
        p, pages, key = self.p, self.p.pages, block * KEYS
        if not pages.listed:
            yield piece.sequence, pl.ds(pl.multiple_of(key, 8), KEYS), pl.ds(0, KEYS)
            return
        rows = min(KEYS, pages.size)
        last: Any = pages.count - 1
        if not p.mask.averages:
            # Invisible pages are not read: they may hold keys of other sequences.
            last = lax.div(jnp.maximum(piece.range.limit - 1, 0), jnp.int32(pages.size))
        for i in range(copies(p)):
            place = lax.div(key + i * rows, jnp.int32(pages.size))
            inside = key + i * rows - place * pages.size
            page = pallas.scalar(
                self.given["table"], piece.sequence, jnp.minimum(place, last)
            )
            yield page, pl.ds(pl.multiple_of(inside, 8), rows), pl.ds(i * rows, rows)

    # ---------------------------------------------------------------- computing
    def compute(self) -> None:
        """Computes every piece, half of the columns in each warpgroup."""
        for w in range(TILES):
            pallas.when(self.warpgroup == w)(lambda w=w: self.compute_half(w))

    def compute_half(self, w: int) -> None:
        """Computes half of the columns of every piece."""
        x, add = self.x, (self.add_first, self.add_second)[w]
        plgpu.barrier_arrive(x["q_free"].at[0])
        plgpu.barrier_arrive(x["early_free"].at[w])
        plgpu.barrier_arrive(x["late_free"].at[1 - w])

        def one(piece: _Piece) -> None:
            plgpu.barrier_wait(x["q_ready"].at[0])
            carry = (
                pallas.zeros((ROWS, self.p.half)), pallas.zeros((ROWS,), -jnp.inf),
                pallas.zeros((ROWS,)),
            )  # fmt: skip
            whole = piece.seen_whole
            for start, end, part in ((0, whole, False), (whole, piece.pairs, True)):
                body = lambda i, c, part=part: add(piece, i, c, part)
                carry = lax.fori_loop(start, end, body, carry)
            self.store(piece, w, *carry)

        self.over_pieces(one)
        if w == 0:
            plgpu.wait_smem_to_gmem(0)

    def add_first(self, piece: _Piece, i: Any, carry: Any, part: bool) -> Any:
        """Adds a pair of blocks to the first half of the columns."""
        (out, top, total), x = carry, self.x
        scores = self.scores(piece, i, 0, part)
        higher = jnp.maximum(top, scores.max(axis=1))
        x["tops"].at[0][...] = higher
        plgpu.barrier_arrive(x["top_ready"].at[0])
        weights, fade = self.weigh(scores, top, higher)
        total = total * fade + weights.sum(axis=1)
        out = out * pallas.along(fade, out.shape)
        out = self.add_values(out, weights.astype(x["tiles"].dtype), 0, 0)
        plgpu.barrier_arrive(x["early_free"].at[0])
        plgpu.barrier_wait(x["top_ready"].at[1])
        both = pallas.loaded(x["tops"].at[1], pallas.ROWS)
        fade = jnp.exp2(higher * self.factor - self.least(both))
        self.put(weights * pallas.along(fade, weights.shape), 0)
        out = out * pallas.along(fade, out.shape)
        plgpu.barrier_wait(x["late_ready"].at[1])
        plgpu.barrier_wait(x["weights_ready"].at[1])
        out = self.add_values(out, x["weights"].at[1], 1, 0)
        plgpu.barrier_arrive(x["late_free"].at[1])
        return out, both, total * fade

    def add_second(self, piece: _Piece, i: Any, carry: Any, part: bool) -> Any:
        """Adds a pair of blocks to the second half of the columns."""
        (out, top, total), x = carry, self.x
        scores = self.scores(piece, i, 1, part)
        plgpu.barrier_wait(x["top_ready"].at[0])
        first = pallas.loaded(x["tops"].at[0], pallas.ROWS)
        higher = jnp.maximum(first, scores.max(axis=1))
        x["tops"].at[1][...] = higher
        plgpu.barrier_arrive(x["top_ready"].at[1])
        weights, fade = self.weigh(scores, top, higher)
        total = total * fade + weights.sum(axis=1)
        self.put(weights, 1)
        out = out * pallas.along(fade, out.shape)
        out = self.add_values(out, weights.astype(x["tiles"].dtype), 1, 1)
        plgpu.barrier_arrive(x["early_free"].at[1])
        plgpu.barrier_wait(x["late_ready"].at[0])
        plgpu.barrier_wait(x["weights_ready"].at[0])
        out = self.add_values(out, x["weights"].at[0], 0, 1)
        plgpu.barrier_arrive(x["late_free"].at[0])
        return out, higher, total

    def scores(self, piece: _Piece, i: Any, w: int, part: bool) -> Array:
        """Returns the scores of a warpgroup's block of a pair, before the scale."""
        x, tile = self.x, self.x["tiles"]

        def scored(scores: Any) -> Any:
            for name in (name for name, which in ORDER if which == w):
                plgpu.barrier_wait(x[f"{name}_ready"].at[w])
                half = w if name == "early" else 1 - w
                keys = tile.at[w, half].transpose((1, 0))
                plgpu.wgmma(scores, x["q_tiles"].at[half], keys)
                if self.p.r and name == "late":
                    keys = x["rope_tiles"].at[w].transpose((1, 0))
                    plgpu.wgmma(scores, x["q_rope_tile"], keys)
            return scores[...]

        scores = pl.run_scoped(scored, plgpu.ACC((ROWS, KEYS), jnp.float32))
        done = lambda: plgpu.barrier_arrive(x["q_free"].at[0])
        pallas.when(i == piece.pairs - 1)(done)
        return self.seen(piece, scores, piece.start + 2 * i + w) if part else scores

    def add_values(self, out: Array, weights: Any, tile: int, half: int) -> Array:
        """Returns the result with the weighed values of a block."""

        def summed(result: Any) -> Any:
            result[...] = out
            plgpu.wgmma(result, weights, self.x["tiles"].at[tile, half])
            return result[...]

        return pl.run_scoped(summed, plgpu.ACC(out.shape, jnp.float32))

    def put(self, weights: Array, w: int) -> None:
        """Hands weights to the other warpgroup."""
        place = self.x["weights"].at[w]
        place[...] = weights.astype(self.x["tiles"].dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.x["weights_ready"].at[w])

    # ------------------------------------------------------------------ softmax
    def least(self, top: Array) -> Array:
        """Returns what exponents are relative to: the scaled maxima, 0 for -inf."""
        return jnp.where(top == -jnp.inf, 0.0, top) * self.factor

    def weigh(self, scores: Array, top: Array, higher: Array) -> tuple[Array, Array]:
        """Returns weights, and the factor for what was added before."""
        least = self.least(higher)
        weights = jnp.exp2(scores * self.factor - pallas.along(least, scores.shape))
        return weights, jnp.exp2(top * self.factor - least)

    def seen(self, piece: _Piece, scores: Array, block: Any) -> Array:
        """Returns the scores, -inf for keys that are not seen or not of the piece."""
        mask, key = self.p.mask, block * KEYS
        last = pallas.rows(piece.range.limit - 1)
        if mask.right is not None:
            last = jnp.minimum(mask.visibility.last(self.positions(piece)), last)
        end = piece.end * KEYS - 1
        if not mask.averages:
            last = jnp.minimum(last, pallas.rows(end)) - key
            return pallas.hide(scores, None, last)
        empty = last < 0
        last = jnp.where(empty, -1, jnp.minimum(last, pallas.rows(end)) - key)
        fill = jnp.where(empty, 0.0, -jnp.inf)
        end = pallas.rows(jnp.minimum(end, mask.s - 1) - key)
        return pallas.hide(scores, None, last, fill, end)

    def positions(self, piece: _Piece) -> Array:
        """Returns the position of each row's query: int32 [64]."""
        at = pallas.rows(piece.offset)
        row = pallas.row_positions(ROWS) + self.group * ROWS
        for i in range(1, self.p.mask.t):  # rows of a query follow each other
            at = at + jnp.where(row >= i * self.p.n, 1, 0)
        return at

    # ------------------------------------------------------------------ storing
    def store(
        self, piece: _Piece, w: int, out: Array, top: Array, total: Array
    ) -> None:
        """Writes half of a piece's result."""
        p, x, given = self.p, self.x, self.given
        x["sums"].at[w][...] = total
        plgpu.barrier_arrive(x["sum_ready"].at[w])
        plgpu.barrier_wait(x["sum_ready"].at[1 - w])
        total = total + pallas.loaded(x["sums"].at[1 - w], pallas.ROWS)
        inverse = 1.0 / total
        or_zero = jnp.where(total == 0.0, 0.0, inverse)
        rows = pl.ds(self.group * ROWS, ROWS)
        columns = pl.ds(w * p.half, p.half)

        @pallas.when(piece.whole)
        def _() -> None:
            place = given["out"].at[piece.sequence, rows, columns]
            factor = or_zero if p.zero else inverse
            made = (out * pallas.along(factor, out.shape)).astype(p.dtype)
            pallas.store_rows(place, made)

        @pallas.when(jnp.logical_not(piece.whole))
        def _() -> None:
            place = given["parts"].at[piece.number, rows, columns]
            pallas.store_rows(place, out * pallas.along(or_zero, out.shape))
            if w == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                x["lse_rows"][...] = top * p.scale + jnp.log(total)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    x["lse_rows"], given["lse"].at[piece.number, rows]
                )
