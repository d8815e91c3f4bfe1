"""Memory-bounded kernels against the op as most people write it, in one run.

  python3 tests/bench/memory_bounded.py [--quick] [--platform cuda] [--dtype bfloat16]
      [--json PATH] [--repeats N]

Both programs of a case take turns, so that a busy machine slows both. Times are
in milliseconds, the fastest of all turns; memory is XLA's temporary memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.registry import registry

Arrays = tuple[jax.Array, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A use of an op.

    Attributes:
        op: The op's name.
        shape: (b, t, s, n, k, h), or (m, k, n, g) of a ragged dot.
        detail: "causal" or "full"; "even" or "uneven" group sizes.
        bars: Least (times faster, times less memory), forward and gradient.
    """

    op: str
    shape: tuple[int, ...]
    detail: str
    bars: tuple[tuple[float, float] | None, tuple[float, float] | None] = (None, None)
    dtype: str = "float32"

    @property
    def name(self) -> str:
        letters = "btsnkh" if self.op == "attention" else "mkng"
        sizes = " ".join(f"{x}{i}" for x, i in zip(letters, self.shape, strict=True))
        dtype = "" if self.dtype == "float32" else f" {self.dtype}"
        return f"{self.op} {self.detail} {sizes}{dtype}"


CASES = (
    Case("attention", (1, 4096, 4096, 8, 8, 64), "causal", ((4, 20), (2.5, 8))),
    Case("ragged_dot", (2048, 512, 512, 64), "even", ((30, 1), None)),
    Case("attention", (1, 512, 512, 8, 8, 64), "causal"),
    Case("attention", (1, 1024, 1024, 8, 8, 64), "causal"),
    Case("attention", (4, 1, 8192, 8, 8, 64), "full"),
    Case("ragged_dot", (2048, 512, 512, 8), "uneven"),
    Case("ragged_dot", (256, 256, 512, 4), "even"),
    Case("attention", (1, 2048, 2048, 8, 8, 64), "causal"),
    Case("attention", (1, 2048, 2048, 8, 8, 64), "full"),
    Case("attention", (1, 2048, 2048, 32, 8, 128), "causal"),
    Case("attention", (4, 256, 256, 16, 16, 64), "full"),
    Case("attention", (1, 128, 128, 8, 8, 64), "causal"),
    Case("ragged_dot", (2048, 512, 512, 64), "uneven"),
    Case("ragged_dot", (2048, 512, 512, 2), "even"),
    Case("ragged_dot", (4096, 256, 256, 128), "uneven"),
)
LARGE = (
    Case("attention", (1, 1024, 1024, 8, 8, 64), "causal"),
    Case("attention", (1, 4096, 4096, 8, 8, 64), "causal"),
    Case("attention", (4, 4096, 4096, 32, 8, 128), "causal"),
    Case("attention", (1, 16384, 16384, 8, 8, 64), "causal"),
    Case("attention", (1, 16384, 16384, 8, 8, 64), "full"),
    Case("attention", (16, 1, 8192, 32, 8, 128), "full"),
    Case("ragged_dot", (2048, 512, 512, 8), "even"),
    Case("ragged_dot", (2048, 512, 512, 64), "even"),
    Case("ragged_dot", (8192, 2048, 2048, 8), "uneven"),
    Case("ragged_dot", (8192, 2048, 2048, 64), "uneven"),
    Case("ragged_dot", (8192, 1024, 1024, 128), "even"),
)
"""What an accelerator is measured on."""
QUICK = 7
"""How many of the cases ``--quick`` runs."""


def attention_case(case: Case) -> tuple[Arrays, Function, Function]:
    """Returns operands, attention as written, and the kernel with its gradient."""
    b, t, s, n, k, h = case.shape
    causal = case.detail == "causal"
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (b, t, n, h), (b, s, k, h), (b, s, k, h)
    operands = tuple(
        jax.random.normal(key, shape).astype(case.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )

    def written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, n // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / h**0.5
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((t, s), bool)), scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(v.dtype)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    params = {"scale": h**-0.5, "window": (None, 0 if causal else None)}
    return operands, written, kernel("attention", ("q", "k", "v"), params)


def ragged_case(case: Case) -> tuple[Arrays, Function, Function]:
    """Returns operands, `jax.lax.ragged_dot`, and the kernel with its gradient."""
    m, k, n, g = case.shape
    left, right, chosen = jax.random.split(jax.random.key(0), 3)
    weights = jnp.ones(g) if case.detail == "even" else 0.5 ** (jnp.arange(g) / 4)
    group = jnp.sort(jax.random.categorical(chosen, jnp.log(weights), shape=(m,)))
    sizes = jnp.bincount(group, length=g).astype(jnp.int32)
    lhs = jax.random.normal(left, (m, k)).astype(case.dtype)
    rhs = (jax.random.normal(right, (g, k, n)) / k**0.5).astype(case.dtype)
    ours = kernel("ragged_dot", ("lhs", "rhs", "group_sizes"), {})
    return (lhs, rhs, sizes), jax.lax.ragged_dot, ours


def kernel(op: str, names: tuple[str, ...], params: dict[str, Any]) -> Function:
    """Returns the op's memory-bounded kernel as a function with a gradient."""
    found = registry().kernel(op, "memory_bounded")

    @jax.custom_vjp
    def run(*operands: jax.Array) -> jax.Array:
        return found.forward(**dict(zip(names, operands, strict=True)), **params)

    def forward(*operands: jax.Array) -> Any:
        given = dict(zip(names, operands, strict=True))
        out, residuals = found.forward(**given, **params, residuals=True)
        return out, (given, out, residuals)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        given, out, residuals = kept
        grads = found.backward(
            **given, **params, out=out, residuals=residuals, cotangent=cotangent
        )
        return tuple(grads.get(name) for name in names)

    run.defvjp(forward, backward)
    return run


def with_gradient(function: Function, operands: Arrays) -> Function:
    """Returns the value and gradients of a sum of squares of the result."""
    floats = tuple(
        i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)
    )

    def loss(*x: jax.Array) -> jax.Array:
        return (function(*x).astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss, floats)


def compare(written: Function, ours: Function, operands: Arrays, turns: int) -> Any:
    """Returns times in ms, memory in bytes, and the largest difference."""
    both = [jax.jit(f).lower(*operands).compile() for f in (written, ours)]
    results = [jax.block_until_ready(f(*operands)) for f in both]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for compiled, mine in zip(both, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*operands))
            mine.append((time.perf_counter() - start) * 1e3)
    memory = [getattr(f.memory_analysis(), "temp_size_in_bytes", 0) for f in both]
    apart = jax.tree.map(lambda x, y: jnp.abs(x - y).max() / jnp.abs(x).max(), *results)
    return {
        "written_ms": round(min(times[0]), 3),
        "ours_ms": round(min(times[1]), 3),
        "written_median_ms": round(statistics.median(times[0]), 3),
        "ours_median_ms": round(statistics.median(times[1]), 3),
        "faster": round(min(times[0]) / min(times[1]), 2),
        "written_bytes": memory[0],
        "ours_bytes": memory[1],
        "less_memory": round(memory[0] / max(1, memory[1]), 1),
        "largest_relative_difference": float(max(jax.tree.leaves(apart))),
    }


def measure(case: Case, turns: int) -> list[dict[str, Any]]:
    """Returns a row for the forward pass and one with the gradient, and prints both."""
    make = {"attention": attention_case, "ragged_dot": ragged_case}[case.op]
    operands, written, ours = make(case)
    rows = []
    for what, bars in zip(("forward", "gradient"), case.bars, strict=True):
        pair = written, ours
        if what == "gradient":
            pair = with_gradient(written, operands), with_gradient(ours, operands)
        row = {"case": case.name, "what": what, "turns": turns}
        row |= compare(pair[0], pair[1], operands, turns)
        if bars is not None:
            row["bars"] = bars
            row["met"] = row["faster"] >= bars[0] and row["less_memory"] >= bars[1]
        rows.append(row)
        print(line(row), flush=True)
    return rows


HEADER = (
    f"{'case':48} {'':8} {'written':>9} {'ours':>8} {'faster':>7}"
    f" {'written':>9} {'ours':>8} {'less':>6}  bars"
)


def line(row: dict[str, Any]) -> str:
    """Returns one row of the table."""
    bars = ""
    if "bars" in row:
        bars = (
            f"{row['bars'][0]}x, {row['bars'][1]}x {'met' if row['met'] else 'MISSED'}"
        )
    mib = 1 << 20
    return (
        f"{row['case']:48} {row['what']:8}"
        f" {row['written_ms']:9.2f} {row['ours_ms']:8.2f}"
        f" {row['faster']:6.1f}x {row['written_bytes'] / mib:6.1f}MiB"
        f" {row['ours_bytes'] / mib:5.1f}MiB {row['less_memory']:5.0f}x  {bars}"
    )


def main() -> None:
    """Measures the cases, prints a table, and writes it as JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the main cases only")
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    parser.add_argument("--platform", default="cpu", help="cpu, cuda or tpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="turns per case")
    options = parser.parse_args()
    root = str(pathlib.Path(__file__).resolve().parent.parent.parent)
    if root not in sys.path:  # a clone that is not installed
        sys.path.insert(0, root)
    jax.config.update("jax_platforms", options.platform)
    print(HEADER)
    cases = CASES if options.platform == "cpu" else LARGE
    cases = cases[:QUICK] if options.quick else cases
    cases = tuple(dataclasses.replace(c, dtype=options.dtype) for c in cases)
    rows = [row for case in cases for row in measure(case, options.repeats)]
    if options.json:
        record = {
            "command": "python3 -m tests.bench.memory_bounded"
            f" --platform {options.platform} --dtype {options.dtype}"
            f" --repeats {options.repeats}" + " --quick" * options.quick,
            "date": datetime.date.today().isoformat(),
            "device_kind": jax.devices()[0].device_kind,
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": platform.python_version(),
            "results": rows,
        }
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
