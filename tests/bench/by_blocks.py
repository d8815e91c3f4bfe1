"""Products part by part with scales of blocks: as written, and by kernels for Hopper.

  python3 -m tests.bench.by_blocks [--cases "fp8 2048x4096x14336"] [--every]
      [--turns N] [--json PATH]

Cases are kinds, and rows x summed x columns. A part of the summed axis has 128 numbers.
Of `fp8` and `int8`, rows and matrix are of 8 bits: scales are those of 1 x 128 and of
128 x 128 numbers. Else rows are bfloat16: the matrix is widened, and 128 x 1 numbers
have a scale. Times are device time by CUPTI of all kernels of a program, on two sets of
inputs in turns.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.hardware import timing
from rewriter.kernels.quantized_dot import (
    BLOCKS,
    by_blocks_few_rows,
    by_blocks_hopper,
)
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import numbers_of
from rewriter.site.implementation import settings
from tests.bench import record

COMMAND = "python3 -m tests.bench.by_blocks"
CASES = (
    "fp8 2048x4096x14336;fp8 8192x7168x4096;int8 1024x4096x14336;fp8 64x7168x16384;"
    "fp8 16x4096x14336;bf16 int8 16x4096x14336;bf16 int8 64x4096x14336;"
    "bf16 int4 16x8192x28672;bf16 fp8 1x4096x14336"
)
FLOATS = {"fp8": "float8_e4m3fn"}
PART = 128


def params(kind: str, parts: int) -> dict[str, Any]:
    """The parameters of the op."""
    made: dict[str, Any] = {"groups": parts, "behind": "bfloat16"}
    if kind.startswith("bf16"):
        inside = {"inside": "*scale float32", "sums": "bfloat16", "widen": "bfloat16"}
        return made | inside
    if kind == "int8":
        return made | {
            "inside": "float32 *rows *scale", "sums": "int32", "mode": "transposed"
        }  # fmt: skip
    return made | {"inside": "*rows *scale", "sums": "float32", "mode": "transposed"}


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def inputs(seed: int, kind: str, m: int, k: int, n: int) -> dict[str, jax.Array]:
    """Returns operands of the op."""
    keys = jax.random.split(jax.random.key(seed), 4)
    rows, dtype = kind.split()[0], kind.split()[-1]
    dtype = FLOATS.get(dtype, dtype)
    x, z = jax.random.normal(keys[0], (m, k)), k // PART
    if rows == "bf16":
        w = numbers_of(jax.random.normal(keys[1], (k, n)), dtype)
        scale = jax.random.uniform(keys[2], (z, n)).astype(jnp.bfloat16)
        return {"x": x.astype(jnp.bfloat16), "w": w, "w_scale": scale}
    return {
        "x": numbers_of(x, dtype),
        "w": numbers_of(jax.random.normal(keys[1], (n, k)), dtype),
        "x_scale": jax.random.uniform(keys[3], (m, z)),
        "w_scale": jax.random.uniform(keys[2], (z, n // PART)),
    }


def measured(
    kind: str, m: int, k: int, n: int, every: bool, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    sets = [[inputs(seed, kind, m, k, n)] for seed in range(2)]
    how, here = params(kind, k // PART), device.attached()
    spec = spec_of(BLOCKS, sets[0][0], how)
    module = by_blocks_few_rows if kind.startswith("bf16") else by_blocks_hopper
    own = module.default(spec, here)
    configs, _ = worth_measuring(module.KERNEL.space, spec, here, 8)
    ways: list[Any] = [("as written", None, lambda g: BLOCKS.reference(**g, **how))]
    for c in configs if every else [own]:
        run = functools.partial(module.KERNEL.forward, config=c, **how)
        ways.append((module.KERNEL.name, c, lambda g, run=run: run(**g)))
    compiled = lambda way: jax.jit(way[2]).lower(*sets[0]).compile()
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, ways))
    want = programs[0](*sets[0]).astype("float32")
    rows = []
    for (by, config, _), run in zip(ways, programs, strict=True):
        got = run(*sets[0]).astype("float32")
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        rows.append({
            "m, k, n": [m, k, n], "kind": kind, "by": by,
            "config": dict(settings(config) or ()) if config else None,
            "default": config == own, "differs": float(f"{error:.2g}"),
        })  # fmt: skip
    times = timing.measure(programs, sets, turns)
    for row, t in zip(rows, times, strict=True):
        row["tflops"] = round(2e-12 * m * k * n / t.median)
    return record.with_times(rows, times)


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--every", action="store_true", help="every config")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for case in given.cases.split(";"):
        kind, sizes = case.rsplit(" ", 1)
        m, k, n = map(int, sizes.split("x"))
        found = measured(kind, m, k, n, given.every, given.turns)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
