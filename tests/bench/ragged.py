"""Ragged dots on Hopper's tensor cores: each product apart, config by config.

  python3 -m tests.bench.ragged [--shapes targets] [--uses 0,1,2] [--peers] [--apart]
      [--json PATH]

The three products of a use are timed by themselves: the result, the gradient of lhs
and that of rhs. Group sizes are drawn from Dirichlet's distribution with alpha = 2, as
those of a router are uneven; the row has them. Times are device time by CUPTI, of all
kernels, that which lays out the tiles included; TF/s count 2·m·k·n operations. Three
sets of inputs take turns. Numbers are checked on a sample of the result.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.hardware import timing
from rewriter.kernels.ragged.dot.hopper import Tiles
from rewriter.ops import device
from rewriter.ops.kernel import Kernel, Spec, spec_of
from rewriter.ops.registry import registry
from rewriter.site.implementation import settings
from rewriter.tools.bench_ops import named_uses
from tests.bench import record

COMMAND = "python3 -m tests.bench.ragged"
SETS = 3
MODES = {"forward": "forward", "gradient of lhs": "transposed",
         "gradient of rhs": "contracting"}  # fmt: skip


APART = [Tiles(128, 128, 6, w, apart=True) for w in (8, 16)]


def sizes_of(m: int, groups: int, seed: int = 0) -> np.ndarray:
    """Uneven sizes of groups that sum to m: int32 [groups]."""
    r = np.random.default_rng(seed)
    return r.multinomial(m, r.dirichlet(np.full(groups, 2.0))).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1,))
def normal(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Normal bfloat16 numbers."""
    return jax.random.normal(key, shape, jnp.bfloat16)


def inputs(use: Spec, mode: str) -> list[list[Any]]:
    """Sets of (lhs, rhs, group sizes) of one of the products of a use."""
    (m, k), n = use.shape("lhs"), use.shape("rhs")[2]
    (g,) = use.shape("group_sizes")
    # The gradient of lhs is a product of the cotangent, [m, n], with rhs, [g, k, n].
    shapes = {
        "forward": ((m, k), (g, k, n)),
        "transposed": ((m, n), (g, k, n)),
        "contracting": ((m, k), (m, n)),
    }[mode]
    made = []
    for i in range(SETS):
        keys = jax.random.split(jax.random.key(i))
        arrays = [normal(a, s) for a, s in zip(keys, shapes, strict=True)]
        made.append([*arrays, jnp.asarray(sizes_of(m, g))])
    return made


def error_of(out: jax.Array, args: Sequence[Any], mode: str) -> float:
    """Relative error of a sample of the result, in the Frobenius norm."""
    lhs, rhs, sizes = args
    r = np.random.default_rng(1)
    group = np.repeat(np.arange(len(sizes)), np.asarray(sizes))
    n = np.sort(r.choice(out.shape[-1], 64, replace=False))
    f32 = lambda x: x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        if mode == "contracting":
            k = np.sort(r.choice(out.shape[1], 16, replace=False))
            rows = jax.nn.one_hot(group, len(sizes), dtype=jnp.float32)
            left = jnp.einsum("mg,mk->mgk", rows, f32(lhs[:, k]))
            want = jnp.einsum("mgk,mn->gkn", left, f32(rhs[:, n]))
            got = out[:, k][:, :, n]
        else:
            m = np.sort(r.choice(len(group), 48, replace=False))
            matrices = rhs[:, n].swapaxes(1, 2) if mode == "transposed" else rhs[..., n]
            want = jnp.einsum("mk,mkn->mn", f32(lhs[m]), f32(matrices[group[m]]))
            got = out[m][:, n]
    return float(jnp.linalg.norm(f32(got) - want) / jnp.linalg.norm(want))


def compiled(kernel: Kernel, config: Any, mode: str, args: Sequence[Any]) -> Any:
    """The compiled product, or why there is none."""
    run = jax.jit(functools.partial(kernel.forward, mode=mode, config=config))
    try:
        return run.lower(*args).compile()
    except Exception as problem:
        return (str(problem).splitlines() or [repr(problem)])[0][:120]


def contestants(
    use: Spec, mode: str, peers: bool = False, apart: bool = False
) -> list[tuple[Kernel, Any]]:
    """Kernels with configs: all of Hopper's, and each peer's rule of thumb.

    With `apart` also those that the autotuner does not measure yet.
    """
    on = device.attached()
    given = {n: jax.ShapeDtypeStruct(use.shape(n), use.dtype(n)) for n in use.operands}
    spec = spec_of(registry().op("ragged_dot"), given, {"mode": mode})
    found = []
    for kernel in registry().kernels("ragged_dot"):
        if on.platform not in kernel.platforms:
            continue
        assert kernel.space is not None
        first = kernel.space.default(spec, on)
        if kernel.name == "hopper":
            every = dict.fromkeys((first, *kernel.space.configs(spec, on)))
            every |= dict.fromkeys(APART if apart else ())
            found += [(kernel, c) for c in every if kernel.space.fits(c, spec, on).ok]
        elif peers:
            found.append((kernel, first))
    return found


def measured(
    use: Spec, what: str, wanted: Sequence[tuple[Kernel, Any]], turns: int = 20
) -> list[dict[str, Any]]:
    """A row for each contestant, the fastest first."""
    mode = MODES[what]
    sets = inputs(use, mode)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda w: compiled(*w, mode, sets[0]), wanted))
    return timed(use, what, wanted, made, sets, turns)


def timed(
    use: Spec, what: str, wanted: Any, made: Any, sets: Any, turns: int = 20
) -> list[dict[str, Any]]:
    """The same of compiled programs."""
    (m, k), n = use.shape("lhs"), use.shape("rhs")[2]
    rows, running = [], []
    for (kernel, config), program in zip(wanted, made, strict=True):
        row = {"m, k, n, g": (m, k, n, *use.shape("group_sizes")), "what": what,
               "kernel": kernel.name,
               "config": dict(settings(config) or ())}  # fmt: skip
        rows.append(row)
        if isinstance(program, str):
            row["failed"] = program
            continue
        row["error"] = float(f"{error_of(program(*sets[0]), sets[0], MODES[what]):.2g}")
        running.append((row, program))
    times = timing.measure([p for _, p in running], sets, turns)
    for (row, _), t in zip(running, times, strict=True):
        row |= {"us": round(1e6 * t.median, 1), "sigma_us": round(1e6 * t.sigma, 1),
                "tflops": round(2 * m * k * n / t.median / 1e12, 1),
                "method": t.method}  # fmt: skip
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    """Measures the uses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--shapes", default="targets")
    parser.add_argument("--uses", help="which of the shapes, such as 0,2; else all")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--apart", action="store_true")
    given = parser.parse_args()
    rows, uses = [], named_uses("ragged_dot", given.shapes)
    if given.uses:
        uses = [uses[i] for i in map(int, given.uses.split(","))]
    for use in uses:
        for what, mode in MODES.items():
            found = measured(
                use, what, contestants(use, mode, given.peers, given.apart)
            )
            rows += found
            print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        shapes = [u.shape for u in uses]
        sizes = [sizes_of(u("lhs")[0], *u("group_sizes")).tolist() for u in shapes]
        command = f"{COMMAND} --shapes {given.shapes}"
        record.write(given.json, command, group_sizes=sizes, results=rows)


if __name__ == "__main__":
    main()
