"""An exact GELU of 16-bit numbers on a GPU, by XLA's `erfc` and by the shorter one.

  python3 -m tests.bench.exact_gelu

Prints microseconds of kernels: forward, and of gradients that compute `erfc` again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.rewrite.passes.erfc_in_16_bits import erfc

SHAPES = {"BERT-base 32x512": (16384, 3072), "ViT-B 128 images": (25216, 3072)}
WAYS = {"xla": jax.lax.erfc, "short": erfc}
REPEATS = 7


def microseconds(fn: Callable[..., Any], *args: Any) -> float:
    """The kernels' time of a compiled function, the median of several calls."""
    program = jax.jit(fn).lower(*args).compile()
    program(*args)
    times = [
        sum(seconds for _, seconds in _jax.kernel_seconds(lambda: program(*args)))
        for _ in range(REPEATS)
    ]
    return round(1e6 * statistics.median(times), 1)


def main() -> None:
    """Measures both ways at each shape."""
    for name, shape in SHAPES.items():
        x, up = (
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2)
        )
        for way, function in WAYS.items():
            root = jnp.bfloat16(0.5**0.5)
            gelu = lambda x, f=function, r=root: 0.5 * x * f(-x * r)

            def gradient(x: Any, up: Any, gelu: Any = gelu) -> Any:
                (dx,) = jax.vjp(gelu, x)[1](up)
                return dx, dx.sum(0)

            row = {
                "what": name, "shape": shape, "erfc": way,
                "forward": microseconds(gelu, x),
                "recomputed": microseconds(gradient, x, up),
            }  # fmt: skip
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
