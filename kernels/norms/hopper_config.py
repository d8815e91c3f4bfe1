"""Configs of norms of rows on Hopper: teams of warpgroups, and which of them fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.norms.forms import is_centred
from rewriter.kernels.shared.hopper import PROCESSORS, SHARED_MEMORY
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

LANES = 128
"""Lanes of a warpgroup."""

TOGETHER = 8
"""The most warpgroups of a block: 1024 lanes."""

BARRIERS = 32
"""The most barriers that one number of a lane can index."""

SUMS = 32
"""The most sums that a warp computes at once: as many as lanes."""

SPREAD = 4096
"""The most columns of a row for a single warpgroup. A lane then has 64 registers of
sums for a layer norm's scale and bias, of the 128 that it has with four warpgroups."""

FOUR = 4
"""Warpgroups of a block, and rows of a step of narrow rows. Each multiprocessor issues
for four warps at a time, and a row of 1024 columns takes it little longer than summing
over lanes."""

REGISTERS = 512
"""Registers of all warpgroups of a block, for one lane of each."""

MORE_REGISTERS = 48
"""Registers per lane for everything but sums over rows; with them ptxas spills
nothing."""

BARRIER = 8
"""Bytes of a barrier: each step in shared memory has one, and all operands another."""

MORE = 1 << 10
"""Bytes of shared memory for barriers of tiles of rows."""

COPIED_AT_ONCE = 128
"""Bytes of which Pallas wants a multiple in copies to shared memory."""

ALIGNMENT = 1 << 10
"""Bytes of shared memory of which the place of each array is a multiple."""

TILE_ROWS = 64
"""Rows of a tile of narrow rows."""

TILE_COLUMNS = range(16, 257, 16)
"""Columns of such rows."""


@dataclass(frozen=True)
class Teams:
    """The config of both passes.

    Attributes:
        rows: The most rows of a step; see `rows_of`.
        warpgroups: Warpgroups of a team, which share the columns of a row.
        teams: Teams of a block of threads. Each takes steps of its own.
        stages: Steps of a team that shared memory holds.
        programs: The most blocks of threads.
        tiled: Whether each warpgroup takes tiles of 64 rows; see `hopper_tiles`. Then
            a team is one warpgroup, and `rows` does not count.
    """

    rows: int = 1
    warpgroups: int = 1
    teams: int = 4
    stages: int = 3
    programs: int = PROCESSORS
    tiled: bool = False


@dataclass(frozen=True)
class Norm:
    """One norm to compute.

    Attributes:
        centred: Whether the mean is subtracted, as a layer norm does.
        eps: Added to the mean square.
        m: Rows.
        d: Columns.
        dtype: That of x.
        out: The result's dtype, and so the cotangent's.
        given: Dtypes of scale, bias and epsilon by name, where there are.
        addend: Whether rows as x are added to x, or to x's cotangent.
        of_squares: As `reference` has it.
    """

    centred: bool
    eps: float
    m: int
    d: int
    dtype: str
    out: str
    given: tuple[tuple[str, str], ...]
    addend: bool = False
    of_squares: bool = False

    @property
    def summed(self) -> tuple[str, ...]:
        """The operands whose cotangents are sums over rows."""
        return tuple(n for n, _ in self.given if n != "epsilon")

    @property
    def corrects(self) -> bool:
        """Whether gradients correct the remainder of rounded means.

        Rows in 16 bits are not so far from 0, relative to their spread, that it
        matters.
        """
        return self.centred and self.dtype == "float32"

    def bytes_of(self, *names: str) -> int:
        """Returns the bytes of one number of each of these operands, if present."""
        return sum(_item(t) for n, t in self.given if n in names)


def norm_of(
    centred: bool,
    x: Any,
    out: str | None,
    eps: float,
    given: Mapping[str, Any],
    addend: bool = False,
    of_squares: bool = False,
) -> Norm:
    """Returns the norm of arrays, or of anything with their shape and dtype."""
    m, d = math.prod(x.shape[:-1]), x.shape[-1]
    kinds = tuple((n, str(y.dtype)) for n, y in given.items())
    dtype, out = str(x.dtype), str(out or x.dtype)
    return Norm(centred, eps, m, d, dtype, out, kinds, addend, of_squares)


def of_spec(spec: Spec) -> Norm:
    """Returns the norm of a use of an op."""
    given = tuple((n, t) for n, t in spec.dtypes if n != "x")
    (*rows, d), dtype = spec.shape("x"), spec.dtype("x")
    out = spec.param("out_dtype") or dtype
    return Norm(is_centred(spec), 0.0, math.prod(rows), d, dtype, out, given)


def rows_of(m: int, config: Teams, backward: bool = False) -> int:
    """Returns the rows of a step: the largest power of two up to `Teams.rows`.

    The last step begins earlier where rows are no multiple of it, and computes some
    rows again. In gradients it divides all rows: their sums count each row once.

    Example:
        >>> [rows_of(m, Teams(rows=4)) for m in (8, 6, 7, 3)]
        [4, 4, 4, 2]
        >>> [rows_of(m, Teams(rows=4), backward=True) for m in (8, 6, 7, 3)]
        [4, 2, 1, 1]
    """
    rows = 1
    while 2 * rows <= min(config.rows, m) and not (backward and m % (2 * rows)):
        rows *= 2
    return rows


def steps_of(m: int, config: Teams, backward: bool = False) -> int:
    """Returns the number of steps of all rows."""
    return -(-m // rows_of(m, config, backward))


def programs_of(steps: int, config: Teams) -> int:
    """Returns the number of blocks of threads.

    It is the smallest number with the same most turns per block: with more blocks, some
    would only wait for others at the end.

    Example:
        >>> programs_of(4096, Teams(teams=1)), programs_of(4096, Teams(teams=4))
        (128, 128)
        >>> programs_of(3, Teams(teams=4))
        1
    """
    turns = -(-steps // (config.programs * config.teams))
    return -(-steps // (turns * config.teams))


def vector_of(norm: Norm, config: Teams) -> int:
    """Returns the neighbouring columns that a lane loads at once: 16 bytes at most.

    Chunks fill a warpgroup's columns if they can. Otherwise the last two overlap, and a
    vector is chosen for which all chunks take the fewest instructions.

    Example:
        >>> norm = Norm(True, 0.0, 8, 1536, "bfloat16", "bfloat16", ())
        >>> vector_of(norm, Teams()), vector_of(norm, Teams(warpgroups=2))
        (4, 2)
        >>> from dataclasses import replace
        >>> [vector_of(replace(norm, d=d), Teams()) for d in (2880, 576, 200)]
        [8, 2, 1]
    """
    own, vector = norm.d // config.warpgroups, _most_loaded(norm)
    if own % LANES == 0:
        while own % (LANES * vector):
            vector //= 2
        return vector
    able = [v for v in (8, 4, 2, 1) if v <= vector and _takes(own, v)]
    return min(able, key=lambda v: -(-own // (LANES * v)) * (v + 1), default=1)


def _most_loaded(norm: Norm) -> int:
    return 16 // max(_item(norm.dtype), _item(norm.out))


def _takes(own: int, vector: int) -> bool:
    """Whether chunks of a vector for each lane lie in so many columns."""
    return own % vector == 0 and own >= LANES * vector


def chunks_of(norm: Norm, config: Teams) -> int:
    """Returns the number of chunks of a warpgroup's columns.

    Example:
        >>> norm = Norm(True, 0.0, 8, 2880, "bfloat16", "bfloat16", ())
        >>> chunks_of(norm, Teams())
        3
    """
    return -(-norm.d // (config.warpgroups * LANES * vector_of(norm, config)))


def is_spread(norm: Norm, warpgroups: int) -> bool:
    """Returns whether so many warpgroups can share a row.

    Rows are copied in pieces of 128 bytes. Each warpgroup has a chunk of columns at
    least.

    Example:
        >>> norm = Norm(True, 0.0, 8, 2880, "bfloat16", "bfloat16", ())
        >>> from dataclasses import replace
        >>> [is_spread(replace(norm, d=d), 1) for d in (2880, 1000, 96)]
        [True, False, False]
    """
    if norm.d % (warpgroups * LANES) == 0:
        return True
    read = (norm.dtype, norm.out, *(t for n, t in norm.given if n != "epsilon"))
    least = min(map(_item, read))
    if norm.d % warpgroups or norm.d * least % COPIED_AT_ONCE:
        return False
    return _takes(norm.d // warpgroups, 1)


def shared_memory(norm: Norm, config: Teams, backward: bool) -> int:
    """Returns the bytes of shared memory that a block of threads takes."""
    slots, rows = config.teams * config.stages, rows_of(norm.m, config, backward)
    items = [_item(norm.dtype)] * (1 + norm.addend)
    items += [_item(norm.out)] if backward else []
    ring = sum(_aligned(slots * rows * norm.d * item) for item in items)
    if backward and config.teams > 1:
        ring = max(ring, _aligned(4 * norm.d) * len(norm.summed))
    names = ("scale",) if backward else ("scale", "bias")
    kept = sum(_aligned(norm.bytes_of(name) * norm.d) for name in names)
    barriers = BARRIER * (slots + 1)
    return ring + kept + _aligned(sums_of(norm, config, backward)) + barriers


def _aligned(size: int) -> int:
    """Returns the bytes that an array takes: each begins at a multiple of 1024."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def sums_of(norm: Norm, config: Teams, backward: bool) -> int:
    """Returns the bytes in which warps of a team exchange sums."""
    values = rows_of(norm.m, config, backward) * (2 if backward else 1)
    return 4 * 2 * values * 4 * config.warpgroups * config.teams


def _item(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


# ------------------------------------------------------------------ what fits
def verdict_of(config: Teams, norm: Norm, backward: bool) -> Verdict:
    """Returns whether a config can run for a norm, with reasons if not."""
    together, found = config.teams * config.warpgroups, [YES]
    if config.tiled:
        return _verdict_of_tiles(config, norm, backward)
    numbers = (config.rows, config.warpgroups, config.teams, config.programs)
    if min(numbers) < 1 or config.stages < 2:
        return no("numbers", f"{config} has a number below 1, or fewer than 2 stages")
    if together > TOGETHER:
        text = f"{together} warpgroups, and a block has {TOGETHER} at most"
        found.append(no("warpgroups", text))
    if not is_spread(norm, config.warpgroups):
        text = f"nor of {COPIED_AT_ONCE} bytes from {LANES} columns on"
        if config.warpgroups > 1:
            text = f"{text} for each of {config.warpgroups} warpgroups"
        text = f"rows of {norm.d}: not a multiple of {LANES} columns, {text}"
        found.append(no("lanes", text))
        return all_of(*found)
    if (count := config.teams * config.stages) > BARRIERS:
        found.append(no("stages", f"{count} of all teams, of at most {BARRIERS}"))
    if (values := rows_of(norm.m, config, backward) * (1 + backward)) > SUMS:
        found.append(no("rows", f"{values} sums at once, of at most {SUMS}"))
    if backward:
        each = chunks_of(norm, config) * vector_of(norm, config)
        sums = each * len(norm.summed)
        most = min(255, REGISTERS // together // 8 * 8)
        if (used := sums + MORE_REGISTERS) > most:
            found.append(no("registers", f"{used} registers a lane, of at most {most}"))
    if (size := shared_memory(norm, config, backward)) > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    return all_of(*found)


def columns_of_panel(norm: Norm) -> int:
    """Returns the columns of a panel of a tile of rows, the same for both arrays.

    Example:
        >>> columns_of_panel(Norm(True, 0.0, 64, 96, "bfloat16", "float32", ()))
        32
    """
    widest = 128 // max(_item(norm.dtype), _item(norm.out))
    widest = min(widest, 32) if norm.d > LANES else widest  # registers hold sums
    return next(x for x in (64, 32, 16) if x <= widest and norm.d % x == 0)


def result_has_memory(norm: Norm) -> bool:
    """Returns whether a result is too large for the place of its rows, or too small."""
    return _item(norm.out) != _item(norm.dtype)


def _verdict_of_tiles(config: Teams, norm: Norm, backward: bool) -> Verdict:
    """Returns the same for tiles of rows."""
    found, lanes = [YES], config.teams
    if norm.d not in TILE_COLUMNS:
        found.append(no("width", f"rows of {norm.d}, not a multiple of 16 up to 256"))
        return all_of(*found)
    if config.warpgroups != 1 or not 1 <= lanes <= FOUR or config.stages < 2:
        found.append(no("numbers", f"{config}: one to four teams of one warpgroup"))
    items = _item(norm.dtype) * (1 + norm.addend)
    items += _item(norm.out) if backward else 0
    size = lanes * config.stages * TILE_ROWS * norm.d * items + 2 * MORE
    size += norm.bytes_of("scale", "bias") * norm.d
    if result_has_memory(norm) and not backward:
        size += lanes * TILE_ROWS * norm.d * _item(norm.out)
    if size > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    if backward:
        panel = columns_of_panel(norm)
        used = len(norm.summed) * norm.d // 4 + 2 * panel + MORE_REGISTERS
        if used > (most := min(255, REGISTERS // lanes // 8 * 8)):
            found.append(no("registers", f"{used} registers a lane, of at most {most}"))
    return all_of(*found)


# --------------------------------------------------------------- what is proposed
def _likely(norm: Norm, programs: int) -> Iterator[Teams]:
    """Yields configs, most promising first."""
    able = [w for w in (1, 2, FOUR) if norm.d % (w * LANES) == 0]
    able = able or [w for w in (1, 2, FOUR) if is_spread(norm, w)] or [1]
    if norm.d in TILE_COLUMNS:
        # One warpgroup leaves a multiprocessor idle: only where rows are no lines.
        fewest = 1 if norm.d % LANES else 2
        yield from (c for c in tiled(programs) if c.teams >= fewest)
    enough = [w for w in able if norm.d <= w * SPREAD]
    narrow = 1 << max(1, SPREAD // norm.d).bit_length() - 1
    for warpgroups in enough + [w for w in reversed(able) if w not in enough]:
        most = FOUR // warpgroups
        together = dict.fromkeys((min(FOUR, narrow), 1))
        sizes = itertools.product((3, 2), range(most, 0, -1), together)
        # With another array to hold, prefer two stages of all teams to three of fewer.
        order = sorted(sizes, key=lambda s: (-s[2], -s[1])) if norm.addend else sizes
        for stages, teams, rows in order:
            yield Teams(rows, warpgroups, teams, stages, programs)


def tiled(programs: int) -> Iterator[Teams]:
    """Yields configs of tiles of rows, most promising first."""
    for stages, teams in ((3, 2), (2, 2), (3, 1), (2, 1), (3, 3), (2, FOUR)):
        yield Teams(TILE_ROWS, 1, teams, stages, programs, tiled=True)


def usual(norm: Norm, backward: bool, programs: int = PROCESSORS) -> Teams:
    """Returns the first likely config that fits; if none does, one that does not.

    Example:
        >>> usual(Norm(True, 0.0, 64, 16384, "bfloat16", "bfloat16", ()), True)
        Teams(rows=1, warpgroups=4, teams=1, stages=3, programs=132, tiled=False)
    """
    every = list(_likely(norm, programs))
    good = (c for c in every if verdict_of(c, norm, backward).ok)
    return next(good, every[0])


def proposed(norm: Norm, backward: bool, programs: int) -> list[Teams]:
    """Returns configs worth measuring, most promising first."""
    first = usual(norm, backward, programs)
    narrow = [c for c in tiled(programs) if verdict_of(c, norm, backward).ok]
    if first.tiled:
        return narrow
    rows, shared, teams = first.rows, first.warpgroups, first.teams
    made = [
        Teams(r, w, t, stages, programs)
        for r, w, t in (
            (rows, shared, teams),
            (rows, shared, teams // 2),
            (2 * rows, shared, teams // 2),
            (rows // 2, shared, 2 * teams),
            (rows, shared, 2 * teams),
            (rows, 2 * shared, teams // 2),
            (rows, 2 * shared, teams),
            *([(rows, shared, teams - 1)] if norm.addend else []),
        )
        for stages in dict.fromkeys(
            (first.stages, first.stages + norm.addend, 2 * first.stages)
        )
    ]
    made = [c for c in dict.fromkeys(made) if verdict_of(c, norm, backward).ok]
    return [*made, *narrow]
