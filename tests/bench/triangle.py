"""Times triangle multiplication on a GPU: XLA as written beside what is chosen.

    python3 -m tests.bench.triangle [--sizes 512,768] [--edges outgoing,incoming]
        [--passes both,forward] [--arms written,chosen,units,norms,both] [--kernels]
        [--json PATH]

Outgoing and incoming edges of n x n pairs of 128 channels, gated, with both layer
norms, as AlphaFold 3 writes them, forward and with the gradients of pairs and weights.
Microseconds on the device by CUPTI, medians of runs that take turns: as ``written``, as
``chosen``, and with kernels that are forced for gated units, for norms and for both.
``parts`` are the kernels of one run, those that take longest, by what they do. With
``--kernels``, ``kernels`` are those of ``written`` one by one, with the bytes that they
read and write, the operations of their products, and the time of each at the device's
limits. ``passes_us`` are these added up: what XLA's own passes take at the limits, and
``passed`` their bytes. Times at the device's limits, from `rewriter.ops.device`:

- ``bytes_us``: of reading and writing each array once that a program must pass between
  its contractions: pairs, both gated projections, the product, the result.
- ``products_us``: of all contractions.

No program takes less than the larger one, and none that does not overlap both takes
less than their sum.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pathlib
import re
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
from tests.bench import hlo_kernels, record
from tests.bench.choices import BF16, F32, apart

CHANNELS, TURNS, SHOWN = 128, 9, 12
EDGES = {"outgoing": "cik,cjk->cij", "incoming": "ckj,cki->cij"}
PASSES = "forward", "both"
FORCED = {
    "units": {"gated_linear_unit": "hopper"}, "norms": {"layer_norm": "hopper"},
    "both": {"gated_linear_unit": "hopper", "layer_norm": "hopper"},
}  # fmt: skip
"""Kernels that an arm is given."""
ARMS = "written", "chosen", *FORCED


def norm(x: Any, scale: Any, offset: Any) -> Any:
    """Returns a layer norm, in float32 inside."""
    wide = x.astype(F32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    made = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    return (made * scale + offset).astype(x.dtype)


def multiplied(edges: str, z: Any, mask: Any, p: Any) -> Any:
    """Returns the update of pairs [n, n, c]."""
    x = norm(z, p["scale"], p["offset"])
    projected = jnp.transpose(x @ p["both"], (2, 0, 1)) * mask
    projected *= jax.nn.sigmoid(jnp.transpose(x @ p["gates"], (2, 0, 1)))
    a, b = jnp.split(projected, 2)
    made = jnp.transpose(jnp.einsum(EDGES[edges], a, b), (1, 2, 0))
    made = norm(made, p["scale_2"], p["offset_2"])
    return (made @ p["out"]) * jax.nn.sigmoid(x @ p["gate"])


def with_gradients(edges: str, z: Any, mask: Any, p: Any, up: Any) -> Any:
    """Returns the update, and the gradients of pairs and weights."""
    out, back = jax.vjp(lambda z, p: multiplied(edges, z, mask, p), z, p)
    return out, back(up)


def operands(n: int, seed: int) -> tuple[Any, ...]:
    """Returns pairs, a mask, weights and a cotangent."""
    c = CHANNELS
    shapes = {
        "both": (c, 2 * c), "gates": (c, 2 * c), "out": (c, c), "gate": (c, c),
    }  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, BF16)
    p = {name: normal(*shape) * c**-0.5 for name, shape in shapes.items()}
    p |= {name: jnp.ones(c, F32) for name in ("scale", "scale_2")}
    p |= {name: jnp.zeros(c, F32) for name in ("offset", "offset_2")}
    mask = jax.random.uniform(next(keys), (n, n)) < 0.9
    return normal(n, n, c), mask.astype(BF16), p, normal(n, n, c)


def compiled(edges: str, n: int, passes: str, by: str) -> Any:
    """Returns a compiled program, and the kernels of its sites."""
    run: Callable[..., Any] = multiplied if passes == "forward" else with_gradients
    args = jax.eval_shape(lambda: operands(n, 0))
    args = args if passes == "both" else args[:3]
    fn = functools.partial(run, edges)
    if by == "written":
        return jax.jit(fn).lower(*args).compile(), ()
    forced = {} if by == "chosen" else {"implementation": FORCED[by]}
    fast = rewriter.optimize(fn, **forced)
    sites = tuple(f"{s.form or s.op} {s.kernel}" for s in fast.report(*args).sites)
    return fast.lower(*args).compile(), sites


def parts_of(call: Callable[[], Any]) -> dict[str, float]:
    """Returns microseconds of one run's kernels, by name, the longest."""
    found: collections.Counter[str] = collections.Counter()
    for name, seconds in _jax.kernel_seconds(call):
        found[re.sub(r"[_.]?\d+$", "", name)[:70]] += 1e6 * seconds
    return {name: round(us, 1) for name, us in found.most_common(SHOWN)}


def kernels_of(program: Any, call: Callable[[], Any]) -> dict[str, Any]:
    """Returns a program's kernels in order, with times, bytes and operations.

    A kernel of cuBLAS has no instruction's name: it takes the next call's work.
    """
    on, works = device.attached(), hlo_kernels.work_of(program)
    by_name = {x.name: x for x in works}
    ran = [min(pair, key=lambda x: x[1]) for pair in _turns(call)]
    calls = iter([x for x in works if not any(x.name == name for name, _ in ran)])
    rows = []
    for name, seconds in ran:
        work = by_name.get(name) or next(calls, None)
        us = {"kernel": name[:60], "us": round(1e6 * seconds, 1)}
        if work is not None:
            least = max(work.nbytes / on.bandwidth, work.flops / on.flops)
            us |= {
                "instruction": work.name, "mb": round(work.nbytes / 1e6, 1),
                "gflop": round(work.flops / 1e9, 1), "least_us": round(1e6 * least, 1),
            }  # fmt: skip
        rows.append(us)
    return {
        "kernels": rows,
        "passed_mb": round(sum(x.nbytes for x in works) / 1e6),
        "passes_us": round(sum(x.get("least_us", 0.0) for x in rows), 1),
    }


def _turns(call: Callable[[], Any]) -> list[tuple[Any, ...]]:
    """The kernels of some runs, each with its name and seconds."""
    return list(zip(*(_jax.kernel_seconds(call) for _ in range(5)), strict=False))


def limits(n: int, passes: str) -> dict[str, float]:
    """Returns the microseconds at the device's limits.

    A backward reads the pairs, the cotangent, both projections and the product, and
    writes the cotangents of the product, of both projections and of the pairs; each of
    those between contractions is read once more. Each contraction has two more.
    """
    on, pairs, both = device.attached(), n * n * CHANNELS, passes == "both"
    arrays = 2 + 2 * (2 + 1) + 1  # pairs twice, what is between, the result
    arrays += (2 + 1 + 2 + 1) + 2 * (1 + 2) + 1 if both else 0
    flops = 2 * pairs * (n + CHANNELS * (4 + 2)) * (3 if both else 1)
    return {
        "bytes_us": round(1e6 * 2 * arrays * pairs / on.bandwidth, 1),
        "products_us": round(1e6 * flops / on.flops, 1),
    }


def measured(
    edges: str, n: int, passes: str, arms: dict[str, Any], kernels: bool = False
) -> dict[str, Any]:
    """Returns a row's figures, with those of single kernels if they are asked for."""
    sets = [operands(n, seed) for seed in range(2)]
    sets = [x if passes == "both" else x[:3] for x in sets]
    made: dict[str, Any] = {
        "row": f"{edges}, {n}x{n}x{CHANNELS}", "pass": passes, "us": {},
        **limits(n, passes), "sites": {by: sites for by, (_, sites) in arms.items()},
    }  # fmt: skip
    want, *others = (
        [np.asarray(x, F32) for x in jax.tree.leaves(program(*sets[0]))]
        for program, _ in arms.values()
    )
    made["apart from written"] = [max(map(apart, x, want)) for x in others]
    times = timing.measure([x for x, _ in arms.values()], sets, TURNS)
    for by, samples in zip(arms, times, strict=True):
        made["us"][by] = round(1e6 * samples.median, 1)
    made["parts"] = {
        by: parts_of(lambda x=x: x(*sets[1])) for by, (x, _) in arms.items()
    }
    if kernels and "written" in arms:
        program = arms["written"][0]
        made["written"] = kernels_of(program, lambda: program(*sets[1]))
    return made


def main() -> None:
    """Prints a line per row, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="512,768")
    parser.add_argument("--edges", default=",".join(EDGES))
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    sizes, arms = map(int, given.sizes.split(",")), given.arms.split(",")
    edges, passes = given.edges.split(","), given.passes.split(",")
    rows = []
    for x in [(e, n, p) for n in sizes for e in edges for p in passes]:
        with ThreadPoolExecutor(len(arms)) as pool:
            made = {by: pool.submit(compiled, *x, by) for by in arms}
        programs = {by: future.result() for by, future in made.items()}
        found = measured(*x, programs, given.kernels)
        print(json.dumps(found, default=str), flush=True)
        rows.append(found)
        if given.json:
            told = f"--edges {given.edges} --passes {given.passes} --arms {given.arms}"
            told += " --kernels" * given.kernels
            record.write(
                given.json, f"python3 -m tests.bench.triangle {told}", rows=rows
            )


if __name__ == "__main__":
    main()
