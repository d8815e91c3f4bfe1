"""8-bit rows times an 8-bit matrix, with scales of rows and columns: XLA, and ours.

  python3 -m tests.bench.eight_bits [--sizes "8192x8192x8192;64x4096x14336"]
      [--kinds "int8;fp8"] [--every] [--turns N] [--json PATH]

Sizes are rows x summed x columns. Times are device time by CUPTI of all kernels of a
program, on two sets of inputs in turns. XLA multiplies by cuBLAS: tuning its Triton
products takes minutes, and they were no faster. The error is that of 256 rows and 64
columns against float64, in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.hardware import timing
from rewriter.kernels.quantized_dot import OP, eight_bits
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import numbers_of
from rewriter.site.implementation import settings
from tests.bench import record

COMMAND = "python3 -m tests.bench.eight_bits"
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
NAMES = ("x", "w", "x_scale", "w_scale")
SIZES = "8192x8192x8192;2048x4096x4096;1024x4096x14336;256x4096x14336;64x4096x14336"


@dataclass(frozen=True)
class Kind:
    """What is multiplied.

    Attributes:
        numbers: The dtype of the numbers.
        precision: The precision of the product.
        mode: "transposed" for a matrix [n, k], "forward" for [k, n].
    """

    numbers: str
    precision: str | None = None
    mode: str = "transposed"

    @property
    def sums(self) -> str:
        """The dtype of sums."""
        return "int32" if self.numbers == "int8" else "float32"

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the op."""
        cast = "float32 " if self.sums == "int32" else ""
        return {
            "widen": "", "mode": self.mode, "sums": self.sums,
            "precision": self.precision, "behind": f"{cast}*scale *rows bfloat16",
        }  # fmt: skip


KINDS = {
    "int8": Kind("int8"),
    "int8 [k, n]": Kind("int8", mode="forward"),
    "fp8": Kind("float8_e4m3fn"),
    "fp8 highest": Kind("float8_e4m3fn", "highest"),
    "fp8 [k, n]": Kind("float8_e4m3fn", mode="forward"),
}


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def inputs(seed: int, m: int, k: int, n: int, kind: Kind) -> list[jax.Array]:
    """Returns rows, the matrix, and the scales of both."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shape = (n, k) if kind.mode == "transposed" else (k, n)
    draw = lambda key, shape: numbers_of(jax.random.normal(key, shape), kind.numbers)
    scale = functools.partial(jax.random.uniform, minval=1e-3, maxval=3e-3)
    return [
        draw(keys[0], (m, k)), draw(keys[1], shape), scale(keys[2], (m,)),
        scale(keys[3], (1, n)),
    ]  # fmt: skip


def as_written(kind: Kind, x: Any, w: Any, rows: Any, columns: Any) -> Any:
    """The product as programs write it."""
    dims = (((1,), (1 if kind.mode == "transposed" else 0,)), ((), ()))
    y = jax.lax.dot_general(
        x, w, dims, precision=kind.precision, preferred_element_type=kind.sums
    )
    y = y.astype(jnp.float32) * columns * rows[:, None]
    return y.astype(jnp.bfloat16)


def by_kernel(kind: Kind, config: Any, *args: Any) -> Any:
    """The product by the kernel."""
    given = dict(zip(NAMES, args, strict=True))
    return eight_bits.forward(**given, **kind.params, config=config)


def compiled(run: Callable[..., Any], args: Any) -> Any:
    """Returns the compiled program, or why there is none."""
    try:
        return jax.jit(run).lower(*args).compile(compiler_options=CUBLAS)
    except Exception as problem:
        return str(problem).splitlines()[0][:120]


def error(got: Any, args: Any, kind: Kind) -> float:
    """Returns the relative error of some rows and columns."""
    x, w, rows, columns = args
    w = w if kind.mode == "transposed" else w.T
    n = np.sort(np.random.default_rng(1).choice(w.shape[0], 64, replace=False))
    a, b = np.asarray(x[:256], "f8"), np.asarray(w[n], "f8")
    want = a @ b.T * np.asarray(columns[0, n], "f8")
    want *= np.asarray(rows[:256, None], "f8")
    got = np.asarray(got[:256, n], "f8")
    return float(f"{np.linalg.norm(got - want) / np.linalg.norm(want):.2g}")


Ways = list[tuple[str, Any, Callable[..., Any]]]


def ways(kind: Kind, shapes: Any, every: bool) -> Ways:
    """Returns (name, config, function): XLA, and the kernel by config."""
    spec = spec_of(OP, dict(zip(NAMES, shapes, strict=True)), kind.params)
    here = device.attached()
    own = eight_bits.default(spec, here)
    configs, _ = worth_measuring(eight_bits.KERNEL.space, spec, here, 12)
    found: Ways = [("xla", None, functools.partial(as_written, kind))]
    for config in configs if every else [own]:
        found.append(("hopper", config, functools.partial(by_kernel, kind, config)))
    return found


def measured(
    size: tuple[int, int, int], name: str, programs: Any, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    (m, k, n), kind = size, KINDS[name]
    sets = [inputs(seed, m, k, n, kind) for seed in range(2)]
    rows, running = [], []
    for by, config, run in programs:
        row: dict[str, Any] = {
            "m, k, n": size, "kind": name, "by": by,
            "config": dict(settings(config) or ()) if config else None,
        }  # fmt: skip
        rows.append(row)
        if isinstance(run, str):
            row["failed"] = run
            continue
        row["error"] = error(run(*sets[0]), sets[0], kind)
        running.append((row, run))
    times = timing.measure([run for _, run in running], sets, turns)
    for (row, _), t in zip(running, times, strict=True):
        row["us"] = round(1e6 * t.median, 1)
        row["sigma_us"] = round(1e6 * t.sigma, 1)
        row["tflops"] = round(2e-12 * m * k * n / t.median)
        row["method"] = t.method
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def cases(sizes: str, kinds: str) -> list[tuple[tuple[int, int, int], str]]:
    """Returns sizes and kinds; the long names at the first size alone."""
    every = [tuple(map(int, size.split("x"))) for size in sizes.split(";")]
    return [
        (size, kind)
        for i, size in enumerate(every)
        for kind in kinds.split(";")
        if i == 0 or kind in ("int8", "fp8")
    ]  # type: ignore[misc]


def run(sizes: str, kinds: str, every: bool, turns: int) -> list[dict[str, Any]]:
    """Measures cases, and prints each row."""
    jobs, rows = [], []
    with ThreadPoolExecutor(14) as pool:
        for size, name in cases(sizes, kinds):
            kind = KINDS[name]
            shapes = jax.eval_shape(functools.partial(inputs, 0, *size, kind))
            made = [
                (by, config, pool.submit(compiled, f, shapes))
                for by, config, f in ways(kind, shapes, every)
            ]
            jobs.append((size, name, made))
    for size, name, made in jobs:
        programs = [(by, config, job.result()) for by, config, job in made]
        found = measured(size, name, programs, turns)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    return rows


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--kinds", default=";".join(KINDS))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--every", action="store_true", help="every config")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = run(given.sizes, given.kinds, given.every, given.turns)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
