"""Whether a gradient reads an activation's values, or computes them again, on a GPU.

  python3 -m tests.bench.activations [--json PATH]

For each elementwise function f that XLA computes once: ``x * f(x)`` forward, and its
gradient in a second program. The first form saves what JAX's derivative reads, the
second saves x alone and computes f again. Prints microseconds of both programs'
kernels (median of several), and the bytes that are saved. `recompute_activations`
takes functions for which the second form is no slower.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.rewrite.passes import erfc_in_16_bits
from tests.bench import record

SHAPE = (16384, 3072)
"""An inner layer of BERT-base, 32 x 512 tokens."""

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "erfc, short": erfc_in_16_bits.erfc,
    "exp": lambda x: jnp.exp(-jnp.square(x)),
    "log1p": jax.nn.softplus,
    "mish": lambda x: jnp.tanh(jax.nn.softplus(x)),
}
"""Functions of the passes' own list, and two that programs make of them."""

REPEATS = 7


def programs(f: Callable[[jax.Array], jax.Array], dtype: Any) -> dict[str, list[Any]]:
    """Compiled programs by form: forward, and the gradient."""
    x = jax.ShapeDtypeStruct(SHAPE, dtype)

    def act(x: jax.Array) -> jax.Array:
        return x * f(x)

    def saving(x: jax.Array) -> Any:
        return jax.vjp(act, x)

    def reading(pull: Any, up: jax.Array) -> Any:
        return pull(up)

    def again(x: jax.Array, up: jax.Array) -> Any:
        return jax.vjp(act, x)[1](up)

    _, pull = jax.eval_shape(saving, x)
    forms = {
        "saved": [(saving, (x,)), (reading, (pull, x))],
        "again": [(act, (x,)), (again, (x, x))],
    }
    return {
        name: [jax.jit(fn).lower(*args).compile() for fn, args in both]
        for name, both in forms.items()
    }


def microseconds(program: Any, *args: Any) -> float:
    """The kernels' time of a compiled function, the median of several calls."""
    program(*args)
    times = [
        sum(seconds for _, seconds in _jax.kernel_seconds(lambda: program(*args)))
        for _ in range(REPEATS)
    ]
    return round(1e6 * statistics.median(times), 1)


def measured(name: str, dtype: Any, made: dict[str, list[Any]]) -> dict[str, Any]:
    """A row: both forms of a function, for numbers of a normal distribution."""
    x, up = (jax.random.normal(jax.random.key(i), SHAPE, dtype) for i in range(2))
    row: dict[str, Any] = {"function": name, "dtype": jnp.dtype(dtype).name}
    _, pull = made["saved"][0](x)
    row["saved_bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    for form, args in (("saved", (pull, up)), ("again", (x, up))):
        forward, gradient = made[form]
        row[form] = [microseconds(forward, x), microseconds(gradient, *args)]
    row["faster"] = round(sum(row["saved"]) / sum(row["again"]), 3)
    return row


def main() -> None:
    """Compiles all programs, then measures one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    cases = [(name, t) for name in FUNCTIONS for t in (jnp.bfloat16, jnp.float32)]
    cases.remove(("erfc, short", jnp.float32))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda case: programs(FUNCTIONS[case[0]], case[1]), cases))
    rows = []
    for case, compiled in zip(cases, made, strict=True):
        rows.append(measured(*case, compiled))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        command = "python3 -m tests.bench.activations"
        record.write(given.json, command, shape=SHAPE, results=rows)


if __name__ == "__main__":
    main()
