"""Cycles of norms in a residual stream on TPUs that are not there: XLA's, and ours.

  python3 -m tests.bench.tpu_norms_cycles [--json PATH] [--seconds 120]

Rows in bfloat16. "sum" is ``h = x + addend; y = norm(h)``, both of which are results.
"gradients" are those of ``y = norm(h)`` from y's cotangent, to which what comes back
along the stream is added for h. XLA's are what it makes of the op as usually written.
The simulator knows no limit of the memory's bandwidth: no program is faster than its
bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.device import Device
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from tests.bench import estimates
from tests.support.kernels import tpu

GENERATIONS = ("v5e", "v5p", "v6e")
SHAPES = ("8192 4096", "4096 16384")

WANTED = tuple(
    ("cycles", generation, f"{whose} {what} {op} {shape}")
    for generation in GENERATIONS
    for op in ("rms_norm", "layer_norm")
    for shape in SHAPES
    for what in ("sum", "gradients")
    for whose in ("xla", "ours")
)
"""Mode, generation, and whose, what, of which op and shape."""


def program(name: str, generation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what a name stands for, and its arguments."""
    whose, what, op, rows, columns = name.split()
    x = jax.ShapeDtypeStruct((int(rows), int(columns)), jnp.bfloat16)
    weights = {"scale": jax.ShapeDtypeStruct(x.shape[1:], jnp.float32)}
    if op == "layer_norm":
        weights["bias"] = weights["scale"]
    made = of_xla(op) if whose == "xla" else ours(op, tpu.KINDS[generation])
    return made[what], (x, x, x, weights)


def of_xla(op: str) -> dict[str, Callable[..., Any]]:
    """Returns the programs in plain JAX."""
    norm = functools.partial(registry().op(op).reference, eps=1e-6)

    def summed(x: Any, addend: Any, _: Any, weights: Any) -> Any:
        h = x + addend
        return h, norm(x=h, **weights)

    def gradients(x: Any, up: Any, passing: Any, weights: Any) -> Any:
        of = lambda x, weights: norm(x=x, **weights)
        along, others = jax.vjp(of, x, weights)[1](up)
        return along + passing, others

    return {"sum": summed, "gradients": gradients}


def ours(op: str, device: Device) -> dict[str, Callable[..., Any]]:
    """Returns the programs by the kernel, with the config of its rule."""
    kernel = next(k for k in registry().kernels(op) if k.name == "mosaic_tpu")

    def more(x: Any, weights: Any) -> dict[str, Any]:
        spec = spec_of(registry().op(op), {"x": x, **weights}, {})
        return {"eps": 1e-6, "config": kernel.space.default(spec, device), **weights}

    def summed(x: Any, addend: Any, _: Any, weights: Any) -> Any:
        return kernel.forward(x=x, addend=addend, **more(x, weights))

    def gradients(x: Any, up: Any, passing: Any, weights: Any) -> Any:
        return kernel.backward(
            x=x, out=None, residuals=(), cotangent=up, addend=passing,
            **more(x, weights),
        )  # fmt: skip

    return {"sum": summed, "gradients": gradients}


if __name__ == "__main__":
    estimates.run("tpu_norms_cycles", WANTED, 120.0)
