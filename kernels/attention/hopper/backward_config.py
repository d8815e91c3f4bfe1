"""Configs of the Hopper backward kernels, and which of them fit into an SM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from rewriter.kernels.attention.hopper import short
from rewriter.kernels.attention.hopper.config import (
    BARRIERS,
    KIB,
    REGISTERS,
    sees_unevenly,
)
from rewriter.kernels.attention.hopper.dtypes import is_halved
from rewriter.kernels.attention.hopper.extra_operands import NONE, Extra, extra_in
from rewriter.kernels.attention.hopper.widths import backward_widths
from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY, processors
from rewriter.ops.score import COLUMN, LOOKUP, ROW
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


@dataclass(frozen=True)
class BackwardTiles:
    """The config of the backward.

    Attributes:
        queries: Queries of a block that a tile of keys meets, for dk and dv.
        keys: Keys of a block that a tile of queries meets, for dq.
        stages: Blocks that shared memory holds.
        warpgroups: Warpgroups that compute, 64 rows of a tile each.
        programs: As in `Tiles`.
        fused: Whether one kernel computes all gradients. That saves two products of
            seven, but adds up dq in memory, in an order that varies between runs. From
            jax 0.11 on.
        divided: Whether, for dk and dv, two warpgroups share 64 keys: one computes
            weights and dv, the other their changes and dk. For wide heads.
        v_stages: Blocks of v that shared memory holds for dq, since they are free
            before those of k; 0 for as many as `stages`.
        tables: Whether a kernel computes the cotangent of a bias that varies along
            queries and keys, if that is needed and fits.
        claimed: As in `Tiles`.
        ahead: Tiles whose own rows shared memory holds. With two, those of the next
            tile are copied while one is computed, which helps where tiles meet few
            blocks.
        short: Whether each warpgroup takes a whole head, of up to 64 queries and keys.
            Of the other numbers only warpgroups, stages and programs count then.
    """

    queries: int = 64
    keys: int = 64
    stages: int = 2
    warpgroups: int = 2
    programs: int = PROCESSORS
    fused: bool = False
    divided: bool = False
    v_stages: int = 0
    tables: bool = True
    claimed: bool = False
    ahead: int = 1
    short: bool = False


def backward_default(spec: Spec, device: Device) -> BackwardTiles:
    """Returns the default config, by the heads' width and the operands of scores.

    Microseconds of dk and dv on an H200, with it and without it
    (``tests/bench/results/attention_backward_h200.json``):

    128 queries, heads of 64, causal                    572   620
    128 queries, heads of 64, in windows                372   320
    3 blocks of queries, heads of 128, all keys seen   1458  1654

    With the rows of two tiles in memory, 197 positions with gradients took 0.83 of the
    time. 577 took 0.92, and 2048 under a causal mask 0.95
    (``tests/bench/results/hopper_float32_h200.json``).
    Under a mask three blocks of queries in memory take as long as two.
    A function of scores needs registers of its own: with heads of more than 64 blocks
    then have 64 keys, unless it is of products alone. What positions give is computed
    before the products are there, and ptxas 13.0 spills it with 128 keys (a decay 464
    bytes; caps, softplus, SiLU and GELU nothing).
    Otherwise heads of 128 have blocks of 128 keys for dq, not 64.
    With slopes both passes then take 0.99 of the time, and with a bias of keys 0.97
    (``tests/bench/results/hopper_attention_h200.json``).
    """
    whole = short.likely(BackwardTiles(short=True), spec, device, True)
    if whole is not None:
        return whole
    h, e = backward_widths(spec)
    width, extra, halves = max(h, e), extra_in(spec), is_halved(spec.dtype("q"))
    window = spec.param("window", (None, None))
    if extra.computed:
        best = BackwardTiles(64, 128 if width <= 64 or _of_products(spec) else 64)
    elif extra.copied or extra.slopes:
        untried = width > 64 and (extra.tables or extra.rows)
        best = BackwardTiles(64, 64 if untried else 128)
    elif width <= 64 and window[0] is None and _plain(spec):
        best = BackwardTiles(128, 128, ahead=2)
    elif width <= 64:
        best = BackwardTiles(64, 128, 3)
    else:
        best = (
            BackwardTiles(64, 128) if sees_unevenly(spec) else BackwardTiles(64, 64, 3)
        )
    tried = (best, replace(best, keys=64), *(HALVES if halves else WIDE))
    tried = [_claiming_backward(x, spec) for x in tried]
    fitting = (x for x in tried if fits_backward_widths(x, h, e, extra, halves).ok)
    return replace(next(fitting, best), programs=processors(device))


def _of_products(spec: Spec) -> bool:
    """Whether a function reads nothing but products and numbers of heads."""
    score = spec.param("score")
    if score is None or extra_in(spec).copied:
        return False
    reads = {ref.kind for step in score.steps for ref in step.ins}
    looks_up = any(step.name == LOOKUP for step in score.steps)
    return not (looks_up or reads & {ROW, COLUMN})


def _plain(spec: Spec) -> bool:
    """Whether no further operands need registers, so that blocks of 128 queries fit."""
    return not (spec.param("softcap") or spec.has("prefix"))


def _claiming_backward(config: BackwardTiles, spec: Spec) -> BackwardTiles:
    """Returns a config whose tiles are claimed, if they differ in work and it fits.

    On an H200 that took 0.97 to 1.00 of the time of tiles that are dealt out, 0.82
    with segments, and 1.01 where all tiles are alike.
    """
    (h, e), extra = backward_widths(spec), extra_in(spec)
    halves = is_halved(spec.dtype("q"))
    differ = sees_unevenly(spec) or extra.rows or extra.columns or spec.has("mask")
    made = replace(config, claimed=config.programs > 0 and bool(differ))
    fits = fits_backward_widths(made, h, e, extra, halves).ok
    return made if fits else replace(made, claimed=False)


def backward_configs(spec: Spec, device: Device) -> list[BackwardTiles]:
    """Returns configs worth measuring, most promising first.

    The second is fused, whose sums differ from run to run: on an H200 that kernel took
    0.91 to 1.02 of the best other one's time. No rule of thumb takes it.
    """
    found = _backward_configs(spec)
    extra = extra_in(spec)
    if not (extra.copied or extra.slopes):
        found.insert(1, BackwardTiles(fused=True))
    found = [_claiming_backward(x, spec) for x in found]
    found = [replace(x, programs=processors(device)) for x in found]
    return [*short.configs(BackwardTiles(short=True), spec, device, True), *found]


def _backward_configs(spec: Spec) -> list[BackwardTiles]:
    if is_halved(spec.dtype("q")):
        return list(HALVES)
    width = max(backward_widths(spec))
    if width <= 64:
        return [
            BackwardTiles(128, 128, ahead=2), BackwardTiles(128, 128),
            BackwardTiles(64, 128, 3),
            BackwardTiles(64, 64, 3, 3), BackwardTiles(64, 64, 3),
        ]  # fmt: skip
    narrow = [BackwardTiles(64, 128), BackwardTiles(64, 64, 3)]
    if width <= 128:
        return narrow
    return [*narrow, *WIDE, BackwardTiles(32, 64, 3), BackwardTiles(32, 64, 2)]


WIDE = (
    BackwardTiles(64, 64, 3, divided=True),
    BackwardTiles(64, 64, 2, divided=True),
    BackwardTiles(64, 64, 2, divided=True, v_stages=1),
    BackwardTiles(64, 32, 2, divided=True),
    BackwardTiles(32, 32, 2, divided=True),
    BackwardTiles(32, 32, 2, divided=True, v_stages=1),
)
"""Configs to try, in order, if dk and dv do not fit into one warpgroup's registers.

Heads of 192 with values of 128 take the first, and heads of 256 the third. With tables
of biases they take the others. ptxas 13.0 spills no register in any of them.
"""


HALVES = (
    BackwardTiles(64, 64, ahead=2), BackwardTiles(64, 64), BackwardTiles(64, 128),
    BackwardTiles(64, 64, 3), BackwardTiles(32, 64), BackwardTiles(32, 32),
)  # fmt: skip
"""Configs for operands of float32: each half takes as much memory as 16 bits do."""


def first_fitting_backward(
    h: int, e: int, extra: Extra = NONE, halves: bool = False
) -> BackwardTiles | None:
    """Returns the same for the backward; None if nothing fits."""
    tried = (BackwardTiles(), *(HALVES if halves else WIDE))
    fitting = (x for x in tried if fits_backward_widths(x, h, e, extra, halves).ok)
    return next(fitting, None)


def fits_backward(config: BackwardTiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config of the backward can run."""
    del device
    if config.short:
        return short.fits(spec, config, True)
    h, e = backward_widths(spec)
    halves = is_halved(spec.dtype("q"))
    return fits_backward_widths(config, h, e, extra_in(spec), halves)


def fits_backward_widths(
    config: BackwardTiles, h: int, e: int, extra: Extra = NONE, halves: bool = False
) -> Verdict:
    """Returns the same for heads of width h and values of width e."""
    found = [YES]
    if config.warpgroups not in REGISTERS:
        text = f"{config.warpgroups} warpgroups, not 2 or 3"
        return no("warpgroups", text)
    for name, block in (("queries", config.queries), ("keys", config.keys)):
        if (block % 64 and block != 32) or not 32 <= block <= 256:
            found.append(no(name, f"{block} is neither 32 nor a multiple of 64 to 256"))
        divided = config.divided and name == "queries"
        rows = 64 if divided else 64 * config.warpgroups
        values = config.v_stages if name == "keys" else 0
        size = 2 * (h + e) * rows * config.ahead + 2 * config.stages * block * h
        size += 2 * (values or config.stages) * block * e
        size += 2 * 64 * block * WEIGHTS * divided
        if halves:  # twice as much, and pieces of results
            size += size + 4 * rows * 32
        its = extra.transposed if name == "queries" else extra
        size += its.nbytes(config.stages, rows, block) + BARRIERS
        # Numbers of queries, and of others, each in memory that begins at a KiB.
        numbers = 3 if extra.copied else 2
        if config.fused:  # all in one
            numbers = -(-numbers * config.stages * 4 * config.queries // KIB)
        size += KIB * (numbers + its.rows + its.columns)
        size += KIB if config.claimed else 0
        if config.fused:  # changes of scores in 16 bits, and dq
            size += config.warpgroups * (CHANGES * 2 * 64 * block + 4 * block * h)
        if size > SHARED_MEMORY:
            text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
            found.append(no("shared_memory", text))
    # Two accumulators of scores with the weights of one in 16 bits, beside results.
    most = REGISTERS[config.warpgroups][0] - 16
    sums, narrow = max(h, e) if config.divided else h + e, 2 if halves else 4
    used = max(
        config.queries + config.queries // narrow + sums // 2,
        config.keys + config.keys // narrow + h // 2,
    )
    if used > most:
        found.append(no("registers", f"{used} registers for tiles, of {most}"))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    if config.divided and config.warpgroups != 2:
        found.append(no("divided", f"{config.warpgroups} warpgroups, not 2"))
    if not 1 <= config.ahead <= 2 or (
        config.ahead > 1 and (config.divided or config.fused)
    ):
        found.append(no("ahead", f"rows of {config.ahead} tiles"))
    if halves and (config.divided or config.fused):
        text = "float32 operands, whose weights would be rounded to 16 bits in memory"
        found.append(no("dtype", text))
    if config.fused:
        found.append(_fits_fused(config))
    return all_of(*found)


def _fits_fused(config: BackwardTiles) -> Verdict:
    if jax.__version_info__ < (0, 11):
        return no("jax", f"jax {jax.__version__} cannot add up dq in memory")
    if config.divided or config.warpgroups != CHANGES or config.queries != 64:
        return no("fused", "dq is added up by 2 warpgroups, for 64 queries at a time")
    return YES


CHANGES = 2
"""Blocks of changes of scores that shared memory holds, for dq."""

WEIGHTS = 2
"""Blocks of weights that it holds, where another warpgroup reads them."""

TABLE_BLOCK = 64
"""Keys of a block of a table's cotangent."""


def table_stages(config: BackwardTiles, h: int, e: int, extra: Extra) -> int:
    """Returns the members that shared memory holds for a table's cotangent; 0 for none.

    Example:
        >>> [table_stages(BackwardTiles(), x, x, Extra((2,))) for x in (32, 128, 256)]
        [4, 1, 0]
    """
    rows = 64 * config.warpgroups
    size = 2 * (h + e) * (rows + TABLE_BLOCK) + extra.nbytes(1, rows, TABLE_BLOCK)
    size += KIB * (3 + extra.rows + extra.columns)
    room = SHARED_MEMORY - BARRIERS - 4 * rows * TABLE_BLOCK
    return min(4, room // size)


def sums_block(config: BackwardTiles, h: int, e: int, extra: Extra) -> int:
    """Returns the columns that sums of changes take at a time; 0 if nothing fits.

    Args:
        config: The config of the backward, whose warpgroups these kernels have.
        h: Width of q and k.
        e: Width of v.
        extra: Operands of scores beside q and k, transposed where rows are keys.

    Example:
        >>> [sums_block(BackwardTiles(), x, x, Extra(rows=1)) for x in (64, 256)]
        [64, 32]
    """
    rows = 64 * config.warpgroups
    for block in (64, 32):
        size = 2 * (h + e) * (rows + SUMS_STAGES * block) + BARRIERS
        size += extra.nbytes(SUMS_STAGES, rows, block)
        # Numbers of queries, sums and claims, each in memory that begins at a KiB.
        size += KIB * (5 + extra.rows + extra.columns)
        if size <= SHARED_MEMORY:
            return block
    return 0


SUMS_STAGES = 2
"""Blocks that shared memory holds for sums of changes."""
