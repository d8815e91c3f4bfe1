"""The work of one warpgroup: 64 rows of a tile of queries.

Scores of a block of keys become weights by a running softmax: see
`rewriter.kernels.attention.hopper.forward_kernel`.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import block_masks, pallas, panels
from rewriter.kernels.attention.hopper.blocks import blocks_of, inside
from rewriter.kernels.attention.hopper.dtypes import in_parts
from rewriter.kernels.attention.hopper.pallas import LOG2E
from rewriter.kernels.attention.hopper.terms import Place
from rewriter.kernels.attention.visibility import Range
from rewriter.kernels.shared.halves import Halves

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.forward_kernel import _Block


FIRST, LAST = "first", "last"
"""The ends of rows' visible ranges that may lie within a block of keys."""


class Tile:
    """One tile of rows, and the work of one warpgroup on it."""

    def __init__(self, block: _Block, place: tuple[Any, Any]):
        p = block.p
        row, pair = place
        self.block, self.p, self.x = block, p, block.named
        self.first = row * p.config.rows
        self.b, self.n = lax.div(pair, jnp.int32(p.n)), lax.rem(pair, jnp.int32(p.n))
        self.head = lax.div(self.n, jnp.int32(p.group))
        self.offset: Any = p.mask.shift
        given = block.given
        if "offsets" in given:
            self.offset = self.offset + pallas.scalar(given["offsets"], self.b)
        self.length: Any = None
        if "lengths" in given:
            self.length = pallas.scalar(given["lengths"], self.b)
        self.prefix: Any = None
        if "prefixes" in given:
            self.prefix = pallas.scalar(given["prefixes"], self.b)
        self.fill: Any = None
        """The score of hidden keys, if there may be rows that weigh them."""
        if p.mask.weighs:
            self.fill = pallas.scalar(given["fills"], 0)
        self.range = self.blocks(self.first, p.config.rows)
        if "reach" in given:
            self.range = block_masks.left(
                given["reach"], self.range, self.b, self.n, row
            )
        self.mine = self.first + 64 * block.warpgroup
        self.shape = (64, p.config.block_kv)

    def blocks(self, first: Any, rows: int) -> Range:
        """Returns the blocks that some rows see by position."""
        p, block = self.p, self.p.config.block_kv
        numbers = self.offset, self.length, self.prefix
        every = None
        if self.fill is not None and p.mask.hides:
            every = self.fill > -jnp.inf
        return blocks_of(p.mask, first, rows, block, *numbers, every=every)

    @functools.cached_property
    def own(self) -> Range:
        """The tile's blocks that this warpgroup's rows see."""
        config = self.p.config
        same = config.rows <= config.block_kv or self.classed
        if same or not self.p.mask.hides:
            return self.range
        return inside(self.blocks(self.mine, 64), self.range)

    def slot(self, i: Any, step: Any) -> Any:
        """The slot of the i-th block; `step` blocks were read before this tile."""
        return lax.rem(step + i, jnp.int32(self.p.config.stages))

    def compute(self, step: Any) -> Any:
        """Computes and stores 64 rows, if there are; returns the blocks read so far."""
        mask, rows = self.p.mask, self.p.config.rows
        if -mask.t % rows < 64:  # even in the last tile each warpgroup has some
            self.compute_rows(step)
        else:
            there = self.mine < mask.t
            pallas.when(there)(lambda: self.compute_rows(step))
            pallas.when(jnp.logical_not(there))(lambda: self.pass_by(step))
        return step + self.range.count

    def compute_rows(self, step: Any) -> None:
        """Computes and stores 64 rows.

        The last block comes first: under a causal mask it is the one seen in part, so
        later ones need no comparisons.
        """
        r, own, x, mine = self.range, self.own, self.x, self.block.warpgroup
        plgpu.barrier_wait(x["q_ready"].at[mine])
        begin, end = r.end - own.end, r.end - own.start
        if own is not r:
            self.skip(0, begin, step)
        carry = self.begin(begin, step)
        loops = [(r.end - own.part, r.end - own.whole, ())]
        if self.hides:
            loops = [(begin, r.end - own.part, self.cut_behind), *loops]
        if self.p.mask.left is not None or self.classed:
            loops += [(r.end - own.whole, end, self.cut_before)]
        for start, stop, cut in loops:
            start = jnp.maximum(start, begin + 1)
            body = lambda i, c, cut=cut: self.step(i, step, c, cut)
            carry = lax.fori_loop(start, jnp.maximum(stop, start), body, carry)
        if self.p.result_has_memory:
            plgpu.barrier_arrive(x["q_free"].at[mine])
        out = self.finish(end - 1, step, carry)
        if own is not r:
            self.skip(end, r.count, step)
        self.store(*out)
        if not self.p.result_has_memory:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(x["q_free"].at[mine])

    def pass_by(self, step: Any) -> None:
        """Releases the copies for rows that are past the last one."""
        x, mine = self.x, self.block.warpgroup
        plgpu.barrier_wait(x["q_ready"].at[mine])
        plgpu.barrier_arrive(x["q_free"].at[mine])
        self.release_block(0, step)  # others begin with it, and take no turn
        self.skip(1, self.range.count, step)

    def release_block(self, i: Any, step: Any) -> None:
        """Releases the memory of the i-th block without reading it."""
        slot = self.slot(i, step)
        for name in "kv":
            plgpu.barrier_wait(self.x[f"{name}_ready"].at[slot])
            plgpu.barrier_arrive(self.x[f"{name}_free"].at[slot])

    def skip(self, start: Any, end: Any, step: Any) -> None:
        """Releases blocks that only rows of other warpgroups see."""
        config = self.p.config

        def block(i: Any, carry: Any) -> Any:
            self.release_block(i, step)
            if config.turns:
                pallas.wait_for_turn(config.warpgroups)
                pallas.pass_turn(config.warpgroups)
            return carry

        lax.fori_loop(start, end, block, jnp.int32(0))

    @property
    def cut_behind(self) -> tuple[str, ...]:
        """The range ends that lie within blocks from `Range.part` on."""
        mask = self.p.mask
        return (FIRST, LAST) if mask.averages or mask.weighs else (LAST,)

    @property
    def cut_before(self) -> tuple[str, ...]:
        """The range ends that lie within blocks before `Range.whole`.

        No block has both ends if a window is longer than a tile and a block.
        """
        mask, config = self.p.mask, self.p.config
        if mask.averages or self.classed or mask.left is None or mask.lengths:
            return FIRST, LAST
        if mask.right is None:
            alone = mask.s % config.block_kv == 0
        else:
            alone = mask.left + mask.right + 1 >= config.rows + config.block_kv
            alone &= mask.s % config.block_kv == 0
        return (FIRST,) if alone else (FIRST, LAST)

    @property
    def hides(self) -> bool:
        """Whether there may be blocks that are seen in part."""
        mask = self.p.mask
        cut = mask.s % self.p.config.block_kv > 0
        return mask.hides or cut or self.classed

    @property
    def classed(self) -> bool:
        """Whether masks and segments hide keys only in some blocks."""
        return "reach" in self.block.given

    def multiply_keys(self, scores: Any, slot: Any) -> None:
        """Starts the product of this warpgroup's queries with a block's keys."""
        q = self.x["q_tiles"].at[self.block.warpgroup]
        panels.add_scores(scores, q, self.x["k_tiles"].at[slot])

    def multiply_values(self, result: Any, weights: Any, slot: Any) -> None:
        """Starts the product of weights, in their parts, with a block's values."""
        both = weights[0] if len(weights) == 1 else Halves(*weights)
        panels.add_rows(result, both, self.x["v_tiles"].at[slot])

    def rounded(self, weights: Array) -> tuple[Array, ...]:
        """Returns weights as tensor cores take them."""
        return in_parts(weights, self.block.given["q"].dtype, self.p.parts)

    def begin(self, i: Any, step: Any) -> Any:
        """Returns (result, maxima, sums, weights) after the scores of one block."""
        slot = self.slot(i, step)
        plgpu.barrier_wait(self.x["k_ready"].at[slot])

        def product(scores: Any) -> Any:
            self.multiply_keys(scores, slot)
            return scores[...]

        found = pl.run_scoped(product, plgpu.ACC(self.shape, jnp.float32))
        found = self.seen_and_freed(found, i, slot, (FIRST, LAST))
        top, total = self.first_sums()
        weights, top, total, _ = self.weigh(found, top, total)
        out = pallas.zeros((64, self.p.e))
        return out, top, total, self.rounded(weights)

    def step(self, i: Any, step: Any, carry: Any, cut: tuple[str, ...]) -> Any:
        """Computes the i-th block's scores while earlier weights multiply v."""
        out, top, total, weights = carry
        config, x = self.p.config, self.x
        slot, before = self.slot(i, step), self.slot(i - 1, step)

        # Waits before the accumulator is made zero: ptxas then sees that it is, and
        # leaves out what makes it so (32 of 489 instructions for heads of 64).
        plgpu.barrier_wait(x["k_ready"].at[slot])
        if config.turns:
            pallas.wait_for_turn(config.warpgroups)

        def products(scores: Any, result: Any) -> Any:
            result[...] = out
            self.multiply_keys(scores, slot)
            plgpu.barrier_wait(x["v_ready"].at[before])
            self.multiply_values(result, weights, before)
            if config.turns:
                pallas.pass_turn(config.warpgroups)
            later = len(weights) + self.p.halves  # products of weights and values
            found = plgpu.wgmma_accumulator_load(scores, wait_n=later)
            found = lax.optimization_barrier(found)
            found = self.seen_and_freed(found, i, slot, cut)
            found = self.weigh(found, top, total)
            new, higher, sums, fade = lax.optimization_barrier(found)
            if config.held:
                pallas.hold(sums)
            made = lax.optimization_barrier(result[...])
            plgpu.barrier_arrive(x["v_free"].at[before])
            made = made * pallas.along(fade, made.shape)
            return made, higher, sums, self.rounded(new)

        by_rows, sums = self.p.by_rows, [(64, self.p.e)]
        return panels.run_scoped(products, [self.shape], sums, by_rows)

    def finish(self, i: Any, step: Any, carry: Any) -> Any:
        """Returns (result, maxima, sums) with the i-th block's weights times v."""
        out, top, total, weights = carry
        slot = self.slot(i, step)
        plgpu.barrier_wait(self.x["v_ready"].at[slot])

        def product(result: Any) -> Any:
            result[...] = out
            self.multiply_values(result, weights, slot)
            return result[...]

        out = panels.run_scoped(product, (), [(64, self.p.e)], self.p.by_rows)
        plgpu.barrier_arrive(self.x["v_free"].at[slot])
        return out, top, total

    # ------------------------------------------------------------------ softmax
    def seen_and_freed(
        self, scores: Array, i: Any, slot: Any, cut: tuple[str, ...]
    ) -> Array:
        """Returns `seen`, and releases the memory of the i-th block's keys."""
        free = self.x["k_free"].at[slot]
        if not self.p.terms.parts:
            plgpu.barrier_arrive(free)
            return self.seen(scores, i, slot, cut)
        found = lax.optimization_barrier(self.seen(scores, i, slot, cut))
        plgpu.barrier_arrive(free)  # also of terms, which have been read by now
        return found

    def first_sums(self) -> tuple[Array, Array]:
        """Returns maxima, [64], and sums, [64] or [64, 8], before the first key."""
        p = self.p
        shape = (64, 8) if p.config.held else (64,)
        if not p.terms.sinks:
            return pallas.zeros((64,), -jnp.inf), pallas.zeros(shape)
        sink = pallas.scalar(self.block.given["sinks"], self.n)
        if not p.natural:
            sink = sink / p.scale if p.softcap is None else sink * LOG2E
        top = pallas.zeros((64,)) + sink
        top = top + self.row_slopes() if p.terms.slopes else top
        return top, pallas.zeros(shape, shape[0] / math.prod(shape))

    def row_slopes(self) -> Array:
        """Returns the part of slopes that depends on a row's place: [64]."""
        rows = pallas.row_positions(64).astype(jnp.float32)
        return rows * pallas.scalar(self.block.given["slopes"], self.n)

    def sloped(self, scores: Array, key: Any) -> Array:
        """Returns scores with distances from the tile's first row, times the slope.

        The rest, `row_slopes`, is the same for all of a row's keys.
        """
        slope = pallas.scalar(self.block.given["slopes"], self.n)
        away = jnp.asarray(key - self.mine - self.offset, jnp.float32)
        each = pallas.zeros((64,))
        return pallas.sloped(scores, each + away * slope, each + slope)

    def place(self, i: Any, slot: Any) -> Place:
        """Returns the place of the i-th block, for a function of scores."""
        p, config = self.p, self.p.config
        return Place(
            self.b, self.n, self.first, self.key(i), config.block_kv, config.warpgroups,
            slot, p.mask.most(config.rows, config.block_kv),
        )  # fmt: skip

    def key(self, i: Any) -> Any:
        """Returns the first key of the i-th block."""
        return (self.range.end - 1 - i) * self.p.config.block_kv

    def seen(self, scores: Array, i: Any, slot: Any, cut: tuple[str, ...]) -> Array:
        """Returns the scores of the i-th block, -inf for keys that are not seen.

        Scores with an addend are multiplied with the scale. With only a soft cap they
        are multiplied with the scale and log2(e). Others are not multiplied yet.
        """
        p, mask, terms = self.p, self.p.mask, self.p.terms
        if p.softcap is not None:
            unit = 1.0 if p.natural else LOG2E
            bent = pallas.tanh(scores * (p.scale / p.softcap))
            scores = bent * (p.softcap * unit)
        elif terms.function is not None:
            (scores,) = terms.computed(
                scores, self.place(i, slot), self.x, self.block.given,
                self.block.warpgroup, scale=p.scale,
            )  # fmt: skip
        elif p.natural:
            scores = scores * p.scale
        if terms.slopes:
            scores = self.sloped(scores, self.key(i))
        mine = self.block.warpgroup
        hides = bool(cut) or not self.classed
        scores = terms.added(scores, self.x, slot, mine, hides, self.fill)
        if not (cut and (mask.hides or mask.s % p.config.block_kv)):
            return scores
        key = self.key(i)
        first, last = self.keys_of_rows()
        first = None if first is None or FIRST not in cut else first - key
        last = last - key if LAST in cut else None
        if self.fill is not None:
            fill = pallas.zeros((64,)) + self.fill
            cut = mask.s % p.config.block_kv
            end = pallas.rows(mask.s - 1 - key) if cut else None
            return pallas.hide(scores, first, last, fill, end, p.fill_passes)
        if not mask.averages:
            return pallas.hide(scores, first, last)
        empty = self.empty()
        last = jnp.where(empty, -1, last)
        fill = jnp.where(empty, 0.0, -jnp.inf)
        return pallas.hide(scores, first, last, fill, pallas.rows(mask.s - 1 - key))

    def keys_of_rows(self) -> tuple[Array | None, Array]:
        """Returns the first (None for 0) and last key that each row sees: [64]."""
        mask = self.p.mask
        at = pallas.row_positions(64) + (self.mine + self.offset)
        first, last = None, pallas.rows(self.range.limit - 1)
        if mask.right is not None:
            ahead = mask.visibility.last(at)
            if self.prefix is not None:
                ahead = jnp.maximum(ahead, pallas.rows(self.prefix - 1))
            last = jnp.minimum(ahead, last)
        if mask.left is not None:
            first = mask.visibility.first(at)
        return first, last

    def empty(self) -> Array:
        """Returns whether each row sees no key, bool [64]."""
        first, last = self.keys_of_rows()
        none = last < 0
        return none if first is None else none | (first > last)

    def weigh(self, scores: Array, top: Array, total: Array) -> tuple[Array, ...]:
        """Returns weights, new maxima, new sums, and the factor for earlier sums.

        With `held`, sums are kept for every eighth column. Later code then waits only
        for exponentials, and threads combine the sums at the end.
        """
        c = self.p.scale * LOG2E if self.p.softcap is None else 1.0
        higher = jnp.maximum(top, scores.max(axis=1))
        least = jnp.where(higher == -jnp.inf, 0.0, higher)
        if self.p.natural:
            weights = jnp.exp2((scores - pallas.along(least, self.shape)) * LOG2E)
            fade = jnp.exp2((top - least) * LOG2E)
        else:
            least = least * c
            weights = jnp.exp2(scores * c - pallas.along(least, self.shape))
            fade = jnp.exp2(top * c - least)
        if not self.p.config.held:
            return weights, higher, total * fade + weights.sum(axis=1), fade
        total = total * pallas.along(fade, total.shape) + pallas.by_eights(weights)
        return weights, higher, total, fade

    # ------------------------------------------------------------------ storing
    def store(self, out: Array, top: Array, total: Array) -> None:
        """Writes the rows, and their log-sum-exp on request."""
        p, x, mine = self.p, self.x, self.block.warpgroup
        total = total.sum(axis=1) if p.config.held else total
        inverse = 1.0 / total
        if self.block.zero:
            inverse = jnp.where(total == 0.0, 0.0, inverse)
        out = out * pallas.along(inverse, out.shape)
        if "means" in self.block.given:
            mean = self.block.given["means"].at[self.b, self.head]
            mean = pallas.across(pallas.read(mean, pallas.COLUMNS), out.shape)
            out = jnp.where(pallas.along(total, out.shape) == 0.0, mean, out)
        given, place = self.block.given, x["o_tiles"].at[mine]
        columns = math.prod(place.shape) // 64
        for first in range(0, p.e, columns):  # memory holds half of a wide result
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            piece = out if columns == p.e else out[:, first : first + columns]
            panels.put(place, piece.astype(given["out"].dtype))
            if p.saves and first == 0:
                self.put_sums(top, total)
            plgpu.commit_smem()
            at: tuple[Any, ...] = (self.b, pl.ds(self.mine, 64), self.n)
            at = at if columns == p.e else (*at, pl.ds(first, columns))
            for target, rows in panels.parts(given["out"], at, x["o_rows"].at[mine]):
                plgpu.copy_smem_to_gmem(rows, target)
        for name in p.saved:
            plgpu.copy_smem_to_gmem(
                x[f"{name}_rows"].at[mine],
                given[name].at[self.b, self.n, pl.ds(self.mine, 64)],
            )

    def put_sums(self, top: Array, total: Array) -> None:
        """Puts the rows' log-sum-exp into shared memory, or its two terms."""
        p, x, mine = self.p, self.x, self.block.warpgroup
        if p.terms.slopes:
            top = top - self.row_slopes()
        c = p.scale if p.softcap is None else 1 / LOG2E
        top, rest = top * (1.0 if p.natural else c), jnp.log(total)
        if p.splits:
            x["lse_rows"].at[mine][...] = top
            x["rest_rows"].at[mine][...] = rest
            return
        lse = top + rest
        if p.mask.averages:
            lse = jnp.where(self.empty(), -jnp.inf, lse)
        x["lse_rows"].at[mine][...] = lse
