"""A token of a quantized decoder in plain JAX, as written and rewritten.

  python3 -m tests.bench.quantized_decoder [--kinds "int8;int4"] [--batches "1;16;64"]
      [--ways "as written;rewritten"] [--cache N] [--turns N] [--small] [--json PATH]

Layers have the sizes of Llama 3 8B: width 4096, 32 heads of 128 that share 8 heads of
keys, SwiGLU of 14336. Weights and the cache of keys and values are stored in few bits,
as public serving code in JAX writes them:

  int8         weights widened and scaled by column before each product (MaxText, qwix)
  int8 behind  products with int8 as it is, scaled by column after (jax-llm-examples)
  int4         groups of 128 numbers with a scale, before each product (qwix)
  int8 packed  as int8, with both branches of the unit in one matrix

Keys and values of a new token are rounded to int8, with a scale for each token and
head, and written to the cache. Scores and weights are multiplied by these scales.

Rows: `as written`, `rewritten` as chosen by default, and `one unit` with the kernel
that computes both branches of the unit. Times are device time of all kernels of a
program. `share` is the part of the memory's bandwidth that reading weights and cache
once would take.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import rewriter
from rewriter.hardware import timing
from rewriter.ops import device
from rewriter.ops.stored import levels_of, numbers_of
from tests.bench import record
from tests.bench.hopper_glu import compiled

COMMAND = "python3 -m tests.bench.quantized_decoder"
BF, F32 = jnp.bfloat16, jnp.float32
GROUP = 128
KINDS = ("int8", "int8 behind", "int4", "int8 packed")
ONE_UNIT = {"quantized_gated_linear_unit": ["hopper", "memory_bounded", "xla"]}


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder."""

    layers: int = 4
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    hidden: int = 14336


SMALL = Size(2, 256, 4, 2, 64, 512)

Array = jax.Array
Layer = dict[str, Any]


# ---------------------------------------------------------------------- the model
def norm(x: Array, scale: Array) -> Array:
    """RMS norm in float32."""
    wide = x.astype(F32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def linear(kind: str, x: Array, stored: tuple[Array, Array]) -> Array:
    """Rows times a stored matrix [k, n] with scales [groups, n]."""
    w, scale = stored
    if kind == "int8 behind":
        return (x @ w.astype(x.dtype)) * scale[0]
    parts = w.reshape(scale.shape[0], -1, w.shape[1]).astype(x.dtype) * scale[:, None]
    return x @ parts.reshape(w.shape)


def rounded(x: Array) -> tuple[Array, Array]:
    """Keys or values in int8, and a scale for each token and head."""
    scale = jnp.max(jnp.abs(x.astype(F32)), -1) / 127
    return jnp.round(x / scale[..., None]).astype(jnp.int8), scale


def attention(size: Size, kind: str, p: Layer, x: Array, cache: Any, at: Array) -> Any:
    """One token's attention to a cache [b, s, k, h] of 8 bits."""
    b, heads, each = x.shape[0], size.kv_heads, size.heads // size.kv_heads
    q = linear(kind, x, p["q"]).reshape(b, heads, each, size.head)
    new = [linear(kind, x, p[n]).reshape(b, 1, heads, size.head) for n in ("k", "v")]
    cache = [
        (
            jax.lax.dynamic_update_slice(numbers, one, (0, at, 0, 0)),
            jax.lax.dynamic_update_slice(scale, own, (0, at, 0)),
        )
        for (numbers, scale), (one, own) in zip(cache, map(rounded, new), strict=True)
    ]
    (k, k_scale), (v, v_scale) = cache
    scores = jnp.einsum("bkgh,bskh->bkgs", q, k.astype(x.dtype)).astype(F32)
    scores = scores * size.head**-0.5 * k_scale.swapaxes(1, 2)[:, :, None]
    seen = jnp.arange(k.shape[1]) <= at
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    weights = (weights * v_scale.swapaxes(1, 2)[:, :, None]).astype(x.dtype)
    out = jnp.einsum("bkgs,bskh->bkgh", weights, v.astype(x.dtype))
    return linear(kind, out.reshape(b, -1), p["o"]), cache


def unit(kind: str, p: Layer, x: Array) -> Array:
    """The gated linear unit."""
    if "both" in p:
        gate, up = jnp.split(linear(kind, x, p["both"]), 2, -1)
    else:
        gate, up = linear(kind, x, p["gate"]), linear(kind, x, p["up"])
    return linear(kind, jax.nn.silu(gate) * up, p["down"])


def step(
    size: Size, kind: str, layers: list[Layer], caches: Any, x: Array, at: Array
) -> tuple[Array, Any]:
    """One token [b, width] through all layers."""
    kept = []
    for p, cache in zip(layers, caches, strict=True):
        out, cache = attention(size, kind, p, norm(x, p["n1"]), cache, at)
        x = x + out
        x = x + unit(kind, p, norm(x, p["n2"]))
        kept.append(cache)
    return x, kept


# ----------------------------------------------------------------------- operands
def stored(key: Array, k: int, n: int, kind: str) -> tuple[Array, Array]:
    """Numbers [k, n], and scales that keep the size of rows."""
    dtype = "int4" if kind == "int4" else "int8"
    draw = jax.jit(lambda key: numbers_of(jax.random.normal(key, (k, n)), dtype))
    groups = k // GROUP if kind == "int4" else 1
    spread = k**-0.5 / levels_of(dtype)
    scale = jax.random.uniform(key, (groups, n), F32, 0.5 * spread, 1.5 * spread)
    return draw(key), scale.astype(BF)


def layer_of(size: Size, kind: str, seed: int) -> Layer:
    """The weights of a layer."""
    own, kv = size.heads * size.head, size.kv_heads * size.head
    shapes = {"q": (size.width, own), "k": (size.width, kv), "v": (size.width, kv),
              "o": (own, size.width), "down": (size.hidden, size.width)}  # fmt: skip
    if kind == "int8 packed":
        shapes["both"] = size.width, 2 * size.hidden
    else:
        shapes |= dict.fromkeys(("gate", "up"), (size.width, size.hidden))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    made = {
        name: stored(key, *shape, kind)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    ones = jnp.ones(size.width, BF)
    return {**made, "n1": ones, "n2": ones}


def cache_of(size: Size, b: int, tokens: int, seed: int) -> Any:
    """Keys and values of 8 bits, and their scales."""

    def one(key: Array) -> tuple[Array, Array]:
        shape = b, tokens, size.kv_heads, size.head
        numbers = jax.jit(lambda key: numbers_of(jax.random.normal(key, shape), "int8"))
        return numbers(key), jnp.full(shape[:3], 1 / levels_of("int8"), F32)

    return [one(key) for key in jax.random.split(jax.random.key(seed), 2)]


def bytes_of(tree: Any) -> float:
    """Bytes of arrays, of which int4 has two in each."""
    sizes = (
        x.size * (0.5 if x.dtype == jnp.int4 else x.dtype.itemsize)
        for x in jax.tree.leaves(tree)
    )
    return float(sum(sizes))


# ------------------------------------------------------------------- measurements
def measured(
    size: Size, kind: str, b: int, tokens: int, turns: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns a row for each way to run a step."""
    layers = [layer_of(size, kind, i) for i in range(size.layers)]
    caches = [cache_of(size, b, tokens, i) for i in range(size.layers)]
    x = jax.random.normal(jax.random.key(9), (b, size.width), BF)
    args = layers, caches, x, jnp.int32(tokens - 3)
    program: Callable[..., Any] = functools.partial(step, size, kind)
    ways = {
        "as written": (program, None),
        "rewritten": (rewriter.optimize(program), None),
        "one unit": (rewriter.optimize(program, implementation=ONE_UNIT), None),
    }
    ways = {name: ways[name] for name in names}
    want = jax.jit(program)(*args)[0].astype(F32)
    rows, running = [], []
    for name, (run, _) in ways.items():
        row: dict[str, Any] = {"kind": kind, "batch": b, "cache": tokens, "by": name}
        rows.append(row)
        if name != "as written":
            sites = run.report(*args).sites
            chosen = Counter(
                f"{s.form or s.op} {s.kernel}" for s in sites for _ in range(s.repeats)
            )
            row["kernels"] = dict(chosen)
        ready = compiled(run, args)
        if isinstance(ready, str):
            row["failed"] = ready
            continue
        got = ready(*args)[0].astype(F32)
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        row["differs"] = float(f"{error:.2g}")
        running.append((row, ready))
    times = timing.measure([run for _, run in running], [args], turns)
    moved, peak = bytes_of((layers, caches)), device.attached().bandwidth
    for (row, _), t in zip(running, times, strict=True):
        row["us"] = round(1e6 * t.median, 1)
        row["sigma_us"] = round(1e6 * t.sigma, 1)
        row["share"] = round(moved / t.median / peak, 2) if peak else None
        row["method"] = t.method
    return rows


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=";".join(KINDS))
    parser.add_argument("--batches", default="1;16;64")
    parser.add_argument("--ways", default="as written;rewritten;one unit")
    parser.add_argument("--cache", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    size, tokens = (SMALL, 64) if given.small else (Size(), given.cache)
    ways = given.ways.split(";")
    rows = []
    for kind in given.kinds.split(";"):
        for b in map(int, given.batches.split(";")):
            found = measured(size, kind, b, tokens, given.turns, ways)
            rows += found
            print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND + " --small" * given.small, results=rows)


if __name__ == "__main__":
    main()
