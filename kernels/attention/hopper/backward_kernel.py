"""The gradients of attention on Hopper's tensor cores, in two kernels.

With weights P = exp(scores - lse), dP = dO vᵀ and delta = sum(dO · out) over a row,
dS = P · (dP - delta); then dv = Pᵀ dO, dk = dSᵀ q and dq = dS k. One kernel has tiles
of keys, goes over blocks of queries and keeps dk and dv in registers; its scores are
transposed, so that weights are operands of tensor cores as they are. The other has
tiles of queries and goes over blocks of keys for dq. No sums meet in memory: results
are the same in every run. Source: Dao, "FlashAttention-2" (arXiv 2307.08691), section
3.1.2; Shah et al., "FlashAttention-3" (arXiv 2407.08608), section 3.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.attention.hopper.blocks import FAR, Mask, Range, blocks_of
from rewriter.kernels.attention.hopper.config import CHANGES, REGISTERS, BackwardTiles
from rewriter.kernels.attention.hopper.forward_kernel import even
from rewriter.kernels.attention.hopper.order import Order

if TYPE_CHECKING:
    from jax import Array

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class _Problem:
    """All that is known while tracing.

    Attributes:
        mask: Of rows of a tile and columns of a block: queries and keys for dq, keys
            and queries for dk and dv.
        block: Columns of a block.
        heads: Heads of what the tiles are of.
        group: Query heads that a tile of keys meets, one after the other; 1 for dq.
        shared: Query heads of a key head; 1 for dk and dv.
    """

    b: int
    heads: int
    group: int
    shared: int
    h: int
    e: int
    mask: Mask
    scale: float
    block: int
    stages: int
    warpgroups: int
    programs: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @functools.cached_property
    def order(self) -> Order:
        tiles = range(0, self.mask.t, self.rows)
        ranges = [
            blocks_of(self.mask, i, self.rows, self.block, self.mask.shift)
            for i in tiles
        ]
        return Order(
            pairs=self.b * self.heads,
            bytes_of_pair=max(
                1, 2 * self.mask.s * (self.h + self.e) * self.group // self.shared
            ),
            programs=self.programs,
            work=tuple(r.count * self.group for r in ranges),
        )


def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array,
    residuals: tuple[Array, ...],
    cotangent: Array,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
    config: BackwardTiles | None = None,
) -> dict[str, Array]:
    """Returns the cotangents of q, k and v.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        out: [b, t, n, e], from the forward.
        residuals: ``(lse,)``, float32 [b, n, t].
        cotangent: [b, t, n, e].
        kv_lengths: int [b|1].
        offset: int [b|1].
        scale: As in the forward.
        window: As in the forward.
        shift: As in the forward.
        softcap: None.
        empty_rows: As in the forward.
        out_dtype: q's.
        config: The tiles.
    """
    del out_dtype
    assert softcap is None
    config = config or BackwardTiles()
    b, t, n, h = q.shape
    s, heads, e = k.shape[1], k.shape[2], v.shape[3]
    left, right = window
    lengths, offsets = (
        None if x is None else jnp.broadcast_to(x.astype(jnp.int32), (b,))
        for x in (kv_lengths, offset)
    )
    (lse,) = residuals
    up = cotangent.astype(q.dtype)
    delta = jnp.einsum(
        "btne,btne->bnt", up, out, preferred_element_type=jnp.float32
    )  # fmt: skip
    empty = lse == -jnp.inf
    rows = (
        _padded(jnp.where(empty, jnp.inf, lse * LOG2E), config, jnp.inf),
        _padded(jnp.where(empty, 0.0, delta), config, 0.0),
    )
    common = {"b": b, "h": h, "e": e, "scale": scale, "programs": config.programs,
              "stages": config.stages, "warpgroups": config.warpgroups}  # fmt: skip
    of_keys = _Problem(
        heads=heads, group=n // heads, shared=1, block=config.queries,
        mask=Mask(s, t, right, left, -shift, False, offsets is not None), **common,
    )  # fmt: skip
    of_queries = _Problem(
        heads=n, group=1, shared=n // heads, block=config.keys,
        mask=Mask(t, s, left, right, shift, lengths is not None, offsets is not None),
        **common,
    )  # fmt: skip
    arrays = [even(x) for x in (q, k, v, up)]
    numbers = {"lengths": lengths, "offsets": offsets}
    if config.fused:
        total = jax.new_ref(jnp.zeros(arrays[0].shape, jnp.float32))
        dk, dv = _call(_Fused, of_keys, arrays, rows, numbers, total)
        dq = (total[...] * scale).astype(q.dtype)
    else:
        dk, dv = _call(_OfKeys, of_keys, arrays, rows, numbers)
        (dq,) = _call(_OfQueries, of_queries, arrays, rows, numbers)
    dv = dv[:, :s]
    if of_queries.mask.may_be_empty:
        dv = _with_empty_rows(dv, empty, cotangent, empty_rows)
    return {"q": dq[:, :t], "k": dk[:, :s], "v": dv}


def _padded(x: Array, config: BackwardTiles, value: float) -> Array:
    """Returns [b, n, t] with whole blocks and tiles of t."""
    t = x.shape[2]
    most = max(-(-t // m) * m for m in (config.queries, 64 * config.warpgroups))
    return jnp.pad(x, ((0, 0), (0, 0), (0, most - t)), constant_values=value)


def _with_empty_rows(dv: Array, empty: Array, up: Array, empty_rows: str) -> Array:
    """Returns dv with what rows without keys add: NaN, or their mean's share."""
    if empty_rows == "zero":
        return dv
    (b, s, heads, e), n = dv.shape, empty.shape[1]
    if empty_rows == "nan":
        bad = empty.reshape(b, heads, -1).any(-1)[:, None, :, None]
        return jnp.where(bad, jnp.nan, dv)
    rows = jnp.where(empty.swapaxes(1, 2)[..., None], up.astype(jnp.float32), 0)
    share = (rows.sum(1) / s).reshape(b, 1, heads, n // heads, e).sum(3)
    return (dv.astype(jnp.float32) + share).astype(dv.dtype)


def _call(
    kind: Any,
    p: _Problem,
    arrays: Sequence[Array],
    rows: tuple[Array, Array],
    numbers: dict[str, Array | None],
    total: Any = None,
) -> Any:
    """Runs one of the kernels: its results. `total` is memory for dq to be added to."""
    q = arrays[0]
    named = dict(zip("qkvg", arrays, strict=True))
    named |= {"lse": rows[0], "delta": rows[1]}
    named |= {x: a for x, a in numbers.items() if a is not None}
    if p.order.table is not None:
        named["table"] = jnp.asarray(p.order.table)
    if total is not None:
        named["dq"] = total
    out = [jax.ShapeDtypeStruct(named[x].shape, q.dtype) for x in kind.results]
    scratch = kind.scratch(p, q.dtype)

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, *kind.outputs), references, strict=True))
        kind(p, given, memory).run()

    return pallas.kernel(
        body, kind.name, out, scratch, p.order.blocks, p.warpgroups + 1
    )(*named.values())


class _Kernel(abc.ABC):
    """What the two kernels have in common: tiles that stay, blocks that pass."""

    name: str
    fixed: tuple[str, str]
    """The arrays whose tiles stay, of widths h and e."""
    passing: tuple[str, str]
    """The arrays whose blocks pass, of widths h and e."""
    results: tuple[str, ...]
    """The arrays like which the results are."""
    outputs: tuple[str, ...]

    def __init__(self, p: _Problem, given: dict[str, Any], memory: dict[str, Any]):
        self.p, self.given, self.memory = p, given, memory
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)

    @classmethod
    def scratch(cls, p: _Problem, dtype: Any) -> dict[str, Any]:
        """Returns shared memory by name."""
        made = {}
        for name, width in zip((*cls.fixed, *cls.passing), (p.h, p.e) * 2, strict=True):
            stays = name in cls.fixed
            shape = (p.warpgroups, 64) if stays else (p.stages, p.block)
            deep = pallas.swizzle(width) if stays else pallas.swizzle(width, p.block)
            made[name] = pallas.tiles((*shape, width), dtype, deep)
        return made | {
            "ready": pallas.barriers(p.warpgroups, cls.copies()),
            "done": pallas.barriers(p.warpgroups),
            "first_ready": pallas.barriers(p.stages, cls.copies_passing()),
            "second_ready": pallas.barriers(p.stages, cls.copies_passing()),
            "free": pallas.barriers(p.stages, p.warpgroups),
            **cls.row_memory(p),
        }

    @classmethod
    def copies(cls) -> int:
        """Copies of a warpgroup's tiles."""
        return 2

    @classmethod
    def copies_passing(cls) -> int:
        """Copies of a block, for each of the two arrays."""
        return 1

    @classmethod
    @abc.abstractmethod
    def row_memory(cls, p: _Problem) -> dict[str, Any]:
        """Returns shared memory for lse and delta."""

    def run(self) -> None:
        most, least = REGISTERS[self.p.warpgroups]
        computes = self.warpgroup < self.p.warpgroups

        @pl.when(computes)
        def _() -> None:
            plgpu.set_max_registers(most, action="increase")
            self.compute()

        @pl.when(jnp.logical_not(computes))
        def _() -> None:
            plgpu.set_max_registers(least, action="decrease")
            self.copy()

    def over_tiles(self, body: Any) -> None:
        order, table = self.p.order, self.given.get("table")
        of = lambda index, steps: body(_Tile(self, order.place(index)), steps)
        pallas.over_tiles(order, table, of, jnp.int32(0))

    def compute(self) -> None:
        """Computes this warpgroup's rows of every tile."""
        plgpu.barrier_arrive(self.memory["done"].at[self.warpgroup])
        for slot in range(self.p.stages):
            plgpu.barrier_arrive(self.memory["free"].at[slot])
        self.over_tiles(self.compute_tile)
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, tile: _Tile, step: Any) -> Any:
        p, r, mine = self.p, tile.range, self.warpgroup
        plgpu.barrier_wait(self.memory["ready"].at[mine])
        tile.start = step
        loops = [(r.whole, r.part, False)]
        if p.mask.hides or p.mask.s % p.block or tile.length is not None:
            loops += [(r.part, r.end, True)]
        if p.mask.left is not None:
            loops = [(r.start, r.whole, True), *loops]

        def head(i: Any, carry: Any) -> Any:
            before = step + i * r.count - r.start
            for start, end, part in loops:
                body = lambda j, c, part=part: self.step(tile, j, before + j, c, part)
                carry = lax.fori_loop(start, jnp.maximum(start, end), body, carry)
            return carry

        carry = self.begin(tile)
        if p.group == 1:
            carry = head(0, carry)
        else:
            carry = lax.fori_loop(0, p.group, head, carry)
        self.store(tile, carry)
        return step + r.count * p.group

    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x = self.p, self.memory

        def one(tile: _Tile, step: Any) -> Any:
            for w in range(p.warpgroups):
                plgpu.barrier_wait(x["done"].at[w])
                self.copy_tile(tile, w)

            def head(i: Any, step: Any) -> Any:
                def block(j: Any, step: Any) -> Any:
                    slot = lax.rem(step, jnp.int32(p.stages))
                    plgpu.barrier_wait(x["free"].at[slot])
                    self.copy_block(tile, i, j, slot)
                    return step + 1

                return lax.fori_loop(tile.range.start, tile.range.end, block, step)

            return lax.fori_loop(0, p.group, head, step)

        self.over_tiles(one)

    def send(self, name: str, at: tuple[Any, ...], to: Any, barrier: Any) -> None:
        """Copies a part of an array to its place in shared memory."""
        plgpu.copy_gmem_to_smem(
            self.given[name].at[at], self.memory[name].at[to], barrier
        )

    # What differs:
    @abc.abstractmethod
    def copy_tile(self, tile: _Tile, w: int) -> None:
        """Copies what stays for a tile."""

    @abc.abstractmethod
    def copy_block(self, tile: _Tile, i: Any, j: Any, slot: Any) -> None:
        """Copies a block that passes."""

    @abc.abstractmethod
    def begin(self, tile: _Tile) -> Any:
        """Returns what is summed, at the start of a tile."""

    @abc.abstractmethod
    def step(self, tile: _Tile, j: Any, step: Any, carry: Any, part: bool) -> Any:
        """Returns the sums with a block added."""

    @abc.abstractmethod
    def store(self, tile: _Tile, carry: Any) -> None:
        """Writes the sums of a tile."""

    def put(self, x: Array, name: str, output: str, tile: _Tile) -> None:
        """Writes rows to where a tile was, and from there to the result."""
        place = self.memory[name].at[self.warpgroup]
        place[...] = x.astype(self.given[output].dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile.mine, 64)
        plgpu.copy_smem_to_gmem(place, self.given[output].at[tile.b, rows, tile.head])

    def hidden(self, tile: _Tile, scores: Array, j: Any) -> Array:
        """Returns scores with -inf where a row does not see a column."""
        mask = self.p.mask
        start = j * self.p.block
        at = pallas.row_positions(64) + (tile.mine + tile.offset - start)
        first = None if mask.left is None else at - min(mask.left, FAR)
        last = pallas.rows(tile.range.limit - 1 - start)
        if mask.right is not None:
            last = jnp.minimum(at + min(mask.right, FAR), last)
        if tile.length is not None and not mask.lengths:
            row = pallas.row_positions(64) + tile.mine
            last = jnp.where(row < pallas.rows(tile.length), last, -1)
        return pallas.hide(scores, first, last)


def _without_rows(r: Range, some: Any) -> Range:
    """Returns blocks that are seen in part from the first whole one on, if `some`."""
    return replace(r, part=jnp.where(some, r.whole, r.part))


class _Tile:
    """Where a tile of rows is, and which blocks of columns it meets."""

    def __init__(self, kernel: _Kernel, place: tuple[Any, Any]):
        p, (row, pair) = kernel.p, place
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
        self.range = blocks_of(p.mask, self.first, p.rows, p.block, self.offset, limit)
        if self.length is not None and not p.mask.lengths:  # rows may be past it
            self.range = _without_rows(self.range, self.first + p.rows > self.length)
        self.mine = self.first + 64 * kernel.warpgroup
        self.start: Any = 0
        """Blocks that were read before this tile."""


class _OfKeys(_Kernel):
    """dk and dv of tiles of keys."""

    name = "attention_dk_dv"
    fixed, passing, results = ("k", "v"), ("q", "g"), ("k", "v")
    outputs = ("dk", "dv")
    sign = -1

    @classmethod
    def copies_passing(cls) -> int:
        return 2

    @classmethod
    def row_memory(cls, p: _Problem) -> dict[str, Any]:
        rows = plgpu.SMEM((p.stages, p.block), jnp.float32)
        return {"lse": rows, "delta": rows}

    def copy_tile(self, tile: _Tile, w: int) -> None:
        rows = pl.ds(tile.first + 64 * w, 64)
        for name in self.fixed:
            at = (tile.b, rows, tile.head)
            self.send(name, at, w, self.memory["ready"].at[w])

    def copy_block(self, tile: _Tile, i: Any, j: Any, slot: Any) -> None:
        head = tile.head * self.p.group + i
        rows = pl.ds(j * self.p.block, self.p.block)
        for name, row, kind in (("q", "lse", "first"), ("g", "delta", "second")):
            barrier = self.memory[f"{kind}_ready"].at[slot]
            self.send(name, (tile.b, rows, head), slot, barrier)
            self.send(row, (tile.b, head, rows), slot, barrier)

    def begin(self, tile: _Tile) -> Any:
        return pallas.zeros((64, self.p.h)), pallas.zeros((64, self.p.e))

    def step(self, tile: _Tile, j: Any, step: Any, carry: Any, part: bool) -> Any:
        return self.changed(tile, j, step, carry, part)[0]

    def changed(
        self, tile: _Tile, j: Any, step: Any, carry: Any, part: bool
    ) -> tuple[Any, Array]:
        """Returns new (dk, dv), and dSᵀ in 16 bits: [64, block]."""
        p, x, mine = self.p, self.memory, self.warpgroup
        slot = lax.rem(step, jnp.int32(p.stages))
        shape, dtype = (64, p.block), self.given["q"].dtype
        for name in ("first_ready", "second_ready"):
            plgpu.barrier_wait(x[name].at[slot])

        def products(scores: Any, changes: Any, dk: Any, dv: Any) -> Any:
            dk[...], dv[...] = carry
            plgpu.wgmma(scores, x["k"].at[mine], x["q"].at[slot].transpose((1, 0)))
            plgpu.wgmma(changes, x["v"].at[mine], x["g"].at[slot].transpose((1, 0)))
            lse = pallas.loaded(x["lse"].at[slot], pallas.COLUMNS)
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            found = lax.optimization_barrier(found)
            if part:
                found = self.hidden(tile, found, j)
            found = found * (p.scale * LOG2E) - pallas.across(lse, shape)
            weights = lax.optimization_barrier(jnp.exp2(found))
            change = lax.optimization_barrier(changes[...])
            plgpu.wgmma(dv, weights.astype(dtype), x["g"].at[slot])
            delta = pallas.loaded(x["delta"].at[slot], pallas.COLUMNS)
            change = weights * (change - pallas.across(delta, shape))
            change = change.astype(dtype)
            plgpu.wgmma(dk, change, x["q"].at[slot])
            made = dk[...], dv[...]
            plgpu.barrier_arrive(x["free"].at[slot])
            return made, change

        return pl.run_scoped(
            products,
            plgpu.ACC(shape, jnp.float32),
            plgpu.ACC(shape, jnp.float32),
            plgpu.ACC((64, p.h), jnp.float32),
            plgpu.ACC((64, p.e), jnp.float32),
        )

    def store(self, tile: _Tile, carry: Any) -> None:
        dk, dv = carry
        dk = dk * self.p.scale
        self.put(dk, "k", "dk", tile)
        self.put(dv, "v", "dv", tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["done"].at[self.warpgroup])


class _Fused(_OfKeys):
    """dk and dv of tiles of keys, and what they add to dq.

    The warpgroups leave their dSᵀ of a block in shared memory, in one of two places in
    turn. The warpgroup of that number multiplies it with all keys of the tile and adds
    the product to dq in global memory.
    """

    name = "attention_backward"

    @classmethod
    def scratch(cls, p: _Problem, dtype: Any) -> dict[str, Any]:
        shape = (CHANGES, p.warpgroups, 64, p.block)
        return super().scratch(p, dtype) | {
            "changes": pallas.tiles(shape, dtype, pallas.swizzle(p.block)),
            "changes_ready": pallas.barriers(CHANGES, p.warpgroups),
            "changes_free": pallas.barriers(CHANGES),
            "added": pallas.barriers(1, p.warpgroups),
            "sums": pallas.wide_tiles((CHANGES, p.block, p.h)),
        }

    def compute(self) -> None:
        plgpu.barrier_arrive(self.memory["changes_free"].at[self.warpgroup])
        super().compute()

    def step(self, tile: _Tile, j: Any, step: Any, carry: Any, part: bool) -> Any:
        x, mine = self.memory, self.warpgroup
        made, change = self.changed(tile, j, step, carry, part)
        place = lax.rem(step, jnp.int32(CHANGES))
        plgpu.barrier_wait(x["changes_free"].at[place])
        x["changes"].at[place, mine][...] = change
        plgpu.commit_smem()
        plgpu.barrier_arrive(x["changes_ready"].at[place])

        @pl.when(place == mine)
        def _() -> None:
            self.add(tile, j, lax.div(step - tile.start, tile.range.count), place)

        return made

    def add(self, tile: _Tile, j: Any, i: Any, place: Any) -> None:
        """Adds a block's dS k to dq of the i-th query head."""
        p, x = self.p, self.memory
        plgpu.barrier_wait(x["changes_ready"].at[place])

        def product(total: Any) -> Any:
            for w in range(p.warpgroups):
                change = x["changes"].at[place, w].transpose((1, 0))
                plgpu.wgmma(total, change, x["k"].at[w])
            return total[...]

        total = pl.run_scoped(product, plgpu.ACC((p.block, p.h), jnp.float32))
        plgpu.barrier_arrive(x["changes_free"].at[place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x["sums"].at[place][...] = total
        plgpu.commit_smem()
        rows, head = pl.ds(j * p.block, p.block), tile.head * p.group + i
        plgpu.copy_smem_to_gmem(
            x["sums"].at[place],
            self.given["dq"].at[tile.b, rows, head],
            reduction_op="add",
        )

    def store(self, tile: _Tile, carry: Any) -> None:
        """Stores dk and dv where k and v were, once all have multiplied with k."""
        plgpu.barrier_arrive(self.memory["added"].at[0])
        plgpu.barrier_wait(self.memory["added"].at[0])
        super().store(tile, carry)


class _OfQueries(_Kernel):
    """dq of tiles of queries."""

    name = "attention_dq"
    fixed, passing, results = ("q", "g"), ("k", "v"), ("q",)
    outputs = ("dq",)
    sign = 1

    @classmethod
    def copies(cls) -> int:
        return 4

    @classmethod
    def row_memory(cls, p: _Problem) -> dict[str, Any]:
        rows = plgpu.SMEM((p.warpgroups, 64), jnp.float32)
        return {"lse": rows, "delta": rows}

    def copy_tile(self, tile: _Tile, w: int) -> None:
        rows, barrier = pl.ds(tile.first + 64 * w, 64), self.memory["ready"].at[w]
        for name in self.fixed:
            self.send(name, (tile.b, rows, tile.head), w, barrier)
        for name in ("lse", "delta"):
            self.send(name, (tile.b, tile.head, rows), w, barrier)

    def copy_block(self, tile: _Tile, i: Any, j: Any, slot: Any) -> None:
        del i
        head = lax.div(tile.head, jnp.int32(self.p.shared))
        rows = pl.ds(j * self.p.block, self.p.block)
        for name, kind in (("k", "first"), ("v", "second")):
            barrier = self.memory[f"{kind}_ready"].at[slot]
            self.send(name, (tile.b, rows, head), slot, barrier)

    def begin(self, tile: _Tile) -> Any:
        lse, delta = (
            pallas.loaded(self.memory[x].at[self.warpgroup], pallas.ROWS)
            for x in ("lse", "delta")
        )
        return pallas.zeros((64, self.p.h)), lse, delta

    def step(self, tile: _Tile, j: Any, step: Any, carry: Any, part: bool) -> Any:
        p, x, mine = self.p, self.memory, self.warpgroup
        dq_before, lse, delta = carry
        slot = lax.rem(step, jnp.int32(p.stages))
        shape, dtype = (64, p.block), self.given["q"].dtype
        for name in ("first_ready", "second_ready"):
            plgpu.barrier_wait(x[name].at[slot])

        def products(scores: Any, changes: Any, dq: Any) -> Any:
            dq[...] = dq_before
            plgpu.wgmma(scores, x["q"].at[mine], x["k"].at[slot].transpose((1, 0)))
            plgpu.wgmma(changes, x["g"].at[mine], x["v"].at[slot].transpose((1, 0)))
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            found = lax.optimization_barrier(found)
            if part:
                found = self.hidden(tile, found, j)
            found = found * (p.scale * LOG2E) - pallas.along(lse, shape)
            weights = lax.optimization_barrier(jnp.exp2(found))
            change = lax.optimization_barrier(changes[...])
            change = weights * (change - pallas.along(delta, shape))
            plgpu.wgmma(dq, change.astype(dtype), x["k"].at[slot])
            made = dq[...]
            plgpu.barrier_arrive(x["free"].at[slot])
            return made

        made = pl.run_scoped(
            products,
            plgpu.ACC(shape, jnp.float32),
            plgpu.ACC(shape, jnp.float32),
            plgpu.ACC((64, p.h), jnp.float32),
        )
        return made, lse, delta

    def store(self, tile: _Tile, carry: Any) -> None:
        self.put(carry[0] * self.p.scale, "q", "dq", tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["done"].at[self.warpgroup])
