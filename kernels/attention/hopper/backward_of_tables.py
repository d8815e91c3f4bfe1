"""A kernel for the cotangent of a table of biases, summed over all that share it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas, panels
from rewriter.kernels.attention.hopper.backward_of_queries import OfQueries
from rewriter.kernels.attention.hopper.backward_problem import Problem, Seen
from rewriter.kernels.attention.hopper.backward_tiles import Tile
from rewriter.kernels.attention.hopper.blocks import blocks_of
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.visibility import least


@dataclass(frozen=True)
class TableProblem(Problem):
    """The problem as known while tracing.

    Attributes:
        entries: Batch entries and heads of the table: all of them, or 1 for all.
        splits: The number of partial sums for each entry, so that all processors have
            work.
        dtype: The sums' type.
    """

    entries: tuple[int, int] = (1, 1)
    splits: int = 1
    dtype: str = "float32"

    @property
    def members(self) -> int:
        """Pairs of a batch entry and a head that share an entry of the table."""
        return self.b * self.heads // (self.entries[0] * self.entries[1])

    @property
    def across(self) -> int:
        """Blocks of columns."""
        return -(-self.mask.s // self.block)

    @property
    def down(self) -> int:
        """Tiles of rows."""
        return -(-self.mask.t // self.rows)

    @functools.cached_property
    def order(self) -> Order:
        """The order in which blocks of the table are taken."""
        each = -(-self.members // self.splits)
        return Order(
            pairs=self.entries[0] * self.entries[1] * self.splits,
            bytes_of_pair=1,
            programs=self.programs,
            work=tuple(
                each if self.seen(i, j) else 0
                for i in range(self.down)
                for j in range(self.across)
            ),
        )

    def seen(self, i: Any, j: Any) -> Any:
        """Whether some row of a tile may see some column of a block."""
        if self.mask.offsets or self.mask.prefixes:
            return True
        r = blocks_of(self.mask, i * self.rows, self.rows, self.block, self.mask.shift)
        return (r.start <= j) & (j < r.end)


def splits(blocks: int, members: int, programs: int) -> int:
    """Returns the number of partial sums of each block of a table.

    Example:
        >>> splits(72, 512, 132), splits(1000, 512, 132)
        (4, 1)
    """
    return max(1, min(members, -(-2 * programs // blocks)))


class OfTables(OfQueries):
    """The cotangent of a table of biases.

    A block of threads loops over all pairs of a batch entry and a head that share a
    part of the table. It computes the changes of their scores, and adds them up in
    registers, in the same order in every run.
    """

    name = "attention_dbias"

    @classmethod
    def scratch(cls, p: TableProblem, dtype: Any) -> dict[str, Any]:  # pyright: ignore
        """Returns shared memory by name."""
        made = {}
        for name, width in (("q", p.h), ("g", p.e), ("k", p.h), ("v", p.e)):
            rows = (p.warpgroups, 64) if name in cls.fixed else (p.block,)
            deep = pallas.swizzle(width, p.block)
            made[name] = p.tiles((p.stages, *rows, width), dtype, deep)
        shape = (p.stages, p.warpgroups, 64)
        copies = p.warpgroups * (sum(p.copies) + len(p.numbers))
        copies += sum(p.copies) + p.terms.copies(p.warpgroups)
        return made | {
            **{x: plgpu.SMEM(shape, jnp.float32) for x in p.numbers},
            "ready": pallas.barriers(p.stages, copies),
            "free": pallas.barriers(p.stages, p.warpgroups),
            "sums": pallas.table_tiles((p.warpgroups, 64, p.block), p.dtype),
            **p.terms.scratch(p.stages, p.warpgroups, p.block),
        }

    def over_blocks(self, body: Callable[[Any, Any], Any]) -> None:
        """Runs ``steps = body(index, steps)`` for blocks of the table."""
        of = lambda index, steps, _: body(index, steps)
        pallas.over_tiles(self.p.order, self.given, self.memory, of)

    def over_members(
        self, index: Any, body: Callable[[Tile, Any, Any], Any], carry: Any
    ) -> Any:
        """Runs ``carry = body(tile, block, carry)`` for all members of a block."""
        p: Any = self.p
        i, j, pair = self.place(index)
        entry, split = self.parts_of(pair, p.splits)
        b, n = self.parts_of(entry, p.entries[1])
        each, heads = -(-p.members // p.splits), p.heads // p.entries[1]
        first = split * each
        last = least(first + each, jnp.int32(p.members))
        seen = p.seen(i, j)
        if p.mask.weighs:
            seen = seen | (pallas.scalar(self.given["fills"], 0) > -jnp.inf)
        last = jnp.where(seen, last, first)

        def member(m: Any, carry: Any) -> Any:
            more, other = self.parts_of(m, heads)
            tile = Tile(self, (i, (b + more) * p.heads + n + other))
            return body(tile, j, carry)

        return lax.fori_loop(first, jnp.maximum(first, last), member, carry)

    def place(self, index: Any) -> tuple[Any, Any, Any]:
        """Returns a block of the table: tile of rows, block of columns, and pair."""
        p: Any = self.p
        place, pair = p.order.place(index)
        return *self.parts_of(place, p.across), pair

    @staticmethod
    def parts_of(x: Any, size: int) -> tuple[Any, Any]:
        """Returns x // size and x % size of integers that are not negative."""
        return lax.div(x, jnp.int32(size)), lax.rem(x, jnp.int32(size))

    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x = self.p, self.memory

        def one(tile: Tile, j: Any, step: Any) -> Any:
            slot = lax.rem(step, jnp.int32(p.stages))
            plgpu.barrier_wait(x["free"].at[slot])
            ready = x["ready"].at[slot]
            for w in range(p.warpgroups):
                rows = pl.ds(tile.first + 64 * w, 64)
                for name in self.fixed:
                    self.send(name, (tile.b, rows, tile.head), (slot, w), ready)
                for name in p.numbers:
                    self.send(name, (tile.b, tile.head, rows), (slot, w), ready)
            head, rows = (
                lax.div(tile.head, jnp.int32(p.shared)),
                pl.ds(j * p.block, p.block),
            )
            for name in self.passing:
                self.send(name, (tile.b, rows, head), slot, ready)
            self.send_terms(tile, tile.head, j, slot, ready)
            return step + 1

        self.over_blocks(lambda index, step: self.over_members(index, one, step))

    def compute(self) -> None:
        """Computes this warpgroup's rows of every block."""
        for slot in range(self.p.stages):
            plgpu.barrier_arrive(self.memory["free"].at[slot])
        self.over_blocks(self.compute_block)
        plgpu.wait_smem_to_gmem(0)

    def compute_block(self, index: Any, step: Any) -> Any:
        """Sums up and stores 64 rows of a block; returns the steps taken so far."""
        p, x, mine = self.p, self.memory, self.warpgroup

        def one(tile: Tile, j: Any, carry: Any) -> Any:
            total, step = carry
            return total + self.changes(tile, j, step), step + 1

        start = pallas.zeros((64, p.block)), step
        total, step = self.over_members(index, one, start)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x["sums"].at[mine][...] = total.astype(x["sums"].dtype)
        plgpu.commit_smem()
        i, j, pair = self.place(index)
        rows, columns = pl.ds(i * p.rows + 64 * mine, 64), pl.ds(j * p.block, p.block)
        plgpu.copy_smem_to_gmem(
            x["sums"].at[mine], self.given["dbias"].at[pair, rows, columns]
        )
        return step

    def changes(self, tile: Tile, j: Any, step: Any) -> Any:
        """Returns the changes of a block's scores: [64, block]."""
        p, x = self.p, self.memory
        slot, shape = lax.rem(step, jnp.int32(p.stages)), (64, p.block)
        (mine,) = pallas.opaque(self.warpgroup)
        plgpu.barrier_wait(x["ready"].at[slot])

        def products(scores: Any, changes: Any) -> Any:
            q, g = (x[name].at[slot, mine] for name in self.fixed)
            k, v = (x[name].at[slot] for name in self.passing)
            panels.add_scores(scores, q, k)
            panels.add_scores(changes, g, v)
            numbers = self.numbers(tile, (slot, self.warpgroup))
            lse, delta, *rest = (pallas.along(y, shape) for y in numbers.values())
            found = plgpu.wgmma_accumulator_load(scores, wait_n=p.copies[1])
            found = lax.optimization_barrier(found)
            cut = p.mask.hides or p.mask.s % p.block or tile.length is not None
            seen = Seen.SOME if cut else Seen.ALL
            found, _ = self.scores(tile, found, j, slot, step, seen)
            found = self.weights(found, lse, rest[0] if rest else None, seen)
            weights = lax.optimization_barrier(found)
            change = lax.optimization_barrier(changes[...])
            plgpu.barrier_arrive(x["free"].at[slot])
            change = self.chosen(weights * (change - delta), lse)
            return self.only_seen(change, weights, seen)

        two = (plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
        return pl.run_scoped(products, *two)
