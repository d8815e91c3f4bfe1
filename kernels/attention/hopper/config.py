"""Configs of the Hopper kernel, and which of them fit into an SM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rewriter.kernels.attention.hopper import short
from rewriter.kernels.attention.hopper.dtypes import products
from rewriter.kernels.attention.hopper.extra_operands import NONE, Extra, extra_in
from rewriter.kernels.attention.hopper.widths import EDGE, widths
from rewriter.kernels.attention.weights import PARAM
from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY, processors
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

REGISTERS = {2: (240, 24), 3: (160, 32)}
"""Registers per lane, by number of computing warpgroups: for these, and for the one
that copies. All lanes of an SM together have 512 x 128."""


@dataclass(frozen=True)
class Tiles:
    """The config of the forward.

    Attributes:
        block_kv: Keys of a block.
        stages: Blocks of k and of v that shared memory holds.
        warpgroups: Warpgroups that compute, 64 query rows each.
        programs: Persistent blocks of threads, which take one tile of rows after the
            other; 0 starts one for every tile.
        turns: Whether warpgroups take turns at the tensor cores, so that one
            computes exponentials while the other multiplies.
        claimed: Whether blocks of threads claim tiles from a work queue, from jax 0.11
            on; otherwise tiles are assigned before the kernel runs.
        held: Whether the kernel waits for the previous product of weights and values
            after a block's exponentials. Otherwise ptxas (13.0) waits for it before
            them.
        short: Whether each warpgroup takes a whole head, of up to 64 queries and keys.
            Of the other numbers only warpgroups, stages and programs count then.
    """

    block_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    programs: int = PROCESSORS
    turns: bool = True
    claimed: bool = False
    held: bool = False
    short: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return 64 * self.warpgroups


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config, by the widths of heads and by masks.

    Measured on an H200, bfloat16, jax 0.11.2
    (``tests/bench/results/hopper_attention_h200.json``).
    """
    if (whole := short.likely(Tiles(short=True), spec, device, False)) is not None:
        return whole
    h, e = widths(spec)
    left, _ = spec.param("window", (None, None))
    extra, hides = extra_in(spec), sees_unevenly(spec)
    long = spec.shape("k")[1] >= (LONG_CAUSAL if hides else LONG)
    if max(h, e) <= 64 and extra.computed:
        best = Tiles(128, 2, 2)
    elif max(h, e) <= 64 and is_one_block(spec):
        best = Tiles(-(-spec.shape("k")[1] // 32) * 32, 2, 2, turns=False, held=True)
    elif max(h, e) <= 64:
        best = Tiles(128, 4, 3, turns=False, held=left is not None or not hides)
    elif max(h, e) > 128:
        best = _of_wide_heads(h, e, spec)
    elif long and left is None and not _is_copied_by_rows(spec):
        best = Tiles(160, 2, 2, turns=False)
    elif left is not None and extra == NONE and not spec.param("softcap"):
        best = Tiles(64, 3, 3, turns=False)
    else:
        held = hides and not extra.copied
        best = Tiles(128, 2, 2, turns=hides and not held, held=held)
    # Other widths of values and tables take more memory: 32 keys are few enough.
    two = _count(spec) > 1  # parts of weights, which take more registers
    fewer = replace(best, block_kv=min(best.block_kv, 128), warpgroups=2)
    tried = (best, *((fewer,) if two else ()))
    more = extra.copied or extra.slopes or extra.computed or two
    tried = (*tried, *(_SMALLER if more else ()))
    smallest = Tiles(32, 2, 2, turns=False)
    claiming = (_claiming(x, spec) for x in tried)
    made = next((x for x in claiming if _fits(x, spec).ok), smallest)
    return replace(made, programs=processors(device))


def is_one_block(spec: Spec) -> bool:
    """Whether one block of more than 128 keys holds all of them, and all are seen.

    197 keys of heads of 64 then took 0.88 of the time of two blocks on an H200
    (``tests/bench/results/hopper_float32_h200.json``).
    """
    more = extra_in(spec) != NONE or spec.param("softcap") or _count(spec) > 1
    return not (sees_unevenly(spec) or more) and 128 < spec.shape("k")[1] <= ONE_BLOCK


def _is_copied_by_rows(spec: Spec) -> bool:
    """Whether panels are copied: of 64 columns, if that divides the keys of a block."""
    lengths = spec.shape("q")[1], spec.shape("k")[1]
    read = widths(spec) != (spec.shape("q")[3], spec.shape("v")[3])
    return read or any(x % EDGE for x in lengths)


def _of_wide_heads(h: int, e: int, spec: Spec) -> Tiles:
    """Returns the default for heads wider than 128; their values may be narrower.

    For heads of 192 and values of 128 under a causal mask, blocks of 96 keys were
    compared with blocks of 64. They took 0.94 of the time with 8k keys, and 0.95 with
    4k. With 1k keys there is
    room for a third warpgroup, which took 0.97. For heads of 256 blocks of 80 take 1.02
    (``tests/bench/results/attention_wide_h200.json``).
    """
    if h > 192 or e > 128 or extra_in(spec) != NONE or spec.param("softcap"):
        return Tiles(64, 2, 2, turns=False)
    if spec.shape("k")[1] <= SHORT:
        return Tiles(64, 2, 3, turns=False)
    return Tiles(96, 2, 2, turns=False)


ONE_BLOCK = 224
"""Keys of the largest block that registers hold beside heads of 64."""

SHORT = 1024
"""Keys up to which three warpgroups are faster for heads of 192."""


def sees_unevenly(spec: Spec) -> bool:
    """Whether numbers of visible keys differ between rows or sequences."""
    return spec.param("window", (None, None)) != (None, None) or spec.has("kv_lengths")


def _claiming(config: Tiles, spec: Spec) -> Tiles:
    """Returns a config whose tiles are claimed, where that was faster and fits.

    On an H200 they took 0.94 to 1.00 of the time of assigned tiles, 0.81 with segments,
    whose work is uneven, and 1.02 with tables of biases.
    """
    claimed = config.programs > 0 and not extra_in(spec).tables
    made = replace(config, claimed=claimed)
    return made if _fits(made, spec).ok else replace(made, claimed=False)


_SMALLER = (
    Tiles(128, 2, 3), Tiles(128, 2, 2), Tiles(96, 2, 2), Tiles(64, 2, 2, turns=False),
)  # fmt: skip

LONG, LONG_CAUSAL = 2048, 8192
"""Keys from which blocks of 160 are faster than blocks of 128: 680 against 669 TF/s for
4k keys, 564 against 575 for 1k. Under a causal mask 692 against 657 for 16k keys, 591
against 634 for 4k, where 656 is reached with `Tiles.held`.

With `Tiles.held`, blocks of 128 keys take 0.84 to 0.99 of the time without it. For
heads of 64 under a causal mask they take 1.02 of it, and blocks of 160 keys 1.01 to
1.04 (``tests/bench/results/attention_held_h200.json``).
"""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    here = processors(device)
    found = [_claiming(c, spec) for c in _configs(spec)]
    found = [replace(c, programs=min(c.programs, here)) for c in found]
    return [*short.configs(Tiles(short=True), spec, device, False), *found]


def _configs(spec: Spec) -> list[Tiles]:
    width = max(widths(spec))
    if extra_in(spec).copied:
        return [
            *_SMALLER, Tiles(96, 2, 3), Tiles(64, 2, 3), Tiles(64, 3, 2),
            Tiles(128, 2, 2, turns=False), Tiles(128, 2, 2, programs=0),
        ]  # fmt: skip
    if width <= 64:
        return [
            Tiles(128, 4, 3, turns=False), Tiles(128, 4, 3, turns=False, held=True),
            Tiles(128, 4, 3), Tiles(96, 4, 3, turns=False),
            Tiles(128, 4, 2), Tiles(64, 6, 3, turns=False),
            Tiles(128, 4, 3, programs=0),
        ]  # fmt: skip
    if width <= 128:
        return [
            Tiles(128, 2, 2), Tiles(160, 2, 2, turns=False),
            Tiles(128, 2, 2, turns=False, held=True), Tiles(64, 3, 3, turns=False),
            Tiles(128, 2, 2, turns=False), Tiles(144, 2, 2, turns=False),
            Tiles(96, 3, 2, turns=False), Tiles(128, 2, 2, programs=0),
        ]  # fmt: skip
    return [
        Tiles(64, 2, 2, turns=False), Tiles(80, 2, 2, turns=False),
        Tiles(96, 2, 2, turns=False), Tiles(64, 2, 3, turns=False),
        Tiles(112, 2, 2, turns=False), Tiles(80, 2, 2),
        Tiles(64, 2, 2, programs=0, turns=False),
    ]  # fmt: skip


def shared_memory(
    config: Tiles,
    h: int,
    e: int,
    own: bool,
    extra: Extra = NONE,
    halves: bool = False,
) -> int:
    """Returns bytes of shared memory for heads of width h and values of width e.

    Args:
        config: The config.
        h: Width of q and k.
        e: Width of v.
        own: Whether the result has memory of its own instead of q's.
        extra: The operands of scores beside q and k.
        halves: Whether q, k and v are float32, in two parts.
    """
    times = 1 + halves
    q, out = times * config.rows * h, config.rows * e
    blocks = times * config.stages * config.block_kv * (h + e)
    tiles = 2 * (blocks + (q + out if own else max(q, out)))
    others = extra.nbytes(config.stages, config.rows, config.block_kv)
    others += KIB if config.claimed else 0
    return tiles + others + 4 * config.rows + BARRIERS


KIB = 1 << 10

BARRIERS = KIB
"""Bytes for barriers and alignment, at most."""


def result_has_memory(
    config: Tiles, h: int, e: int, extra: Extra = NONE, halves: bool = False
) -> bool:
    """Returns whether shared memory holds the result beside the next tile's q.

    It must if they differ in width, since one warpgroup's rows would otherwise overlap
    another's.
    """
    room = shared_memory(config, h, e, True, extra, halves) <= SHARED_MEMORY
    return h != e or (config.programs > 0 and room)


def registers(config: Tiles, e: int, count: int = 1) -> int:
    """Returns registers per lane for scores, weights and result.

    An accumulator of 64 rows has ``columns / 2`` registers of float32 per lane, each
    part of weights in 16 bits half of that. `count` is that of `dtypes.products`.
    """
    return config.block_kv // 2 + min(count, 2) * config.block_kv // 4 + e // 2


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, registers, block sizes."""
    del device
    return short.fits(spec, config, False) if config.short else _fits(config, spec)


def _fits(config: Tiles, spec: Spec) -> Verdict:
    return fits_widths(config, *widths(spec), extra_in(spec), _count(spec))


def _count(spec: Spec) -> int:
    return products(spec.param(PARAM), spec.dtype("q"))


def first_fitting(h: int, e: int, extra: Extra = NONE, count: int = 1) -> Tiles:
    """Returns the default tiles for heads of width h and values of width e.

    Args:
        h: The width of q and k.
        e: The width of v.
        extra: The operands of scores beside q and k.
        count: Products of 16 bits that make one; see `dtypes.products`.

    Example:
        >>> first_fitting(64, 64).block_kv, first_fitting(256, 256).block_kv
        (128, 64)
    """
    smallest = Tiles(32, 2, 2, turns=False)
    tried = Tiles(), *_SMALLER
    fitting = (x for x in tried if fits_widths(x, h, e, extra, count).ok)
    return next(fitting, smallest)


def fits_widths(
    config: Tiles, h: int, e: int, extra: Extra = NONE, count: int = 1
) -> Verdict:
    """Returns the same for heads of width h and values of width e."""
    found = [YES]
    if config.warpgroups not in REGISTERS:
        found.append(no("warpgroups", f"{config.warpgroups} warpgroups, not 2 or 3"))
        return all_of(*found)
    size = shared_memory(config, h, e, h != e, extra, count > 2)
    if size > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    most = REGISTERS[config.warpgroups][0] - OTHERS
    used = registers(config, e, count) + extra.registers(config.block_kv)
    if used > most:
        found.append(no("registers", f"{used} registers for tiles, of {most}"))
    if config.block_kv % 16 or not 16 <= config.block_kv <= 256:
        found.append(
            no("block_kv", f"{config.block_kv} is not a multiple of 16 to 256")
        )
    if extra.copied and config.block_kv % 32:
        text = f"{config.block_kv} is not a multiple of 32, as tables and segments want"
        found.append(no("block_kv", text))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    return all_of(*found)


OTHERS = 32
"""Registers per lane beside the tiles: maxima, sums, addresses. With fewer, ptxas
spills (12.9: blocks of 160 keys and 3 warpgroups for heads of 64)."""
