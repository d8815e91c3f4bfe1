"""Times activations between products by one kernel, against XLA, on a Hopper GPU.

  python3 -m tests.bench.fused_activations [--passes forward,both] [--json PATH]

A program is ``f(x·w + b)·v``, forward or with all gradients. `on` is rewritten, `off`
is rewritten without the pass, and `written` is as XLA compiles it. Prints microseconds
of all kernels, and of those that are no products; errors are those of gradients
against the same program in float32.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter import _jax
from tests.bench import record

SIZES = ((16384, 768, 3072), (25216, 768, 3072))
"""Rows, columns and hidden columns: BERT's of 32 x 512 tokens, ViT's of 128 images."""

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu by tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "mish": jax.nn.mish,
    "tanh": jnp.tanh,
}
REPEATS = 5
PRODUCTS = ("nvjet", "gemm", "cublas", "_ZNcublas", "cutlass")


def layer(act: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns two products with an activation between them."""
    return lambda x, w, b, v, c: act(x @ w + b) @ v + c


def both(act: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the same with its gradients; the cotangent is the first argument."""

    def run(up: Any, *given: Any) -> Any:
        out, back = jax.vjp(layer(act), *given)
        return out, back(up)

    return run


PASSES: dict[str, Callable[[Any], Any]] = {"forward": layer, "both": both}


def shapes(size: tuple[int, int, int], passes: str, dtype: Any) -> list[Any]:
    """Returns the arguments' shapes."""
    n, k, m = size
    of = [(n, k), (k, m), (m,), (m, k), (k,)]
    of = of if passes == "forward" else [(n, k), *of]
    return [jax.ShapeDtypeStruct(x, dtype) for x in of]


def compiling(
    pool: ThreadPoolExecutor, fn: Any, size: Any, passes: str
) -> dict[str, Future[Any]]:
    """Returns the programs of a row, each compiled soon."""
    given = shapes(size, passes, jnp.bfloat16)
    ways = {
        "on": rewriter.optimize(fn),
        "off": rewriter.optimize(fn, disable=("activations",)),
        "written": jax.jit(fn),
    }
    made = {
        name: pool.submit(lambda f=f: f.lower(*given).compile())
        for name, f in ways.items()
    }
    wide = shapes(size, passes, jnp.float32)
    made["float32"] = pool.submit(lambda: jax.jit(fn).lower(*wide).compile())
    return made


def microseconds(program: Any, given: Any) -> dict[str, float]:
    """Returns medians: of all kernels, and of those that are no products by name."""
    jax.block_until_ready(program(*given))
    runs = []
    for _ in range(REPEATS):
        found: Counter[str] = Counter()
        for name, seconds in _jax.kernel_seconds(lambda: program(*given)):
            found[re.sub(r"[_.]?\d+", "", name)[:40]] += 1e6 * seconds
        runs.append(found)
    rest = [n for n in runs[0] if not n.startswith(PRODUCTS)]
    median = lambda of: round(statistics.median(map(of, runs)), 1)
    return {
        "all": median(lambda run: sum(run.values())),
        **{n: median(lambda run, n=n: run[n]) for n in rest},
    }


def measured(name: str, size: Any, passes: str, made: Any) -> dict[str, Any]:
    """Returns a row."""
    given = shapes(size, passes, jnp.float32)
    keys = jax.random.split(jax.random.key(0), len(given))
    scale = lambda x: 2 * x.shape[0] ** -0.5 if x.shape[0] in size[1:] else 1.0
    wide = [
        jax.random.normal(k, x.shape) * scale(x)
        for k, x in zip(keys, given, strict=True)
    ]
    narrow = [x.astype(jnp.bfloat16) for x in wide]
    row: dict[str, Any] = {"function": name, "rows, k, m": size, "pass": passes}
    exact = [x.astype(jnp.float32) for x in narrow]
    want = jax.tree.leaves(made["float32"].result()(*exact))
    for way in ("on", "off", "written"):
        program = made[way].result()
        found = jax.tree.leaves(program(*narrow))
        errors = [_apart(x, y) for x, y in zip(found, want, strict=True)]
        row[way] = {"us": microseconds(program, narrow), "error": max(errors)}
    return row


def _apart(found: jax.Array, want: jax.Array) -> float:
    """The norm of a difference, relative to a result's."""
    wide = jnp.asarray(found, jnp.float32)
    return float(f"{float(jnp.linalg.norm(wide - want) / jnp.linalg.norm(want)):.1e}")


def main() -> None:
    """Compiles all programs, then measures one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", default="forward,both", help="by commas")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    asked = [(p, PASSES[p]) for p in given.passes.split(",")]
    with ThreadPoolExecutor(12) as pool:
        todo = [
            (name, size, passes, compiling(pool, of(act), size, passes))
            for size in SIZES
            for name, act in FUNCTIONS.items()
            for passes, of in asked
        ]
        for *_, made in todo:
            for program in made.values():
                program.exception()
    rows = []
    for name, size, passes, made in todo:
        rows.append(measured(name, size, passes, made))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        command = "python3 -m tests.bench.fused_activations"
        record.write(given.json, command, results=rows)


if __name__ == "__main__":
    main()
