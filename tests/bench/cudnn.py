"""Attention by cuDNN against the program as written, on an NVIDIA GPU.

  python3 -m tests.bench.cudnn [--json PATH]

Times are wall-clock seconds of many calls in a row, divided by their number. Memory is
XLA's temporary memory. TF/s count 4·b·n·t·s·h operations: half of it if causal, and 3.5
times that with gradients.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from tests.bench import record

CASES = [  # b, t, n, heads of k, h, causal
    (4, 4096, 16, 16, 128, True),
    (4, 4096, 16, 16, 128, False),
    (4, 4096, 16, 4, 128, True),
    (4, 4096, 16, 16, 64, True),
    (2, 4096, 8, 8, 256, True),
    (1, 16384, 16, 16, 128, True),
    (8, 1024, 16, 16, 64, True),
    (32, 512, 12, 12, 64, False),
    (32, 256, 12, 12, 64, False),
    (64, 128, 12, 12, 64, False),
    (128, 64, 12, 12, 64, False),
    (256, 32, 12, 12, 64, False),
    (1, 256, 8, 8, 64, True),
    (1, 128, 8, 8, 64, True),
    (1, 64, 8, 8, 64, True),
]


def attention(causal: bool) -> Callable[..., jax.Array]:
    """Attention as most people write it, for [b, t, n, h] and [b, s, k, h]."""

    def written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32)
        scores = scores / q.shape[-1] ** 0.5
        if causal:
            keep = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            scores = jnp.where(keep, scores, -1e30)
        weights = jax.nn.softmax(scores).astype(q.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return written


def seconds(fn: Callable[..., Any], args: tuple) -> tuple[float, int]:
    """Seconds a call, and temporary bytes."""
    compiled = fn.lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    calls = int(min(200, max(3, 0.2 / (time.perf_counter() - start))))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            out = compiled(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best, compiled.memory_analysis().temp_size_in_bytes


def measured(case: tuple[Any, ...]) -> list[dict[str, Any]]:
    """A row for the result, and one for result and gradients."""
    b, t, n, heads, h, causal = case
    fn = attention(causal)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (b, t, m, h)).astype(jnp.bfloat16)
        for i, m in enumerate((n, heads, heads))
    )
    g = jnp.cos(q)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, back = jax.vjp(fn, q, k, v)
        return out, back(g)

    rows = []
    flops = 4 * b * n * t * t * h / (2 if causal else 1)
    for what, code, args, work in (
        ("forward", fn, (q, k, v), flops),
        ("forward and gradient", both, (q, k, v, g), 3.5 * flops),
    ):
        fast = rewriter.optimize(code, implementation={"attention": "cudnn"})
        (site,) = fast.report(*args).sites
        row = {"case": case, "what": what, "kernel": site.kernel}
        try:
            for name, one in (("written", jax.jit(code)), ("cudnn", fast)):
                took, size = seconds(one, args)
                row[f"{name}_ms"] = round(1e3 * took, 4)
                row[f"{name}_tflops"] = round(work / took / 1e12, 1)
                row[f"{name}_bytes"] = size
            row["faster"] = round(row["written_ms"] / row["cudnn_ms"], 2)
        except jax.errors.JaxRuntimeError as problem:
            row["failed"] = str(problem)[:100]
        rows.append(row)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = [row for case in CASES for row in measured(case)]
    if given.json:
        record.write(given.json, "python3 -m tests.bench.cudnn", results=rows)


if __name__ == "__main__":
    main()
