"""What decides the choice of a loss over a vocabulary on a GPU, in few lines.

  python3 -m tests.bench.vocabulary_loss_choice

The ways of `vocabulary_loss_gpu` that may be chosen, alone: a line for each, with
milliseconds and temporary MiB.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax

import rewriter
from rewriter.kernels.linear_cross_entropy import hopper
from rewriter.kernels.linear_cross_entropy.chunks import Chunk, least_memory
from rewriter.ops.device import attached
from tests.bench.vocabulary_loss_gpu import (
    SHAPES,
    Program,
    compiled,
    drawn,
    loss,
    ours,
    spec_of_loss,
)

REPEATS = 12


def ways(shape: tuple[int, int, int]) -> Iterator[tuple[str, Program]]:
    """Programs by name."""
    (n, k, v), spec = shape, spec_of_loss(shape)
    chosen = hopper.default(spec, attached())
    both = jax.value_and_grad(loss, (0, 1))
    budget = 1 << (30 if v < 100000 else 29)
    config = Chunk(budget, 1024, True, 128, True)
    yield "as written", both
    yield "ours", ours(config)
    yield "hopper", ours(config, hopper)
    yield "hopper, by default", ours(chosen, hopper)
    if chosen.beside is not None:
        yield "all rows beside", ours(replace(chosen, beside=n - k), hopper)
        yield "chunks copied", ours(least_memory(spec, config), hopper)
    yield "forward, as written", loss
    for name in ("memory_bounded", "hopper"):
        forced = {"linear_cross_entropy": name}
        yield f"forward, {name}", rewriter.optimize(loss, implementation=forced)


def main() -> None:
    """Measures all shapes; products are compiled side by side, and timed alone."""
    for shape in SHAPES:
        args = jax.block_until_ready(jax.jit(lambda s=shape: drawn(s))())
        plan = list(ways(shape))
        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(compiled, p, args) for _, p in plan]
        for (name, _), future in zip(plan, made, strict=True):
            try:
                run, _ = future.result()
                print(shape, f"{name:24}", *measured(run, args), flush=True)
            except Exception as problem:
                print(shape, f"{name:24}", "failed", str(problem)[:60], flush=True)
        del args


def measured(run: Any, args: Any) -> tuple[str, str]:
    """Median and least milliseconds, and temporary memory."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(1e3 * (time.perf_counter() - start))
    size = run.memory_analysis().temp_size_in_bytes / 2**20
    return f"{statistics.median(times):.2f} ({min(times):.2f}) ms", f"{size:.0f} MiB"


if __name__ == "__main__":
    main()
