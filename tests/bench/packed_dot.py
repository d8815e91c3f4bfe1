"""Rows times a matrix of GPTQ, AWQ or nf4: as written, as chosen, and by config.

  python3 -m tests.bench.packed_dot [--kinds "gptq;awq;nf4"] [--rows "1;16"]
      [--sizes "4096x14336"] [--every] [--turns N] [--json PATH]

Words of 32 bits have eight numbers each: of rows by GPTQ, of columns by AWQ. Zero
points are packed too; they and scales are those of 128 numbers. A byte of nf4 has two
numbers, which a table of 16 floats is looked up by; 64 have a scale. Times are device
time of all kernels of a program, on two sets of inputs in turns. `share` is the part of
the GPU's memory bandwidth that reading the words once would take. The error is that of
the result against float32, in the Frobenius norm.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from rewriter.kernels.quantized_dot import PACKED, packed_few_rows
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.site.implementation import settings
from tests.bench import record, stored_cases

COMMAND = "python3 -m tests.bench.packed_dot"
GROUP, EACH = 128, 8
BLOCK = 64
"""The numbers of nf4 that have a scale."""

NF4 = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
"""The codebook of QLoRA (arXiv 2305.14314, appendix E)."""

AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where AutoAWQ puts each of eight numbers."""


def of_rows(w: Any) -> Any:
    """Numbers of words that hold eight rows."""
    shifts = jnp.arange(0, 32, 4)[:, None]
    return ((w[:, None] >> shifts) & 15).reshape(-1, w.shape[1])


def of_columns(w: Any) -> Any:
    """Numbers of words that hold eight columns."""
    shifts = jnp.arange(0, 32, 4)
    return ((w[:, :, None] >> shifts) & 15).reshape(w.shape[0], -1)


def in_order(numbers: Any) -> Any:
    """Columns in AutoAWQ's order."""
    order = jnp.arange(numbers.shape[1]).reshape(-1, EACH)[:, AWQ].reshape(-1)
    return numbers[:, order]


def of_nf4(x: Any, packed: Any, scales: Any) -> Any:
    """The product with a matrix [n, k] of nf4, in the order of bitsandbytes."""
    index = jnp.stack([packed >> 4, packed & 15], -1).reshape(-1)
    blocks = jnp.array(NF4)[index].reshape(-1, BLOCK) * scales[:, None]
    return x @ blocks.reshape(-1, x.shape[1]).astype(x.dtype).T


def matrix(kind: str, w: Any, zeros: Any, scales: Any) -> Any:
    """The widened matrix."""
    if kind == "gptq":
        w, zeros = of_rows(w), of_columns(zeros) + 1
    else:
        w, zeros = in_order(of_columns(w)), in_order(of_columns(zeros))
    groups, n = scales.shape
    parts = (w.reshape(groups, -1, n) - zeros[:, None]) * scales[:, None]
    return parts.reshape(-1, n)


def as_written(kind: str, x: Any, w: Any, zeros: Any, scales: Any) -> Any:
    """The product, as such models write it."""
    if kind == "nf4":
        return of_nf4(x, w, scales)
    return x @ matrix(kind, w, zeros, scales)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def inputs(kind: str, m: int, k: int, n: int, seed: Any) -> list[jax.Array]:
    """Returns rows, words, zero points and scales."""
    keys = jax.random.split(jax.random.key(seed), 4)
    if kind == "nf4":
        return [
            jax.random.normal(keys[0], (m, k), jnp.bfloat16),
            jax.random.bits(keys[1], (k * n // 2,), jnp.uint8), jnp.zeros(()),
            jax.random.uniform(keys[3], (k * n // BLOCK,), minval=0.01, maxval=0.03),
        ]  # fmt: skip
    shape = (k // EACH, n) if kind == "gptq" else (k, n // EACH)
    zeros = (k // GROUP, n // EACH)
    draw = lambda key, shape: jax.random.bits(key, shape).view(jnp.int32)
    return [
        jax.random.normal(keys[0], (m, k), jnp.float16),
        draw(keys[1], shape), draw(keys[2], zeros),
        jax.random.uniform(keys[3], (k // GROUP, n), jnp.float16, 1e-3, 3e-3),
    ]  # fmt: skip


def ways(kind: str, args: list[jax.Array], every: bool) -> list[tuple[str, Any, Any]]:
    """Returns (name, config, function) of each way."""
    program, module = functools.partial(as_written, kind), packed_few_rows
    found: list[tuple[str, Any, Any]] = [("xla", None, program)]
    found.append(("rewriter", None, rewriter.optimize(program)))
    how = {"packed_dot": [module.KERNEL.name, "xla"]}
    (site,) = rewriter.explain(program, implementation=how)(*args).sites
    if site.form != PACKED.name or not every:
        return found
    given, params = operands(kind, *args), dict(site.params)
    spec, here = spec_of(PACKED, given, params), device.attached()
    for config in worth_measuring(module.KERNEL.space, spec, here, 8)[0]:
        run = functools.partial(module.KERNEL.forward, **params, config=config)
        program = lambda *args, run=run: run(**operands(kind, *args))
        found.append((module.KERNEL.name, config, program))
    return found


def operands(kind: str, x: Any, w: Any, zeros: Any, scales: Any) -> dict[str, Any]:
    """The operands of the op, from arguments."""
    if kind == "nf4":
        n = 2 * w.size // x.shape[1]
        scales = scales.reshape(n, -1).T
        return {"x": x, "w": w.reshape(n, -1), "w_scale": scales}
    z = of_columns(zeros) + 1 if kind == "gptq" else in_order(of_columns(zeros))
    return {"x": x, "w": w, "w_scale": scales, "w_zero": z}


def error(kind: str, got: Any, args: list[jax.Array]) -> float:
    """Returns the relative error of a result."""
    x, w, zeros, scales = args
    x, scales = x.astype(jnp.float32), scales.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        want = as_written(kind, x, w, zeros, scales)
    return record.difference(got, want)


def measured(
    kind: str, m: int, k: int, n: int, every: bool, turns: int
) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    sets = [inputs(kind, m, k, n, seed) for seed in range(2)]
    wanted = ways(kind, sets[0], every)
    compiled = lambda way: jax.jit(way[2]).lower(*sets[0]).compile()
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, wanted))
    rows = []
    for (by, config, run), program in zip(wanted, programs, strict=True):
        row: dict[str, Any] = {
            "kind": kind, "m, k, n": [m, k, n], "by": by,
            "config": dict(settings(config) or ()) if config else None,
            "error": error(kind, program(*sets[0]), sets[0]),
        }  # fmt: skip
        if by == "rewriter":
            row["kernel"] = ", ".join(s.kernel for s in run.report(*sets[0]).sites)
        rows.append(row)
    times, peak = timing.measure(programs, sets, turns), device.attached().bandwidth
    for row, t in zip(rows, times, strict=True):
        row["share"] = round(k * n / 2 / t.median / peak, 2) if peak else None
    return record.with_times(rows, times)


def main() -> None:
    """Measures the cases."""
    parser = stored_cases.parser(__doc__, "gptq;awq;nf4")
    parser.add_argument("--every", action="store_true", help="every config")
    given = parser.parse_args()
    one = lambda kind, m, k, n: measured(kind, m, k, n, given.every, given.turns)
    stored_cases.run(given, COMMAND, one)


if __name__ == "__main__":
    main()
