"""Attention on Hopper's tensor cores: warpgroups that multiply, and one that copies.

A block of threads takes tiles of query rows, one after the other: 64 rows for each
computing warpgroup. Its last warpgroup only copies: q of a tile, then blocks of k and
v, as shared memory becomes free. The others keep a running softmax in registers, with
exponentials to the base of two. Two things hide the exponentials. While a warpgroup
weighs block j, its tensor cores multiply the weights of block j - 1 with v. And the
warpgroups take turns, so that one multiplies while another weighs. Source: Shah et al.,
"FlashAttention-3" (arXiv 2407.08608), sections 3.1 and 3.2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.empty_rows import AVERAGED, ZERO
from rewriter.kernels.attention.hopper import (
    block_masks,
    pallas,
    panels,
    shared_keys,
    short_kernel,
)
from rewriter.kernels.attention.hopper.blocks import (
    Mask,
    blocks_ahead,
    blocks_of,
)
from rewriter.kernels.attention.hopper.config import REGISTERS, Tiles, result_has_memory
from rewriter.kernels.attention.hopper.dtypes import is_halved, parts
from rewriter.kernels.attention.hopper.extra_operands import Extra, extra_of
from rewriter.kernels.attention.hopper.forward_tile import Tile
from rewriter.kernels.attention.hopper.order import Order
from rewriter.kernels.attention.hopper.terms import Place, Terms, terms_of
from rewriter.kernels.attention.hopper.use import Use, head_in_array
from rewriter.kernels.attention.hopper.widths import filled
from rewriter.kernels.attention.visibility import least
from rewriter.kernels.shared import warpgroups, work_stealing
from rewriter.kernels.shared.halves import split

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Heads


@dataclass(frozen=True)
class _Problem:
    """The problem as known while tracing."""

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
    extra: Extra
    splits: bool
    swapped: tuple[str, ...]
    out: jnp.dtype
    parts: int
    by_rows: bool
    """Whether arrays are copied by rows; see `Use.by_rows`."""
    packed: tuple[tuple[str, Heads], ...]
    """The heads of operands in the arrays that are read."""
    fill_passes: bool
    """Whether the fill is the least of hidden scores, and not all of them."""
    halves: bool = False
    """Whether q, k and v are float32, in two parts."""

    @property
    def swizzles(self) -> dict[str, int]:
        """Bytes of a row of the tiles of q, k, v and the result."""
        width, block = pallas.swizzle(self.h), self.config.block_kv
        deep, flat = pallas.swizzle(self.e, block), pallas.swizzle(self.e)
        return {"q": width, "k": width, "v": deep, "o": flat}

    @property
    def copies(self) -> dict[str, int]:
        """The copies that bring a block of q, k and v each."""
        wide = {"q": self.h, "k": self.h, "v": self.e}
        return {
            name: panels.copies(x, self.swizzles[name], self.by_rows, self.halves)
            for name, x in wide.items()
        }

    @property
    def group(self) -> int:
        return self.n // self.heads

    @property
    def result_has_memory(self) -> bool:
        own = self.config, self.h, self.e, self.extra, self.halves
        return result_has_memory(*own)

    @property
    def saved(self) -> tuple[str, ...]:
        """Names of the statistics saved for each row."""
        if not self.saves:
            return ()
        return ("lse", "rest") if self.splits else ("lse",)

    @property
    def natural(self) -> bool:
        """Whether scores are compared as natural logarithms; see `_Tile.seen`."""
        return self.terms.natural

    @functools.cached_property
    def order(self) -> Order:
        both = 2 * (1 + self.halves) * self.mask.s * (self.h + self.e) // self.group
        rows = self.config.rows
        return Order(
            pairs=self.b * self.n,
            bytes_of_pair=max(1, both),
            programs=self.config.programs,
            work=tuple(
                1
                if self.terms.compares
                else blocks_of(
                    self.mask, i * rows, rows, self.config.block_kv, self.mask.shift
                ).count
                for i in range(-(-self.mask.t // rows))
            ),
            claims=self.config.claimed and work_stealing.AVAILABLE,
        )


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    residuals: bool = False,
    config: Tiles | None = None,
    swapped: tuple[str, ...] = (),
    **given: Any,
) -> Any:
    """Returns attention, as `reference` does, for supported uses.

    Args:
        q: [b, t, n, h].
        k: [b, s, k, h].
        v: [b, s, k, e].
        residuals: Whether to return ``(result, (lse,))``, lse float32 [b, n, t], -inf
            for rows without keys.
        config: The tiles.
        swapped: Names among q, k and v whose heads lie before positions in memory; they
            are read in place, without a copy.
        **given: The other fields of `Use`.
    """
    use = Use(q, k, v, **given)
    if config is not None and config.short:
        out, lse = short_kernel.forward(use, config, swapped)
        return (out, (lse,)) if residuals else out
    out, kept = _run(use, config or Tiles(), "lse" if residuals else "", swapped)
    return (out, kept) if residuals else out


def row_sums(use: Use) -> tuple[Array, Array]:
    """Returns each row's largest score, and the logarithm of its sum relative to it.

    Only 16 columns of v are read.

    Returns:
        Two of float32 [b, n, t], -inf for rows without keys.
    """
    use = use.unpacked()
    narrow = replace(use, v=use.v[..., :16], empty_rows="nan", out_dtype=None)
    return _run(narrow, Tiles(32, 2, 2, turns=False), "split")[1]


def _run(
    use: Use, config: Tiles, saves: str, swapped: tuple[str, ...] = ()
) -> tuple[Array, tuple[Array, ...]]:
    """The result, and statistics of rows.

    Args:
        use: The use.
        config: The tiles.
        saves: ``"lse"``; ``"split"``, for a row's maximum and the logarithm of its sum
            instead; or nothing.
        swapped: As in `forward`.
    """
    b, t, n, _ = use.q.shape
    hidden = use.hidden()
    terms, arrays = terms_of(
        *use.lengths, hidden=hidden, fill_passes=use.fill_passes, **use.extra
    )
    if use.fill is not None:
        arrays["fills"] = hidden.reshape(1)
    h, e = use.widths
    widths = filled(h), filled(e)
    hides = terms.hides or use.fill is not None
    seen = use.visible(hides, use.empty_rows in AVERAGED and not terms.sinks)
    p = _Problem(
        b, n, use.k.shape[2], *widths, seen, use.scale, use.softcap, config,
        bool(saves), terms, extra_of(use.extra), saves == "split", swapped,
        jnp.dtype(use.out_dtype or use.q.dtype), parts(use.weights, use.q.dtype),
        use.by_rows(widths), use.heads, use.fill_passes, is_halved(use.q.dtype),
    )  # fmt: skip
    made = _call(
        p, use.empty_rows in ZERO and seen.may_be_empty, _named(p, use, arrays)
    )
    return made[0], tuple(x[:, :, :t] for x in made[1:])


def _named(p: _Problem, use: Use, extra: dict[str, Array]) -> dict[str, Array]:
    """The kernel's arrays by name. `extra` has those of operands beside q, k and v."""
    named = use.tensors()
    named |= {name: named[name].swapaxes(1, 2) for name in p.swapped}
    named |= {name: split(named[name]) for name in "qkv"} if p.halves else {}
    named |= pallas.assigned_tiles(p.order) | use.numbers() | extra
    found = block_masks.table(
        p.b, *use.lengths, p.config.rows, p.config.block_kv, use.masks
    )
    if found is not None:
        blocks = -(-use.lengths[1] // p.config.block_kv)
        named["reach"] = block_masks.every(found, blocks, use.reaches)
    if p.mask.mean and p.mask.more:
        more = p.e - use.v.shape[3]
        mean = use.v.astype(jnp.float32).mean(1)
        if use.fill is not None:
            mean = jnp.where(use.reaches[0], jnp.nan, mean)
        named["means"] = jnp.pad(mean, ((0, 0), (0, 0), (0, more))) if more else mean
    return named


def _call(p: _Problem, zero: bool, named: dict[str, Array]) -> Any:
    config, wgs, stages = p.config, p.config.warpgroups, p.config.stages
    q, terms, swizzles, copies = named["q"], p.terms, p.swizzles, p.copies
    tiles = panels.panels if p.by_rows else pallas.tiles
    out = [jax.ShapeDtypeStruct((p.b, p.mask.t, p.n, named["v"].shape[-1]), p.out)]
    two = (2,) if p.halves else ()
    q_tiles = tiles((*two, wgs, 64, p.h), q.dtype, swizzles["q"])
    # As many bytes in any dtype: those of q, where they share memory.
    o_tiles = tiles((wgs, 64, 2 * p.e // p.out.itemsize), p.out, swizzles["o"])
    scratch = {
        f"{name}_tiles": tiles(
            (*two, stages, config.block_kv, width), q.dtype, swizzles[name]
        )
        for name, width in (("k", p.h), ("v", p.e))
    }
    scratch |= {
        "q_ready": pallas.barriers(wgs, copies["q"]),
        "q_free": pallas.barriers(wgs),
        **{
            name: pallas.barriers(stages, arrivals)
            for name, arrivals in (
                ("k_ready", copies["k"] + terms.copies(wgs)),
                ("v_ready", copies["v"]),
                ("k_free", wgs), ("v_free", wgs),
            )
        },
        **terms.scratch(stages, wgs, config.block_kv),
        **(work_stealing.scratch(wgs) if p.order.claimed else {}),
    }  # fmt: skip
    if p.result_has_memory:
        scratch |= {"q_tiles": q_tiles, "o_tiles": o_tiles}
    elif p.by_rows:
        scratch |= {"shared": plgpu.RefUnion(*q_tiles.refs, *o_tiles.refs)}
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
    """The work of one block of threads."""

    def __init__(
        self, p: _Problem, zero: bool, given: dict[str, Any], memory: dict[str, Any]
    ):
        self.p, self.zero, self.given = p, zero, given
        if "shared" in memory:
            shared = tuple(memory.pop("shared"))
            half = len(shared) // 2
            parts = (shared[:half], shared[half:]) if p.by_rows else shared
            memory["q_tiles"], memory["o_tiles"] = parts
        names = {f"{x}_tiles": f"{x}_rows" for x in "qkvo"}
        halves = [f"{x}_tiles" for x in "qkv"] if p.halves else []
        self.named = panels.with_rows(memory, names, p.by_rows, halves)
        self.warpgroup = lax.axis_index(pallas.WARPGROUP)

    def run(self) -> None:
        """Runs this warpgroup's part."""
        count = self.p.config.warpgroups
        computes = self.warpgroup < count
        warpgroups.divide(computes, self.compute, self.copy, REGISTERS[count])

    def over_tiles(self, body: Any, copies: bool = False) -> None:
        """Runs ``steps = body(tile, steps)`` for this block's tiles of rows."""
        order = self.p.order
        of = lambda index, steps, turn: body(Tile(self, order.place(index)), steps)
        pallas.over_tiles(order, self.given, self.named, of, copies)

    # ------------------------------------------------------------------ copying
    def send(self, name: str, at: tuple[Any, Any, Any], slot: Any) -> None:
        """Copies a head's rows: `at` is their batch entry, they, and the head."""
        entry, rows, head = at
        head = head_in_array(self.p.packed, name, head)
        x, ready = self.named, self.named[f"{name}_ready"].at[slot]
        at = (entry, head, rows) if name in self.p.swapped else (entry, rows, head)
        place = x[f"{name}_rows"].at[slot]
        if name == "k" and shared_keys.SECOND in self.given:
            found = shared_keys.parts(self.given, at, place)
        else:
            found = panels.parts(self.given[name], at, place)
        for source, target in found:
            plgpu.copy_gmem_to_smem(source, target, ready)

    def copy(self) -> None:
        """Fills shared memory as it becomes free."""
        p, x = self.p, self.named

        def one(tile: Tile, step: Any) -> Any:
            def block(i: Any, step: Any) -> Any:
                slot = lax.rem(step, jnp.int32(p.config.stages))
                first = (tile.range.end - 1 - i) * p.config.block_kv
                keys = pl.ds(first, p.config.block_kv)
                for name in "kv":
                    plgpu.barrier_wait(x[f"{name}_free"].at[slot])
                    self.send(name, (tile.b, keys, tile.head), slot)
                    if name == "k":
                        self.copy_terms(tile, first, slot)
                return step + 1

            count = tile.range.count
            ahead = least(blocks_ahead(p.config.stages), count)
            step = lax.fori_loop(0, ahead, block, step)
            for w in range(p.config.warpgroups):
                plgpu.barrier_wait(x["q_free"].at[w])
                rows = pl.ds(tile.first + 64 * w, 64)
                self.send("q", (tile.b, rows, tile.n), w)
            return lax.fori_loop(ahead, count, block, step)

        self.over_tiles(one, copies=True)

    def copy_terms(self, tile: Tile, first: Any, slot: Any) -> None:
        """Copies the operands that change the scores of a block of keys."""
        config, x = self.p.config, self.named
        place = Place(
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
            pallas.when(last)(lambda: pallas.pass_turn(config.warpgroups))
        self.over_tiles(lambda tile, step: tile.compute(step))
        plgpu.wait_smem_to_gmem(0)
        if config.turns:
            pallas.when(self.warpgroup == 0)(
                lambda: pallas.wait_for_turn(config.warpgroups)
            )
