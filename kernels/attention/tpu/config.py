"""Sizes of blocks on TPUs: the choices, and which of them fit into VMEM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.attention.tpu.schedule import MOST_BLOCKS
from rewriter.kernels.attention.tpu.sizes import FEW_ROWS, LANES, extent, listed
from rewriter.ops.device import Device
from rewriter.ops.tpu import UNKNOWN, generation
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

ANY = Device(UNKNOWN.kind, "tpu")
"""A TPU of unknown kind."""

MOST_STEPS = 1 << 17
"""The most words of the list of steps: 512 KiB of 1 MiB of SMEM."""


@dataclass(frozen=True)
class Blocks:
    """The config of the forward.

    Attributes:
        rows: Queries of a block.
        keys: Keys of a block.
        inner_rows: Queries whose scores are computed at a time.
        inner_keys: Keys whose scores are computed at a time.
    """

    rows: int = 512
    keys: int = 1024
    inner_rows: int = 512
    inner_keys: int = 512


def clipped(config: Blocks, t: int, s: int) -> Blocks:
    """Returns a config for few queries or keys: no larger than what there is.

    Example:
        >>> clipped(Blocks(1024, 1024, 256, 512), 20, 300)
        Blocks(rows=32, keys=384, inner_rows=32, inner_keys=384)
    """
    rows = min(config.rows, _up(t, 16 if t <= LANES else LANES))
    keys = min(config.keys, _up(s, LANES))
    inner = _part(config.inner_rows, rows), _part(config.inner_keys, keys)
    return Blocks(rows, keys, *inner)


def _part(inner: int, size: int) -> int:
    """The largest part of a size, in whole registers, that is no larger than inner.

    The size itself if it is less than half of inner.
    """
    if inner >= size:
        return size
    part = max(x for x in range(LANES, inner + 1, LANES) if size % x == 0)
    return part if 2 * part >= inner else size


def _up(x: int, step: int) -> int:
    return -(-x // step) * step


SMALLEST = Blocks(128, 128, 128, 128)

COSTS = {
    Blocks(1024, 2048, 1024, 512): (0.94, 0.92),
    Blocks(1024, 1024, 1024, 512): (1.0, 1.0),
    Blocks(512, 1024, 512, 512): (1.06, 1.27),
    Blocks(512, 512, 512, 512): (1.27, 1.60),
    Blocks(256, 512, 256, 512): (1.55, 2.58),
    Blocks(256, 256, 256, 256): (3.0, 4.9),
    SMALLEST: (6.0, 10.0),
}
"""Relative time per score by size of blocks, by libtpu's simulator, on a v5e and on a
v6e: 1 is 5183 and 3252 cycles for 1024 x 1024, heads of 128, bfloat16."""

LIKE_V6E = ("v6e", "7x")


def default(spec: Spec, device: Device) -> Blocks:
    """Returns the blocks that take the fewest cycles, of those that fit.

    Small blocks have fewer hidden scores; large ones take less time per score.
    """
    made = configs(spec, device)
    return made[0] if made else clipped(SMALLEST, *extent(spec))


def configs(spec: Spec, device: Device) -> list[Blocks]:
    """Returns configs worth measuring, most promising first."""
    size, good = extent(spec), list(runnable(spec, device))
    if size[0] <= FEW_ROWS:
        return good
    column = int(generation(device).name in LIKE_V6E)
    costs = {clipped(c, *size): cost[column] for c, cost in reversed(COSTS.items())}
    return sorted(good, key=lambda c: _time(spec, size, c, costs[c]))


def runnable(spec: Spec, device: Device) -> Iterator[Blocks]:
    """Yields the configs that can run, in no order of time."""
    size = extent(spec)
    proposed = list(COSTS)
    if size[0] <= FEW_ROWS:  # a step takes longer than reading few keys
        proposed = [Blocks(FEW_ROWS, k, FEW_ROWS, k) for k in (4096, 2048, 1024, 512)]
    for config in dict.fromkeys(clipped(c, *size) for c in proposed):
        if fits(config, spec, device).ok:
            yield config


def _time(
    spec: Spec, size: tuple[int, int], blocks: Blocks | BackwardBlocks, cost: float
) -> float:
    """The time of all scores, including those beyond edges, and of all steps."""
    each = cost * blocks.rows * blocks.keys + STEP
    return listed(spec, size, blocks) * each


STEP = 0.07 * (1 << 20)
"""The overhead of a step, some 350 cycles; the simulator counts few of them."""


def fits(config: Blocks, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: multiples of registers, VMEM, SMEM."""
    found = [YES]
    if config.rows % 16 or (config.rows > LANES and config.rows % LANES):
        found.append(
            no("rows", f"blocks of {config.rows} queries, not a multiple of 128")
        )
    if config.keys % LANES:
        found.append(no("keys", f"blocks of {config.keys} keys, not a multiple of 128"))
    for name, inner, outer in (
        ("inner_rows", config.inner_rows, config.rows),
        ("inner_keys", config.inner_keys, config.keys),
    ):
        if outer % inner or (inner < outer and inner % LANES):
            found.append(no(name, f"{inner}, no part of {outer} in multiples of 128"))
    found.append(_listed(config, extent(spec), spec))
    found.append(_within(vmem(config, *sizes(spec)), device))
    return all_of(*found)


def _listed(
    config: Blocks | BackwardBlocks, size: tuple[int, int], spec: Spec
) -> Verdict:
    """Whether the list of blocks fits into SMEM, if every batch entry has its own."""
    b, (t, s), rows, keys = spec.shape("q")[0], size, config.rows, config.keys
    alone = any(
        spec.has(n) and spec.shape(n)[0] > 1
        for n in ("mask", "q_segments", "kv_segments", "kv_lengths", "offset", "prefix")
    )
    many, per = -(-t // rows), -(-s // keys)
    steps = (b if alone else 1) * many * per
    if steps > MOST_STEPS:
        return no("smem", f"{steps} blocks of scores, more than {MOST_STEPS}")
    if max(many, per) > MOST_BLOCKS:
        return no("smem", f"{max(many, per)} blocks in a line, above {MOST_BLOCKS}")
    return YES


def _within(size: int, device: Device) -> Verdict:
    most = generation(device).vmem
    if size <= most:
        return YES
    return no("vmem", f"{size >> 20} MiB of VMEM of {most >> 20} MiB")


def sizes(spec: Spec) -> tuple[int, int, int, tuple[int, ...]]:
    """Returns widths of q and v, bytes of a number, and of numbers in tables."""
    tables = tuple(
        _bytes(spec.dtype(n))
        for n in ("bias", "mask", "dropout")
        if spec.has(n) and 1 not in spec.shape(n)[2:]
    )
    return spec.shape("q")[3], spec.shape("v")[3], _bytes(spec.dtype("q")), tables


def _bytes(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def vmem(
    config: Blocks, h: int, e: int, size: int, tables: tuple[int, ...] = ()
) -> int:
    """Returns bytes of VMEM: blocks twice, scratch, and intermediate values.

    Args:
        config: The config.
        h: Width of q and k.
        e: Width of v.
        size: Bytes of a number of q, k and v.
        tables: Bytes of a number of each table of all queries and keys.
    """
    h, e = _up(h, LANES), _up(e, LANES)
    rows, keys = config.rows, config.keys
    blocks = size * (rows * (h + e) + keys * (h + e)) + rows * keys * sum(tables)
    scratch = 4 * rows * (e + 2 * LANES)
    columns = 2 * 4 * LANES * (rows + keys)  # thin blocks: statistics, segments
    inner = config.inner_rows * config.inner_keys
    scores = 4 * inner * (3 + len(tables)) + 4 * config.inner_rows * e
    return 2 * blocks + scratch + columns + scores + (2 << 20)


@dataclass(frozen=True)
class BackwardBlocks:
    """The config of the backward.

    Attributes:
        rows: Queries of a block.
        keys: Keys of a block.
        inner_rows: Queries whose scores are computed at a time.
        inner_keys: Keys whose scores are computed at a time.
        fused: Whether one kernel computes all, with dk and dv of all keys in VMEM.
    """

    rows: int = 512
    keys: int = 512
    inner_rows: int = 512
    inner_keys: int = 512
    fused: bool = False


def backward_vmem(
    config: BackwardBlocks,
    s: int,
    h: int,
    e: int,
    size: int,
    tables: tuple[int, ...] = (),
) -> int:
    """Returns bytes of VMEM of the backward.

    Args:
        config: The config.
        s: Keys whose dk and dv stay in VMEM to the end; 0 if only a block's do.
        h: Width of q and k.
        e: Width of v.
        size: Bytes of a number of q, k and v.
        tables: Bytes of a number of each table of all queries and keys.
    """
    h, e = _up(h, LANES), _up(e, LANES)
    rows, keys = config.rows, config.keys
    blocks = size * (rows + keys) * (h + e) + rows * keys * sum(tables)
    held = _up(s, keys) if s else keys
    results = size * (rows * h + held * (h + e))
    scratch = 4 * (rows * h + held * (h + e))
    columns = 2 * 4 * LANES * (rows + keys)
    inner = config.inner_rows * config.inner_keys
    scores = 4 * inner * (5 + len(tables))
    scores += 4 * (config.inner_rows + config.inner_keys) * (h + e)
    return 2 * (blocks + results) + scratch + columns + scores + (2 << 20)


def backward_clipped(config: BackwardBlocks, t: int, s: int) -> BackwardBlocks:
    """Returns a config for few queries or keys: no larger than what there is."""
    rows, keys = min(config.rows, _up(t, LANES)), min(config.keys, _up(s, LANES))
    inner = _part(config.inner_rows, rows), _part(config.inner_keys, keys)
    return BackwardBlocks(rows, keys, *inner, config.fused)


SMALLEST_BACKWARD = BackwardBlocks(128, 128, 128, 128, False)


BACKWARD_COSTS = {
    BackwardBlocks(1024, 1024, 512, 512, True): 1.0,
    BackwardBlocks(1024, 1024, 1024, 512, True): 1.02,
    BackwardBlocks(512, 1024, 512, 512, True): 1.01,
    BackwardBlocks(512, 512, 512, 512, True): 1.1,
    BackwardBlocks(256, 512, 256, 512, True): 1.5,
    BackwardBlocks(1024, 1024, 512, 512, False): 1.5,
    BackwardBlocks(512, 1024, 512, 512, False): 1.7,
    BackwardBlocks(512, 512, 512, 512, False): 1.83,
    BackwardBlocks(256, 512, 256, 512, False): 2.3,
    BackwardBlocks(256, 256, 256, 256, False): 3.0,
    SMALLEST_BACKWARD: 5.0,
}
"""Like `COSTS`, on a v5e: 1 is 11516 cycles for 1024 x 1024. Costs for less than 512
keys are guesses."""


def backward_default(spec: Spec, device: Device) -> BackwardBlocks:
    """Returns the blocks that take the fewest cycles, of those that fit."""
    made = backward_configs(spec, device)
    return made[0] if made else SMALLEST_BACKWARD


def backward_configs(spec: Spec, device: Device) -> list[BackwardBlocks]:
    """Returns configs worth measuring, most promising first."""
    size = spec.shape("q")[1], spec.shape("k")[1]
    costs = {
        backward_clipped(c, *size): cost for c, cost in reversed(BACKWARD_COSTS.items())
    }
    good = backward_runnable(spec, device)
    return sorted(good, key=lambda c: _time(spec, size, c, costs[c]))


def backward_runnable(spec: Spec, device: Device) -> Iterator[BackwardBlocks]:
    """Yields the configs of the backward that can run, in no order of time."""
    size = spec.shape("q")[1], spec.shape("k")[1]
    found = (backward_clipped(c, *size) for c in reversed(BACKWARD_COSTS))
    for config in dict.fromkeys(found):
        if fits_backward(config, spec, device).ok:
            yield config


def fits_backward(config: BackwardBlocks, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config of the backward can run."""
    found = [YES]
    for name, size in (("rows", config.rows), ("keys", config.keys)):
        inner = getattr(config, f"inner_{name}")
        if size % LANES or inner % LANES or size % inner:
            text = f"{size} {name} in parts of {inner}, no multiples of 128"
            found.append(no(name, text))
    size = spec.shape("q")[1], spec.shape("k")[1]
    found.append(_listed(config, size, spec))
    s = spec.shape("k")[1] if config.fused else 0
    found.append(_within(backward_vmem(config, s, *sizes(spec)), device))
    return all_of(*found)
