"""Norms and gated linear units of few numbers: where XLA is as fast on a CPU.

  python3 -m tests.bench.small [--pairs N] [--write]

Prints how much faster the memory-bounded kernels are, forward and with gradients,
and the temporary memory of both programs in bytes; ``--write`` keeps the figures in
``results/small.json``.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp

import rewriter
from tests.bench import record


def rms_norm(x, scale):
    """RMS norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    """Layer norm over the last axis."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale + bias


def gated_linear_unit(x, gate, up):
    """SwiGLU."""
    return jax.nn.silu(x @ gate) * (x @ up)


def measured(rows: int, pairs: int) -> list[dict[str, object]]:
    """Times faster and temporary bytes for each op.

    Rows are of 256 numbers, of 512 by 2048 for the unit.
    """
    random = lambda *shape: jax.random.normal(jax.random.key(0), shape)
    cases = {
        rms_norm: (random(rows, 256), random(256)),
        layer_norm: (random(rows, 256), random(256), random(256)),
        gated_linear_unit: (random(rows, 512), random(512, 2048), random(512, 2048)),
    }
    out = []
    for fn, args in cases.items():
        forced = {fn.__name__: "memory_bounded"}
        result = rewriter.benchmark(fn, pairs=pairs, implementation=forced)(*args)
        faster = {r.mode: round(r.speedup, 2) for r in result.rows}
        memory = {
            r.mode: {
                "original": r.original.temp_bytes,
                "rewritten": r.rewritten.temp_bytes,
            }
            for r in result.rows
        }
        row = {"op": fn.__name__, "rows": rows, **faster, "temp_bytes": memory}
        out.append(row)
        print(json.dumps(row), flush=True)
    return out


def main() -> None:
    """Measures every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    results = [r for n in (32, 128, 512, 2048, 8192) for r in measured(n, given.pairs)]
    if given.write:
        command = f"python3 -m tests.bench.small --pairs {given.pairs} --write"
        record.write(record.named("small"), command, results=results)


if __name__ == "__main__":
    main()
