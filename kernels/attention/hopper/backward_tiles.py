"""Shared code of the backward kernels: resident tiles and streamed blocks."""

from __future__ import annotations

import abc
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import block_masks, pallas, panels
from rewriter.kernels.attention.hopper.backward_functions import values_and_slopes
from rewriter.kernels.attention.hopper.backward_problem import Problem, Seen
from rewriter.kernels.attention.hopper.blocks import blocks_of, only_first
from rewriter.kernels.attention.hopper.config import REGISTERS
from rewriter.kernels.attention.hopper.dtypes import in_parts
from rewriter.kernels.attention.hopper.pallas import LOG2E
from rewriter.kernels.attention.hopper.terms import Place
from rewriter.kernels.attention.hopper.use import head_in_array
from rewriter.kernels.attention.visibility import FAR, Range
from rewriter.kernels.shared import warpgroups, work_stealing
from rewriter.kernels.shared.halves import Halves

if TYPE_CHECKING:
    from jax import Array


class Kernel(abc.ABC):
    """Common code of the two kernels: resident tiles and streamed blocks."""

    name: str
    fixed: tuple[str, str]
    """The arrays whose tiles stay resident, of widths h and e."""
    passing: tuple[str, str]
    """The arrays whose blocks are streamed, of widths h and e."""
    shows = False
    """Whether masks hide whole rows of tiles, which are left out when they are
    stored."""

    def __init__(self, p: Problem, given: dict[str, Any], memory: dict[str, Any]):
        arrays = (*self.fixed, *self.passing)
        names = {x: f"{x}_rows" for x in (*arrays, *(["piece"] if p.halves else []))}
        halves = arrays if p.halves else ()
        self.p, self.given = p, given
        self.memory = panels.with_rows(memory, names, p.by_rows, halves)
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)
        self.part = 0 if p.divided else self.warpgroup

    @classmethod
    def scratch(cls, p: Problem, dtype: Any) -> dict[str, Any]:
        """Returns shared memory by name."""
        made = {}
        for name, width in zip((*cls.fixed, *cls.passing), (p.h, p.e) * 2, strict=True):
            stays = name in cls.fixed
            stages = p.values if name == cls.passing[1] else p.stages
            shape = (p.ahead * p.parts, 64) if stays else (stages, p.block)
            shape = (2, *shape) if p.halves else shape
            deep = pallas.swizzle(width, p.block)  # alike in all operands of a product
            made[name] = p.tiles((*shape, width), dtype, deep)
        if p.halves:
            shape = (p.parts, 64, p.piece)
            made["piece"] = p.tiles(shape, jnp.float32, 4 * p.piece)
        return made | {
            "ready": pallas.barriers(p.ahead * p.warpgroups, cls.copies(p)),
            "done": pallas.barriers(p.ahead * p.warpgroups),
            "first_ready": pallas.barriers(
                p.stages, cls.copies_first(p) + p.terms.copies(p.parts)
            ),
            "second_ready": pallas.barriers(p.values, cls.copies_second(p)),
            "free": pallas.barriers(p.stages, p.warpgroups),
            **cls.row_memory(p),
            **p.terms.scratch(p.stages, p.parts, p.block),
            **(work_stealing.scratch(p.warpgroups) if p.order.claimed else {}),
        }

    @classmethod
    def copies(cls, p: Problem) -> int:
        """Copies of a warpgroup's tiles."""
        return sum(p.copies)

    @classmethod
    def copies_first(cls, p: Problem) -> int:
        """Copies of a block for its scores, beside `Terms`."""
        return p.copies[0]

    @classmethod
    def copies_second(cls, p: Problem) -> int:
        """Copies of a block for changes of scores."""
        return p.copies[1]

    @classmethod
    @abc.abstractmethod
    def row_memory(cls, p: Problem) -> dict[str, Any]:
        """Returns shared memory for numbers of queries: lse, delta, rest."""

    def run(self) -> None:
        """Runs this warpgroup's part."""
        count = self.p.warpgroups
        computes = self.warpgroup < count
        warpgroups.divide(computes, self.compute, self.copy, REGISTERS[count])

    def over_tiles(self, body: Any, copies: bool = False) -> None:
        """Runs ``steps = body(tile, steps)`` for this block's tiles."""
        order = self.p.order
        of = lambda index, steps, turn: body(
            Tile(self, order.place(index), turn), steps
        )
        pallas.over_tiles(order, self.given, self.memory, of, copies)

    def compute(self) -> None:
        """Computes this warpgroup's rows of every tile."""
        for place in range(self.p.ahead):
            slot = self.warpgroup + place * self.p.warpgroups
            plgpu.barrier_arrive(self.memory["done"].at[slot])
        for slot in range(self.p.stages):
            plgpu.barrier_arrive(self.memory["free"].at[slot])
        self.over_tiles(self.compute_tile)
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, tile: Tile, step: Any) -> Any:
        """Computes and stores 64 rows; returns the blocks read so far."""
        p, r = self.p, tile.range
        plgpu.barrier_wait(self.memory["ready"].at[tile.of(self.warpgroup)])
        tile.start = step
        loops = [(r.whole, r.part, Seen.ALL)]
        cut = p.mask.s % p.block or tile.length is not None
        if p.mask.hides or cut or self.classed:
            loops += [(r.part, r.end, Seen.SOME)]
        if p.mask.left is not None or self.classed:
            loops = [(r.start, r.whole, Seen.SOME), *loops]
        carry = self.over_heads(tile, (r.start, r.count), loops, step, self.begin(tile))
        carry, step = self.of_seen(tile, carry), step + r.count * p.group
        if p.averages is not None:
            start, end = tile.averaged
            alike, place = [(start, end, Seen.ALIKE)], (start, end - start)
            carry = self.over_heads(tile, place, alike, step, carry)
            step = step + (end - start) * p.group
        self.store(tile, carry)
        return step

    def over_heads(
        self,
        tile: Tile,
        place: tuple[Any, Any],
        loops: list[tuple[Any, Any, Seen]],
        step: Any,
        carry: Any,
    ) -> Any:
        """Returns the sums with blocks of all heads of a group added.

        Args:
            tile: The tile.
            place: The first block of a head, and the number of its blocks.
            loops: Ranges of these blocks, one after the other.
            step: The number of blocks read before.
            carry: The sums.
        """
        first, count = place

        def head(i: Any, carry: Any) -> Any:
            before = step + i * count - first
            for start, end, seen in loops:
                body = lambda j, c, seen=seen: self.step(tile, j, before + j, c, seen)
                carry = lax.fori_loop(start, jnp.maximum(start, end), body, carry)
            return carry

        if self.p.group == 1:
            return head(0, carry)
        return lax.fori_loop(0, self.p.group, head, carry)

    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x = self.p, self.memory

        def one(tile: Tile, step: Any) -> Any:
            # Blocks before what stays of a tile, as the forward copies them, made
            # dk and dv take 1.00 to 1.03 of the time on an H200.
            for w in range(p.warpgroups):
                plgpu.barrier_wait(x["done"].at[tile.of(w)])
                self.copy_tile(tile, w)

            def blocks(start: Any, end: Any, step: Any) -> Any:
                def block(i: Any, j: Any, step: Any) -> Any:
                    slot = lax.rem(step, jnp.int32(p.stages))
                    plgpu.barrier_wait(x["free"].at[slot])
                    self.copy_block(tile, i, j, step)
                    return step + 1

                def head(i: Any, step: Any) -> Any:
                    of_head = functools.partial(block, i)
                    return lax.fori_loop(start, end, of_head, step)

                return lax.fori_loop(0, p.group, head, step)

            step = blocks(tile.range.start, tile.range.end, step)
            return step if p.averages is None else blocks(*tile.averaged, step)

        self.over_tiles(one, copies=True)

    def send(self, name: str, at: tuple[Any, ...], to: Any, barrier: Any) -> None:
        """Copies a part of an array to its place in shared memory."""
        if name in dict(self.p.packed):
            entry, places, head = at
            at = entry, places, head_in_array(self.p.packed, name, head)
        if (rows := f"{name}_rows") not in self.memory:
            place = self.memory[name].at[to]
            plgpu.copy_gmem_to_smem(self.given[name].at[at], place, barrier)
            return
        for source, place in panels.parts(
            self.given[name], at, self.memory[rows].at[to]
        ):
            plgpu.copy_gmem_to_smem(source, place, barrier)

    def send_terms(
        self, tile: Tile, n: Any, j: Any, slot: Any, ready: Any = None
    ) -> None:
        """Copies the operands that change the scores of a block and of query head n."""
        p = self.p
        ready = self.memory["first_ready"].at[slot] if ready is None else ready
        place = Place(tile.b, n, tile.first, j * p.block, p.block, p.parts, slot)
        p.terms.copy(
            place, self.given,
            lambda source, name, at: plgpu.copy_gmem_to_smem(
                source, self.memory[name].at[at], ready
            ),
        )  # fmt: skip

    def scores(
        self, tile: Tile, found: Array, j: Any, slot: Any, step: Any, seen: Seen
    ) -> tuple[Array, Array | None]:
        """Returns products as scores, and their derivatives by scaled products.

        Scores are -inf for hidden keys. With an addend they are multiplied with the
        scale. With only a soft cap they are multiplied with the scale and log2(e).
        Others are not multiplied yet. Without a soft cap or a function the derivative
        is 1: the second is None. What masks and further operands do to scores is left
        out for rows without keys.
        """
        p, mine, steep, part = self.p, self.part, None, seen is Seen.SOME
        if p.softcap is not None:
            bent = pallas.tanh(found * (p.scale / p.softcap))
            found = bent * (p.softcap * (1.0 if p.terms.natural else LOG2E))
            steep = 1.0 - bent * bent
        elif p.terms.natural and p.terms.function is None:
            found = found * p.scale
        if seen is Seen.ALIKE:
            return found, steep
        if p.terms.function is not None:
            found, steep = values_and_slopes(self, tile, found, j, slot, step, seen)
        if p.terms.slopes:
            found = self.sloped(tile, found, j, step)
        hides = part or not self.classed
        found = p.terms.added(found, self.memory, slot, mine, hides, tile.fill)
        return (self.hidden(tile, found, j) if part else found), steep

    @property
    def classed(self) -> bool:
        """Whether masks and segments hide keys only in some blocks."""
        return "reach" in self.given

    def weights(self, scores: Array, lse: Any, rest: Any, seen: Seen) -> Array:
        """Returns weights from scores and the terms to subtract, which are as wide."""
        p = self.p
        if seen is Seen.ALIKE and p.averages is not None:
            return p.averages.weights(lse)
        if not p.terms.natural:
            unit = p.scale * LOG2E if p.softcap is None else 1.0
            return jnp.exp2(scores * unit - lse)
        found = (scores - lse) * LOG2E
        return jnp.exp2(found if rest is None else found - rest)

    def only_seen(self, changes: Array, weights: Array, seen: Seen) -> Array:
        """Returns changes of scores, 0 where scores are hidden.

        Hidden weights are 0, but 0 times NaN is NaN. If nothing can be hidden, the
        formula gives that NaN too.

        Args:
            changes: float32 [64, block].
            weights: float32 of the same shape.
            seen: What rows see of the block.
        """
        p, part = self.p, seen is Seen.SOME
        if seen is Seen.ALIKE:
            return jnp.where(weights == 0.0, 0.0, changes)
        masked = p.terms.masks and (part if self.classed else not self.shows)
        placed = part and (p.mask.hides or "lengths" in self.given)
        return jnp.where(weights == 0.0, 0.0, changes) if masked or placed else changes

    def chosen(self, changes: Array, lse: Any) -> Array:
        """Returns changes of scores, 0 in queries that weigh hidden keys alone.

        The program chooses a number for these, and other keys weigh nothing.

        Args:
            changes: float32 [64, block].
            lse: The queries' log-sum-exps, as wide.
        """
        if self.p.chosen is None:
            return changes
        return jnp.where(lse <= self.p.chosen / 2, 0.0, changes)

    def of_seen(self, tile: Tile, carry: Any) -> Any:
        """Returns the sums over what rows see, without what must not count."""
        del tile
        return carry

    # What differs:
    @abc.abstractmethod
    def averaged(self, tile: Tile, spans: Any) -> tuple[Any, Any]:
        """Returns the blocks that a tile meets for rows without keys.

        Args:
            tile: The tile.
            spans: See `averaged_rows.spans_of`.
        """

    @abc.abstractmethod
    def sloped(self, tile: Tile, scores: Array, j: Any, step: Any) -> Array:
        """Returns scores with distances times the slope of the query head."""

    @abc.abstractmethod
    def copy_tile(self, tile: Tile, w: int) -> None:
        """Copies the resident arrays of a tile."""

    @abc.abstractmethod
    def copy_block(self, tile: Tile, i: Any, j: Any, step: Any) -> None:
        """Copies a streamed block to free memory of the first array."""

    @abc.abstractmethod
    def begin(self, tile: Tile) -> Any:
        """Returns the initial sums of a tile."""

    @abc.abstractmethod
    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sums with a block added."""

    @abc.abstractmethod
    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sums of a tile."""

    def put(self, x: Array, name: str, output: str, tile: Tile) -> None:
        """Writes rows in place of a tile, and from there to the result."""
        joined = self.p.joined
        to = self.given["joined" if name in dict(joined) else output]
        if self.p.halves:
            self.put_in_pieces(x, name, to, tile)
            return
        mine = tile.of(self.part)
        panels.put(self.memory[name].at[mine], x.astype(to.dtype))
        plgpu.commit_smem()
        head = head_in_array(joined, name, tile.head)
        at = (tile.b, pl.ds(tile.mine, 64), head)
        rows = self.memory[f"{name}_rows"].at[mine]
        for target, place in panels.parts(to, at, rows):
            plgpu.copy_smem_to_gmem(place, target)

    def put_in_pieces(self, x: Array, name: str, to: Any, tile: Tile) -> None:
        """Writes rows of float32 by some columns at a time; see `put`."""
        place, rows = (self.memory[n].at[self.part] for n in ("piece", "piece_rows"))
        head, columns = head_in_array(self.p.joined, name, tile.head), self.p.piece
        for first in range(0, x.shape[1], columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            panels.put(place, x[:, first : first + columns])
            plgpu.commit_smem()
            at = (tile.b, pl.ds(tile.mine, 64), head, pl.ds(first, columns))
            for target, source in panels.parts(to, at, rows):
                plgpu.copy_smem_to_gmem(source, target)

    def operand(self, x: Array) -> Any:
        """Returns numbers in registers as tensor cores take them."""
        made = in_parts(x, self.given["q"].dtype, 1 + self.p.halves)
        return Halves(*made) if self.p.halves else made[0]

    def head(self, tile: Tile, step: Any, seen: Seen = Seen.SOME) -> Any:
        """Returns the query head of a step; those of rows without keys come last."""
        del step, seen
        return tile.head

    def hidden(
        self, tile: Tile, scores: Array, j: Any, value: float | None = None
    ) -> Array:
        """Returns scores with -inf, or a value, where a row does not see a column."""
        mask = self.p.mask
        start = j * self.p.block
        at = pallas.row_positions(64) + (tile.mine + tile.offset - start)
        first = None if mask.left is None else mask.visibility.first(at)
        last = pallas.rows(tile.range.limit - 1 - start)
        if mask.right is not None:
            ahead = mask.visibility.last(at)
            if tile.prefix is not None:
                ahead = jnp.maximum(ahead, pallas.rows(tile.prefix - 1 - start))
            last = jnp.minimum(ahead, last)
        if first is not None and tile.prefix is not None:
            row = pallas.row_positions(64) + tile.mine
            first = jnp.where(row < pallas.rows(tile.prefix), -FAR, first)
        if tile.length is not None and not mask.lengths:
            row = pallas.row_positions(64) + tile.mine
            last = jnp.where(row < pallas.rows(tile.length), last, -1)
        if value is None and tile.fill is not None:
            fill, cut = pallas.zeros((64,)) + tile.fill, mask.s % self.p.block
            end = pallas.rows(mask.s - 1 - start) if cut else None
            passes = self.p.terms.fill_passes
            return pallas.hide(scores, first, last, fill, end, passes)
        if value is None:
            return pallas.hide(scores, first, last)
        fill, end = pallas.zeros((64,), value), pallas.rows(self.p.block)
        return pallas.hide(scores, first, last, fill, end)


def _without_rows(r: Range, some: Any) -> Range:
    """Returns a range without whole blocks, so that all are seen in part, if `some`."""
    return replace(r, part=jnp.where(some, r.whole, r.part))


class Tile:
    """The place of a tile of rows, and the blocks of columns that it meets."""

    def __init__(self, kernel: Kernel, place: tuple[Any, Any], turn: Any = 0):
        p, (row, pair) = kernel.p, place
        self.slot: Any = None
        """Where its resident arrays are; None if there is one tile at a time."""
        if p.ahead > 1:
            self.slot = lax.rem(jnp.int32(turn), jnp.int32(p.ahead)) * p.warpgroups
        heads = jnp.int32(p.heads)
        self.first = row * p.rows
        self.b, self.head = lax.div(pair, heads), lax.rem(pair, heads)
        self.offset: Any = p.mask.shift
        if "offsets" in kernel.given:
            self.offset = self.offset + kernel.sign * pallas.scalar(
                kernel.given["offsets"], self.b
            )
        self.length = None
        if "lengths" in kernel.given:
            self.length = pallas.scalar(kernel.given["lengths"], self.b)
        limit = self.length if p.mask.lengths else None
        self.prefix = None
        if "prefixes" in kernel.given:
            self.prefix = pallas.scalar(kernel.given["prefixes"], self.b)
        self.fill: Any = None
        """The score of hidden keys, if there may be rows that weigh them."""
        every = None
        if p.mask.weighs:
            self.fill = pallas.scalar(kernel.given["fills"], 0)
            every = self.fill > -jnp.inf
        turned = {"early" if kernel.sign < 0 else "prefix": self.prefix}
        self.range = blocks_of(
            p.mask,
            self.first,
            p.rows,
            p.block,
            self.offset,
            limit,
            **turned,
            every=every if p.mask.hides else None,
        )
        if "reach" in kernel.given:
            table = kernel.given["reach"]
            self.range = block_masks.left(table, self.range, self.b, self.head, row)
        if self.length is not None and not p.mask.lengths:  # rows may be past it
            self.range = _without_rows(self.range, self.first + p.rows > self.length)
            past = self.first >= self.length
            past = past if every is None else past & ~every
            self.range = only_first(self.range, past)
        self.mine = self.first + 64 * kernel.part
        self.averaged: Any = None
        """The blocks that it meets for rows without keys: the first, and the end."""
        if p.averages is not None:
            self.averaged = kernel.averaged(self, kernel.given["spans"])
        self.start: Any = 0
        """The number of blocks read before this tile."""

    def of(self, warpgroup: Any) -> Any:
        """Returns the place of a warpgroup's part among resident arrays."""
        return warpgroup if self.slot is None else warpgroup + self.slot
