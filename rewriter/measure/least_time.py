"""A lower bound on the seconds that XLA's program of a function takes.

On a GPU, XLA times matrix products while it compiles: up to 15 s for many groups of
rows. Without those trials it compiles in a third of a second, to a program with as many
operations, by its own count. The bound is the time of these operations at the peak of
the data sheet. However fast its products are, the tuned program takes at least as long.
"""

from __future__ import annotations

import jax

from rewriter.ops.device import Device
from rewriter.ops.estimate import SHEET_FLOPS
from rewriter.ops.kernel import Spec
from rewriter.ops.op import Op

COUNTED = {"xla_gpu_autotune_level": 0}
"""Options with which XLA times nothing, and counts the operations of products."""

UNTRIED = {**COUNTED, "xla_gpu_enable_triton_gemm": False}
"""The same with a library's products, which are slower for some shapes."""


def least_seconds(lowered: jax.stages.Lowered, on: Device) -> float:
    """Returns the least seconds of a program by XLA's count; 0.0 without a count.

    Args:
        lowered: The program.
        on: The device; without a known peak the result is 0.0.

    Example:
        >>> from rewriter.ops import device
        >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
        >>> lowered = jax.jit(lambda x: x @ x).lower(x)
        >>> least = least_seconds(lowered, device.named("h200"))
        >>> round(1e9 * least)  # nanoseconds of 2 * 512**3 operations
        272
    """
    if not (peak := _peak(on)):
        return 0.0
    try:
        count = lowered.compile(compiler_options=COUNTED).cost_analysis() or {}
    except Exception:  # the compilation with trials reports the error
        return 0.0
    return max(0.0, count.get("flops", 0.0)) / peak


def needed_seconds(op: Op, spec: Spec, passes: str, on: Device) -> float:
    """Returns the least seconds for the operations of a use; 0.0 if unknown."""
    if op.cost is None or not (peak := _peak(on)):
        return 0.0
    dtypes = {n: str(spec.dtype(n)) for n in spec.operands}
    params = {**op.defaults, **dict(spec.params)}
    return op.cost(dict(spec.shapes), dtypes, params, passes).flops / peak


def _peak(on: Device) -> float:
    """The FLOP/s that a data sheet says."""
    return on.flops / SHEET_FLOPS if on.measured else on.flops
