"""Where a gated unit's time with gradients goes: kernel by kernel, by XLA and by ours.

  python3 -m tests.bench.unit_gradients [--turns N] [--json PATH]

A unit with all its gradients is six matrix products as it is written. Our kernel keeps
no branches, and multiplies eight times. Each kernel's microseconds are the device's by
CUPTI, medians over runs that take turns on sets of normal inputs. A product's TF/s
count 2·m·k·f operations for each of the six. What is no product is what a kernel that
computes the rest in its products could save at most.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from typing import Any

import jax

from rewriter import _jax
from tests.bench import record
from tests.bench.choices import BF16, Row, compiled, drawn, of_pass, swiglu

COMMAND = "python3 -m tests.bench.unit_gradients"
SHAPES = ((8192, 4096, 14336), (16384, 2048, 8192))
ARMS = ("written", "hopper")
PRODUCTS = 6
SETS = 3
PRODUCT = ("gemm", "nvjet", "cutlass", "cublas", "gated", "dot")
"""Words in the names of kernels that are matrix products."""


def unit(shape: tuple[int, int, int]) -> Row:
    """Returns a unit with its gradients."""
    m, k, f = shape
    given = (((m, k), BF16), ((k, f), BF16), ((k, f), BF16))
    return of_pass(
        Row(f"swiglu {m}x{k}x{f}", "gated_linear_unit", swiglu, given, ()), "both"
    )


def profiled(row: Row, turns: int) -> dict[str, list[dict[str, Any]]]:
    """Returns the kernels of each arm, in the order in which they run."""
    shapes = [jax.ShapeDtypeStruct(*x) for x in row.shapes]
    programs = {by: compiled(row, "both", by, shapes)[0] for by in ARMS}
    sets = [drawn(row, seed) for seed in range(SETS)]
    runs: dict[str, list[list[tuple[str, float]]]] = {by: [] for by in ARMS}
    for program in programs.values():
        jax.block_until_ready(program(*sets[0]))
    for turn in range(turns):
        for by, program in programs.items():
            args = sets[turn % SETS]
            runs[by].append(
                _jax.kernel_seconds(lambda program=program, args=args: program(*args))
            )
    return {by: _medians(each) for by, each in runs.items()}


def _medians(runs: list[list[tuple[str, float]]]) -> list[dict[str, Any]]:
    """The median of each kernel over runs, which have the same kernels."""
    names = [name for name, _ in runs[0]]
    alike = [run for run in runs if [name for name, _ in run] == names]
    return [
        {
            "kernel": name[:120],
            "us": round(1e6 * statistics.median(run[i][1] for run in alike), 1),
            "product": any(word in name.lower() for word in PRODUCT),
        }
        for i, name in enumerate(names)
    ]


def summed(shape: tuple[int, int, int], arms: dict[str, Any]) -> dict[str, Any]:
    """Returns the sums of a unit's kernels, and what is left to gain."""
    made: dict[str, Any] = {}
    m, k, f = shape
    for by, kernels in arms.items():
        products = sum(x["us"] for x in kernels if x["product"])
        rest = sum(x["us"] for x in kernels if not x["product"])
        made[by] = {"products_us": round(products, 1), "rest_us": round(rest, 1)}
    least = made["written"]["products_us"]
    made["tflops_of_products"] = round(PRODUCTS * 2 * m * k * f / least / 1e6, 1)
    made["most_gain"] = round(1 + made["written"]["rest_us"] / least, 3)
    return made


def main() -> None:
    """Prints a line per kernel and per unit, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for shape in SHAPES:
        row = unit(shape)
        arms = profiled(row, given.turns)
        rows.append({"unit": row.name, **summed(shape, arms), "kernels": arms})
        for by, kernels in arms.items():
            for kernel in kernels:
                print(row.name, by, kernel, flush=True)
        print({k: v for k, v in rows[-1].items() if k != "kernels"}, flush=True)
    if given.json:
        record.write(given.json, COMMAND, rows=rows)


if __name__ == "__main__":
    main()
