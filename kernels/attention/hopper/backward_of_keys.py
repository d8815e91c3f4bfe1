"""Three kernels for dk and dv by tiles of keys; one of them also adds to dq."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import averaged_rows, pallas, panels
from rewriter.kernels.attention.hopper.backward_config import CHANGES, WEIGHTS
from rewriter.kernels.attention.hopper.backward_functions import (
    is_alone,
    weights_and_passed,
)
from rewriter.kernels.attention.hopper.backward_problem import Problem, Seen
from rewriter.kernels.attention.hopper.backward_tiles import Kernel, Tile

if TYPE_CHECKING:
    from jax import Array


class OfKeys(Kernel):
    """dk and dv of tiles of keys."""

    name = "attention_dk_dv"
    fixed, passing = ("k", "v"), ("q", "g")
    sign = -1

    @classmethod
    def copies_first(cls, p: Problem) -> int:
        """Copies of a block's queries, with lse and what is beside it."""
        return super().copies_first(p) + 1 + p.terms.unbounded

    @classmethod
    def copies_second(cls, p: Problem) -> int:
        """Copies of a block's cotangents, with delta."""
        return super().copies_second(p) + 1

    @classmethod
    def row_memory(cls, p: Problem) -> dict[str, Any]:
        """Returns shared memory for numbers of queries."""
        return {x: plgpu.SMEM((p.stages, p.block), jnp.float32) for x in p.numbers}

    def copy_tile(self, tile: Tile, w: int) -> None:
        """Copies the resident arrays of a tile."""
        rows, head = pl.ds(tile.first + 64 * w, 64), self.key_head(tile)
        for name in self.fixed:
            at, to = (tile.b, rows, head), tile.of(w)
            self.send(name, at, to, self.memory["ready"].at[to])

    def key_head(self, tile: Tile) -> Any:
        """Returns the key head of a tile, which several parts may share."""
        shared = self.p.shared
        return tile.head if shared == 1 else lax.div(tile.head, jnp.int32(shared))

    def copy_block(self, tile: Tile, i: Any, j: Any, step: Any) -> None:
        """Copies a streamed block to free memory of the first array."""
        slot = lax.rem(step, jnp.int32(self.p.stages))
        head = tile.head * self.p.group + i
        rows = pl.ds(j * self.p.block, self.p.block)
        for name, row, kind in (("q", "lse", "first"), ("g", "delta", "second")):
            barrier = self.memory[f"{kind}_ready"].at[slot]
            self.send(name, (tile.b, rows, head), slot, barrier)
            self.send(row, (tile.b, head, rows), slot, barrier)
        if self.p.terms.unbounded:
            barrier = self.memory["first_ready"].at[slot]
            self.send("rest", (tile.b, head, rows), slot, barrier)
        self.send_terms(tile, head, j, slot)

    @property
    def shows(self) -> bool:  # pyright: ignore
        """Whether masks hide whole keys, and no blocks are left out for it."""
        return self.p.terms.whole_rows and not self.classed

    def shown(self, tile: Tile, x: Array) -> Array:
        """Returns the sums of a tile, with zeros for keys that masks hide."""
        if not self.shows:
            return x
        part = dict(self.p.terms.parts)["row_terms"]
        entry, rows = tile.b if part.batches else 0, pl.ds(tile.mine, 64)
        line = pallas.read(self.given["row_terms"].at[entry, 0, rows], pallas.ROWS)
        hidden = line if x.ndim == 1 else pallas.along(line, x.shape)
        return jnp.where(hidden == -jnp.inf, 0.0, x)

    def of_seen(self, tile: Tile, carry: Any) -> Any:
        """Returns sums of dk and dv, with dk as `shown` gives it."""
        dk, dv = carry
        return self.shown(tile, dk), dv

    def averaged(self, tile: Tile, spans: Any) -> tuple[Any, Any]:
        """Returns the blocks of queries with rows without keys."""
        return averaged_rows.blocks(spans, tile.b, self.p.block)

    def head(self, tile: Tile, step: Any, seen: Seen = Seen.SOME) -> Any:
        """Returns the query head of a step: those of the group come in order."""
        if self.p.group == 1:
            return tile.head
        start, count = tile.start, tile.range.count
        if seen is Seen.ALIKE:
            start = start + count * self.p.group
            count = tile.averaged[1] - tile.averaged[0]
        turn = lax.div(step - start, jnp.int32(count))
        return tile.head * self.p.group + turn

    def sloped(self, tile: Tile, scores: Array, j: Any, step: Any) -> Array:
        """Returns scores with distances times the slope of the query head."""
        slope = pallas.scalar(self.given["slopes"], self.head(tile, step))
        away = pallas.row_positions(64) + (tile.mine + tile.offset - j * self.p.block)
        each = pallas.zeros((64,))
        return pallas.sloped(scores, away.astype(jnp.float32) * slope, each - slope)

    def across(self, name: str, slot: Any, shape: tuple[int, ...]) -> Array | None:
        """Returns numbers of a block's queries in every row; None if there are none."""
        if name not in self.memory:
            return None
        found = pallas.loaded(self.memory[name].at[slot], pallas.COLUMNS)
        return pallas.across(found, shape)

    def weigh(
        self, tile: Tile, products: Array, j: Any, slot: Any, step: Any, seen: Seen
    ) -> tuple[Array, Array]:
        """Returns weights, and the factors of changes of weights.

        Both are the same array, or the first has 16 bits, as an operand of products.
        """
        weights, passed = self.both(tile, products, j, slot, step, seen)
        if passed is weights:
            weights = lax.optimization_barrier(weights)
            return weights, weights
        if self.p.halves:
            return lax.optimization_barrier((weights, passed))
        narrow = weights.astype(self.given["q"].dtype)
        return lax.optimization_barrier((narrow, passed))

    def both(
        self, tile: Tile, products: Array, j: Any, slot: Any, step: Any, seen: Seen
    ) -> tuple[Array, Array]:
        """Returns weights, and the factors of changes of weights, in float32."""
        shape = products.shape
        lse = self.across("lse", slot, shape)
        if self.is_alone(seen):
            rest = self.across("rest", slot, shape)
            return weights_and_passed(
                self, tile, products, j, slot, step, seen, (lse, rest)
            )
        scores, steep = self.scores(tile, products, j, slot, step, seen)
        rest = self.across("rest", slot, shape)
        weights, averages = self.weights(scores, lse, rest, seen), self.p.averages
        if seen is Seen.ALIKE and averages is not None and not averages.passes:
            return weights, pallas.zeros(shape)
        return weights, weights if steep is None else weights * steep

    def is_alone(self, seen: Seen) -> bool:
        """Returns whether weights follow from a function and positions alone."""
        return is_alone(self.p, seen)

    def begin(self, tile: Tile) -> Any:
        """Returns zeros to accumulate in, and the values that a tile's steps read."""
        return pallas.zeros((64, self.p.h)), pallas.zeros((64, self.p.e))

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sums with a block added."""
        return self.changed(tile, j, step, carry, seen)[0]

    def changed(
        self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen
    ) -> tuple[Any, Any]:
        """Returns new (dk, dv), and dSᵀ as an operand of products: [64, block]."""
        p, x = self.p, self.memory
        slot = lax.rem(step, jnp.int32(p.stages))
        (mine,) = pallas.opaque(tile.of(self.warpgroup))
        shape = (64, p.block)
        for name in ("first_ready", "second_ready"):
            plgpu.barrier_wait(x[name].at[slot])

        def products(scores: Any, changes: Any, dk: Any, dv: Any) -> Any:
            dk[...], dv[...] = carry
            panels.add_scores(scores, x["k"].at[mine], x["q"].at[slot])
            panels.add_scores(changes, x["v"].at[mine], x["g"].at[slot])
            found = plgpu.wgmma_accumulator_load(scores, wait_n=p.changes)
            found = lax.optimization_barrier(found)
            weights, steep = self.weigh(tile, found, j, slot, step, seen)
            change = lax.optimization_barrier(changes[...])
            panels.add_rows(dv, self.operand(weights), x["g"].at[slot])
            change = steep * (change - self.across("delta", slot, shape))
            change = self.chosen(change, self.across("lse", slot, shape))
            change = self.operand(self.only_seen(change, steep, seen))
            panels.add_rows(dk, change, x["q"].at[slot])
            made = dk[...], dv[...]
            plgpu.barrier_arrive(x["free"].at[slot])
            return made, change

        sums = (64, p.h), (64, p.e)
        return panels.run_scoped(products, (shape, shape), sums, p.by_rows)

    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sums of a tile."""
        dk, dv = carry
        self.put(dk * self.p.scale, "k", "dk", tile)
        self.put(dv, "v", "dv", tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["done"].at[tile.of(self.warpgroup)])


class Divided(OfKeys):
    """dk and dv of tiles of 64 keys, each by a warpgroup of its own.

    It is for wide heads, whose dk and dv do not fit into the registers of one
    warpgroup. The first computes weights and dv, and leaves weights in shared memory,
    in 16 bits. The second computes changes of weights, and dk. k stays resident for the
    first and v for the second. Once both are done, dv is stored in place of v, and dk
    in place of k.
    """

    @classmethod
    def scratch(cls, p: Problem, dtype: Any) -> dict[str, Any]:
        """Returns shared memory by name."""
        shape = (WEIGHTS, 64, p.block)
        return super().scratch(p, dtype) | {
            "weights": pallas.tiles(shape, dtype, pallas.swizzle(p.block)),
            "weights_ready": pallas.barriers(WEIGHTS),
            "weights_free": pallas.barriers(WEIGHTS),
            "both": pallas.barriers(1, p.warpgroups),
        }

    @classmethod
    def copies(cls, p: Problem) -> int:
        """Copies of a warpgroup's part of a tile; of both, the larger number."""
        return max(p.copies)

    def copy_tile(self, tile: Tile, w: int) -> None:
        """Copies the resident arrays of a tile over those that are stored already."""
        name, count = ("v", "k")[w], self.p.copies[1 - w]
        at = tile.b, pl.ds(tile.first, 64), self.key_head(tile)
        ready = self.memory["ready"]
        self.send(name, at, 0, ready.at[1 - w])
        for _ in range(self.copies(self.p) - count):
            plgpu.barrier_arrive(ready.at[1 - w])

    def compute(self) -> None:
        """Computes this warpgroup's half of every tile."""
        for w, kind in enumerate((_Weights, _Changes)):
            run = kind(self.p, self.given, self.memory).run_warpgroup
            pallas.when(self.warpgroup == w)(run)

    def run_warpgroup(self) -> None:
        """Does what `Kernel.compute` does."""
        super().compute()

    def put_later(self, x: Array, name: str, tile: Tile) -> None:
        """Writes a sum of a tile in place of `name`, once that is not read any more."""
        both = self.memory["both"].at[0]
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)
        self.put(x, name, f"d{name}", tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["done"].at[self.warpgroup])

    def places(self, step: Any) -> tuple[Any, Any]:
        """Where a step's block is, and where its weights are."""
        stages, weights = jnp.int32(self.p.stages), jnp.int32(WEIGHTS)
        return lax.rem(step, stages), lax.rem(step, weights)


class _Weights(Divided):
    """The first warpgroup's part: weights and dv."""

    def begin(self, tile: Tile) -> Any:
        """Returns zeros to sum up in."""
        return pallas.zeros((64, self.p.e))

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sum with a block added."""
        p, x = self.p, self.memory
        slot, place = self.places(step)
        (mine,) = pallas.opaque(0)
        shape, dtype = (64, p.block), self.given["q"].dtype
        plgpu.barrier_wait(x["first_ready"].at[slot])

        def products(scores: Any, dv: Any) -> Any:
            dv[...] = carry
            panels.add_scores(scores, x["k"].at[mine], x["q"].at[slot])
            found = lax.optimization_barrier(scores[...])
            found, passed = self.both(tile, found, j, slot, step, seen)
            passed = self.chosen(passed, self.across("lse", slot, shape))
            weights, passed = lax.optimization_barrier(
                (found.astype(dtype), passed.astype(dtype))
            )
            plgpu.barrier_wait(x["second_ready"].at[slot])
            panels.add_rows(dv, weights, x["g"].at[slot])
            plgpu.barrier_wait(x["weights_free"].at[place])
            x["weights"].at[place][...] = passed
            plgpu.commit_smem()
            plgpu.barrier_arrive(x["weights_ready"].at[place])
            made = dv[...]
            plgpu.barrier_arrive(x["free"].at[slot])
            return made

        return panels.run_scoped(products, [shape], [(64, p.e)], p.by_rows)

    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sum of a tile."""
        self.put_later(carry, "v", tile)

    def of_seen(self, tile: Tile, carry: Any) -> Any:
        """Returns the sum of dv."""
        del tile
        return carry


class _Changes(Divided):
    """The second warpgroup's part: changes of weights, and dk."""

    def run_warpgroup(self) -> None:
        """Does the work of `Kernel.compute`, having marked the weights' memory free."""
        for place in range(WEIGHTS):
            plgpu.barrier_arrive(self.memory["weights_free"].at[place])
        super().run_warpgroup()

    def begin(self, tile: Tile) -> Any:
        """Returns zeros to sum up in."""
        return pallas.zeros((64, self.p.h))

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sum with a block added."""
        p, x = self.p, self.memory
        slot, place = self.places(step)
        (mine,) = pallas.opaque(0)
        shape, dtype = (64, p.block), self.given["q"].dtype
        plgpu.barrier_wait(x["second_ready"].at[slot])

        def products(changes: Any, dk: Any) -> Any:
            dk[...] = carry
            panels.add_scores(changes, x["v"].at[mine], x["g"].at[slot])
            delta = self.across("delta", slot, shape)
            change = lax.optimization_barrier(changes[...]) - delta
            plgpu.barrier_wait(x["weights_ready"].at[place])
            weights = lax.optimization_barrier(x["weights"].at[place][...])
            plgpu.barrier_arrive(x["weights_free"].at[place])
            weights = weights.astype(jnp.float32)
            change = self.only_seen(weights * change, weights, seen)
            plgpu.barrier_wait(x["first_ready"].at[slot])
            panels.add_rows(dk, change.astype(dtype), x["q"].at[slot])
            made = dk[...]
            plgpu.barrier_arrive(x["free"].at[slot])
            return made

        return panels.run_scoped(products, [shape], [(64, p.h)], p.by_rows)

    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sum of a tile."""
        self.put_later(carry * self.p.scale, "k", tile)

    def of_seen(self, tile: Tile, carry: Any) -> Any:
        """Returns the sum of dk, as `shown` gives it."""
        return self.shown(tile, carry)


class Fused(OfKeys):
    """dk and dv of tiles of keys, and their contribution to dq.

    The warpgroups leave their dSᵀ of a block in shared memory, in one of two places in
    turn. The warpgroup of that number multiplies it with all keys of the tile and adds
    the product to dq in global memory.
    """

    name = "attention_backward"

    def __init__(self, p: Problem, given: dict[str, Any], memory: dict[str, Any]):
        together = memory["numbers"]
        each = {name: together.at[i] for i, name in enumerate(p.numbers)}
        super().__init__(p, given, memory | each)

    @classmethod
    def row_memory(cls, p: Problem) -> dict[str, Any]:
        """Returns shared memory for all numbers of queries, which begins at one KiB."""
        shape = (len(p.numbers), p.stages, p.block)
        return {"numbers": plgpu.SMEM(shape, jnp.float32)}

    @classmethod
    def scratch(cls, p: Problem, dtype: Any) -> dict[str, Any]:
        """Returns shared memory by name."""
        shape = (CHANGES, p.warpgroups, 64, p.block)
        deep = pallas.swizzle(p.h, p.block)  # as k, with which they are multiplied
        return super().scratch(p, dtype) | {
            "changes": pallas.tiles(shape, dtype, deep),
            "changes_ready": pallas.barriers(CHANGES, p.warpgroups),
            "changes_free": pallas.barriers(CHANGES),
            "added": pallas.barriers(1, p.warpgroups),
            "sums": pallas.table_tiles((CHANGES, p.block, p.h), jnp.float32),
        }

    def compute(self) -> None:
        """Computes this warpgroup's rows of every tile."""
        plgpu.barrier_arrive(self.memory["changes_free"].at[self.warpgroup])
        super().compute()

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sums with a block added."""
        x, mine = self.memory, self.warpgroup
        made, change = self.changed(tile, j, step, carry, seen)
        place = lax.rem(step, jnp.int32(CHANGES))
        plgpu.barrier_wait(x["changes_free"].at[place])
        x["changes"].at[place, mine][...] = change
        plgpu.commit_smem()
        plgpu.barrier_arrive(x["changes_ready"].at[place])

        @pallas.when(place == mine)
        def _() -> None:
            self.add(tile, j, self.head(tile, step, seen), place)

        return made

    def scores(
        self, tile: Tile, found: Array, j: Any, slot: Any, step: Any, seen: Seen
    ) -> tuple[Array, Array | None]:
        """Returns scores, -inf for rows past the last key, and their derivatives.

        Their weights, which dk and dv leave out, may be infinite if all scores of a
        query are low; in dq they are multiplied with keys of zeros.
        """
        found, steep = super().scores(tile, found, j, slot, step, seen)
        if self.p.mask.t % self.p.rows == 0:
            return found, steep
        rows = pallas.along(pallas.row_positions(64) + tile.mine, found.shape)
        there = rows < self.p.mask.t
        steep = None if steep is None else jnp.where(there, steep, 0.0)
        return jnp.where(there, found, -jnp.inf), steep

    def is_alone(self, seen: Seen) -> bool:
        """Returns whether weights follow so; rows past the last key weigh nothing."""
        return self.p.mask.t % self.p.rows == 0 and super().is_alone(seen)

    def add(self, tile: Tile, j: Any, head: Any, place: Any) -> None:
        """Adds a block's dS k to dq of a query head."""
        p, x = self.p, self.memory
        plgpu.barrier_wait(x["changes_ready"].at[place])

        def product(total: Any) -> Any:
            for w in range(p.warpgroups):
                change = x["changes"].at[place, w]
                panels.add_rows(total, change, x["k"].at[w], turned=True)
            return total[...]

        total = panels.run_scoped(product, (), [(p.block, p.h)], p.by_rows)
        plgpu.barrier_arrive(x["changes_free"].at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x["sums"].at[place][...] = total
        plgpu.commit_smem()
        rows = pl.ds(j * p.block, p.block)
        plgpu.copy_smem_to_gmem(
            x["sums"].at[place],
            self.given["dq"].at[tile.b, rows, head],
            reduction_op="add",
        )

    def store(self, tile: Tile, carry: Any) -> None:
        """Stores dk and dv in place of k and v, once all have multiplied with k."""
        plgpu.barrier_arrive(self.memory["added"].at[0])
        plgpu.barrier_wait(self.memory["added"].at[0])
        super().store(tile, carry)
