"""Sizes of norms of rows that were measured on Hopper GPUs, and where kernels pay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.norms import forward_time
from rewriter.kernels.norms.forms import is_centred
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

NARROW_AND_SMALL = {True: (range(64, 1024),), False: (range(384, 1024),)}
"""The same of arrays below `MEASURED_BYTES`. RMS norms of 8193 x 256 took 1.19 of XLA's
time on an H200, and 1024 x 384 0.88 (``tests/bench/results/norms_grid_h200.json``)."""

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
    if passes == "forward":
        columns, least = (forward_time.COLUMNS,), forward_time.LEAST_BYTES
    elif math.prod(shape[:-1]) >= SMALL_ROWS:
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


def is_small(spec: Spec) -> bool:
    """Returns whether all rows are so small that the chip's cache holds them."""
    return _bytes_of_rows(spec) < MEASURED_BYTES


def _narrow(spec: Spec) -> tuple[range, ...]:
    return (NARROW_AND_SMALL if is_small(spec) else NARROW)[is_centred(spec)]


def _bytes_of_rows(spec: Spec) -> int:
    return math.prod(spec.shape("x")) * jnp.dtype(spec.dtype("x")).itemsize
