"""Two kernels that sum dS for biases of keys and for slopes of heads.

One sums up dS of each key over queries, for a bias that differs along keys alone; sums
over heads and batch entries that share it are left to XLA. The other sums up dS times
distances over the keys of each query, for slopes. A gradient that nobody asks for is
left out of a program, kernel and all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas, panels
from rewriter.kernels.attention.hopper.backward_of_keys import OfKeys
from rewriter.kernels.attention.hopper.backward_of_queries import OfQueries
from rewriter.kernels.attention.hopper.backward_problem import Problem, Seen
from rewriter.kernels.attention.hopper.backward_tiles import Kernel, Tile

if TYPE_CHECKING:
    from jax import Array


class _Sums(Kernel):
    """Common code of both: a number for each row, float32 [b, n, whole tiles]."""

    @classmethod
    def scratch(cls, p: Problem, dtype: Any) -> dict[str, Any]:
        """Returns shared memory by name."""
        sums = {"sums": plgpu.SMEM((p.warpgroups, 64), jnp.float32)}
        return super().scratch(p, dtype) | sums

    def of_seen(self, tile: Tile, carry: Any) -> Any:
        """Returns the sums: they are selected when they are stored."""
        del tile
        return carry

    def put_sums(self, tile: Tile, sums: Array) -> None:
        """Writes the sums of a tile, [64]."""
        x, mine = self.memory, self.warpgroup
        x["sums"].at[mine][...] = sums
        plgpu.commit_smem()
        rows = pl.ds(tile.mine, 64)
        plgpu.copy_smem_to_gmem(
            x["sums"].at[mine], self.given["sums"].at[tile.b, tile.head, rows]
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(x["done"].at[mine])


class OfColumns(_Sums, OfKeys):
    """Sums over the queries of a head.

    A tile of keys is that of one query head, whose key head others may share.
    """

    name = "attention_key_sums"

    def begin(self, tile: Tile) -> Any:
        """Returns zeros to accumulate in, each for every eighth query."""
        del tile
        return pallas.zeros((64, 8))

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sums with a block added."""
        p, x = self.p, self.memory
        slot, shape = lax.rem(step, jnp.int32(p.stages)), (64, p.block)
        (mine,) = pallas.opaque(self.warpgroup)
        for name in ("first_ready", "second_ready"):
            plgpu.barrier_wait(x[name].at[slot])

        def products(scores: Any, changes: Any) -> Any:
            panels.add_scores(scores, x["k"].at[mine], x["q"].at[slot])
            panels.add_scores(changes, x["v"].at[mine], x["g"].at[slot])
            lse = self.across("lse", slot, shape)
            found = plgpu.wgmma_accumulator_load(scores, wait_n=p.copies[1])
            found = lax.optimization_barrier(found)
            found, _ = self.scores(tile, found, j, slot, step, seen)
            rest = self.across("rest", slot, shape)
            found = self.weights(found, lse, rest, seen)
            weights = lax.optimization_barrier(found)
            change = lax.optimization_barrier(changes[...])
            change = weights * (change - self.across("delta", slot, shape))
            change = self.chosen(change, self.across("lse", slot, shape))
            change = self.only_seen(change, weights, seen)
            plgpu.barrier_arrive(x["free"].at[slot])
            return carry + pallas.by_eights(change)

        two = (plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
        return pl.run_scoped(products, *two)

    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sums of a tile."""
        self.put_sums(tile, self.shown(tile, carry.sum(axis=1)))


class OfSlopes(_Sums, OfQueries):
    """Sums of dS times distances over the keys of each query.

    With P and dP that is sum(P dP distance) - sum(P dP) sum(P distance), in float32.
    Most of it cancels. delta comes from a result in 16 bits, and would be too inexact
    for the second sum.
    """

    name = "attention_slope_sums"

    def begin(self, tile: Tile) -> Any:
        """Returns zeros to accumulate in, by every eighth key, and rows' numbers."""
        numbers = self.numbers(tile, (self.warpgroup,))
        del numbers["delta"]
        return tuple(pallas.zeros((64, 8)) for _ in range(3)), *numbers.values()

    def step(self, tile: Tile, j: Any, step: Any, carry: Any, seen: Seen) -> Any:
        """Returns the sums with a block added."""
        p, x = self.p, self.memory
        sums, lse, *rest = carry
        slot, second = self.slots(step)
        mine, second = pallas.opaque(self.warpgroup, second)
        shape = (64, p.block)
        plgpu.barrier_wait(x["first_ready"].at[slot])
        plgpu.barrier_wait(x["second_ready"].at[second])

        def products(scores: Any, changes: Any) -> Any:
            panels.add_scores(scores, x["q"].at[mine], x["k"].at[slot])
            panels.add_scores(changes, x["g"].at[mine], x["v"].at[second])
            found = plgpu.wgmma_accumulator_load(scores, wait_n=p.copies[1])
            found = lax.optimization_barrier(found)
            found, _ = self.scores(tile, found, j, slot, step, seen)
            wide = [pallas.along(x, shape) for x in (lse, *rest)]
            found = self.weights(found, wide[0], wide[1] if rest else None, seen)
            weights = lax.optimization_barrier(found)
            change = lax.optimization_barrier(changes[...])
            for name, place in (("second_free", second), ("free", slot)):
                plgpu.barrier_arrive(x[name].at[place])
            change = weights * change
            away = self.distances(tile, j)
            more = change * away, change, weights * away
            return tuple(
                a + pallas.by_eights(b) for a, b in zip(sums, more, strict=True)
            )

        two = (plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
        return pl.run_scoped(products, *two), lse, *rest

    def distances(self, tile: Tile, j: Any) -> Array:
        """Returns how far the keys of a block are behind each query: [64, block]."""
        first = j * self.p.block - tile.mine - tile.offset
        away = (pallas.rows(first) - pallas.row_positions(64)).astype(jnp.float32)
        nothing = pallas.zeros((64, self.p.block))
        return pallas.sloped(nothing, away, pallas.zeros((64,), 1.0))

    def store(self, tile: Tile, carry: Any) -> None:
        """Writes the sums of a tile."""
        moved, change, away = (x.sum(axis=1) for x in carry[0])
        sums = moved - change * away
        if self.p.mask.may_be_empty:
            sums = jnp.where(carry[1] == jnp.inf, 0.0, sums)
        self.put_sums(tile, self.chosen(sums, carry[1]))
