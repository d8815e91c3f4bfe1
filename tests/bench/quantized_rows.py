"""A norm and its rows in 8 bits: by XLA, and in one pass over memory.

  python3 -m tests.bench.quantized_rows [--cases "rms_norm int8 8192x4096"]
      [--turns N] [--json PATH]

Cases are norms, dtypes of the rows in 8 bits, sizes as rows x columns, and what else
there is: `sum` for a residual sum in front, which is a result too, `norm` if the norm
is one, and `float32` for rows that are not bfloat16. Floats of 8 bits are limited to
their largest number before the cast, as quantizing libraries do. Times are device time
of all kernels of a program, on two sets of inputs in turns. `limit_us` is the time of
reading and writing each array once at the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from tests.bench import record

COMMAND = "python3 -m tests.bench.quantized_rows"
CASES = (
    "rms_norm int8 8192x4096;layer_norm int8 8192x4096 norm;"
    "rms_norm float8_e4m3fn 8192x4096;rms_norm float8_e4m3fn 8192x4096 sum;"
    "layer_norm float8_e4m3fn 8192x8192;rms_norm float8_e5m2 4096x16384;"
    "rms_norm int8 16384x1024;rms_norm int8 2048x4096 sum;"
    "layer_norm int8 8192x4096 float32"
)


def most(kind: str) -> float:
    """Returns the largest number of a dtype of 8 bits that programs use."""
    if jnp.issubdtype(kind, jnp.integer):
        return float(jnp.iinfo(kind).max)
    return float(jnp.finfo(kind).max)


def normed(norm: str, x: Any, weight: Any) -> Any:
    """An RMS norm or a layer norm, as models write it."""
    y = x.astype(jnp.float32)
    if norm == "layer_norm":
        y = y - jnp.mean(y, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * weight


def quantized(kind: str, y: Any) -> tuple[Any, Any]:
    """Rows in 8 bits, and their scales."""
    largest = most(kind)
    scale = jnp.max(jnp.abs(y), -1, keepdims=True).astype(jnp.float32) / largest
    q = y.astype(jnp.float32) / scale
    q = jnp.round(q) if jnp.issubdtype(kind, jnp.integer) else q
    return jnp.clip(q, -largest, largest).astype(kind), scale


def written(norm: str, kind: str, more: tuple[str, ...], x: Any, w: Any, r: Any) -> Any:
    """The program of a case."""
    x = x + r if "sum" in more else x
    y = normed(norm, x, w)
    read = [x] * ("sum" in more) + [y] * ("norm" in more)
    return *quantized(kind, y), *read


def measured(case: str, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    norm, kind, size, *more = case.split()
    m, d = map(int, size.split("x"))
    dtype = jnp.dtype("float32" if "float32" in more else "bfloat16")
    keys = jax.random.split(jax.random.key(0), 4)
    x, r, *others = (jax.random.normal(key, (m, d), dtype) for key in keys)
    sets = [
        [x, jnp.ones((d,), dtype), r],
        [others[0], jnp.ones((d,), dtype), others[1]],
    ]
    fn = functools.partial(written, norm, kind, tuple(more))
    fast = rewriter.optimize(fn)
    one_pass = any(c.by == "quantized_rows" for c in fast.report(*sets[0]).changes)
    programs = [jax.jit(f).lower(*sets[0]).compile() for f in (fn, fast)]
    results = [program(*sets[0]) for program in programs]
    numbers = [np.asarray(out[0].astype(jnp.float32)) for out in results]
    arrays = dtype.itemsize * (1 + 2 * ("sum" in more) + ("norm" in more)) + 1
    bandwidth = device.attached().bandwidth
    about = {
        "norm": norm, "kind": kind, "also": more, "rows": m, "columns": d,
        "limit_us": bandwidth and round(1e6 * m * d * arrays / bandwidth, 1),
    }  # fmt: skip
    rows = [
        {**about, "by": "xla"},
        {
            **about, "by": "rewriter", "one_pass": one_pass,
            "numbers_that_differ": float(np.mean(numbers[0] != numbers[1])),
        },
    ]  # fmt: skip
    return record.with_times(rows, timing.measure(programs, sets, turns))


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for case in given.cases.split(";"):
        found = measured(case, given.turns)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
