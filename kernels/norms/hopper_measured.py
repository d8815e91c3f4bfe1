"""Sizes of norms of rows that were measured on Hopper GPUs, and where kernels pay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.norms.forms import is_centred
from rewriter.kernels.norms.hopper_config import (
    LANES,
    TILE_ROWS,
    Norm,
    steps_of,
    usual,
)
from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

MEASURED_COLUMNS, MEASURED_BYTES = range(1024, 16385), 16 << 20
"""Columns, and the fewest bytes of all rows, that were measured on an H200
(``tests/bench/results/hopper_norms_h200.json``, ``decoder_norms_h200.json``)."""

NARROW = {
    True: (range(64, 1024),), False: (range(64, 257), range(512, 1024)),
}  # fmt: skip
"""Columns that pay with gradients, by whether rows are centred. Layer norms took 0.66
to 0.8 of XLA's time on an H100 and an H200, RMS norms 0.72 to 0.76 on an H200
(``tests/bench/results/choices_h100.json``, ``choices_h200.json``). Of up to 256
columns, tiles took 0.39 to 0.56 for layer norms, and 0.59 to 0.82 for RMS norms of 64
to 192 (``tests/bench/results/narrow_norms_h200.json``,
``choices_few_scores_h200.json``)."""

FORWARD_COLUMNS, FORWARD_BYTES = range(512, 1024), 24 << 20
"""Columns and the fewest bytes of which a forward pays. Alone, layer norms took 0.78 to
0.88 of XLA's time on an H200, and RMS norms 0.92 to 1.00. Between a residual add and a
product they took 0.94 to 1.01, and 1.07 where rows were of 12 MiB
(``tests/bench/results/norms_in_programs_h200.json``)."""

WIDE_BYTES = 64 << 20
"""The bytes from which a forward of an RMS norm of 1024 columns and more is as fast by
XLA: 16384 x 4096 took 0.95 of our time on an H100 and 0.98 on an H200. 8192 x 2048
took 1.2 times our time on an H200, 5735 x 1536 1.35 (the shipped measurements, and
``tests/bench/results/held_out_h200.json``)."""

NARROW_AND_SMALL = {True: (range(64, 1024),), False: (range(256, 1024),)}
"""The same of arrays below `MEASURED_BYTES`."""

SMALL_BYTES, SMALL_ROWS = 5 << 18, 256
"""The fewest bytes and rows that pay with gradients. Smaller arrays than
`MEASURED_BYTES` stay in the chip's cache, and XLA's five to seven kernels took 1.3 to
2.8 times as long as ours on an H100 (``tests/bench/results/small_norms_h100.json``).
On an H200 they took 1.1 times as long for RMS norms of 272 x 2880 and 1192 x 640
(``tests/bench/results/norms_grid_h200.json``)."""


def measured(spec: Spec, passes: str) -> Verdict:
    """Returns whether a use is among the measured sizes, not only supported."""
    shape, size = spec.shape("x"), _bytes_of_rows(spec)
    columns = (MEASURED_COLUMNS,)
    if is_narrow(spec, passes):
        columns = _narrow(spec)
    least = MEASURED_BYTES
    if is_slow_forward(spec, passes):
        return YES
    if passes != "forward" and math.prod(shape[:-1]) >= SMALL_ROWS:
        least = SMALL_BYTES
    if _is_in(shape[-1], columns) and size >= least:
        return YES
    text = f"rows of {shape[-1]} and {size / (1 << 20):.3g} MiB: measured for rows of"
    text = f"{text} {columns[0][0]} to {columns[-1][-1]}"
    return no("unmeasured", f"{text} and {least >> 20} MiB and more")


def is_narrow(spec: Spec, passes: str) -> bool:
    """Returns whether a use has narrow rows that XLA takes long for, with gradients."""
    return passes != "forward" and _is_in(spec.shape("x")[-1], _narrow(spec))


def _is_in(columns: int, ranges: tuple[range, ...]) -> bool:
    return any(columns in each for each in ranges)


def is_slow_forward(spec: Spec, passes: str) -> bool:
    """Returns whether XLA takes longer for a use without gradients."""
    columns, size = spec.shape("x")[-1], _bytes_of_rows(spec)
    if columns in MEASURED_COLUMNS:
        most = math.inf if is_centred(spec) else WIDE_BYTES
        return passes == "forward" and MEASURED_BYTES <= size < most
    enough = columns in FORWARD_COLUMNS and size >= FORWARD_BYTES
    enough = enough and columns % LANES == 0  # 576 took 1.08 of XLA's time
    return passes == "forward" and enough


def busy(norm: Norm, processors: int) -> float:
    """Returns the share of teams that have rows in a forward, over all turns.

    Example:
        >>> from rewriter.kernels.norms.hopper_config import Norm
        >>> norm = Norm(True, 0.0, 2176, 4096, "bfloat16", "bfloat16", ())
        >>> round(busy(norm, 132), 2)
        0.82
    """
    config = usual(norm, False, processors)
    steps = -(-norm.m // TILE_ROWS) if config.tiled else steps_of(norm.m, config)
    teams = config.programs * config.teams
    return steps / (-(-steps // teams) * teams)


def is_small(spec: Spec) -> bool:
    """Returns whether all rows are so small that the chip's cache holds them."""
    return _bytes_of_rows(spec) < MEASURED_BYTES


def _narrow(spec: Spec) -> tuple[range, ...]:
    return (NARROW_AND_SMALL if is_small(spec) else NARROW)[is_centred(spec)]


def _bytes_of_rows(spec: Spec) -> int:
    return math.prod(spec.shape("x")) * jnp.dtype(spec.dtype("x")).itemsize
