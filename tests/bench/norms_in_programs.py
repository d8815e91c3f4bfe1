"""Norms between a residual add and a product, by XLA and by our kernel on a Hopper GPU.

  python3 -m tests.bench.norms_in_programs [--json PATH]

Programs are as GPT-2 and ViT have them (``pre``), and as BERT has them (``post``). XLA
may compute the norm together with what is in front of it. Microseconds are the device's
by CUPTI, of the whole program, medians of runs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.hardware import timing
from tests.bench import choices, record
from tests.bench.choices import BF16, F32, Row, layer, rms

TURNS = 15


def before(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a residual add behind a product with bias, a norm, and a product."""

    def run(x: Any, a: Any, w: Any, b: Any, scale: Any, *more: Any) -> Any:
        *bias, w2 = more
        h = x + (a @ w + b)
        return h, norm(h, scale, *bias) @ w2

    return run


def behind(x: Any, a: Any, w: Any, b: Any, scale: Any, bias: Any, w2: Any) -> Any:
    """The same where the norm's result is the stream, with an activation."""
    h = layer(x + (a @ w + b), scale, bias)
    return h, jax.nn.gelu(h @ w2)


KINDS = {"pre": before(layer), "post": behind, "rms": before(rms)}
CASES = (
    ("pre", 16384, 768, BF16), ("post", 16384, 768, BF16), ("pre", 8192, 768, BF16),
    ("pre", 65536, 512, BF16), ("pre", 16384, 768, F32), ("rms", 32768, 768, BF16),
    ("pre", 16384, 1024, BF16),
)  # fmt: skip


def program(kind: str, rows: int, d: int, dtype: Any) -> Row:
    """Returns the program as a row of `tests.bench.choices`."""
    shapes = [((rows, d), dtype)] * 2 + [((d, d), dtype), ((d,), dtype), ((d,), F32)]
    shapes += [] if kind == "rms" else [((d,), F32)]
    shapes.append(((d, 2 * d), dtype))
    op = "rms_norm" if kind == "rms" else "layer_norm"
    name = f"{kind} {rows}x{d} {jnp.dtype(dtype).name}"
    return Row(name, op, KINDS[kind], tuple(shapes), ("hopper",), ("forward",))


def main() -> None:
    """Prints a line per program, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    made: list[dict[str, Any]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [program(*case) for case in CASES]
        jobs = [
            (row, by, pool.submit(choices.compiled, row, "forward", by, shapes))
            for row in rows
            for shapes in [tuple(jax.ShapeDtypeStruct(*x) for x in row.shapes)]
            for by in ("xla", "hopper")
        ]
        compiled = {(row.name, by): job.result()[0] for row, by, job in jobs}
    for row in rows:
        arms = [compiled[row.name, by] for by in ("xla", "hopper")]
        sets = [choices.drawn(row, seed) for seed in range(2)]
        for arm in arms:
            jax.block_until_ready(arm(*sets[0]))
        xla, hopper = (
            round(1e6 * x.median, 1) for x in timing.measure(arms, sets, TURNS)
        )
        made.append({"program": row.name, "us": {"xla": xla, "hopper": hopper}})
        print(json.dumps(made[-1]), flush=True)
    if given.json:
        record.write(given.json, "python3 -m tests.bench.norms_in_programs", rows=made)


if __name__ == "__main__":
    main()
