"""Models the time of a norm's forward on a Hopper GPU, by XLA and by our kernel.

Both begin with some microseconds, and then move bytes. A few bytes are in the chip's
cache, which is faster than its memory; in between, the rate goes from one to the other.
XLA also takes time for each number. Our kernel takes turns: in each, every team of
warpgroups computes one step. The last turn takes as long as the others, whether all
teams have a step or not, unless memory is what takes the time.

The numbers are fitted to 80 forwards of 384 to 5120 columns on an H200 and an H100
(``tests/bench/results/norms_forward_h200.json``, ``norms_grid_h200.json``,
``small_norms_h100.json``), by least squares of logarithms. With `UNLIKE` as it is,
fewest are chosen wrong. Times of XLA deviate by 8 %, and ours by 9 %.
`tests/choose/test_measured_choices.py` has what follows for choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.norms.forms import is_centred
from rewriter.kernels.norms.hopper_config import Norm, of_spec, rows_of, steps_of, usual
from rewriter.kernels.shared.hopper import PROCESSORS
from rewriter.ops.estimate import SHEET_BANDWIDTH

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

COLUMNS, LEAST_BYTES = range(384, 16385), 6 << 20
"""Columns and the fewest bytes of rows of which forwards are modelled. Of fewer bytes
XLA was faster in all that were measured."""

WIDE_COLUMNS, WIDE_BYTES = 1024, 64 << 20
"""The columns and bytes of rows from which a forward of an RMS norm is as fast by XLA:
16384 x 4096 took 0.95 of our time on an H100 and 0.98 on an H200 (the shipped
measurements)."""


@dataclass(frozen=True)
class Rate:
    """How fast bytes are moved.

    Attributes:
        cache: Bytes a second of few bytes.
        memory: The share of the memory's bandwidth of many bytes.
        few: Up to so many bytes are few.
        many: From so many on they are many.
    """

    cache: float
    memory: float
    few: float
    many: float

    def seconds(self, nbytes: float, bandwidth: float) -> float:
        """Returns how long bytes take.

        Example:
            >>> Rate(5e12, 0.5, 1e7, 2e7).seconds(3e7, 4e12)
            1.5e-05
        """
        share = min(1.0, max(0.0, (nbytes - self.few) / (self.many - self.few)))
        each = (1 - share) / self.cache + share / (self.memory * bandwidth)
        return nbytes * each


XLA = Rate(7.2e12, 1.085, 23e6, 42e6)
OURS = Rate(5e12, 0.94, 38e6, 56e6)

BEGIN = {"xla": 1.35e-6, "hopper": 1.9e-6}
UNLIKE = {True: 1.4e-6, False: 0.85e-6}
"""XLA's seconds for rows in 16 bits of more than 1024 columns that are no power of two,
by whether rows are centred."""

NUMBER = {True: 0.6e-12, False: 0.27e-12}
"""XLA's seconds for a number, by whether rows are centred."""

NARROW, NARROW_SHARE = 512, 0.66
"""Up to so many columns XLA takes this share of that."""

ENOUGH = 0.94
"""The share of XLA's time that is enough. Then 5 of the 76 choices by this model took
1.05 to 1.12 of the faster one's time. Two of these took the kernel, 1.05 and 1.07 of
XLA's time."""

TURN = {True: 0.53e-9, False: 0.23e-9}
"""Our seconds for a column of a warpgroup's step, by whether rows are centred."""


def is_modelled(spec: Spec) -> bool:
    """Returns whether a forward is among the sizes that were measured."""
    columns, size = spec.shape("x")[-1], _bytes(of_spec(spec))
    if columns not in COLUMNS or size < LEAST_BYTES:
        return False
    wide = columns >= WIDE_COLUMNS and size >= WIDE_BYTES
    return is_centred(spec) or not wide


def seconds(spec: Spec, device: Device) -> dict[str, float]:
    """Returns seconds of a modelled forward: of ``"xla"`` and ``"hopper"``."""
    norm = of_spec(spec)
    bandwidth = device.bandwidth * (1.0 if device.measured else SHEET_BANDWIDTH)
    return {"xla": _by_xla(norm, bandwidth), "hopper": _by_ours(norm, bandwidth)}


def _by_xla(norm: Norm, bandwidth: float) -> float:
    begin, d = BEGIN["xla"], norm.d
    unlike = d > WIDE_COLUMNS and d & (d - 1) and jnp.dtype(norm.dtype).itemsize == 2
    begin += UNLIKE[norm.centred] if unlike else 0.0
    each = NUMBER[norm.centred] * (NARROW_SHARE if d <= NARROW else 1.0)
    return begin + XLA.seconds(_moved(norm), bandwidth) + each * norm.m * d


def _by_ours(norm: Norm, bandwidth: float) -> float:
    config = usual(norm, False, PROCESSORS)
    steps, teams = steps_of(norm.m, config), config.programs * config.teams
    turns = -(-steps // teams)
    columns = rows_of(norm.m, config) * norm.d / config.warpgroups
    computed = turns * columns * TURN[norm.centred]
    idle = (turns * teams / steps - 1) / 2
    moved = (1 + idle) * OURS.seconds(_moved(norm), bandwidth)
    return BEGIN["hopper"] + max(computed, moved)


def _bytes(norm: Norm) -> int:
    return norm.m * norm.d * jnp.dtype(norm.dtype).itemsize


def _moved(norm: Norm) -> float:
    """Bytes that are read and written."""
    return _bytes(norm) + norm.m * norm.d * float(jnp.dtype(norm.out).itemsize)
