"""Rows times a matrix of 4 or 8 bits: as written, by each kernel, and as chosen.

  python3 -m tests.bench.quantized_dot [--rows "1;16"] [--sizes "4096x14336"]
      [--kinds "int8;int4 groups"] [--first] [--turns N] [--json PATH]

Times are device time by CUPTI of all kernels of a program, on three sets of inputs in
turns. `share` is the part of the GPU's memory bandwidth that reading the stored matrix
once would take. `in 16 bits` multiplies a matrix that is never quantized. The error is
that of a sample of the result against float32, in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from rewriter.ops.kernel import Spec, spec_of, worth_measuring
from rewriter.ops.registry import registry
from rewriter.ops.stored import numbers_of
from rewriter.site.implementation import settings
from tests.bench import record
from tests.bench.hopper_glu import compiled

COMMAND = "python3 -m tests.bench.quantized_dot"
SETS = 3
WRONG = 0.02
"""The error from which a result is wrong: 16 bits leave 0.005."""

ROWS = (1, 16, 64, 256)
SIZES = ((4096, 14336), (14336, 4096), (8192, 28672))


@dataclass(frozen=True)
class Kind:
    """How a matrix is stored, and how the program widens it.

    Attributes:
        stored: The dtype of its numbers.
        group: How many numbers share a scale along the summed axis; 0 for all.
        behind: Whether scales multiply the product.
        transposed: Whether the matrix is [n, k].
    """

    stored: str
    group: int = 0
    behind: bool = False
    transposed: bool = False


KINDS = {
    "int8": Kind("int8"),
    "int8 behind": Kind("int8", behind=True),
    "int8 groups": Kind("int8", 128),
    "fp8": Kind("float8_e4m3fn"),
    "int4 groups": Kind("int4", 128),
    "int8 transposed": Kind("int8", transposed=True),
    "int4 transposed": Kind("int4", transposed=True),
}


def inputs(m: int, k: int, n: int, kind: Kind, seed: int) -> list[jax.Array]:
    """Returns rows, numbers and scales."""
    keys = jax.random.split(jax.random.key(seed), 3)
    size = (n, k) if kind.transposed else (k, n)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    draw = jax.jit(
        lambda key: numbers_of(jax.random.normal(key, size), jnp.dtype(kind.stored))
    )
    shape = (k // kind.group if kind.group else 1, n)
    scale = jax.random.uniform(keys[2], shape, jnp.bfloat16, 5e-4, 15e-4)
    return [x, draw(keys[1]), scale]


def widened(w: Any, scale: Any, dtype: Any) -> Any:
    """Returns the matrix, in the dtype of products."""
    groups, n = scale.shape
    parts = w.reshape(groups, -1, n).astype(dtype) * scale.astype(dtype)[:, None]
    return parts.reshape(w.shape)


def as_written(kind: Kind) -> Callable[..., Any]:
    """Returns the product as models write it."""

    def program(x: Any, w: Any, scale: Any) -> Any:
        if kind.behind:
            return (x @ w.astype(x.dtype)) * scale[0]
        if kind.transposed:
            return x @ (w.astype(x.dtype) * scale[0][:, None]).T
        return x @ widened(w, scale, x.dtype)

    return program


def contestants(
    kind: Kind, args: Sequence[Any], every: bool
) -> list[tuple[str, Any, Callable[..., Any]]]:
    """Returns (name, config, function): kernels and their configs, and others."""
    program = as_written(kind)
    found: list[tuple[str, Any, Callable[..., Any]]] = [("xla", None, program)]
    found.append(("chosen", None, rewriter.optimize(program)))
    for kernel in registry().kernels("quantized_dot"):
        how = {"quantized_dot": [kernel.name, "xla"]}
        (site,) = rewriter.explain(program, implementation=how)(*args).sites
        if site.kernel != kernel.name:
            continue
        fast = rewriter.optimize(program, implementation=how)
        found.append((kernel.name, None, fast))
        spec = use_of(site, args)
        most = 12 if every and kernel.name != "memory_bounded" else 0
        configs, _ = worth_measuring(kernel.space, spec, device.attached(), 12)
        for config in configs[:most]:
            found.append((kernel.name, config, direct(kernel, config, site)))
    return found


def use_of(site: Any, args: Sequence[Any]) -> Spec:
    """Returns the use of a site."""
    given = dict(zip(("x", "w", "w_scale"), args, strict=True))
    return spec_of(registry().op("quantized_dot"), given, dict(site.params))


def direct(kernel: Any, config: Any, site: Any) -> Callable[..., Any]:
    """Returns a call of a kernel with a config."""
    params = dict(site.params)
    return lambda x, w, scale: kernel.forward(
        x=x, w=w, w_scale=scale, config=config, **params
    )


def error(program: Any, args: Sequence[Any], kind: Kind) -> float:
    """Returns the relative error of a sample of the result's columns."""
    x, w, scale = args
    w = w.T if kind.transposed else w
    n = np.sort(np.random.default_rng(1).choice(w.shape[1], 64, replace=False))
    with jax.default_matmul_precision("highest"):
        want = x.astype("float32") @ widened(w[:, n], scale[:, n], jnp.float32)
    got = program(*args)[:, n].astype("float32")
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def measured(
    m: int, k: int, n: int, name: str, turns: int, every: bool
) -> list[dict[str, Any]]:
    """Returns a row for each contestant of a case, the fastest first."""
    kind = KINDS[name]
    sets = [inputs(m, k, n, kind, seed) for seed in range(SETS)]
    wanted = contestants(kind, sets[0], every)
    matrix = jax.random.normal(jax.random.key(7), (k, n), jnp.bfloat16)
    wanted.append(("in 16 bits", None, lambda x, w, scale: x @ matrix))
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(lambda x: compiled(x[2], sets[0]), wanted))
    rows, running = [], []
    for (by, config, run), program in zip(wanted, programs, strict=True):
        row: dict[str, Any] = {
            "m, k, n": (m, k, n), "kind": name, "by": by,
            "config": dict(settings(config) or ()) if config else None,
        }  # fmt: skip
        rows.append(row)
        if by == "chosen":
            sites = run.report(*sets[0]).sites
            row["kernel"] = ", ".join(site.kernel for site in sites)
        if isinstance(program, str):
            row["failed"] = program
            continue
        if by != "in 16 bits":
            row["error"] = float(f"{error(program, sets[0], kind):.2g}")
            if not row["error"] < WRONG:
                row["failed"] = "wrong"
                continue
        running.append((row, program))
    times = timing.measure([p for _, p in running], sets, turns)
    bits = 4 if kind.stored == "int4" else 8
    peak = device.attached().bandwidth
    for (row, _), t in zip(running, times, strict=True):
        row["us"] = round(1e6 * t.median, 1)
        row["sigma_us"] = round(1e6 * t.sigma, 1)
        row["share"] = round(k * n * bits / 8 / t.median / peak, 2) if peak else None
        row["method"] = t.method
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=";".join(map(str, ROWS)))
    sizes = ";".join(f"{k}x{n}" for k, n in SIZES)
    parser.add_argument("--sizes", default=sizes)
    parser.add_argument("--kinds", default=";".join(KINDS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--first", action="store_true", help="default configs alone")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for size in given.sizes.split(";"):
        k, n = map(int, size.split("x"))
        for name in given.kinds.split(";"):
            for m in map(int, given.rows.split(";")):
                found = measured(m, k, n, name, given.turns, not given.first)
                rows += found
                print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
