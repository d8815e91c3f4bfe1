"""Attention whose queries, keys and values are parts of one product, on a Hopper GPU.

  python3 -m tests.bench.packed_operands [--small] [--only NAMES] [--passes PASSES]
      [--json PATH]

Each program is a product and causal attention of its parts: forward, with gradients in
the program that is rewritten, or with the derivative of the rewritten program. It is
rewritten twice: with operands and gradients where they lie in the product, and without
the pass `packed_operands`, where XLA copies each of them. Both must give the same bits.
Figures are microseconds of all kernels by CUPTI (medians; wall-clock time without it),
and KiB of XLA's temporary memory.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter import _jax
from rewriter.hardware import timing
from tests.bench import record

SHAPES = {
    "GPT-2": (8, 1024, 12, 12, 64),
    "odd length": (4, 1023, 16, 16, 128),
    "ViT-B": (64, 197, 12, 12, 64),
    "fewer heads of keys": (2, 2048, 32, 8, 128),
    "72 wide": (8, 729, 16, 16, 72),
    "head by head": (4, 1024, 16, 16, 96),
    "256 wide": (2, 512, 8, 8, 256),
}
"""Batch, positions, heads of queries and of keys, and their width."""

SMALL = {"head by head": (1, 64, 2, 2, 32), "fewer heads of keys": (1, 40, 4, 2, 32)}
WAYS = {"in place": (), "copied": ("packed_operands",)}
MODEL, REPEATS = 256, 7

Program = Callable[..., Any]


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [b, t, n, h]."""
    t, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, 2) for x in (k, v))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k, preferred_element_type=jnp.float32)
    seen = jnp.tril(jnp.ones((t, t), bool))
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores).astype(q.dtype), v)


def programs(name: str, shape: tuple[int, ...]) -> tuple[dict[str, Program], Any]:
    """The programs of a shape, each made of a way to rewrite, and their arguments."""
    b, t, n, m, h = shape
    every = n + 2 * m

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        if name == "head by head":
            parts = jnp.split((x @ w).reshape(b, t, n, 3 * h), 3, -1)
        else:
            parts = jnp.split((x @ w).reshape(b, t, every, h), [n, n + m], 2)
        return attention(*parts)

    def both(fn: Program) -> Program:
        def run(x: jax.Array, w: jax.Array) -> Any:
            out, back = jax.vjp(fn, x, w)
            return out, back(jnp.cos(out))

        return run

    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (b, t, MODEL), jnp.bfloat16)
    w = jax.random.normal(keys[1], (MODEL, every * h)) / MODEL**0.5
    made = {
        "forward": lambda rewritten: rewritten(forward),
        "gradients": lambda rewritten: rewritten(both(forward)),
        "derivative": lambda rewritten: jax.jit(both(rewritten(forward))),
    }
    return made, (x, w.astype(jnp.bfloat16))


def measured(program: Any, args: Any) -> tuple[dict[str, float], list[np.ndarray]]:
    """The figures of a compiled program, and its results."""
    out = jax.block_until_ready(program(*args))
    times = []
    for _ in range(REPEATS):
        if timing.method() == "cupti":
            kernels = _jax.kernel_seconds(lambda: program(*args))
            times.append(sum(seconds for _, seconds in kernels))
        else:
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            times.append(time.perf_counter() - start)
    memory = program.memory_analysis().temp_size_in_bytes >> 10
    figures = {"us": round(1e6 * statistics.median(times), 1), "kib": memory}
    return figures, [np.asarray(x, np.float32) for x in jax.tree.leaves(out)]


def main() -> None:
    """Measures every program both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--only", default="", help="names of shapes, with commas")
    parser.add_argument("--passes", default="forward,gradients,derivative")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows, shapes = [], SMALL if given.small else SHAPES
    for name in given.only.split(",") if given.only else shapes:
        shape = shapes[name]
        of_shape, args = programs(name, shape)
        for passes in given.passes.split(","):
            row: dict[str, Any] = {"program": name, "shape": shape, "passes": passes}
            results = []
            for way, disabled in WAYS.items():
                rewritten = functools.partial(
                    rewriter.optimize, implementation={"attention": "hopper"},
                    disable=disabled,
                )  # fmt: skip
                fast = of_shape[passes](rewritten)
                row[way], out = measured(fast.lower(*args).compile(), args)
                results.append(out)
            row["same bits"] = all(map(np.array_equal, *results))
            rows.append(row)
            print(row, flush=True)
    if given.json:
        record.write(given.json, "python3 -m tests.bench.packed_operands", rows=rows)


if __name__ == "__main__":
    main()
