"""Run by test_sharding.py on eight devices: experts as written and rewritten.

Prints a line for each mesh and pass, and fails if a rewritten program gives other
numbers or needs more memory of a device. Gradients are placed as their operands are,
as in a training step, so that no device has all of them.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rewriter
from tests.support.sharded_programs import error, memory

ROWS, WIDTH, HIDDEN, EXPERTS = 512, 64, 128, 16
FORCED = {"ragged_dot": "memory_bounded"}
EVEN = (32,) * 16
RAGGED = (40, 0, 100, 61, 1, 50, 0, 0, 96, 3, 50, 0, 4, 19, 48, 40)
CAPACITY = (20, 0, 50, 30, 1, 25, 0, 0, 48, 1, 25, 0, 2, 9, 24, 20)
"""Rows of each expert; in the last, many belong to none."""

CASES = (
    ("experts", (("expert", 8),), P(), "expert", None, EVEN),
    ("experts, ragged", (("expert", 8),), P(), "expert", None, RAGGED),
    ("capacity", (("expert", 8),), P(), "expert", None, CAPACITY),
    ("two axes", (("a", 2), ("b", 4)), P(), ("a", "b"), None, RAGGED),
    ("data", (("data", 2), ("expert", 4)), P("data"), "expert", None, RAGGED),
    ("columns", (("expert", 4), ("model", 2)), P(), "expert", "model", CAPACITY),
    ("rows too", (("expert", 8),), P("expert"), "expert", None, RAGGED),
)
"""Names, meshes, how rows are split, over what experts and columns are, and sizes."""


def layer(x: Any, gate: Any, up: Any, down: Any, sizes: Any) -> jax.Array:
    """Gated linear units of experts, and what leads back."""
    dot = jax.lax.ragged_dot
    return dot(jax.nn.silu(dot(x, gate, sizes)) * dot(x, up, sizes), down, sizes)


def gradients(*given: Any) -> Any:
    """Of all operands but the sizes."""
    *floats, sizes = given
    loss = lambda *moving: (layer(*moving, sizes) ** 2).mean()
    return jax.grad(loss, (0, 1, 2, 3))(*floats)


def compared(case: Any, f: Any) -> tuple[str, bool]:
    """A line, and whether it is as it should be."""
    name, axes, rows, experts, columns, sizes = case
    names, counts = zip(*axes, strict=True)
    mesh = jax.make_mesh(counts, names, axis_types=(AxisType.Auto,) * len(names))
    wide, back = P(experts, None, columns), P(experts, columns)
    specs = [NamedSharding(mesh, s) for s in (rows, wide, wide, back, P())]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(ROWS, WIDTH), *[(EXPERTS, WIDTH, HIDDEN)] * 2, (EXPERTS, HIDDEN, WIDTH)]
    args = [jax.random.normal(k, s) / 8 for k, s in zip(keys, shapes, strict=True)]
    args = jax.device_put([*args, jnp.asarray(sizes, jnp.int32)], specs)
    placed = tuple(specs[:4]) if f is gradients else specs[0]
    original = jax.jit(f, out_shardings=placed)
    fast = rewriter.optimize(f, out_shardings=placed, implementation=FORCED)
    before, after = (g.lower(*args).compile() for g in (original, fast))
    found = fast.report(*args).sites
    gap, used = error(after(*args), before(*args)), (memory(before), memory(after))
    text = f"{name}, {f.__name__}: {used[0]} -> {used[1]} B, error {gap:.0e}"
    replaced = len(found) == 3 and all(s.replaced for s in found)
    return text, replaced and gap < 2e-5 and used[1] <= used[0]


def main() -> int:
    """Prints the lines; the number of wrong ones."""
    assert np.sum(RAGGED) == np.sum(EVEN) == ROWS
    bad = 0
    for case in CASES:
        for f in (layer, gradients):
            text, good = compared(case, f)
            bad += not good
            print(f"{'' if good else 'BAD '}{text}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())
