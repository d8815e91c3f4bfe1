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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import classes, pallas
from rewriter.kernels.attention.hopper.blocks import FAR, Mask, Range, blocks_of
from rewriter.kernels.attention.hopper.config import CHANGES, REGISTERS, BackwardTiles
from rewriter.kernels.attention.hopper.forward_kernel import (
    even,
    pair_of,
    read_within,
    row_sums,
)
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.hopper.terms import (
    Block,
    Terms,
    terms_of,
    transposed,
)

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
    terms: Terms

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of numbers of queries."""
        return ("lse", "delta", "rest") if self.terms.adding else ("lse", "delta")

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
            work=tuple(
                self.group * (1 if self.terms.segments else r.count) for r in ranges
            ),
        )


def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    out: Array,
    residuals: tuple[Array, ...],
    cotangent: Array,
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
    config: BackwardTiles | None = None,
) -> dict[str, Array]:
    """Returns the cotangents of q, k and v, and of sinks.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        out: [b, t, n, e], from the forward.
        residuals: ``(lse,)``, float32 [b, n, t].
        cotangent: [b, t, n, e].
        bias: As in the forward, as all that follow.
        mask: bool [b|1, n|1, t|1, s|1].
        q_segments: int [b|1, t].
        kv_segments: int [b|1, s].
        kv_lengths: int [b|1].
        offset: int [b|1].
        alibi: float [n].
        sinks: float [n].
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
    given = {
        "bias": bias, "mask": mask, "q_segments": q_segments,
        "kv_segments": kv_segments, "alibi": alibi, "sinks": sinks,
    }  # fmt: skip
    given = {name: x for name, x in given.items() if x is not None}
    terms, extra = terms_of(t, s, **given)
    extra.pop("sinks", None)
    empty = lse == -jnp.inf
    unit, rest = (1.0 if terms.natural else LOG2E), None
    if terms.adding:
        again = functools.partial(
            row_sums, q, k, v, **given, kv_lengths=kv_lengths, offset=offset,
            scale=scale, window=window, shift=shift,
        )  # fmt: skip
        lse, rest = _apart(lse, again)
    rows = {
        "lse": _padded(jnp.where(empty, jnp.inf, lse * unit), config, jnp.inf),
        "delta": _padded(jnp.where(empty, 0.0, delta), config, 0.0),
    }
    if rest is not None:
        rows["rest"] = _padded(rest * LOG2E, config, 0.0)
    common = {"b": b, "h": h, "e": e, "scale": scale, "programs": config.programs,
              "stages": config.stages, "warpgroups": config.warpgroups}  # fmt: skip
    turned, extra_turned = transposed(terms, extra)
    of_keys = _Problem(
        heads=heads, group=n // heads, shared=1, block=config.queries,
        mask=Mask(
            s, t, right, left, -shift, False, offsets is not None, more=terms.hides
        ),
        terms=turned, **common,
    )  # fmt: skip
    of_queries = _Problem(
        heads=n, group=1, shared=n // heads, block=config.keys,
        mask=Mask(
            t, s, left, right, shift, lengths is not None, offsets is not None,
            more=terms.hides,
        ),
        terms=terms, **common,
    )  # fmt: skip
    named = dict(zip("qkvg", map(even, (q, k, v, up)), strict=True)) | rows
    for name, x in (("lengths", lengths), ("offsets", offsets)):
        if x is not None:
            named[name] = x
    by_key, by_query = named | extra_turned, named | extra
    turned_mask = None if mask is None else mask.swapaxes(2, 3)
    for p, arrays, hiding, segments in (
        (of_keys, by_key, turned_mask, pair_of(kv_segments, q_segments)),
        (of_queries, by_query, mask, pair_of(q_segments, kv_segments)),
    ):
        found = classes.table(
            b, p.mask.t, p.mask.s, p.rows, p.block, hiding, segments, p.group
        )
        if found is not None:
            arrays["reach"] = found
    if config.fused:
        total = jax.new_ref(jnp.zeros(named["q"].shape, jnp.float32))
        dk, dv = _call(_Fused, of_keys, by_key | {"dq": total})
        dq = (total[...] * scale).astype(q.dtype)
    else:
        dk, dv = _call(_OfKeys, of_keys, by_key)
        (dq,) = _call(_OfQueries, of_queries, by_query)
    dv = dv[:, :s]
    if of_queries.mask.may_be_empty:
        dv = _with_empty_rows(dv, empty, cotangent, empty_rows)
    grads = {"q": dq[:, :t], "k": dk[:, :s], "v": dv}
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - residuals[0]) * delta
        share = jnp.where(empty, 0.0, share).sum((0, 2))
        grads["sinks"] = (-share).astype(sinks.dtype)
    return grads


LARGE = 1000.0
"""A log-sum-exp beyond which it does not tell how many keys share a row: that of 4096
scores of -1e9 is -1e9 itself in float32."""


def _apart(lse: Array, again: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Returns log-sum-exps as two terms, of which the second is small.

    A bias of -1e9 for a whole row takes the digits of the sum. The maxima and sums are
    then computed again, which costs another forward.
    """
    large = jnp.isfinite(lse) & (jnp.abs(lse) > LARGE)
    return lax.cond(jnp.any(large), again, lambda: (lse, jnp.zeros_like(lse)))


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


def _call(kind: Any, p: _Problem, named: dict[str, Any]) -> Any:
    """Runs one of the kernels on arrays by name, and returns its results.

    A "dq" among them is a reference to memory that is added to.
    """
    q, dq = named["q"], named.pop("dq", None)
    if p.order.table is not None:
        named["table"] = jnp.asarray(p.order.table)
    if dq is not None:
        named["dq"] = dq
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
            "ready": pallas.barriers(p.warpgroups, cls.copies(p)),
            "done": pallas.barriers(p.warpgroups),
            "first_ready": pallas.barriers(
                p.stages, cls.copies_first(p) + p.terms.copies(p.warpgroups)
            ),
            "second_ready": pallas.barriers(p.stages, cls.copies_second()),
            "free": pallas.barriers(p.stages, p.warpgroups),
            **cls.row_memory(p),
            **p.terms.scratch(p.stages, p.warpgroups, p.block),
        }

    @classmethod
    def copies(cls, p: _Problem) -> int:
        """Copies of a warpgroup's tiles."""
        del p
        return 2

    @classmethod
    def copies_first(cls, p: _Problem) -> int:
        """Copies of a block that its scores want, beside `Terms`."""
        del p
        return 1

    @classmethod
    def copies_second(cls) -> int:
        """Copies of a block that their changes want."""
        return 1

    @classmethod
    @abc.abstractmethod
    def row_memory(cls, p: _Problem) -> dict[str, Any]:
        """Returns shared memory for numbers of queries: lse, delta, rest."""

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
        cut = p.mask.s % p.block or tile.length is not None
        if p.mask.hides or cut or self.classed:
            loops += [(r.part, r.end, True)]
        if p.mask.left is not None or self.classed:
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

    def send_terms(self, tile: _Tile, n: Any, j: Any, slot: Any) -> None:
        """Copies what changes the scores of a block and of query head n."""
        p, ready = self.p, self.memory["first_ready"].at[slot]
        place = Block(tile.b, n, tile.first, j * p.block, p.block, p.warpgroups, slot)
        p.terms.copy(
            place, self.given,
            lambda source, name, at: plgpu.copy_gmem_to_smem(
                source, self.memory[name].at[at], ready
            ),
        )  # fmt: skip

    def scores(
        self, tile: _Tile, found: Array, j: Any, slot: Any, step: Any, part: bool
    ) -> Array:
        """Returns products as scores, -inf for what is not seen.

        Those that something is added to are multiplied with the scale, others not yet.
        """
        p, mine = self.p, self.warpgroup
        if p.terms.natural:
            found = found * p.scale
        if p.terms.slopes:
            found = self.sloped(tile, found, j, step)
        hides = part or not self.classed
        found = p.terms.added(found, self.memory, slot, mine, hides)
        return self.hidden(tile, found, j) if part else found

    @property
    def classed(self) -> bool:
        """Whether masks and segments hide in some blocks alone."""
        return "reach" in self.given

    def weights(self, scores: Array, lse: Any, rest: Any) -> Array:
        """Returns weights from scores, and from what is taken off: as wide as they."""
        p = self.p
        if not p.terms.natural:
            return jnp.exp2(scores * (p.scale * LOG2E) - lse)
        found = (scores - lse) * LOG2E
        return jnp.exp2(found if rest is None else found - rest)

    # What differs:
    @abc.abstractmethod
    def sloped(self, tile: _Tile, scores: Array, j: Any, step: Any) -> Array:
        """Returns scores with distances times the slope of the query head."""

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
        if "reach" in kernel.given:
            table = kernel.given["reach"]
            self.range = read_within(table, self.range, self.b, self.head, row)
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
    def copies_first(cls, p: _Problem) -> int:
        return 2 + bool(p.terms.adding)

    @classmethod
    def copies_second(cls) -> int:
        return 2

    @classmethod
    def row_memory(cls, p: _Problem) -> dict[str, Any]:
        return {x: plgpu.SMEM((p.stages, p.block), jnp.float32) for x in p.numbers}

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
        if self.p.terms.adding:
            barrier = self.memory["first_ready"].at[slot]
            self.send("rest", (tile.b, head, rows), slot, barrier)
        self.send_terms(tile, head, j, slot)

    def head(self, tile: _Tile, step: Any) -> Any:
        """Returns the query head of a step: those of the group come in order."""
        if self.p.group == 1:
            return tile.head
        turn = lax.div(step - tile.start, jnp.int32(tile.range.count))
        return tile.head * self.p.group + turn

    def sloped(self, tile: _Tile, scores: Array, j: Any, step: Any) -> Array:
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
            lse = self.across("lse", slot, shape)
            found = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            found = lax.optimization_barrier(found)
            found = self.scores(tile, found, j, slot, step, part)
            found = self.weights(found, lse, self.across("rest", slot, shape))
            weights = lax.optimization_barrier(found)
            change = lax.optimization_barrier(changes[...])
            plgpu.wgmma(dv, weights.astype(dtype), x["g"].at[slot])
            change = weights * (change - self.across("delta", slot, shape))
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
            self.add(tile, j, self.head(tile, step), place)

        return made

    def add(self, tile: _Tile, j: Any, head: Any, place: Any) -> None:
        """Adds a block's dS k to dq of a query head."""
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
        rows = pl.ds(j * p.block, p.block)
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
    def copies(cls, p: _Problem) -> int:
        return 2 + len(p.numbers)

    @classmethod
    def row_memory(cls, p: _Problem) -> dict[str, Any]:
        shape = (p.warpgroups, 64)
        return {x: plgpu.SMEM(shape, jnp.float32) for x in p.numbers}

    def copy_tile(self, tile: _Tile, w: int) -> None:
        rows, barrier = pl.ds(tile.first + 64 * w, 64), self.memory["ready"].at[w]
        for name in self.fixed:
            self.send(name, (tile.b, rows, tile.head), w, barrier)
        for name in self.p.numbers:
            self.send(name, (tile.b, tile.head, rows), w, barrier)

    def copy_block(self, tile: _Tile, i: Any, j: Any, slot: Any) -> None:
        del i
        head = lax.div(tile.head, jnp.int32(self.p.shared))
        rows = pl.ds(j * self.p.block, self.p.block)
        for name, kind in (("k", "first"), ("v", "second")):
            barrier = self.memory[f"{kind}_ready"].at[slot]
            self.send(name, (tile.b, rows, head), slot, barrier)
        self.send_terms(tile, tile.head, j, slot)

    def begin(self, tile: _Tile) -> Any:
        numbers = {
            x: pallas.loaded(self.memory[x].at[self.warpgroup], pallas.ROWS)
            for x in self.p.numbers
        }
        if self.p.terms.slopes:  # see `sloped`
            rows = pallas.row_positions(64).astype(jnp.float32)
            slope = pallas.scalar(self.given["slopes"], tile.head)
            numbers["lse"] = numbers["lse"] + rows * slope
        return pallas.zeros((64, self.p.h)), *numbers.values()

    def sloped(self, tile: _Tile, scores: Array, j: Any, step: Any) -> Array:
        """Adds distances from the tile's first row; lse makes up for other rows."""
        del step
        slope = pallas.scalar(self.given["slopes"], tile.head)
        away = jnp.asarray(j * self.p.block - tile.mine - tile.offset, jnp.float32)
        each = pallas.zeros((64,))
        return pallas.sloped(scores, each + away * slope, each + slope)

    def step(self, tile: _Tile, j: Any, step: Any, carry: Any, part: bool) -> Any:
        p, x, mine = self.p, self.memory, self.warpgroup
        dq_before, lse, delta, *rest = carry
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
            found = self.scores(tile, found, j, slot, step, part)
            wide = [pallas.along(x, shape) for x in (lse, *rest)]
            found = self.weights(found, wide[0], wide[1] if rest else None)
            weights = lax.optimization_barrier(found)
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
        return made, lse, delta, *rest

    def store(self, tile: _Tile, carry: Any) -> None:
        self.put(carry[0] * self.p.scale, "q", "dq", tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["done"].at[self.warpgroup])
