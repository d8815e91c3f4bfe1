"""A kernel for dq by tiles of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import averaged_rows, pallas, panels
from rewriter.kernels.attention.hopper.backward_functions import (
    is_alone,
    weights_and_passed,
)
from rewriter.kernels.attention.hopper.backward_problem import Problem, Seen
from rewriter.kernels.attention.hopper.backward_tiles import Kernel, Tile

if TYPE_CHECKING:
    from jax import Array


class OfQueries(Kernel):
    """dq of tiles of queries."""

    name = "attention_dq"
    fixed, passing = ("q", "g"), ("k", "v")
    sign = 1

    @classmethod
    def scratch(cls, p: Problem, dtype: Any) -> dict[str, Any]:
        """Returns shared memory by name."""
        free = pallas.barriers(p.values, p.warpgroups)
        return super().scratch(p, dtype) | {"second_free": free}

    @classmethod
    def copies(cls, p: Problem) -> int:
        """Copies of a warpgroup's tiles: two arrays, and their rows' numbers."""
        return super().copies(p) + len(p.numbers)

    @classmethod
    def row_memory(cls, p: Problem) -> dict[str, Any]:
        """Returns shared memory for numbers of queries."""
        shape = (p.ahead * p.warpgroups, 64)
        return {x: plgpu.SMEM(shape, jnp.float32) for x in p.numbers}

    def copy_tile(self, tile: Tile, w: int) -> None:
        """Copies the resident arrays of a tile."""
        rows, to = pl.ds(tile.first + 64 * w, 64), tile.of(w)
        barrier = self.memory["ready"].at[to]
        for name in self.fixed:
            self.send(name, (tile.b, rows, tile.head), to, barrier)
        for name in self.p.numbers:
            self.send(name, (tile.b, tile.head, rows), to, barrier)

    def copy_block(self, tile: Tile, i: Any, j: Any, step: Any) -> None:
        """Copies a streamed block: keys, and values if their memory is free."""
        del i
        if self.p.averages is not None:
            j = lax.rem(j, jnp.int32(self.blocks))
        x, slot, second = self.memory, *self.slots(step)
        head = lax.div(tile.head, jnp.int32(self.p.shared))
        rows = pl.ds(j * self.p.block, self.p.block)
        self.send("k", (tile.b, rows, head), slot, x["first_ready"].at[slot])
        self.send_terms(tile, tile.head, j, slot)
        plgpu.barrier_wait(x["second_free"].at[second])
        self.send("v", (tile.b, rows, head), second, x["second_ready"].at[second])

    @property
    def blocks(self) -> int:
        """The number of blocks of keys."""
        return -(-self.p.mask.s // self.p.block)

    def slots(self, step: Any) -> tuple[Any, Any]:
        """Where a step's keys and where its values are."""
        p = self.p
        return lax.rem(step, jnp.int32(p.stages)), lax.rem(step, jnp.int32(p.values))

    def compute(self) -> None:
        """Computes this warpgroup's rows of every tile."""
        for slot in range(self.p.values):
            plgpu.barrier_arrive(self.memory["second_free"].at[slot])
        super().compute()

    def begin(self, tile: Tile) -> Any:
        """Returns zeros to accumulate in, and the values that a tile's steps read."""
        numbers = self.numbers(tile, (tile.of(self.warpgroup),))
        return pallas.zeros((64, self.p.h)), *numbers.values()

    def numbers(self, tile: Tile, at: tuple[Any, ...]) -> dict[str, Array]:
        """Returns the numbers of a warpgroup's rows by name, from a place in memory."""
        numbers = {
            x: pallas.loaded(self.memory[x].at[at], pallas.ROWS) for x in self.p.numbers
        }
        if self.p.terms.slopes:  # see `sloped`
            rows = pallas.row_positions(64).astype(jnp.float32)
            slope = pallas.scalar(self.given["slopes"], tile.head)
            numbers["lse"] = numbers["lse"] + rows * slope
        return numbers

    def sloped(self, tile: Tile, scores: Array, j: Any, step: Any) -> Array:
        """Adds distances from the tile's first row; lse makes up for other rows."""
        del step
        slope = pallas.scalar(self.given["slopes"], tile.head)
        away = jnp.asarray(j * self.p.block - tile.mine - tile.offset, jnp.float32)
        each = pallas.zeros((64,))
        return pallas.sloped(scores, each + away * slope, each + slope)

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sums with a block added."""
        p, x, mine = self.p, self.memory, tile.of(self.warpgroup)
        dq_before, lse, delta, *rest = carry
        slot, second = self.slots(step)
        mine, second = pallas.opaque(mine, second)
        shape = (64, p.block)
        plgpu.barrier_wait(x["first_ready"].at[slot])
        plgpu.barrier_wait(x["second_ready"].at[second])

        def products(scores: Any, changes: Any, dq: Any) -> Any:
            dq[...] = dq_before
            panels.add_scores(scores, x["q"].at[mine], x["k"].at[slot])
            panels.add_scores(changes, x["g"].at[mine], x["v"].at[second])
            found = plgpu.wgmma_accumulator_load(scores, wait_n=p.changes)
            found = lax.optimization_barrier(found)
            wide = [pallas.along(x, shape) for x in (lse, *rest)]
            if is_alone(p, seen):
                rows = wide[0], wide[1]
                plain, found = weights_and_passed(
                    self, tile, found, j, slot, step, seen, rows
                )
            else:
                found, steep = self.scores(tile, found, j, slot, step, seen)
                plain = self.weights(found, wide[0], wide[1] if rest else None, seen)
                found = plain if steep is None else plain * steep
            weights = lax.optimization_barrier(found)
            change = lax.optimization_barrier(changes[...])
            plgpu.barrier_arrive(x["second_free"].at[second])
            total = delta
            if seen is Seen.ALIKE:
                change, total = self.averaged_changes(j, change, plain, weights, delta)
            else:
                change = weights * (change - pallas.along(delta, shape))
                change = self.chosen(change, wide[0])
            panels.add_rows(dq, self.operand(change), x["k"].at[slot])
            made = dq[...]
            plgpu.barrier_arrive(x["free"].at[slot])
            return made, total

        sums = [(64, p.h)]
        made, delta = panels.run_scoped(products, (shape, shape), sums, p.by_rows)
        return made, lse, delta, *rest

    def averaged_changes(
        self, j: Any, change: Array, weights: Array, passed: Array, delta: Array
    ) -> tuple[Array, Array]:
        """Returns changes of the scores of rows without keys, and new deltas.

        A tile meets all keys twice for such rows. First it sums up delta: the changes
        of equal weights nearly cancel, and that of a result in 16 bits is too inexact.

        Args:
            j: The block, counted on the second time.
            change: The changes of weights.
            weights: The weights.
            passed: The weights times the derivatives of a soft cap.
            delta: What is summed up so far, [64].
        """
        again = jnp.where(j < self.blocks, jnp.float32(0), jnp.float32(1))
        added = jnp.where(weights == 0.0, 0.0, weights * change).sum(axis=1)
        moved = passed * (change - pallas.along(delta, change.shape))
        moved = self.only_seen(moved, weights, Seen.ALIKE) * again
        return moved, delta + added * (1.0 - again)

    def of_seen(self, tile: Tile, carry: Any) -> Any:
        """Returns the sums of a tile: 0 for rows without keys, whatever was summed.

        Sums of other rows are not finite if hidden values are not. The formula does the
        same, since its delta is not finite either.
        """
        del tile
        dq, lse, delta, *rest = carry
        if self.p.mask.may_be_empty:
            dq = jnp.where(pallas.along(lse, dq.shape) == jnp.inf, 0.0, dq)
        if self.p.averages is not None and self.p.averages.finite:
            delta = jnp.where(lse == jnp.inf, 0.0, delta)  # see `averaged_changes`
        return dq, lse, delta, *rest

    def averaged(self, tile: Tile, spans: Any) -> tuple[Any, Any]:
        """Returns all blocks of keys twice, if some row may be without keys."""
        meets = averaged_rows.meets(spans, tile.b, tile.first, self.p.rows)
        twice = jnp.int32(2 * self.blocks)
        return jnp.int32(0), jnp.where(meets, twice, jnp.int32(0))

    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sums of a tile."""
        self.put(carry[0] * self.p.scale, "q", "dq", tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["done"].at[tile.of(self.warpgroup)])
