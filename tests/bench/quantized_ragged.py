"""Ragged dots of 8-bit matrices on a Hopper GPU: ours config by config, and others.

  python3 -m tests.bench.quantized_ragged [--cases "A;B"] [--turns N] [--json PATH]

Others are the program as written, and one whose matrices are dequantised before our
kernel for 16 bits; of units of experts also one by two ragged dots of ours. Times are
device time by CUPTI, of all kernels. TF/s count two operations a product. TB/s count
what is read and written where matrices of groups with rows are read once, in 8 bits.
Group sizes are uneven (`tests.bench.ragged.sizes_of`), three sets of inputs take turns.
The error is that of a sample of the result against float32 sums, in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.registry import registry
from rewriter.ops.stored import numbers_of as quantized
from rewriter.ops.stored import widened
from rewriter.site.implementation import settings
from tests.bench import record
from tests.bench.hopper_glu import compiled
from tests.bench.hopper_glu import error_of as of_unit
from tests.bench.ragged import error_of, normal, sizes_of

COMMAND = "python3 -m tests.bench.quantized_ragged"
SETS = 3
WRONG = 0.02
"""The error from which a result is wrong: 16 bits leave 0.005."""
Case = tuple[int, int, int, int, str]
CASES: dict[str, Case] = {
    "128 experts, 2 rows each": (256, 2048, 1536, 128, "int8"),
    "128 experts, 2 rows each, e4m3": (256, 2048, 1536, 128, "float8_e4m3fn"),
    "128 experts, 2 rows each, e5m2": (256, 2048, 1536, 128, "float8_e5m2"),
    "8 experts, 8 rows each": (64, 4096, 14336, 8, "int8"),
    "128 experts, 32 rows each": (4096, 2048, 1536, 128, "int8"),
    "16 experts, 512 rows each": (8192, 4096, 4096, 16, "int8"),
    "8 experts, 1024 rows each": (8192, 4096, 14336, 8, "int8"),
}
"""m, k, n, groups and the matrices' dtype by name."""
UNITS: dict[str, Case] = {
    "unit of 128 experts, 2 rows each": (256, 2048, 768, 128, "int8"),
    "unit of 8 experts, 8 rows each": (64, 4096, 14336, 8, "int8"),
}
"""The same of gated linear units."""


def inputs(case: Case, unit: bool, seed: int) -> list[jax.Array]:
    """Returns rows, group sizes, matrices and scales of columns; of a unit both."""
    m, k, n, g, stored = case
    keys = jax.random.split(jax.random.key(seed), 3)
    narrow = jax.jit(functools.partial(quantized, dtype=jnp.dtype(stored)))
    made = [normal(keys[0], (m, k)), jnp.asarray(sizes_of(m, g))]
    for i in range(1 + unit):
        own = jax.random.split(keys[1 + i])
        made.append(narrow(normal(own[0], (g, k, n))))
        made.append(jax.random.uniform(own[1], (g, n), minval=5e-4, maxval=15e-4))
    return made


def dot(x: Any, sizes: Any, w: Any, scale: Any) -> Any:
    """Returns a product as models write it, dequantised to the rows' 16 bits."""
    return jax.lax.ragged_dot(x, widened(w, scale, 1, x.dtype), sizes)


def as_written(x: Any, sizes: Any, w: Any, scale: Any, *up: Any) -> Any:
    """Returns the product, or the unit of two."""
    first = dot(x, sizes, w, scale)
    return jax.nn.silu(first) * dot(x, sizes, *up) if up else first


NAMES = {
    "quantized_ragged_dot": ("lhs", "group_sizes", "rhs", "rhs_scale"),
    "quantized_ragged_gated_linear_unit": (
        "x", "group_sizes", "w", "w_scale", "w_up", "w_up_scale",
    ),
}  # fmt: skip


def contestants(
    args: Sequence[Any], every: bool
) -> list[tuple[str, Any, Callable[..., Any]]]:
    """Returns (name, config, function): all configs of ours, or one, and others."""
    op, names = next(x for x in NAMES.items() if len(x[1]) == len(args))
    kernel = registry().kernel(op, "hopper")
    spec = spec_of(registry().op(op), dict(zip(names, args, strict=True)), {})
    most = 24 if every else 1
    configs, _ = worth_measuring(kernel.space, spec, device.attached(), most)

    def by(config: Any) -> Callable[..., Any]:
        return lambda *given: kernel.forward(
            **dict(zip(names, given, strict=True)), config=config
        )

    apart, before = {"ragged_gated_linear_unit": "xla"}, {"ragged_dot": "hopper"}
    asked = {"rewritten": {}, "dequantised": apart | before}
    if len(args) > 4:
        asked["by parts"] = apart
    found: list[tuple[str, Any, Callable[..., Any]]] = [
        (kernel.name, config, by(config)) for config in configs
    ]
    found += [
        (name, None, rewriter.optimize(as_written, implementation=how))
        for name, how in asked.items()
    ]
    return [*found, ("xla", None, as_written)]


def chosen(args: Sequence[Any]) -> str:
    """Returns what the program as written is rewritten to."""
    sites = rewriter.explain(as_written)(*args).sites
    return ", ".join(f"{site.form or site.op} {site.kernel}" for site in sites)


def error(program: Any, args: Sequence[Any]) -> float:
    """Returns the relative error of a sample of the result."""
    x, sizes, *of_branches = args
    exact = [
        w.astype(jnp.float32) * scale[:, None]
        for w, scale in zip(of_branches[::2], of_branches[1::2], strict=True)
    ]
    if len(exact) == 1:
        return error_of(program(*args), (x, exact[0], sizes), "forward")
    return of_unit(program(*args), [x, *exact, sizes])


def measured(name: str, turns: int, every: bool = True) -> list[dict[str, Any]]:
    """Returns a row for each contestant of a case, the fastest first."""
    case, unit = {**CASES, **UNITS}[name], name in UNITS
    m, k, n, g, stored = case
    sets = [inputs(case, unit, seed) for seed in range(SETS)]
    wanted = contestants(sets[0], every)
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda x: compiled(x[2], sets[0]), wanted))
    rows, running = [], []
    for (by, config, _), program in zip(wanted, programs, strict=True):
        row = {"case": name, "m, k, n, g": (m, k, n, g), "stored": stored, "by": by,
               "config": dict(settings(config) or ()) if config else None}  # fmt: skip
        rows.append(row)
        if by == "rewritten":
            row["chosen"] = chosen(sets[0])
        if isinstance(program, str):
            row["failed"] = program
            continue
        row["error"] = float(f"{error(program, sets[0]):.2g}")
        if not row["error"] < WRONG:
            row["failed"] = "wrong"
            continue
        running.append((row, program))
    times = timing.measure([p for _, p in running], sets, turns)
    products = (1 + unit) * m * k * n
    read = (1 + unit) * np.count_nonzero(sizes_of(m, g)) * k * n
    moved = 2 * m * (k + n) + read
    for (row, _), t in zip(running, times, strict=True):
        row |= {"us": round(1e6 * t.median, 1), "sigma_us": round(1e6 * t.sigma, 1),
                "tflops": round(2 * products / t.median / 1e12, 1),
                "tb_s": round(float(moved) / t.median / 1e12, 2),
                "method": t.method}  # fmt: skip
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=";".join([*CASES, *UNITS]))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", action="store_true", help="one config of ours")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases.split(";"):
        found = measured(name, given.turns, not given.first)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
