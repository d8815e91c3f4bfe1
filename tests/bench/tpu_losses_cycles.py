"""Cycles of losses over a vocabulary on TPUs that are not there: XLA's, and ours.

  python3 -m tests.bench.tpu_losses_cycles [--json PATH] [--seconds 120]

Rows, columns and classes in bfloat16, and the losses of rows without gradients. The
simulator knows no limit of the memory's bandwidth: XLA writes and reads the logits, and
the kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.bench import estimates
from tests.support.kernels import tpu

OP = "linear_cross_entropy"
GENERATIONS = ("v5e", "v5p", "v6e")
SHAPES = ("2048 2048 32000",)
PARAMS = {"outside": "zero"}  # by comparing: gathers are not simulated

WANTED = tuple(
    ("cycles", generation, f"{whose} {shape}")
    for generation in GENERATIONS
    for shape in SHAPES
    for whose in ("xla", "ours")
)
"""Mode, generation, and whose, of which shape."""


def program(name: str, generation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what a name stands for, and its arguments."""
    whose, *sizes = name.split()
    n, k, v = map(int, sizes)
    shapes = {"x": (n, k), "w": (k, v), "labels": (n,)}
    dtypes = {"labels": "int32"}
    args = {
        a: jax.ShapeDtypeStruct(s, dtypes.get(a, "bfloat16")) for a, s in shapes.items()
    }
    if whose == "xla":
        return lambda given: registry().op(OP).reference(**given, **PARAMS), (args,)
    kernel = registry().kernel(OP, "mosaic_tpu")
    spec = spec_of(registry().op(OP), args, PARAMS)
    config = kernel.space.default(spec, tpu.KINDS[generation])
    return lambda given: kernel.forward(**given, config=config, **PARAMS), (args,)


if __name__ == "__main__":
    estimates.run("tpu_losses_cycles", WANTED, 120.0)
