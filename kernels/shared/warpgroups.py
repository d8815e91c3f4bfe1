"""Divides the work of a block among its warpgroups: some compute, others copy.

Those that compute take registers from those that copy, which need few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.shared import pallas_gpu


def divide(
    computes: Any,
    compute: Callable[[], None],
    copy: Callable[[], None],
    registers: tuple[int, int],
) -> None:
    """Runs one of two functions in each warpgroup.

    Args:
        computes: Whether this warpgroup computes.
        compute: What those do that compute.
        copy: What those do that copy.
        registers: Registers per lane of those that compute, and of those that copy. A
            zero leaves them as they are.
    """
    most, least = registers

    @pallas_gpu.when(computes)
    def _() -> None:
        if most:
            plgpu.set_max_registers(most, action="increase")
        compute()

    @pallas_gpu.when(jnp.logical_not(computes))
    def _() -> None:
        if least:
            plgpu.set_max_registers(least, action="decrease")
        copy()
