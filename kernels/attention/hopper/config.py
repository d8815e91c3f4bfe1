"""What the Hopper kernel may be tuned by, and what fits into an SM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from rewriter.kernels.attention.hopper.beside import NONE, Beside, beside_in
from rewriter.kernels.hopper import PROCESSORS, SHARED_MEMORY, processors
from rewriter.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.device import Device
    from rewriter.kernel import Spec

REGISTERS = {2: (240, 24), 3: (160, 32)}
"""By number of computing warpgroups: registers per lane for them and for the one that
copies. All lanes of an SM together have 512 x 128."""


@dataclass(frozen=True)
class Tiles:
    """The config of the forward.

    Attributes:
        block_kv: Keys of a block.
        stages: Blocks of k and of v that shared memory holds.
        warpgroups: Warpgroups that compute, 64 query rows each.
        programs: Blocks of threads that stay and take one tile of rows after the
            other; 0 starts one for every tile.
        turns: Whether warpgroups take turns at the tensor cores, so that one
            computes exponentials while the other multiplies.
        claimed: Whether blocks of threads claim a tile when they are done with one,
            from jax 0.11 on; otherwise tiles are dealt out before.
        held: Whether the product of weights and values before is waited for behind a
            block's exponentials; ptxas (13.0) waits for it in front of them otherwise.
    """

    block_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    programs: int = PROCESSORS
    turns: bool = True
    claimed: bool = False
    held: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return 64 * self.warpgroups


@dataclass(frozen=True)
class BackwardTiles:
    """The config of the backward.

    Attributes:
        queries: Queries of a block that a tile of keys meets, for dk and dv.
        keys: Keys of a block that a tile of queries meets, for dq.
        stages: Blocks that shared memory holds.
        warpgroups: Warpgroups that compute, 64 rows of a tile each.
        programs: As in `Tiles`.
        fused: Whether one kernel computes all, which saves two products of seven, and
            adds up dq in memory: in an order that differs from run to run. From jax
            0.11 on.
        divided: Whether, for dk and dv, two warpgroups share 64 keys: one computes
            weights and dv, the other how they change, and dk. For wide heads.
        v_stages: Blocks of v that shared memory holds for dq, where they are free
            before those of k; 0 for as many as `stages`.
        tables: Whether a kernel computes the cotangent of a bias that differs along
            queries and keys, if it is asked for and has room.
        claimed: As in `Tiles`.
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


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the rule of thumb, by the widths of heads and by what is hidden.

    Measured on an H200, bfloat16, jax 0.11.2
    (``tests/bench/results/hopper_attention_h200.json``).
    """
    h, e = spec.shape("q")[3], spec.shape("v")[3]
    left, _ = spec.param("window", (None, None))
    beside, hides = beside_in(spec), _hides(spec)
    long = spec.shape("k")[1] >= (LONG_CAUSAL if hides else LONG)
    if max(h, e) <= 64:
        best = Tiles(128, 4, 3, turns=False, held=left is not None or not hides)
    elif max(h, e) > 128:
        best = Tiles(64, 2, 2, turns=False)
    elif long and left is None:
        best = Tiles(160, 2, 2, turns=False)
    elif left is not None and beside == NONE and not spec.param("softcap"):
        best = Tiles(64, 3, 3, turns=False)
    else:
        held = hides and not beside.copied
        best = Tiles(128, 2, 2, turns=hides and not held, held=held)
    # Other widths of values and tables take more memory: 32 keys are few enough.
    tried = (best, *(_SMALLER if beside.copied or beside.slopes else ()))
    smallest = Tiles(32, 2, 2, turns=False)
    tried = [_claiming(x, spec) for x in tried]
    made = next((x for x in tried if fits_widths(x, h, e, beside).ok), smallest)
    return replace(made, programs=processors(device))


def _hides(spec: Spec) -> bool:
    """Whether rows see more or fewer keys by where they are, or by lengths."""
    return spec.param("window", (None, None)) != (None, None) or spec.has("kv_lengths")


def _claiming(config: Tiles, spec: Spec) -> Tiles:
    """Returns a config whose tiles are claimed where that was faster, and has room.

    On an H200 they took 0.94 to 1.00 of the time of tiles that are dealt out, 0.81
    with segments, which deal unevenly, and 1.02 beside tables of biases.
    """
    h, e, beside = spec.shape("q")[3], spec.shape("v")[3], beside_in(spec)
    claimed = config.programs > 0 and not beside.tables
    made = replace(config, claimed=claimed)
    return made if fits_widths(made, h, e, beside).ok else replace(made, claimed=False)


_SMALLER = (
    Tiles(128, 2, 3), Tiles(128, 2, 2), Tiles(96, 2, 2), Tiles(64, 2, 2, turns=False),
)  # fmt: skip


LONG, LONG_CAUSAL = 2048, 8192
"""Keys from which blocks of 160 are faster than blocks of 128: 680 against 669 TF/s for
4k keys, 564 against 575 for 1k. Under a causal mask 692 against 657 for 16k keys, 591
against 634 for 4k, where 656 is reached with `Tiles.held`. With that blocks of 128 keys
take 0.84 to 0.99 of the time where no warpgroup waits for its turn, but 1.02 for heads
of 64 under a causal mask, and blocks of 160 keys 1.01 to 1.04
(``tests/bench/results/attention_held_h200.json``).
"""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, the likeliest first."""
    here = processors(device)
    found = [_claiming(c, spec) for c in _configs(spec)]
    return [replace(c, programs=min(c.programs, here)) for c in found]


def _configs(spec: Spec) -> list[Tiles]:
    width = max(spec.shape("q")[3], spec.shape("v")[3])
    if beside_in(spec).copied:
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
        Tiles(96, 2, 2, turns=False), Tiles(80, 2, 2), Tiles(128, 2, 2, turns=False),
        Tiles(64, 2, 2, programs=0, turns=False),
    ]  # fmt: skip


def shared_memory(
    config: Tiles, h: int, e: int, apart: bool, beside: Beside = NONE
) -> int:
    """Returns bytes of shared memory for heads of width h and values of width e.

    Args:
        config: The config.
        h: Width of q and k.
        e: Width of v.
        apart: Whether the result has memory of its own, and not that of q.
        beside: What scores read beside q and k.
    """
    q, out = config.rows * h, config.rows * e
    blocks = config.stages * config.block_kv * (h + e)
    tiles = 2 * (blocks + (q + out if apart else max(q, out)))
    others = beside.nbytes(config.stages, config.rows, config.block_kv)
    others += KIB if config.claimed else 0
    return tiles + others + 4 * config.rows + BARRIERS


KIB = 1 << 10

BARRIERS = KIB
"""Bytes for barriers and alignment, at most."""


def apart(config: Tiles, h: int, e: int, beside: Beside = NONE) -> bool:
    """Returns whether shared memory holds the result beside the next tile's q.

    It must if they differ in width, since one warpgroup's rows would then lie in what
    is another's.
    """
    room = shared_memory(config, h, e, True, beside) <= SHARED_MEMORY
    return h != e or (config.programs > 0 and room)


def registers(config: Tiles, e: int) -> int:
    """Returns registers per lane for scores, weights and result.

    An accumulator of 64 rows has ``columns / 2`` registers of float32 per lane, weights
    in 16 bits half of that.
    """
    return config.block_kv // 2 + config.block_kv // 4 + e // 2


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: shared memory, registers, block sizes."""
    del device
    h, e = spec.shape("q")[3], spec.shape("v")[3]
    return fits_widths(config, h, e, beside_in(spec))


def first_fitting(h: int, e: int, beside: Beside = NONE) -> Tiles:
    """Returns tiles for heads of width h and values of width e where no one says.

    Example:
        >>> first_fitting(64, 64).block_kv, first_fitting(256, 256).block_kv
        (128, 64)
    """
    smallest = Tiles(32, 2, 2, turns=False)
    fitting = (x for x in (Tiles(), *_SMALLER) if fits_widths(x, h, e, beside).ok)
    return next(fitting, smallest)


def first_fitting_backward(
    h: int, e: int, beside: Beside = NONE
) -> BackwardTiles | None:
    """Returns the same of the backward; None if nothing fits."""
    tried = (BackwardTiles(), *WIDE)
    fitting = (x for x in tried if fits_backward_widths(x, h, e, beside).ok)
    return next(fitting, None)


def fits_widths(config: Tiles, h: int, e: int, beside: Beside = NONE) -> Verdict:
    """Returns the same for heads of width h and values of width e."""
    found = [YES]
    if config.warpgroups not in REGISTERS:
        found.append(no("warpgroups", f"{config.warpgroups} warpgroups, not 2 or 3"))
        return all_of(*found)
    size = shared_memory(config, h, e, h != e, beside)
    if size > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    most = REGISTERS[config.warpgroups][0] - OTHERS
    used = registers(config, e) + beside.registers(config.block_kv)
    if used > most:
        found.append(no("registers", f"{used} registers for tiles, of {most}"))
    if config.block_kv % 16 or not 16 <= config.block_kv <= 256:
        found.append(no("block_kv", f"{config.block_kv} is no multiple of 16 to 256"))
    if beside.copied and config.block_kv % 32:
        text = f"{config.block_kv} is no multiple of 32, as tables and segments want"
        found.append(no("block_kv", text))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    return all_of(*found)


OTHERS = 32
"""Registers per lane for all but the tiles: maxima, sums, addresses. With fewer left,
ptxas spills some (12.9: blocks of 160 keys and 3 warpgroups for heads of 64)."""


CHANGES = 2
"""Blocks of changes of scores that shared memory holds, for dq."""

WEIGHTS = 2
"""Blocks of weights that it holds, where another warpgroup reads them."""


def backward_default(spec: Spec, device: Device) -> BackwardTiles:
    """Returns the rule of thumb, by the heads' width and by what scores read.

    On an H200, in microseconds (``tests/bench/results/attention_backward_h200.json``):
    dk and dv of heads of 64 take 572 for 620 with blocks of 128 queries, under a causal
    mask, but 372 for 320 in windows; those of heads of 128 that see all keys 1458 for
    1654 with three blocks of 64 keys in memory, as many as two under a causal mask.
    """
    h, e = spec.shape("q")[3], spec.shape("v")[3]
    width, beside = max(h, e), beside_in(spec)
    window = spec.param("window", (None, None))
    if beside.copied or beside.slopes:  # untried; ptxas spills more with 128 keys
        best = BackwardTiles(64, 128 if width <= 64 else 64)
    elif width <= 64 and window[0] is None and not spec.param("softcap"):
        best = BackwardTiles(128, 128)
    elif width <= 64:
        best = BackwardTiles(64, 128, 3)
    else:
        best = BackwardTiles(64, 128) if _hides(spec) else BackwardTiles(64, 64, 3)
    tried = (best, replace(best, keys=64), *WIDE)
    tried = [_claiming_backward(x, spec) for x in tried]
    fitting = (x for x in tried if fits_backward_widths(x, h, e, beside).ok)
    return replace(next(fitting, best), programs=processors(device))


def _claiming_backward(config: BackwardTiles, spec: Spec) -> BackwardTiles:
    """Returns a config whose tiles are claimed where they differ, and there is room.

    On an H200 that took 0.97 to 1.00 of the time of tiles that are dealt out, 0.82 with
    segments, and 1.01 where all tiles are alike.
    """
    h, e, beside = spec.shape("q")[3], spec.shape("v")[3], beside_in(spec)
    differ = _hides(spec) or beside.rows or beside.columns or spec.has("mask")
    made = replace(config, claimed=config.programs > 0 and bool(differ))
    fits = fits_backward_widths(made, h, e, beside).ok
    return made if fits else replace(made, claimed=False)


WIDE = (
    BackwardTiles(64, 64, 3, divided=True),
    BackwardTiles(64, 64, 2, divided=True),
    BackwardTiles(64, 64, 2, divided=True, v_stages=1),
    BackwardTiles(64, 32, 2, divided=True),
    BackwardTiles(32, 32, 2, divided=True),
    BackwardTiles(32, 32, 2, divided=True, v_stages=1),
)
"""What is tried where dk and dv have no room in one warpgroup's registers, in order:
heads of 192 and values of 128 take the first, heads of 256 the third, tables of biases
beside those the others. ptxas spills nothing in any of them (13.0)."""


def backward_configs(spec: Spec, device: Device) -> list[BackwardTiles]:
    """Returns configs worth measuring, the likeliest first.

    The second is fused, whose sums differ from run to run: on an H200 that kernel took
    0.91 to 1.02 of the best other one's time. No rule of thumb takes it.
    """
    found = _backward_configs(spec)
    beside = beside_in(spec)
    if not (beside.copied or beside.slopes):
        found.insert(1, BackwardTiles(fused=True))
    found = [_claiming_backward(x, spec) for x in found]
    return [replace(x, programs=processors(device)) for x in found]


def _backward_configs(spec: Spec) -> list[BackwardTiles]:
    width = max(spec.shape("q")[3], spec.shape("v")[3])
    if width <= 64:
        return [
            BackwardTiles(128, 128), BackwardTiles(64, 128, 3),
            BackwardTiles(64, 64, 3, 3), BackwardTiles(64, 64, 3),
        ]  # fmt: skip
    narrow = [BackwardTiles(64, 128), BackwardTiles(64, 64, 3)]
    if width <= 128:
        return narrow
    return [*narrow, *WIDE, BackwardTiles(32, 64, 3), BackwardTiles(32, 64, 2)]


TABLE_BLOCK = 64
"""Keys of a block of a table's cotangent."""


def table_stages(config: BackwardTiles, h: int, e: int, beside: Beside) -> int:
    """Returns how many members shared memory holds for a table's cotangent; 0 for none.

    Example:
        >>> [table_stages(BackwardTiles(), x, x, Beside((2,))) for x in (32, 128, 256)]
        [4, 1, 0]
    """
    rows = 64 * config.warpgroups
    size = 2 * (h + e) * (rows + TABLE_BLOCK) + beside.nbytes(1, rows, TABLE_BLOCK)
    size += KIB * (3 + beside.rows + beside.columns)
    room = SHARED_MEMORY - BARRIERS - 4 * rows * TABLE_BLOCK
    return min(4, room // size)


def sums_block(config: BackwardTiles, h: int, e: int, beside: Beside) -> int:
    """Returns how many columns at a time the sums of changes take; 0 without room.

    Args:
        config: The config of the backward, whose warpgroups these kernels have.
        h: Width of q and k.
        e: Width of v.
        beside: What scores read beside q and k, transposed where rows are keys.

    Example:
        >>> [sums_block(BackwardTiles(), x, x, Beside(rows=1)) for x in (64, 256)]
        [64, 32]
    """
    rows = 64 * config.warpgroups
    for block in (64, 32):
        size = 2 * (h + e) * (rows + SUMS_STAGES * block) + BARRIERS
        size += beside.nbytes(SUMS_STAGES, rows, block)
        # Numbers of queries, sums and claims, each in memory that begins at a KiB.
        size += KIB * (5 + beside.rows + beside.columns)
        if size <= SHARED_MEMORY:
            return block
    return 0


SUMS_STAGES = 2
"""Blocks that shared memory holds for sums of changes."""


def fits_backward(config: BackwardTiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config of the backward can run."""
    del device
    h, e = spec.shape("q")[3], spec.shape("v")[3]
    return fits_backward_widths(config, h, e, beside_in(spec))


def fits_backward_widths(
    config: BackwardTiles, h: int, e: int, beside: Beside = NONE
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
        size = 2 * (h + e) * rows + 2 * config.stages * block * h
        size += 2 * (values or config.stages) * block * e
        size += 2 * 64 * block * WEIGHTS * divided
        its = beside.transposed if name == "queries" else beside
        size += its.nbytes(config.stages, rows, block) + BARRIERS
        # Numbers of queries, and of others, each in memory that begins at a KiB.
        size += KIB * ((3 if beside.copied else 2) + its.rows + its.columns)
        size += KIB if config.claimed else 0
        if config.fused:  # changes of scores in 16 bits, and dq
            size += config.warpgroups * (CHANGES * 2 * 64 * block + 4 * block * h)
        if size > SHARED_MEMORY:
            text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
            found.append(no("shared_memory", text))
    # Two accumulators of scores with the weights of one in 16 bits, beside results.
    most = REGISTERS[config.warpgroups][0] - 16
    sums = max(h, e) if config.divided else h + e
    used = max(
        config.queries + config.queries // 4 + sums // 2,
        config.keys + config.keys // 4 + h // 2,
    )
    if used > most:
        found.append(no("registers", f"{used} registers for tiles, of {most}"))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    if config.divided and config.warpgroups != 2:
        found.append(no("divided", f"{config.warpgroups} warpgroups, not 2"))
    if config.fused:
        found.append(_fits_fused(config))
    return all_of(*found)


def _fits_fused(config: BackwardTiles) -> Verdict:
    if jax.__version_info__ < (0, 11):
        return no("jax", f"jax {jax.__version__} cannot add up dq in memory")
    if config.divided or config.warpgroups != CHANGES or config.queries != 64:
        return no("fused", "dq is added up by 2 warpgroups, for 64 queries at a time")
    return YES
