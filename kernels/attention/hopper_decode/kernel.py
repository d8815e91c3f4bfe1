"""Few queries against many keys on Hopper's tensor cores, each key read once.

The queries of all heads that share a key head are the rows of one product. All blocks
of keys form one work queue (`work_split`), and each reader takes an even share. A
reader has two warpgroups. One copies blocks into shared memory as that becomes free,
also those of the next piece. The other keeps a running softmax in registers. The result
of a piece is stored divided by its sum, beside its log-sum-exp; `merge` adds the pieces
up. Keys lie in one array, or in pages that a table names. A mask of keys is copied
beside them, a number for each. Sources: Dao et al., "Flash-Decoding for long-context
inference" (2023); Kwon et al., "Efficient Memory Management for Large Language Model
Serving with PagedAttention" (2023); Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas, panels
from rewriter.kernels.attention.hopper.dtypes import in_parts
from rewriter.kernels.attention.hopper_decode.config import (
    QUERIES,
    REGISTERS,
    ROWS,
    STORED,
    mask_columns,
    stored_columns,
)
from rewriter.kernels.attention.hopper_decode.problem import Problem
from rewriter.kernels.attention.visibility import Range
from rewriter.kernels.shared import warpgroups

if TYPE_CHECKING:
    from jax import Array

LOG2E = math.log2(math.e)


def pieces(
    p: Problem, q: Array, ends: Array, k: Array, v: Array, numbers: dict[str, Array]
) -> tuple[Array, Array]:
    """Returns the result of each piece, and its log-sum-exp.

    Args:
        p: The problem.
        q: [b, heads * queries, h], or more rows: the queries of each pair.
        ends: int32 [b], as `WorkQueue` has it.
        k: Keys, laid out by `p.pages`; positions are a multiple of eight.
        v: Values.
        numbers: int32 ``lengths`` [b], ``offsets`` [b] and ``table`` [b, pages], and
            ``mask``, ``empty_rows`` and ``empty`` from `decode.of_mask`, if present.

    Returns:
        float32 [pieces, rows, columns] and [pieces, 64]; columns from e on, and unused
        pieces, are not written.
    """
    config, count = p.config, p.queue(ends).pieces
    readers, stages = config.readers, config.stages
    wide = stored_columns(p.e)
    out = [
        jax.ShapeDtypeStruct((count, p.rows, p.columns), jnp.float32),
        jax.ShapeDtypeStruct((count, ROWS), jnp.float32),
    ]
    flat, deep = pallas.swizzle(p.h), pallas.swizzle(p.e, config.block_kv)
    # A product reads 64 rows from the start of a piece's queries on, also of the next
    # ones.
    queries = ROWS + (QUERIES * readers - 1) * p.rows
    blocks = (readers, stages, config.block_kv)
    scratch = {
        "queries": panels.panels((queries, p.h), q.dtype, flat),
        "k_tiles": pallas.tiles((*blocks, p.h), q.dtype, flat),
        "v_tiles": pallas.tiles((*blocks, p.e), q.dtype, deep),
        "o_tiles": _float_tiles((readers, STORED, ROWS, wide)),
        "lse_rows": plgpu.SMEM((readers, ROWS), jnp.float32),
        "q_ready": pallas.barriers(readers * QUERIES, panels.copies(p.h, flat, True)),
        "q_free": pallas.barriers(readers * QUERIES),
        **{
            name: pallas.barriers(readers * stages, arrivals)
            for name, arrivals in (
                ("k_ready", copies(p) + p.mask.more), ("v_ready", copies(p)),
                ("k_free", 1), ("v_free", 1),
            )
        },
    }  # fmt: skip
    if p.mask.more:
        line = mask_columns(config.block_kv)
        scratch["mask_lines"] = pallas.lines((readers, stages, line), jnp.float32)
    named = {"q": q, "ends": ends, "k": k, "v": v, **numbers}

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, "out", "lse"), references, strict=True))
        _Reader(p, given, memory).run()

    return pallas.kernel(
        body, "attention_decode", out, scratch, p.programs, 2 * readers
    )(*named.values())


def _float_tiles(shape: tuple[int, ...]) -> Any:
    """Returns shared memory for float32 [..., rows, 32 or 16] that is copied out."""
    columns = shape[-1]
    tiling = plgpu.TilingTransform((8, columns))
    transforms = (tiling, plgpu.SwizzleTransform(4 * columns))
    return plgpu.SMEM(shape, jnp.float32, transforms=transforms)


def copies(p: Problem) -> int:
    """Returns the number of copies for a block of keys: one for each page in it."""
    return max(1, p.config.block_kv // p.pages.size) if p.pages.listed else 1


@dataclass(frozen=True)
class _Piece:
    """Blocks of a pair that a reader takes: from `start` to `end` of its range."""

    sequence: Any
    head: Any
    range: Range
    offset: Any
    start: Any
    end: Any
    number: Any
    """The index of its results."""
    turn: Any
    """The number of pieces that this reader took before."""
    empty: Any = None
    """The averaged rows, if known before: int32 [64], 1 for such."""


class _Reader:
    """The work of two warpgroups, one that copies and one that computes."""

    def __init__(self, p: Problem, given: dict[str, Any], memory: dict[str, Any]):
        views = dict(zip(("q_tiles", "q_rows"), memory["queries"], strict=True))
        self.p, self.given, self.x = p, given, memory | views
        readers = p.config.readers
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)
        self.own = lax.rem(self.warpgroup, jnp.int32(readers))
        self.number = lax.axis_index(pallas.PROGRAM) * readers + self.own
        self.queue = p.queue(given["ends"])

    def run(self) -> None:
        """Runs this warpgroup's part."""
        readers = self.p.config.readers
        registers = REGISTERS.get(readers, (0, 0))
        warpgroups.divide(self.warpgroup < readers, self.compute, self.copy, registers)

    def over_pieces(self, body: Any) -> None:
        """Runs ``body(piece, step)`` for this reader's pieces.

        `step` counts the blocks of all pieces before.
        """
        first, last = self.queue.share(self.number)

        def one(carry: Any) -> Any:
            block, sequence, turn = carry
            piece, next_sequence = self.piece(block, last, sequence, turn)
            body(piece, block - first)
            return block + piece.end - piece.start, next_sequence, turn + 1

        start = (first, self.queue.sequence_of(first), jnp.int32(0))
        lax.while_loop(lambda carry: carry[0] < last, one, start)

    def piece(self, block: Any, last: Any, sequence: Any, turn: Any) -> Any:
        """Returns the piece that begins at a block, and the next one's sequence."""
        p, queue = self.p, self.queue
        begin = queue.begin(sequence)
        count = queue.ends[sequence] - begin
        inside = block - begin * p.heads
        head = lax.div(inside, count)
        start = inside - head * count
        end = jnp.minimum(count, start + last - block)
        offset, length, empty = (
            pallas.scalar(self.given[name], sequence) if name in self.given else None
            for name in ("offsets", "lengths", "empty")
        )
        r = p.blocks(offset, length, empty)
        number = self.number + sequence * p.heads + head
        at = p.mask.shift if offset is None else p.mask.shift + offset
        made = _Piece(
            sequence, head, r, at, r.start + start, r.start + end, number, turn
        )
        done = (head == p.heads - 1) & (end == count)
        following = jnp.minimum(sequence + 1, p.b - 1)
        return made, jnp.where(done, following, sequence)

    def slot(self, step: Any) -> tuple[Any, Any]:
        """Returns a block's index in its reader's memory, and among barriers."""
        stages = self.p.config.stages
        slot = lax.rem(step, jnp.int32(stages))
        return slot, self.own * stages + slot

    def queries(self, turn: Any) -> tuple[Any, Any]:
        """Returns the start of a piece's queries, and the index of their barriers."""
        place = self.own * QUERIES + lax.rem(turn, jnp.int32(QUERIES))
        return pl.multiple_of(place * self.p.rows, 8), place

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x = self.p, self.x

        def one(piece: _Piece, step: Any) -> None:
            first, place = self.queries(piece.turn)
            plgpu.barrier_wait(x["q_free"].at[place])
            at = piece.sequence, pl.ds(piece.head * p.queries, p.rows)
            rows = x["q_rows"].at[:, pl.ds(first, p.rows)]
            for source, target in panels.parts(self.given["q"], at, rows):
                plgpu.copy_gmem_to_smem(source, target, x["q_ready"].at[place])

            def block(i: Any, _: Any) -> None:
                slot, place = self.slot(step + i - piece.start)
                parts = list(self.parts(piece, i * p.config.block_kv))
                for name in "kv":
                    plgpu.barrier_wait(x[f"{name}_free"].at[place])
                    if name == "k" and p.mask.more:
                        self.copy_mask(piece, i, slot, place)
                    for source, rows in parts:
                        plgpu.copy_gmem_to_smem(
                            self.given[name].at[source],
                            x[f"{name}_tiles"].at[self.own, slot, rows],
                            x[f"{name}_ready"].at[place],
                        )

            lax.fori_loop(piece.start, piece.end, block, None)

        self.over_pieces(one)

    def copy_mask(self, piece: _Piece, i: Any, slot: Any, place: Any) -> None:
        """Copies the mask of the i-th block's keys."""
        source, target = self.given["mask"], self.x["mask_lines"]
        sequence = piece.sequence if source.shape[0] > 1 else 0
        keys = pl.ds(i * self.p.config.block_kv, target.shape[2])
        plgpu.copy_gmem_to_smem(
            source.at[sequence, keys], target.at[self.own, slot],
            self.x["k_ready"].at[place],
        )  # fmt: skip

    def parts(self, piece: _Piece, key: Any) -> Any:
        """Yields the places of a block's keys, and their rows within the block."""
        p, pages = self.p, self.p.pages
        rows = min(p.config.block_kv, pages.size) if pages.listed else p.config.block_kv
        last: Any = pages.count - 1
        if pages.listed and not p.mask.averages:
            # Invisible pages are not read: they may hold keys of other sequences.
            last = lax.div(jnp.maximum(piece.range.limit - 1, 0), jnp.int32(pages.size))
        for i in range(copies(p)):
            page, inside = piece.sequence, key
            if pages.listed:
                place = lax.div(key + i * rows, jnp.int32(pages.size))
                inside = key + i * rows - place * pages.size
                place = jnp.minimum(place, last)
                page = pallas.scalar(self.given["table"], piece.sequence, place)
            at = {"k": piece.head, "p": page}
            at["z"] = pl.ds(pl.multiple_of(inside, 8), rows)
            yield tuple(at[x] for x in pages.axes[:3]), pl.ds(i * rows, rows)

    # ---------------------------------------------------------------- computing
    def compute(self) -> None:
        """Computes every piece."""
        p, x = self.p, self.x
        for place in range(QUERIES):
            plgpu.barrier_arrive(x["q_free"].at[self.own * QUERIES + place])
        for name in ("k_free", "v_free"):
            for slot in range(p.config.stages):
                plgpu.barrier_arrive(x[name].at[self.own * p.config.stages + slot])

        def one(piece: _Piece, step: Any) -> None:
            first, place = self.queries(piece.turn)
            plgpu.barrier_wait(x["q_ready"].at[place])
            if p.averages:
                rows = self.given["empty_rows"].at[piece.sequence]
                piece = replace(piece, empty=pallas.read(rows, pallas.ROWS))
            made = self.over_blocks(piece, first, step)
            plgpu.barrier_arrive(x["q_free"].at[place])
            self.store(piece, *made)

        self.over_pieces(one)
        plgpu.wait_smem_to_gmem(0)

    def over_blocks(self, piece: _Piece, q: Any, step: Any) -> Any:
        """Returns (result, maxima, sums) of a piece's blocks; q is its first row."""
        r, p = piece.range, self.p
        carry = (
            pallas.zeros((ROWS, p.e)), pallas.zeros((ROWS,), -jnp.inf),
            pallas.zeros((ROWS,)),
        )  # fmt: skip
        loops = [(r.whole, r.part, False)]
        if p.mask.left is not None:
            loops = [(r.start, r.whole, True), *loops]
        if p.mask.hides or p.averages or p.mask.s % p.config.block_kv > 0:
            loops = [*loops, (r.part, r.end, True)]
        for start, end, part in loops:
            begin = jnp.maximum(start, piece.start)
            end = jnp.maximum(jnp.minimum(end, piece.end), begin)
            body = lambda i, c, part=part: self.add(piece, q, i, step, c, part)
            carry = lax.fori_loop(begin, end, body, carry)
        return carry

    def add(
        self, piece: _Piece, q: Any, i: Any, step: Any, carry: Any, part: bool
    ) -> Any:
        """Adds the values of the i-th block."""
        out, top, total = carry
        p, x = self.p, self.x
        slot, place = self.slot(step + i - piece.start)
        plgpu.barrier_wait(x["k_ready"].at[place])

        def scored(scores: Any) -> Any:
            count, _, each = x["q_tiles"].shape
            for i in range(count):
                keys = x["k_tiles"].at[self.own, slot, :, pl.ds(i * each, each)]
                rows = x["q_tiles"].at[i, pl.ds(q, ROWS)]
                plgpu.wgmma(scores, rows, keys.transpose((1, 0)))
            return scores[...]

        shape = (ROWS, p.config.block_kv)
        scores = pl.run_scoped(scored, plgpu.ACC(shape, jnp.float32))
        if not p.mask.more:
            plgpu.barrier_arrive(x["k_free"].at[place])
        scores = self.seen(piece, scores, i, part, slot)
        if p.mask.more:
            scores = lax.optimization_barrier(scores)
            plgpu.barrier_arrive(x["k_free"].at[place])  # of the mask too, read by now
        weights, top, total, fade = self.weigh(scores, top, total)
        weights = in_parts(weights, self.given["q"].dtype, p.parts)
        out = out * pallas.along(fade, out.shape)
        plgpu.barrier_wait(x["v_ready"].at[place])

        def summed(result: Any) -> Any:
            result[...] = out
            for part in weights:
                plgpu.wgmma(result, part, x["v_tiles"].at[self.own, slot])
            return result[...]

        out = pl.run_scoped(summed, plgpu.ACC(out.shape, jnp.float32))
        plgpu.barrier_arrive(x["v_free"].at[place])
        return out, top, total

    # ------------------------------------------------------------------ softmax
    def seen(
        self, piece: _Piece, scores: Array, i: Any, part: bool, slot: Any
    ) -> Array:
        """Returns the scores of the i-th block, -inf for keys that are not seen.

        With a soft cap they are multiplied with the scale and log2(e), otherwise not
        yet.
        """
        p, mask = self.p, self.p.mask
        if p.softcap is not None:
            scores = tanh(scores * (p.scale / p.softcap)) * (p.softcap * LOG2E)
        if mask.more:
            line = self.x["mask_lines"].at[self.own, slot, pl.ds(0, scores.shape[1])]
            hidden = pallas.across(pallas.loaded(line, pallas.COLUMNS), scores.shape)
            scores = jnp.where(hidden == -jnp.inf, -jnp.inf, scores)
        if not part:
            return scores
        key = i * p.config.block_kv
        first, last = self.keys_of_rows(piece)
        if not (mask.averages or p.averages):
            first = None if first is None else first - key
            return pallas.hide(scores, first, last - key)
        if p.averages:
            empty = piece.empty > 0
        else:
            empty = last < 0 if first is None else (last < 0) | (first > last)
        first = None if first is None else first - key
        last = jnp.where(empty, -1, last - key)
        fill = jnp.where(empty, 0.0, -jnp.inf)
        return pallas.hide(scores, first, last, fill, pallas.rows(mask.s - 1 - key))

    def keys_of_rows(self, piece: _Piece) -> tuple[Array | None, Array]:
        """Returns the first (None for 0) and last key that each row sees: [64]."""
        mask, group = self.p.mask, self.p.group
        at = pallas.rows(piece.offset)
        row = pallas.row_positions(ROWS)
        for i in range(1, mask.t):  # rows of a query follow each other
            at = at + jnp.where(row >= i * group, 1, 0)
        first, last = None, pallas.rows(piece.range.limit - 1)
        if mask.right is not None:
            last = jnp.minimum(mask.visibility.last(at), last)
        if mask.left is not None:
            first = mask.visibility.first(at)
        return first, last

    def weigh(self, scores: Array, top: Array, total: Array) -> tuple[Array, ...]:
        """Returns weights, new maxima, new sums, and the factor for earlier sums."""
        c = self.p.scale * LOG2E if self.p.softcap is None else 1.0
        higher = jnp.maximum(top, scores.max(axis=1))
        least = jnp.where(higher == -jnp.inf, 0.0, higher) * c
        weights = jnp.exp2(scores * c - pallas.along(least, scores.shape))
        fade = jnp.exp2(top * c - least)
        return weights, higher, total * fade + weights.sum(axis=1), fade

    # ------------------------------------------------------------------ storing
    def store(self, piece: _Piece, out: Array, top: Array, total: Array) -> None:
        """Writes the result of a piece; 0 and -inf for rows that saw no key."""
        p, x = self.p, self.x
        out = out * pallas.along(jnp.where(total == 0.0, 0.0, 1.0 / total), out.shape)
        lse = top * (p.scale if p.softcap is None else 1 / LOG2E) + jnp.log(total)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x["lse_rows"].at[self.own][...] = lse
        wide = stored_columns(p.e)
        for i, column in enumerate(range(0, p.e, wide)):
            if i >= STORED:
                plgpu.wait_smem_to_gmem(STORED - 1, wait_read_only=True)
            part = x["o_tiles"].at[self.own, i % STORED]
            part[...] = out[:, column : column + wide]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                x["o_tiles"].at[self.own, i % STORED, pl.ds(0, p.rows)],
                self.given["out"].at[
                    piece.number, pl.ds(0, p.rows), pl.ds(column, wide)
                ],
            )
        plgpu.copy_smem_to_gmem(
            x["lse_rows"].at[self.own], self.given["lse"].at[piece.number]
        )


def tanh(x: Array) -> Array:
    """Returns the hyperbolic tangent, as exact for small x as for large ones."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))
