"""Group norms on a Hopper GPU: as XLA compiles them, and with each of our kernels.

  python3 -m tests.bench.group_norms [--seconds N] [--json PATH] [--small]

The norm is written as flax has it, with channels last, in bfloat16 with float32 scale
and bias. Passes are the result, and the result with all gradients, each also with a
silu behind. Device time by CUPTI, medians of runs that take turns on three sets of
inputs. Errors are relative to float64, in the Frobenius norm: of the result and of the
gradients of x, scale and bias.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from tests.bench import record

EPS, SETS, TURNS = 1e-6, 3, 8
SHAPES = (
    (8, 64, 64, 320, 32), (8, 32, 32, 640, 32), (2, 512, 512, 128, 32),
    (8, 16, 16, 1280, 32), (2, 64, 64, 320, 32), (8, 128, 128, 64, 64),
    (2, 128, 128, 512, 32), (8, 64, 64, 960, 32), (8, 32, 32, 1280, 32),
    (2, 32, 32, 640, 32), (1, 256, 256, 256, 32),
)  # fmt: skip
"""Samples, height, width, channels and groups."""

KERNELS = ("memory_bounded", "hopper")


def norm(x: Any, scale: Any, bias: Any, groups: int) -> Any:
    """A group norm by moments, as `flax.linen.GroupNorm` computes it."""
    each = x.shape[-1] // groups
    y = x.reshape(*x.shape[:-1], groups, each).astype(jnp.float32)
    mean, square = y.mean((1, 2, 4)), jnp.square(y).mean((1, 2, 4))
    var = jnp.maximum(0.0, square - jnp.square(mean))
    mean, var = (jnp.repeat(v, each, axis=-1)[:, None, None] for v in (mean, var))
    return ((x - mean) * (jax.lax.rsqrt(var + EPS) * scale) + bias).astype(x.dtype)


def programs(groups: int) -> dict[str, Callable[..., Any]]:
    """Returns functions of x, scale, bias and the cotangent, by pass."""

    def plain(x: Any, scale: Any, bias: Any, up: Any) -> Any:
        del up
        return norm(x, scale, bias, groups)

    def silu(x: Any, scale: Any, bias: Any, up: Any) -> Any:
        return jax.nn.silu(plain(x, scale, bias, up))

    def both(forward: Any, x: Any, scale: Any, bias: Any, up: Any) -> Any:
        out, back = jax.vjp(lambda *a: forward(*a, None), x, scale, bias)
        return out, *back(up)

    return {
        "forward": plain, "silu forward": silu,
        "both": functools.partial(both, plain),
        "silu both": functools.partial(both, silu),
    }  # fmt: skip


def inputs(shape: tuple[int, ...], seed: int) -> tuple[jax.Array, ...]:
    """Returns x, scale, bias and a cotangent."""
    keys = jax.random.split(jax.random.key(seed), 4)
    x, up = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys[:2])
    scale, bias = (jax.random.normal(k, shape[-1:]) / 8 for k in keys[2:])
    return x + 0.5, 1 + scale, bias, up


def exact(given: tuple[jax.Array, ...], groups: int, silu: bool) -> list[np.ndarray]:
    """Returns the result and all gradients in float64, from their definitions."""
    x, scale, bias, up = (np.asarray(v.astype("f4"), np.float64) for v in given)
    y = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean = lambda v: v.mean((1, 3), keepdims=True)
    r = 1 / np.sqrt(mean((y - mean(y)) ** 2) + EPS)
    n = (y - mean(y)) * r
    out = n.reshape(x.shape) * scale + bias
    if silu:
        share = 1 / (1 + np.exp(-out))
        up, out = up * share * (1 + out * (1 - share)), out * share
    g = (up * scale).reshape(y.shape)
    dx = r * (g - mean(g) - n * mean(g * n))
    rows = tuple(range(x.ndim - 1))
    products = (up * n.reshape(x.shape)).sum(rows)
    return [out, dx.reshape(x.shape), products, up.sum(rows)]


def errors(made: Any, wanted: list[np.ndarray]) -> list[float]:
    """Returns the relative error of each array."""
    made = made if isinstance(made, tuple) else (made,)
    return [
        float(np.linalg.norm(np.asarray(a.astype("f4"), "f8") - w) / np.linalg.norm(w))
        for a, w in zip(made, wanted, strict=False)
    ]


def measured(shape: tuple[int, ...], groups: int, kernels: Any) -> list[dict[str, Any]]:
    """Returns a row for each pass and kernel."""
    sets = [inputs(shape, seed) for seed in range(SETS)]
    rows, compiled = [], []
    for which, program in programs(groups).items():
        for by in ("xla", *kernels):
            fn = program
            if by != "xla":
                forced = {"group_norm": by}
                fn = rewriter.optimize(program, implementation=forced, strict=True)
            compiled.append(jax.jit(fn).lower(*sets[0]).compile())
            rows.append({"shape": shape, "groups": groups, "pass": which, "by": by})
    rows.append({"shape": shape, "pass": "copy", "by": "xla"})
    copy = lambda x, scale, bias, up: x * 2
    compiled.append(jax.jit(copy).lower(*sets[0]).compile())
    wanted = [exact(sets[0], groups, silu) for silu in (False, True)]
    for row, program in zip(rows[:-1], compiled, strict=False):
        made = jax.block_until_ready(program(*sets[0]))
        found = errors(made, wanted[row["pass"].startswith("silu")])
        row["errors"] = [float(f"{e:.1e}") for e in found]
    jax.block_until_ready(compiled[-1](*sets[0]))
    for row, t in zip(rows, timing.measure(compiled, sets, TURNS), strict=True):
        row |= {"us": round(1e6 * t.median, 1), "kernels": len(t.kernels)}
    first = {row["pass"]: row["us"] for row in rows if row["by"] == "xla"}
    for row in rows:
        row["faster"] = round(first[row["pass"]] / row["us"], 2)
    return rows


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no shape later"
    )
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument(
        "--small", action="store_true", help="a small shape, on any device"
    )
    given = parser.parse_args()
    start, rows = time.monotonic(), []
    shapes = ((2, 8, 8, 64, 32),) if given.small else SHAPES
    for *shape, groups in shapes:
        if time.monotonic() - start > given.seconds:
            break
        kernels = KERNELS[:1] if given.small else KERNELS
        for row in measured(tuple(shape), groups, kernels):
            rows.append(row)
            print(*row.values(), flush=True)
        if given.json:  # what is there, should time run out
            command = "python3 -m tests.bench.group_norms --json PATH"
            record.write(given.json, command, sets=SETS, turns=TURNS, rows=rows)


if __name__ == "__main__":
    main()
