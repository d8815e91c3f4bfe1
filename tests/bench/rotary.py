"""Times what rotary embeddings and QK norms cost in front of attention on a GPU.

    python3 -m tests.bench.rotary [--passes both,step,forward] [--shapes 3]
        [--fronts "alone,norms and rotary"] [--json PATH]

A row is a causal attention with norms and rotations of q and k before it, and the same
attention alone, forward or with the gradients of q, k and v. A step of decoding writes
its key and value into a cache, which it gives back. XLA fuses what is in front:
``chosen`` are the kernels that are chosen, norms too; ``fused`` leaves norms to XLA.

The difference to attention alone is the most that a kernel could win which applies both
while it loads q and k. Such a kernel rotates keys once for each tile of queries, not
once. ``reads_us`` is the time that reading and writing q and k once takes at the
device's bandwidth, so no kernel in front takes less. With gradients it counts reading
q, k and their cotangents and writing both too.

Microseconds on the device by CUPTI, medians of runs that take turns.
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
import numpy as np

import rewriter
from rewriter import _jax
from rewriter.hardware import timing
from rewriter.ops import device
from tests.bench import choices, record
from tests.bench.choices import BF16, F32, Row

SHAPES = ((8, 4096, 16, 16, 128), (4, 4096, 32, 8, 128), (8, 2048, 16, 16, 64))
"""Batch entries, positions, heads of queries, heads of keys, width."""

STEPS = ((64, 4096, 32, 8, 128), (8, 4096, 32, 8, 128))
"""The same of steps of decoding, with the cache's positions."""

TURNS = 9
ARMS = {"chosen": {}, "fused": {"implementation": {"rms_norm": "xla"}}}


def normed(x: Any, scale: Any) -> Any:
    """Returns the RMS norm of each head, in float32 inside."""
    wide = x.astype(F32)
    size = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * size * scale).astype(x.dtype)


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Returns rotations of the two halves of each head, as in Llama."""
    first, second = jnp.split(x.astype(F32), 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    made = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(made, -1).astype(x.dtype)


def attend(q: Any, k: Any, v: Any) -> Any:
    """Returns causal attention, with heads of queries in groups."""
    (b, t, n, h), heads = q.shape, k.shape[2]
    q = q.reshape(b, t, heads, n // heads, h)
    x = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=F32) * h**-0.5
    x = jnp.where(jnp.tril(jnp.ones((t, t), bool)), x, -jnp.inf)
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(x, -1).astype(BF16), v)
    return out.reshape(b, t, n, h)


def before(norms: bool, rotates: bool) -> Callable[..., Any]:
    """Returns attention with what is asked for in front."""

    def run(q: Any, k: Any, v: Any, scales: Any, cos: Any, sin: Any) -> Any:
        if norms:
            q, k = normed(q, scales[0]), normed(k, scales[1])
        if rotates:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return attend(q, k, v)

    return run


FRONTS = {
    "alone": (False, False), "rotary": (False, True), "norms": (True, False),
    "norms and rotary": (True, True),
}  # fmt: skip


def row_of(front: str, shape: tuple[int, ...], passes: str) -> Row:
    """Returns a row of `choices`; with gradients those of q, k and v are results."""
    b, t, n, heads, h = shape
    front_and_attention = before(*FRONTS[front])
    run = front_and_attention
    tables = (((2, h), F32), ((t, h // 2), F32), ((t, h // 2), F32))
    shapes: tuple[Any, ...] = (
        ((b, t, n, h), BF16), ((b, t, heads, h), BF16), ((b, t, heads, h), BF16),
        *tables,
    )  # fmt: skip

    def both(q: Any, k: Any, v: Any, *more: Any) -> Any:
        *tables, up = more
        out, back = jax.vjp(lambda *x: front_and_attention(*x, *tables), q, k, v)
        return out, back(up)

    if passes != "forward":
        run, shapes = both, (*shapes, shapes[0])
    name = f"{front}, {b}x{t}x{n}/{heads}x{h}"
    return Row(name, "attention", run, shapes, (), scores=4.0 * b * n * t * t)


def compiled(front: str, shape: tuple[int, ...], passes: str, by: str) -> Any:
    """Returns an arm's compiled program, and its kernels."""
    row = row_of(front, shape, passes)
    shapes = tuple(jax.ShapeDtypeStruct(*x) for x in row.shapes)
    fast = rewriter.optimize(row.fn, **ARMS[by])
    kernels = tuple(f"{s.op} {s.kernel}" for s in fast.report(*shapes).sites)
    return fast.lower(*shapes).compile(), kernels


def once_us(shape: tuple[int, ...], passes: str) -> float:
    """Returns the time of reading and writing q and k; see above."""
    b, t, n, heads, h = shape
    t = 1 if passes == "step" else t
    moved = 2 * 2 * b * t * (n + heads) * h
    moved += 3 * 2 * b * t * (n + heads) * h * (passes == "both")
    return round(1e6 * moved / device.attached().bandwidth, 1)


def measured(shape: tuple[int, ...], passes: str, made: Any) -> list[dict[str, Any]]:
    """Returns and prints a figure for each front."""
    rows = []
    for front, arms in made.items():
        row = row_of(front, shape, passes)
        sets = [choices.drawn(row, seed) for seed in range(2)]
        found: dict[str, Any] = {"row": row.name, "pass": passes, "us": {}}
        programs = {by: future.result() for by, future in arms.items()}
        for program, _ in programs.values():
            jax.block_until_ready(program(*sets[0]))
        times = timing.measure([x for x, _ in programs.values()], sets, TURNS)
        for (by, (_, kernels)), samples in zip(programs.items(), times, strict=True):
            found["us"][by] = round(1e6 * samples.median, 1)
            found[by] = kernels
        found["reads_us"] = once_us(shape, passes)
        print(json.dumps(found, default=str), flush=True)
        rows.append(found)
    return rows


def step_of(front: str) -> Callable[..., Any]:
    """Returns a step of decoding against a cache, which it writes to."""
    norms, rotates = FRONTS[front]

    def run(
        q: Any, k: Any, v: Any, caches: Any, at: Any, scales: Any, tables: Any
    ) -> Any:
        if norms:
            q, k = normed(q, scales[0]), normed(k, scales[1])
        if rotates:
            cos, sin = (x[at][:, None] for x in tables)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        place = jnp.arange(q.shape[0]), at
        keys, values = (
            c.at[place].set(x[:, 0]) for c, x in zip(caches, (k, v), strict=True)
        )
        return attend_cache(q, keys, values, at), (keys, values)

    return run


def attend_cache(q: Any, k: Any, v: Any, at: Any) -> Any:
    """Returns attention of one query for each entry, to what its cache holds."""
    (b, t, n, h), heads = q.shape, k.shape[2]
    q = q.reshape(b, t, heads, n // heads, h)
    x = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=F32) * h**-0.5
    seen = jnp.arange(k.shape[1]) <= at[:, None]
    x = jnp.where(seen[:, None, None, None], x, -jnp.inf)
    out = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(x, -1).astype(BF16), v)
    return out.reshape(b, t, n, h)


def step_operands(shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns a step's arguments."""
    b, s, n, heads, h = shape
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, BF16)
    q, k, v = normal(b, 1, n, h), normal(b, 1, heads, h), normal(b, 1, heads, h)
    caches = normal(b, s, heads, h), normal(b, s, heads, h)
    at = jnp.asarray(np.linspace(s // 2, s - 2, b), jnp.int32)
    tables = jnp.ones((s, h // 2)), jnp.zeros((s, h // 2))
    return q, k, v, caches, at, jnp.ones((2, h)), tables


def compiled_step(front: str, shape: tuple[int, ...], by: str) -> Any:
    """Returns a step's compiled program, which writes over its caches."""
    args = jax.eval_shape(lambda: step_operands(shape))
    fast = rewriter.optimize(step_of(front), **ARMS[by])
    kernels = tuple(f"{s.op} {s.kernel}" for s in fast.report(*args).sites)
    return jax.jit(fast, donate_argnums=3).lower(*args).compile(), kernels


def ran(program: Any, *args: Any) -> tuple[Any, float]:
    """Runs a step; returns its caches and the seconds of its kernels."""
    results: list[Any] = []

    def call() -> Any:
        results.append(program(*args))
        return results

    seconds = sum(s for _, s in _jax.kernel_seconds(call))
    return results[0][1], seconds


def measured_step(shape: tuple[int, ...], made: Any) -> list[dict[str, Any]]:
    """Returns and prints a figure for each front."""
    rows = []
    for front, arms in made.items():
        found: dict[str, Any] = {"row": f"{front}, {shape}", "pass": "step", "us": {}}
        for by, future in arms.items():
            program, kernels = future.result()
            *given, caches, at, scales, tables = step_operands(shape)
            times = []
            for _ in range(TURNS + 1):
                caches, seconds = ran(program, *given, caches, at, scales, tables)
                times.append(seconds)
            found["us"][by] = round(1e6 * statistics.median(times[1:]), 1)
            found[by] = kernels
        found["reads_us"] = once_us(shape, "step")
        print(json.dumps(found, default=str), flush=True)
        rows.append(found)
    return rows


def prepared(make: Callable[..., Any], front: str, *case: Any) -> dict[str, Any]:
    """Returns the compiled arms of a front."""
    with ThreadPoolExecutor(2) as pool:
        return {by: pool.submit(make, front, *case, by) for by in arms(front)}


def arms(front: str) -> list[str]:
    """Returns the arms of a front: norms can be left to XLA where there are any."""
    return list(ARMS) if FRONTS[front][0] else ["chosen"]


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", default="both,step,forward")
    parser.add_argument("--fronts", default=",".join(FRONTS))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    fronts = asked.fronts.split(",")
    rows: list[dict[str, Any]] = []
    for passes in asked.passes.split(","):
        for shape in (STEPS if passes == "step" else SHAPES)[: asked.shapes]:
            for front in fronts:
                if passes == "step":
                    made = {front: prepared(compiled_step, front, shape)}
                    rows += measured_step(shape, made)
                else:
                    made = {front: prepared(compiled, front, shape, passes)}
                    rows += measured(shape, passes, made)
                if asked.json:
                    told = f"--passes {asked.passes} --shapes {asked.shapes}"
                    command = f"python3 -m tests.bench.rotary {told}"
                    record.write(asked.json, command, rows=rows)


if __name__ == "__main__":
    main()
