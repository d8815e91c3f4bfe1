"""XLA's trials: on GPUs it times ways to compute products while it compiles.

For a ragged dot of 128 groups that takes 15 s of 16, all of what tuning it may. What is
not timed, the reference, is compiled without. So is the program as written where by the
kernels' estimates it takes `LOST` times as long as the best of them, which no trial
makes up for; if it turns out to take less, it is compiled again with its trials.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from rewriter.device import Device
from rewriter.implementation import XLA
from rewriter.key import BOTH, FORWARD
from rewriter.programs import Task

OPTION = "xla_gpu_autotune_level"

LOST = 8.0
"""How many times the best one's time a program takes that no trial would save."""

NOTE = "compiled without XLA's trials of products"


def compiled(lowered: Any, trials: bool) -> Any:
    """Returns the compiled program.

    Args:
        lowered: What `jax.jit` lowered.
        trials: Whether XLA may time products.
    """
    if trials or jax.default_backend() != "gpu":
        return lowered.compile()
    try:
        return lowered.compile(compiler_options={OPTION: 0})
    except Exception as problem:
        if OPTION not in str(problem):
            raise
        return lowered.compile()  # an XLA that has no such option any more


def likely_lost(task: Task, on: Device) -> bool:
    """Returns whether the program as written is far behind, by the kernels' estimates.

    Args:
        task: The task.
        on: The device; of others than those that were measured nothing is said.
    """
    if on.platform != "cuda" or not on.measured:
        return False
    xla, best = 0.0, math.inf
    for kernel in task.kernels:
        takes = on.platform in kernel.platforms and kernel.supports(task.spec).ok
        if takes and kernel.runs_on(on).ok and kernel.estimate is not None:
            passes = task.passes if task.passes == FORWARD else BOTH
            found = kernel.estimate(task.spec, on, passes)
            xla, best = found[XLA], min(best, found[kernel.name])
    return xla > LOST * best
