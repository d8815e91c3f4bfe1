"""The loss over a vocabulary: its value and gradients, as written and in chunks.

  python3 -m tests.bench.vocabulary_loss [--pairs N] [--write]
  python3 -m tests.bench.vocabulary_loss --gpu [--small] [--seconds N] [--write]

Runs both in turn, and prints processor time, wall clock and temporary memory. The
processor time of all threads counts on a busy machine. The second form is that of
`tests.bench.vocabulary_loss_gpu`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from tests.bench import record, vocabulary_loss_gpu

SHAPES = ((1024, 256, 32000), (2048, 512, 16000), (512, 1024, 32000), (256, 256, 32000))
FORCED = {"linear_cross_entropy": "memory_bounded"}


def loss(x, w, labels):
    """The mean over the rows of x [n, k], weights [k, v] and labels [n]."""
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.take_along_axis(logits, labels[:, None], -1).mean()


def inputs(n: int, k: int, v: int) -> tuple[jax.Array, ...]:
    """Normal rows and weights in float32, and labels."""
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(n, k)), draw.normal(size=(k, v)) * k**-0.5
    labels = jnp.asarray(draw.integers(0, v, n), jnp.int32)
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), labels


def both_forms(program: Any) -> dict[str, Any]:
    """A program as written and as rewritten."""
    fast = rewriter.optimize(program, implementation=FORCED)
    return {"original": jax.jit(program), "rewritten": jax.jit(fast)}


def measured(
    forms: dict[str, Any], values: tuple[jax.Array, ...], pairs: int
) -> dict[str, Any]:
    """Times of a program in some forms, in turn, and what they need in memory."""
    compiled = {n: f.lower(*values).compile() for n, f in forms.items()}
    times: dict[str, list[tuple[float, float]]] = {n: [] for n in forms}
    for _ in range(pairs + 1):
        for name, run in compiled.items():
            before = time.process_time(), time.perf_counter()
            jax.block_until_ready(run(*values))
            after = time.process_time(), time.perf_counter()
            times[name].append((after[0] - before[0], after[1] - before[1]))
    row: dict[str, Any] = {}
    for name, run in compiled.items():
        processor, wall = zip(*times[name][1:], strict=True)
        row[name] = {
            "processor_ms": 1e3 * statistics.median(processor),
            "wall_ms": 1e3 * statistics.median(wall),
            "least_wall_ms": 1e3 * min(wall),
            "temporary_bytes": run.memory_analysis().temp_size_in_bytes,
        }
    return row


def main() -> None:
    """Measures all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--gpu", action="store_true", help="shapes for a GPU")
    parser.add_argument("--small", action="store_true", help="to try that on a CPU")
    parser.add_argument("--parts", action="store_true", help="of the loss, on a GPU")
    parser.add_argument("--seconds", type=float, default=150.0, help="to begin shapes")
    given = parser.parse_args()
    if given.gpu:
        own = given.small, given.seconds, given.write, given.pairs, given.parts
        return vocabulary_loss_gpu.main(*own)
    rows = []
    for shape in SHAPES[: given.shapes]:
        values = inputs(*shape)
        programs = {"forward": loss, "gradient": jax.value_and_grad(loss, (0, 1))}
        for mode, program in programs.items():
            row = measured(both_forms(program), values, given.pairs)
            rows.append({"rows, k, v": shape, "mode": mode, **row})
            for name in ("original", "rewritten"):
                figures = row[name]
                print(
                    f"{shape!s:20} {mode:9} {name:10}"
                    f" processor {figures['processor_ms']:7.0f} ms"
                    f"  wall {figures['wall_ms']:6.0f} ms"
                    f" (least {figures['least_wall_ms']:.0f})"
                    f"  temporary {figures['temporary_bytes'] / 2**20:6.1f} MiB"
                )
    if given.write:
        about = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}"
        command = (
            f"python3 -m tests.bench.vocabulary_loss --pairs {given.pairs} --write"
        )
        path = record.named("vocabulary_loss")
        record.write(path, command, about=about, rows=rows)


if __name__ == "__main__":
    main()
