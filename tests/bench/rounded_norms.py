"""A norm of rows that are then rounded to 8 bits: by XLA, and with the norm's kernel.

  python3 -m tests.bench.rounded_norms [--sizes "8192x4096"] [--turns N] [--json PATH]

Sizes are rows x columns, in bfloat16. Times are device time of all kernels of a
program, on two sets of inputs in turns. `limit` is the time of reading the rows and
writing 8 bits for each number at the memory's bandwidth.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from tests.bench import quantized_rows, record

COMMAND = "python3 -m tests.bench.rounded_norms"
SIZES = "64x8192;8192x4096;8192x8192"
KINDS = ("int8", "float8_e4m3fn")


def rounded(kind: str, x: Any, weight: Any) -> Any:
    """An RMS norm, its rows in 8 bits, and their scales."""
    return quantized_rows.quantized(kind, quantized_rows.normed("rms_norm", x, weight))


def measured(kind: str, m: int, d: int, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    keys = jax.random.split(jax.random.key(0), 2)
    weight = jnp.ones((d,), jnp.bfloat16)
    sets = [[jax.random.normal(key, (m, d), jnp.bfloat16), weight] for key in keys]
    written = functools.partial(rounded, kind)
    ways = {
        "xla": jax.jit(written),
        "by default": rewriter.optimize(written),
        "norm kernel": rewriter.optimize(
            written, implementation={"rms_norm": ["hopper", "xla"]}
        ),
    }
    programs = [jax.jit(f).lower(*sets[0]).compile() for f in ways.values()]
    for program in programs:
        jax.block_until_ready(program(*sets[0]))
    bandwidth = device.attached().bandwidth
    limit = bandwidth and round(3e6 * m * d / bandwidth, 1)
    case = {"rows": m, "columns": d, "kind": kind, "limit_us": limit}
    rows = [{**case, "by": by} for by in ways]
    return record.with_times(rows, timing.measure(programs, sets, turns))


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for size in given.sizes.split(";"):
        m, d = map(int, size.split("x"))
        for kind in KINDS:
            found = measured(kind, m, d, given.turns)
            rows += found
            print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
