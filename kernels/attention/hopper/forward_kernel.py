"""Attention on Hopper's tensor cores: warpgroups that multiply, one that copies.

A block of threads takes tiles of query rows, 64 for each computing warpgroup, one
after the other. Its last warpgroup only copies: q of a tile, then blocks of k and v,
as shared memory becomes free. The others keep a running softmax in registers, with
exponentials to the base of two. Two things hide the exponentials: while a warpgroup
weighs block j, its tensor cores multiply the weights of block j - 1 with v; and the
warpgroups take turns, so that one multiplies while another weighs. Source: Shah et al.,
"FlashAttention-3" (arXiv 2407.08608), sections 3.1 and 3.2.
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

from rewriter.kernels.attention.hopper import classes, pallas
from rewriter.kernels.attention.hopper.beside import Beside, beside_of
from rewriter.kernels.attention.hopper.blocks import FAR, Mask, Range, blocks_of
from rewriter.kernels.attention.hopper.config import REGISTERS, Tiles, apart
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.hopper.terms import Block, Terms, terms_of

if TYPE_CHECKING:
    from jax import Array

LOG2E = math.log2(math.e)
EDGE = 8
"""Rows that tiles in shared memory are copied by: t and s are padded to multiples."""


@dataclass(frozen=True)
class _Problem:
    """All that is known while tracing."""

    b: int
    n: int
    heads: int
    h: int
    e: int
    mask: Mask
    scale: float
    softcap: float | None
    config: Tiles
    saves: bool
    terms: Terms
    beside: Beside
    splits: bool

    @property
    def group(self) -> int:
        return self.n // self.heads

    @property
    def apart(self) -> bool:
        return apart(self.config, self.h, self.e, self.beside)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of what is saved of each row."""
        if not self.saves:
            return ()
        return ("lse", "rest") if self.splits else ("lse",)

    @property
    def natural(self) -> bool:
        """Whether scores are compared as natural logarithms; see `_Tile.seen`."""
        return self.terms.natural

    @functools.cached_property
    def order(self) -> Order:
        both = 2 * self.mask.s * (self.h + self.e) // self.group
        rows = self.config.rows
        return Order(
            pairs=self.b * self.n,
            bytes_of_pair=max(1, both),
            programs=self.config.programs,
            work=tuple(
                1
                if self.terms.segments
                else blocks_of(
                    self.mask, i * rows, rows, self.config.block_kv, self.mask.shift
                ).count
                for i in range(-(-self.mask.t // rows))
            ),
        )


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    bias: Array | None = None,
    mask: Array | None = None,
    q_segments: Array | None = None,
    kv_segments: Array | None = None,
    kv_lengths: Array | None = None,
    offset: Array | None = None,
    alibi: Array | None = None,
    sinks: Array | None = None,
    scale: float = 1.0,
    window: tuple[int | None, int | None] = (None, None),
    shift: int = 0,
    softcap: float | None = None,
    empty_rows: str = "nan",
    out_dtype: str | None = None,
    residuals: bool = False,
    apart: bool = False,
    config: Tiles | None = None,
) -> Any:
    """Returns attention, as `reference` does, for what `supports` takes.

    Args:
        q: [b, t, n, h], bfloat16 or float16.
        k: [b, s, k, h].
        v: [b, s, k, e].
        bias: float [b|1, n|1, t|1, s|1].
        mask: bool [b|1, n|1, t|1, s|1].
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s].
        kv_lengths: int [b|1].
        offset: int [b|1].
        alibi: float [n].
        sinks: float [n].
        scale: Multiplies the scores; positive.
        window: As in `reference`.
        shift: As in `reference`.
        softcap: As in `reference`.
        empty_rows: As in `reference`.
        out_dtype: q's.
        residuals: Whether to return ``(result, (lse,))``, lse float32 [b, n, t], -inf
            for rows without keys.
        apart: Whether lse is instead a row's maximum and the logarithm of its sum.
        config: The tiles.
    """
    del out_dtype
    b, t, n, h = q.shape
    s, heads, e = k.shape[1], k.shape[2], v.shape[3]
    left, right = window
    given = {
        "bias": bias, "mask": mask, "q_segments": q_segments,
        "kv_segments": kv_segments, "alibi": alibi, "sinks": sinks,
    }  # fmt: skip
    given = {name: x for name, x in given.items() if x is not None}
    terms, arrays = terms_of(t, s, **given)
    seen = Mask(
        t, s, left, right, shift, kv_lengths is not None, offset is not None,
        empty_rows == "mean" and not terms.sinks, terms.hides,
    )  # fmt: skip
    config = config or Tiles()
    p = _Problem(
        b, n, heads, h, e, seen, scale, softcap, config, residuals, terms,
        beside_of(given), apart,
    )  # fmt: skip
    named = {"q": even(q), "k": even(k), "v": even(v)}
    if p.order.table is not None:
        named["table"] = jnp.asarray(p.order.table)
    for name, x in (("lengths", kv_lengths), ("offsets", offset)):
        if x is not None:
            named[name] = jnp.broadcast_to(x.astype(jnp.int32), (b,))
    named |= arrays
    found = classes.table(
        b, t, s, config.rows, config.block_kv, mask, pair_of(q_segments, kv_segments)
    )
    if found is not None:
        named["reach"] = found
    if seen.mean and seen.more:
        named["means"] = v.astype(jnp.float32).mean(1)
    made = _call(p, empty_rows == "zero" and seen.may_be_empty, named)
    out = made[0][:, :t]
    return (out, tuple(x[:, :, :t] for x in made[1:])) if residuals else out


def row_sums(
    q: Array, k: Array, v: Array, *, sinks: Array | None = None, **given: Any
) -> tuple[Array, Array]:
    """Returns each row's largest score, and the logarithm of its sum beside it.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e], of which 16 columns are read.
        sinks: float [n].
        **given: The other operands and parameters of `forward`, of which some are
            added to scores.

    Returns:
        Two of float32 [b, n, t], -inf for rows without keys.
    """
    smallest = Tiles(32, 2, 2, turns=False)
    return forward(
        q, k, v[..., :16], sinks=sinks, **given, residuals=True, apart=True,
        config=smallest,
    )[1]  # fmt: skip


def pair_of(rows: Array | None, columns: Array | None) -> tuple[Array, Array] | None:
    """Returns segments, which count if both are there."""
    return None if rows is None or columns is None else (rows, columns)


def even(x: Array) -> Array:
    """Adds rows up to a multiple of `EDGE`."""
    more = -x.shape[1] % EDGE
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))) if more else x


def _call(p: _Problem, zero: bool, named: dict[str, Array]) -> Any:
    config, wgs, stages = p.config, p.config.warpgroups, p.config.stages
    width, deep = pallas.swizzle(p.h), pallas.swizzle(p.e, config.block_kv)
    flat, q, terms = pallas.swizzle(p.e), named["q"], p.terms
    out = [jax.ShapeDtypeStruct((p.b, q.shape[1], p.n, p.e), q.dtype)]
    q_tiles = pallas.tiles((wgs, 64, p.h), q.dtype, width)
    o_tiles = pallas.tiles((wgs, 64, p.e), q.dtype, flat)
    scratch = {
        "k_tiles": pallas.tiles((stages, config.block_kv, p.h), q.dtype, width),
        "v_tiles": pallas.tiles((stages, config.block_kv, p.e), q.dtype, deep),
        "q_ready": pallas.barriers(wgs),
        "q_free": pallas.barriers(wgs),
        **{
            name: pallas.barriers(stages, arrivals)
            for name, arrivals in (
                ("k_ready", 1 + terms.copies(wgs)), ("v_ready", 1),
                ("k_free", wgs), ("v_free", wgs),
            )
        },
        **terms.scratch(stages, wgs, config.block_kv),
    }  # fmt: skip
    if p.apart:
        scratch |= {"q_tiles": q_tiles, "o_tiles": o_tiles}
    else:
        scratch |= {"shared": plgpu.RefUnion(q_tiles, o_tiles)}
    if p.saves:
        rows = len(p.order.work) * config.rows
        for name in p.saved:
            out.append(jax.ShapeDtypeStruct((p.b, p.n, rows), jnp.float32))
            scratch[f"{name}_rows"] = plgpu.SMEM((wgs, 64), jnp.float32)

    outputs = ("out", *p.saved)

    def body(*references: Any, **memory: Any) -> None:
        given = dict(zip((*named, *outputs), references, strict=True))
        _Block(p, zero, given, memory).run()

    programs = p.order.blocks
    return pallas.kernel(body, "attention", out, scratch, programs, wgs + 1)(
        *named.values()
    )


class _Block:
    """What one block of threads does."""

    def __init__(
        self, p: _Problem, zero: bool, given: dict[str, Any], memory: dict[str, Any]
    ):
        self.p, self.zero, self.given = p, zero, given
        if "shared" in memory:
            memory["q_tiles"], memory["o_tiles"] = memory.pop("shared")
        self.named = memory
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)

    def run(self) -> None:
        most, least = REGISTERS[self.p.config.warpgroups]
        computes = self.warpgroup < self.p.config.warpgroups

        @pl.when(computes)
        def _() -> None:
            plgpu.set_max_registers(most, action="increase")
            self.compute()

        @pl.when(jnp.logical_not(computes))
        def _() -> None:
            plgpu.set_max_registers(least, action="decrease")
            self.copy()

    def over_tiles(self, body: Any, steps: Any) -> None:
        """Runs ``steps = body(tile, steps)`` for this block's tiles of rows."""
        order = self.p.order
        of = lambda index, steps: body(_Tile(self, order.place(index)), steps)
        pallas.over_tiles(order, self.given.get("table"), of, steps)

    # ------------------------------------------------------------------ copying
    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x, given = self.p, self.named, self.given

        def one(tile: _Tile, step: Any) -> Any:
            for w in range(p.config.warpgroups):
                plgpu.barrier_wait(x["q_free"].at[w])
                rows = pl.ds(tile.first + 64 * w, 64)
                plgpu.copy_gmem_to_smem(
                    given["q"].at[tile.b, rows, tile.n],
                    x["q_tiles"].at[w], x["q_ready"].at[w],
                )  # fmt: skip

            def block(i: Any, step: Any) -> Any:
                slot = lax.rem(step, jnp.int32(p.config.stages))
                first = (tile.range.end - 1 - i) * p.config.block_kv
                keys = pl.ds(first, p.config.block_kv)
                for name in "kv":
                    plgpu.barrier_wait(x[f"{name}_free"].at[slot])
                    plgpu.copy_gmem_to_smem(
                        given[name].at[tile.b, keys, tile.head],
                        x[f"{name}_tiles"].at[slot], x[f"{name}_ready"].at[slot],
                    )  # fmt: skip
                    if name == "k":
                        self.copy_terms(tile, first, slot)
                return step + 1

            return lax.fori_loop(0, tile.range.count, block, step)

        self.over_tiles(one, jnp.int32(0))

    def copy_terms(self, tile: _Tile, first: Any, slot: Any) -> None:
        """Copies what changes the scores of a block of keys."""
        config, x = self.p.config, self.named
        place = Block(
            tile.b, tile.n, tile.first, first, config.block_kv, config.warpgroups, slot
        )
        ready = x["k_ready"].at[slot]
        self.p.terms.copy(
            place, self.given,
            lambda source, name, at: plgpu.copy_gmem_to_smem(
                source, x[name].at[at], ready
            ),
        )  # fmt: skip

    # ---------------------------------------------------------------- computing
    def compute(self) -> None:
        """Computes this warpgroup's rows of every tile."""
        config, x = self.p.config, self.named
        plgpu.barrier_arrive(x["q_free"].at[self.warpgroup])
        for name in ("k_free", "v_free"):
            for slot in range(config.stages):
                plgpu.barrier_arrive(x[name].at[slot])
        if config.turns:
            last = self.warpgroup == config.warpgroups - 1
            pl.when(last)(lambda: pallas.pass_turn(config.warpgroups))
        self.over_tiles(lambda tile, step: tile.compute(step), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
        if config.turns:
            pl.when(self.warpgroup == 0)(
                lambda: pallas.wait_for_turn(config.warpgroups)
            )


class _Tile:
    """One tile of rows: where it is, and what a warpgroup computes of it."""

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
        length = None
        if "lengths" in given:
            length = pallas.scalar(given["lengths"], self.b)
        self.range = blocks_of(
            p.mask, self.first, p.config.rows, p.config.block_kv, self.offset, length
        )
        if "reach" in given:
            self.range = read_within(given["reach"], self.range, self.b, self.n, row)
        self.mine = self.first + 64 * block.warpgroup
        self.shape = (64, p.config.block_kv)

    def slot(self, i: Any, step: Any) -> Any:
        """Where the i-th block is; `step` blocks were read before this tile."""
        return lax.rem(step + i, jnp.int32(self.p.config.stages))

    def compute(self, step: Any) -> Any:
        """Computes and stores 64 rows; returns the blocks read so far.

        The last block comes first: under a causal mask it is the one that is seen in
        part, so that those after it need no comparisons.
        """
        r, x, mine = self.range, self.x, self.block.warpgroup
        plgpu.barrier_wait(x["q_ready"].at[mine])
        carry = self.begin(step)
        loops = [(r.end - r.part, r.end - r.whole, False)]
        if self.hides:
            loops = [(1, r.end - r.part, True), *loops]
        if self.p.mask.left is not None or self.classed:
            loops += [(r.end - r.whole, r.count, True)]
        for start, end, part in loops:
            begin = jnp.maximum(start, 1)
            body = lambda i, c, part=part: self.step(i, step, c, part)
            carry = lax.fori_loop(begin, jnp.maximum(end, begin), body, carry)
        if self.p.apart:
            plgpu.barrier_arrive(x["q_free"].at[mine])
        self.store(*self.finish(step, carry))
        if not self.p.apart:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(x["q_free"].at[mine])
        return step + r.count

    @property
    def hides(self) -> bool:
        """Whether there may be blocks that are seen in part."""
        mask = self.p.mask
        cut = mask.s % self.p.config.block_kv > 0
        return mask.hides or cut or self.classed

    @property
    def classed(self) -> bool:
        """Whether masks and segments hide in some blocks alone."""
        return "reach" in self.block.given

    def multiply_keys(self, scores: Any, slot: Any) -> None:
        q = self.x["q_tiles"].at[self.block.warpgroup]
        plgpu.wgmma(scores, q, self.x["k_tiles"].at[slot].transpose((1, 0)))

    def begin(self, step: Any) -> Any:
        """Returns (result, maxima, sums, weights) after the scores of one block."""
        slot = self.slot(0, step)
        plgpu.barrier_wait(self.x["k_ready"].at[slot])

        def product(scores: Any) -> Any:
            self.multiply_keys(scores, slot)
            return scores[...]

        found = pl.run_scoped(product, plgpu.ACC(self.shape, jnp.float32))
        found = self.seen_and_freed(found, 0, slot, True)
        top, total = self.first_sums()
        weights, top, total, _ = self.weigh(found, top, total)
        out = pallas.zeros((64, self.p.e))
        return out, top, total, weights.astype(self.block.given["q"].dtype)

    def step(self, i: Any, step: Any, carry: Any, part: bool) -> Any:
        """The scores of the i-th block beside the product of the one before and v."""
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
            plgpu.wgmma(result, weights, x["v_tiles"].at[before])
            if config.turns:
                pallas.pass_turn(config.warpgroups)
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            found = lax.optimization_barrier(found)
            found = self.seen_and_freed(found, i, slot, part)
            found = self.weigh(found, top, total)
            # Holds the exponentials before the wait for the product with v.
            new, higher, sums, fade = lax.optimization_barrier(found)
            made = lax.optimization_barrier(result[...])
            plgpu.barrier_arrive(x["v_free"].at[before])
            made = made * pallas.along(fade, made.shape)
            return made, higher, sums, new.astype(self.block.given["q"].dtype)

        return pl.run_scoped(
            products,
            plgpu.ACC(self.shape, jnp.float32),
            plgpu.ACC((64, self.p.e), jnp.float32),
        )

    def finish(self, step: Any, carry: Any) -> Any:
        """Returns (result, maxima, sums) with the last block's weights times v."""
        out, top, total, weights = carry
        slot = self.slot(self.range.count - 1, step)
        plgpu.barrier_wait(self.x["v_ready"].at[slot])

        def product(result: Any) -> Any:
            result[...] = out
            plgpu.wgmma(result, weights, self.x["v_tiles"].at[slot])
            return result[...]

        out = pl.run_scoped(product, plgpu.ACC(out.shape, jnp.float32))
        plgpu.barrier_arrive(self.x["v_free"].at[slot])
        return out, top, total

    # ------------------------------------------------------------------ softmax
    def seen_and_freed(self, scores: Array, i: Any, slot: Any, part: bool) -> Array:
        """Returns `seen`, and gives back the memory of the i-th block's keys."""
        free = self.x["k_free"].at[slot]
        if not self.p.terms.parts:
            plgpu.barrier_arrive(free)
            return self.seen(scores, i, slot, part)
        found = lax.optimization_barrier(self.seen(scores, i, slot, part))
        plgpu.barrier_arrive(free)  # of terms too, which are read by now
        return found

    def first_sums(self) -> tuple[Array, Array]:
        """Returns maxima and sums before the first key: [64]."""
        p = self.p
        if not p.terms.sinks:
            return pallas.zeros((64,), -jnp.inf), pallas.zeros((64,))
        sink = pallas.scalar(self.block.given["sinks"], self.n)
        if not p.natural:
            sink = sink / p.scale if p.softcap is None else sink * LOG2E
        top = pallas.zeros((64,)) + sink
        return (top + self.lean() if p.terms.slopes else top), pallas.zeros((64,), 1.0)

    def lean(self) -> Array:
        """Returns what slopes take from scores by a row's place in its tile: [64]."""
        rows = pallas.row_positions(64).astype(jnp.float32)
        return rows * pallas.scalar(self.block.given["slopes"], self.n)

    def sloped(self, scores: Array, key: Any) -> Array:
        """Returns scores with distances from the tile's first row, times the slope.

        What is left out for other rows, `lean`, is the same for all of a row's keys.
        """
        slope = pallas.scalar(self.block.given["slopes"], self.n)
        away = jnp.asarray(key - self.mine - self.offset, jnp.float32)
        each = pallas.zeros((64,))
        return pallas.sloped(scores, each + away * slope, each + slope)

    def key(self, i: Any) -> Any:
        """Returns the first key of the i-th block."""
        return (self.range.end - 1 - i) * self.p.config.block_kv

    def seen(self, scores: Array, i: Any, slot: Any, part: bool) -> Array:
        """Returns the scores of the i-th block, -inf for keys that are not seen.

        Those that something is added to are multiplied with the scale, those that are
        bent alone with the scale and log2(e), others not yet.
        """
        p, mask, terms = self.p, self.p.mask, self.p.terms
        if p.softcap is not None:
            unit = 1.0 if p.natural else LOG2E
            scores = _capped(scores * (p.scale / p.softcap)) * (p.softcap * unit)
        elif p.natural:
            scores = scores * p.scale
        if terms.slopes:
            scores = self.sloped(scores, self.key(i))
        mine = self.block.warpgroup
        hides = part or not self.classed
        scores = terms.added(scores, self.x, slot, mine, hides)
        if not (part and (mask.hides or mask.s % p.config.block_kv)):
            return scores
        key = self.key(i)
        first, last = self.keys_of_rows()
        first = None if first is None else first - key
        if not mask.averages:
            return pallas.hide(scores, first, last - key)
        empty = self.empty()
        last = jnp.where(empty, -1, last - key)
        fill = jnp.where(empty, 0.0, -jnp.inf)
        return pallas.hide(scores, first, last, fill, pallas.rows(mask.s - 1 - key))

    def keys_of_rows(self) -> tuple[Array | None, Array]:
        """Returns the first (None for 0) and last key that each row sees: [64]."""
        mask = self.p.mask
        at = pallas.row_positions(64) + (self.mine + self.offset)
        first, last = None, pallas.rows(self.range.limit - 1)
        if mask.right is not None:
            last = jnp.minimum(at + min(mask.right, FAR), last)
        if mask.left is not None:
            first = at - min(mask.left, FAR)
        return first, last

    def empty(self) -> Array:
        """Returns which rows see no key, bool [64]."""
        first, last = self.keys_of_rows()
        none = last < 0
        return none if first is None else none | (first > last)

    def weigh(self, scores: Array, top: Array, total: Array) -> tuple[Array, ...]:
        """Returns weights, new maxima, new sums, and what to fade by."""
        c = self.p.scale * LOG2E if self.p.softcap is None else 1.0
        higher = jnp.maximum(top, scores.max(axis=1))
        if self.p.natural:
            least = jnp.where(higher == -jnp.inf, 0.0, higher)
            weights = jnp.exp2((scores - pallas.along(least, self.shape)) * LOG2E)
            fade = jnp.exp2((top - least) * LOG2E)
            return weights, higher, total * fade + weights.sum(axis=1), fade
        least = jnp.where(higher == -jnp.inf, 0.0, higher) * c
        weights = jnp.exp2(scores * c - pallas.along(least, self.shape))
        fade = jnp.exp2(top * c - least)
        return weights, higher, total * fade + weights.sum(axis=1), fade

    # ------------------------------------------------------------------ storing
    def store(self, out: Array, top: Array, total: Array) -> None:
        """Writes the rows, and their log-sum-exp if it is asked for."""
        p, x, mine = self.p, self.x, self.block.warpgroup
        inverse = 1.0 / total
        if self.block.zero:
            inverse = jnp.where(total == 0.0, 0.0, inverse)
        out = out * pallas.along(inverse, out.shape)
        if "means" in self.block.given:
            mean = self.block.given["means"].at[self.b, self.head]
            mean = pallas.across(pallas.read(mean, pallas.COLUMNS), out.shape)
            out = jnp.where(pallas.along(total, out.shape) == 0.0, mean, out)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        given = self.block.given
        x["o_tiles"].at[mine][...] = out.astype(given["out"].dtype)
        if p.saves:
            self.put_sums(top, total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            x["o_tiles"].at[mine],
            given["out"].at[self.b, pl.ds(self.mine, 64), self.n],
        )
        for name in p.saved:
            plgpu.copy_smem_to_gmem(
                x[f"{name}_rows"].at[mine],
                given[name].at[self.b, self.n, pl.ds(self.mine, 64)],
            )

    def put_sums(self, top: Array, total: Array) -> None:
        """Puts the rows' log-sum-exp into shared memory, or its two terms."""
        p, x, mine = self.p, self.x, self.block.warpgroup
        if p.terms.slopes:
            top = top - self.lean()
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


def read_within(table: Any, r: Range, b: Any, head: Any, row: Any) -> Range:
    """Returns what `classes.table` leaves of a tile's blocks.

    Args:
        table: A reference to it.
        r: The blocks that positions leave.
        b: The batch entry.
        head: The head.
        row: The tile.
    """
    lead = (b, head if table.shape[1] > 1 else 0, row)
    return classes.within(r, *(pallas.scalar(table, *lead, i) for i in range(4)))


def _capped(x: Array) -> Array:
    """Returns tanh(x), as exact for small x as for large ones."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))
