"""Single ops before and after, as written by most people.

  python3 -m tests.bench.ops [--pairs N] [--write]

Prints time and temporary memory; ``--write`` keeps the figures for the README.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp

import rewriter
from rewriter import demo

RESULTS = pathlib.Path(__file__).parent / "results"


def attention(q, k, v):
    """Causal attention over [b, t, n, h]."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def attention_inputs():
    """1 x 4096 tokens, 8 heads of 64, float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, 4096, 8, 64)) for key in keys)


def ragged_inputs():
    """2048 rows of 512 for 64 experts of 512 x 512, float32."""
    x, w, sizes = jax.random.split(jax.random.key(0), 3)
    chosen = jax.random.randint(sizes, (2048,), 0, 64)
    return (
        jax.random.normal(x, (2048, 512)),
        jax.random.normal(w, (64, 512, 512)) / 512**0.5,
        jnp.bincount(chosen, length=64).astype(jnp.int32),
    )


CASES = {
    "the demo's transformer, 2048 tokens": (demo.build, "both"),
    "causal attention 1×4096×8×64": (lambda: (attention, attention_inputs()), "both"),
    "ragged_dot 2048×512 by 64 experts": (
        lambda: (jax.lax.ragged_dot, ragged_inputs()), "forward",
    ),
}  # fmt: skip


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = []
    for name, (make, mode) in CASES.items():
        fn, args = make()
        result = rewriter.benchmark(fn, mode=mode, pairs=given.pairs)(*args)
        print(f"{name}\n{result}", flush=True)
        rows += [{"what": name, **row} for row in json.loads(result.json())["rows"]]
    if given.write:
        about = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}"
        command = f"python3 -m tests.bench.ops --pairs {given.pairs} --write"
        data = {
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "about": about,
            "rows": rows,
        }
        (RESULTS / "ops.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
