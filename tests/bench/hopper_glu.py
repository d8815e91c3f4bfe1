"""Gated linear units on a Hopper GPU: ours config by config, against XLA as written.

  python3 -m tests.bench.hopper_glu [--cases "A;B"] [--turns N] [--json PATH]

Units of experts are also compared with two ragged dots of ours and what XLA makes of
joining them. Times are device time by CUPTI, of all kernels; TF/s count 4·m·k·f
operations. Weights and rows are normal, three sets of them take turns, and group sizes
are uneven (`tests.bench.ragged.sizes_of`). The error is that of a sample of the result
against float32 sums, in the Frobenius norm.
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

from rewriter.hardware import timing
from rewriter.ops import device
from rewriter.ops.kernel import Kernel, spec_of, worth_measuring
from rewriter.ops.registry import registry
from rewriter.site.implementation import settings
from tests.bench import record
from tests.bench.ragged import normal, sizes_of

COMMAND = "python3 -m tests.bench.hopper_glu"
SETS = 3
WRONG = 0.02
"""The error from which a result is wrong: 16 bits leave 0.005."""
CASES: dict[str, tuple[int, int, int, int]] = {
    "8 experts": (8192, 4096, 14336, 8),
    "16 experts": (8192, 4096, 4096, 16),
    "128 experts": (32768, 2048, 1536, 128),
    "128 experts, 2 rows each": (256, 2048, 1536, 128),
    "dense": (8192, 4096, 14336, 0),
    "dense, many rows": (16384, 2048, 8192, 0),
    "dense, wide": (2048, 8192, 28672, 0),
    "dense, 384 columns": (15360, 384, 1536, 0),
    "dense, 128 columns": (65536, 128, 256, 0),
    "dense, few rows": (16, 4096, 14336, 0),
}
"""m, k, f, groups by name; no groups are a dense unit."""


def inputs(shape: tuple[int, ...], seed: int) -> list[jax.Array]:
    """Returns x, both matrices and, of experts, group sizes."""
    m, k, f, g = shape
    keys = jax.random.split(jax.random.key(seed), 3)
    matrices = (g, k, f) if g else (k, f)
    shapes = (m, k), matrices, matrices
    x, w, w_up = (normal(*given) for given in zip(keys, shapes, strict=True))
    scaled = jax.jit(lambda y: y * jnp.bfloat16(k**-0.5), donate_argnums=0)
    made = [x, scaled(w), scaled(w_up)]
    return [*made, jnp.asarray(sizes_of(m, g))] if g else made


def as_written(x: Any, w: Any, w_up: Any, sizes: Any = None) -> Any:
    """Returns the unit as models write it in 16 bits."""
    product = jnp.matmul
    if sizes is not None:
        product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    return jax.nn.silu(product(x, w)) * product(x, w_up)


def by(kernel: Kernel, config: Any) -> Callable[..., Any]:
    """Returns a function of the inputs that runs a kernel."""
    names = "x", "w", "w_up", "group_sizes"
    if kernel.op == "gated_linear_unit":
        names = "x", "w_gate", "w_up"
    return lambda *given: kernel.forward(
        **dict(zip(names, given, strict=True)), config=config
    )


def contestants(args: Sequence[Any]) -> list[tuple[str, Any, Callable[..., Any]]]:
    """Returns (name, config, function): all configs of ours, one of its parts, XLA."""
    op = "ragged_gated_linear_unit" if len(args) == 4 else "gated_linear_unit"
    names = registry().op(op).required if len(args) == 3 else registry().op(op).names
    spec = spec_of(registry().op(op), dict(zip(names, args, strict=True)), {})
    found: list[tuple[str, Any, Callable[..., Any]]] = []
    for kernel in registry().kernels(op):
        if "hopper" in kernel.name:
            most = 24 if kernel.name == "hopper" else 1
            configs, _ = worth_measuring(kernel.space, spec, device.attached(), most)
            found += [(kernel.name, c, by(kernel, c)) for c in configs]
    return [*found, ("xla", None, as_written)]


def compiled(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns the compiled program, or why there is none."""
    try:
        return jax.jit(run).lower(*args).compile()
    except Exception as problem:
        return str(problem).splitlines()[0][:120]


def error_of(out: jax.Array, args: Sequence[Any]) -> float:
    """Returns the relative error of a sample of rows and columns."""
    x, w, w_up = args[:3]
    r = np.random.default_rng(1)
    n = np.sort(r.choice(out.shape[1], 64, replace=False))
    m = np.sort(r.choice(len(x), min(48, len(x)), replace=False))
    form = "mk,kn->mn"
    if len(args) == 4:
        group = np.repeat(np.arange(len(w)), np.asarray(args[3]))[m]
        form, w, w_up = "mk,mkn->mn", w[..., n][group], w_up[..., n][group]
    else:
        w, w_up = w[:, n], w_up[:, n]
    wide = lambda y: y.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        gate, up = (jnp.einsum(form, wide(x[m]), wide(y)) for y in (w, w_up))
    want = jax.nn.silu(gate) * up
    return float(jnp.linalg.norm(wide(out[m][:, n]) - want) / jnp.linalg.norm(want))


def measured(name: str, turns: int) -> list[dict[str, Any]]:
    """Returns a row for each contestant of a case, the fastest first."""
    m, k, f, g = CASES[name]
    sets = [inputs(CASES[name], seed) for seed in range(SETS)]
    wanted = contestants(sets[0])
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda x: compiled(x[2], sets[0]), wanted))
    rows, running = [], []
    for (by, config, _), program in zip(wanted, programs, strict=True):
        row = {"case": name, "m, k, f, g": (m, k, f, g), "by": by,
               "config": dict(settings(config) or ()) if config else None}  # fmt: skip
        rows.append(row)
        if isinstance(program, str):
            row["failed"] = program
            continue
        row["error"] = float(f"{error_of(program(*sets[0]), sets[0]):.2g}")
        if not row["error"] < WRONG:
            row["failed"] = "wrong"
            continue
        running.append((row, program))
    times = timing.measure([p for _, p in running], sets, turns)
    for (row, _), t in zip(running, times, strict=True):
        read = np.count_nonzero(sizes_of(m, g)) if g else 1
        moved = m * (k + f) + 2 * read * k * f
        row |= {"us": round(1e6 * t.median, 1), "sigma_us": round(1e6 * t.sigma, 1),
                "tflops": round(4 * m * k * f / t.median / 1e12, 1),
                "tb_s": round(2 * moved / t.median / 1e12, 2),
                "method": t.method}  # fmt: skip
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases.split(";"):
        found = measured(name, given.turns)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        sizes = {n: sizes_of(m, g).tolist() for n, (m, _, _, g) in CASES.items() if g}
        record.write(given.json, COMMAND, group_sizes=sizes, results=rows)


if __name__ == "__main__":
    main()
