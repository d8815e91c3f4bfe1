"""Times optimizers' updates by XLA: the share of memory's bandwidth that they reach.

  python3 -m tests.bench.optimizer_steps [--small] [--json PATH]

Updates are optax's, of weights with GPT-2's shapes, which they write over as a training
step does. Bytes are those of all arrays that an update reads or writes, each once. A
kernel of ours could gain no more than what is missing of the bandwidth.

Needs optax.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from rewriter import _jax
from tests.bench import record

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second, by the vendor's data sheets."""

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adam": lambda: optax.adam(1e-3),
    "sgd with momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "lion": lambda: optax.lion(1e-4),
    "adamw, clipped by the norm of all": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    ),
}
REPEATS = 20


def shapes(small: bool) -> list[tuple[int, ...]]:
    """The shapes of GPT-2's weights."""
    d, layers, words = (64, 2, 512) if small else (768, 12, 50257)
    layer = [(d, 3 * d), (3 * d,), (d, d), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    norms: list[tuple[int, ...]] = [(d,)] * 4
    return [(words, d), (1024, d), (d,), (d,), *(layer + norms) * layers]


def measured(name: str, dtype: str, small: bool) -> dict[str, Any]:
    """Returns a row: the milliseconds of an update, and its bytes a second."""
    optimizer = OPTIMIZERS[name]()
    keys = jax.random.split(jax.random.key(0), len(shapes(small)))
    weights = [
        jax.random.normal(k, s).astype(dtype) * 0.02
        for k, s in zip(keys, shapes(small), strict=True)
    ]
    gradients = [w * 0.1 for w in weights]
    state = optimizer.init(weights)

    def update(weights: Any, state: Any, gradients: Any) -> Any:
        changes, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state

    run = jax.jit(update, donate_argnums=(0, 1)).lower(weights, state, gradients)
    compiled = run.compile()
    size = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree))
    nbytes = 2 * (size(weights) + size(state)) + size(gradients)
    given = [weights, state]

    def step() -> Any:
        given[:] = compiled(*given, gradients)
        return given

    jax.block_until_ready(step())
    start = time.perf_counter()
    for _ in range(REPEATS):
        last = step()
    jax.block_until_ready(last)
    wall = (time.perf_counter() - start) / REPEATS
    row = {
        "optimizer": name,
        "dtype": dtype,
        "bytes": nbytes,
        "ms": round(1e3 * wall, 3),
    }
    if jax.default_backend() == "gpu":
        found = [[s for _, s in _jax.kernel_seconds(step)] for _ in range(5)]
        seconds = statistics.median(map(sum, found))
        row |= {"kernels": len(found[0]), "kernels_ms": round(1e3 * seconds, 3)}
        device = jax.devices()[0].device_kind
        peak = next((x for n, x in BANDWIDTH.items() if n in device), None)
        if peak:
            row["share_of_bandwidth"] = round(nbytes / seconds / peak, 3)
    return row


def main() -> None:
    """Measures each optimizer with weights of bfloat16 and of float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in OPTIMIZERS:
        for dtype in ("bfloat16", "float32"):
            rows.append(measured(name, dtype, given.small))
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        command = "python3 -m tests.bench.optimizer_steps"
        versions = {"optax": optax.__version__}
        record.write(given.json, command, **versions, results=rows)


if __name__ == "__main__":
    main()
