"""Gated units of matrices of few bits: as written, by two products, and in one launch.

  python3 -m tests.bench.quantized_unit [--kinds "int8;int4 groups"] [--rows "1;16"]
      [--sizes "4096x14336"] [--turns N] [--json PATH]

Sizes are those of both matrices. Each column has a scale, or 128 numbers of one have.
`products` has a kernel for each product, and XLA joins them. Times are device time of
all kernels of a program, on two sets of inputs in turns. `share` is the part of the
GPU's memory bandwidth that reading both matrices once would take. The error is that of
the result against float32, in the Frobenius norm.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from rewriter.ops.stored import levels_of, numbers_of
from tests.bench import record, stored_cases
from tests.bench.quantized_dot import KINDS, Kind, widened

COMMAND = "python3 -m tests.bench.quantized_unit"
OP = "quantized_gated_linear_unit"


def as_written(x: Any, gate: Any, of_gate: Any, up: Any, of_up: Any) -> Any:
    """The unit, as models write it."""
    gate, up = widened(gate, of_gate, x.dtype), widened(up, of_up, x.dtype)
    return jax.nn.silu(x @ gate) * (x @ up)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def inputs(kind: Kind, m: int, k: int, f: int, seed: Any) -> list[jax.Array]:
    """Returns rows, and the numbers and scales of both matrices."""
    keys = jax.random.split(jax.random.key(seed), 5)
    made = [jax.random.normal(keys[0], (m, k), jnp.bfloat16)]
    size = k**-0.5 / levels_of(kind.stored)
    for i in (1, 3):
        numbers = numbers_of(jax.random.normal(keys[i], (k, f)), kind.stored)
        shape = (k // kind.group if kind.group else 1, f)
        uniform = jax.random.uniform(keys[i + 1], shape, minval=0.5, maxval=1.5)
        made += [numbers, (uniform * size).astype(jnp.bfloat16)]
    return made


def error(got: Any, args: list[jax.Array]) -> float:
    """Returns the relative error of a result."""
    x, *others = args
    with jax.default_matmul_precision("highest"):
        want = jax.jit(as_written)(x.astype(jnp.float32), *others)
    return record.difference(got, want)


def measured(name: str, m: int, k: int, f: int, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    kind = KINDS[name]
    sets = [inputs(kind, m, k, f, seed) for seed in range(2)]
    products = rewriter.optimize(as_written, implementation={OP: "xla"})
    fast = rewriter.optimize(as_written)
    ways = {"xla": as_written, "products": products, "rewriter": fast}
    compiled = lambda run: jax.jit(run).lower(*sets[0]).compile()
    with ThreadPoolExecutor(4) as pool:
        programs = list(pool.map(compiled, ways.values()))
    rows = []
    for (by, run), program in zip(ways.items(), programs, strict=True):
        row: dict[str, Any] = {"kind": name, "m, k, f": [m, k, f], "by": by}
        if by != "xla":
            sites = run.report(*sets[0]).sites
            row["kernels"] = [s.kernel for s in sites if s.kernel != "xla"]
        row["error"] = error(program(*sets[0]), sets[0])
        rows.append(row)
    times, peak = timing.measure(programs, sets, turns), device.attached().bandwidth
    bits = 4 if kind.stored == "int4" else 8
    for row, t in zip(rows, times, strict=True):
        row["share"] = round(k * f * bits / 4 / t.median / peak, 2) if peak else None
    return record.with_times(rows, times)


def main() -> None:
    """Measures the cases."""
    parser = stored_cases.parser(__doc__, "int8;int4 groups;fp8")
    given = parser.parse_args()
    one = lambda kind, m, k, f: measured(kind, m, k, f, given.turns)
    stored_cases.run(given, COMMAND, one)


if __name__ == "__main__":
    main()
