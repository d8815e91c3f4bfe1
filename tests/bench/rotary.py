"""Times what rotary embeddings and QK norms cost in front of attention on a GPU.

    python3 -m tests.bench.rotary [--json PATH]

A row is a causal attention with norms and rotations of q and k before it, and the same
attention alone. Both are computed by the kernels that are chosen, and XLA fuses what is
in front. The difference is the most that a kernel could win which applies both while it
loads q and k. Such a kernel rotates keys once for each tile of queries, not once.
``reads_us`` is the time that reading and writing q and k once takes at the bandwidth
measured here, so no fusion in front can take less.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops import device
from tests.bench import choices, record
from tests.bench.choices import BF16, F32, Row

SHAPES = ((8, 4096, 16, 16, 128), (4, 4096, 32, 8, 128), (8, 2048, 16, 16, 64))
"""Batch entries, positions, heads of queries, heads of keys, width."""


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


def compiled(front: str, shape: tuple[int, ...], passes: str) -> Any:
    """Returns a row and its compiled program."""
    row = row_of(front, shape, passes)
    shapes = tuple(jax.ShapeDtypeStruct(*x) for x in row.shapes)
    return row, choices.compiled(row, passes, "chosen", shapes)


def once_us(shape: tuple[int, ...], passes: str) -> float:
    """Returns the time of reading and writing q and k, and of both cotangents."""
    b, t, n, heads, h = shape
    moved = 2 * 2 * b * t * (n + heads) * h * (1 if passes == "forward" else 2)
    return 1e6 * moved / device.attached().bandwidth


def measured(shapes: Any = SHAPES) -> list[dict[str, Any]]:
    """Returns and prints a figure for each front, shape and pass."""
    todo = [
        (f, s, p) for s in shapes for p in ("forward", "both") for f in FRONTS
    ]  # fmt: skip
    rows = []
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(compiled, *x) for x in todo]
        for (_, shape, passes), future in zip(todo, made, strict=True):
            row, (program, kernels) = future.result()
            arm = pool.submit(tuple, (program, kernels))
            found = choices.measured(row, passes, {"chosen": arm})
            found["reads_us"] = round(once_us(shape, passes), 1)
            print(json.dumps(found, default=str), flush=True)
            rows.append(found)
    return rows


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    rows = measured()
    if asked.json:
        record.write(asked.json, "python3 -m tests.bench.rotary", rows=rows)


if __name__ == "__main__":
    main()
