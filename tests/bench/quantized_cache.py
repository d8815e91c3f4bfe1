"""Attention of one token to a cache of few bits: as written, by the kernel, in 16 bits.

  python3 -m tests.bench.quantized_cache [--cases "1x32768;16x4096 int4"] [--first]
      [--turns N] [--json PATH]

Cases are sequences x tokens, and perhaps the dtype of a cache that is not int8. There
are 8 heads of keys, 32 of queries, all 128 wide. Scales are for each token and head,
and multiply scores and weights. Times are device time of all kernels of a program.
`share` is the part of the GPU's memory bandwidth that reading keys and values once
would take. `in 16 bits` is the kernel for decoding on a cache that is never quantized.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.hardware import timing
from rewriter.kernels.attention import STORED, hopper_decode, hopper_stored
from rewriter.ops import device
from rewriter.ops.kernel import spec_of, worth_measuring
from rewriter.ops.stored import levels_of, numbers_of
from rewriter.site.implementation import settings
from tests.bench import record

COMMAND = "python3 -m tests.bench.quantized_cache"
CASES = "1x32768;4x32768;16x4096;64x4096;4x32768 int4;64x4096 int4"
HEADS, QUERIES, WIDTH = 8, 32, 128
SCALE = WIDTH**-0.5
NAMES = ("q", "k", "v", "k_scale", "v_scale", "kv_lengths")
HOW = {
    "widen_k": "float32 *scale", "widen_v": "float32 *scale", "scale": SCALE,
    "empty_rows": "mean",
}  # fmt: skip


def inputs(b: int, s: int, seed: int, stored: str = "int8") -> list[jax.Array]:
    """Returns queries, keys, values, their scales, and lengths."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = b, s, HEADS, WIDTH
    draw = jax.jit(lambda key: numbers_of(jax.random.normal(key, shape), stored))
    q = jax.random.normal(keys[0], (b, 1, QUERIES, WIDTH), jnp.bfloat16)
    scale = jnp.full((*shape[:3], 1), 1 / levels_of(stored), jnp.float32)
    lengths = jnp.full((b,), s - 3, jnp.int32)
    return [q, *map(draw, keys[1:]), scale, scale, lengths]


def as_written(q: Any, k: Any, v: Any, k_scale: Any, v_scale: Any, lengths: Any) -> Any:
    """The attention as models write it."""
    b, s = k.shape[:2]
    by_key = lambda x: x[..., 0].swapaxes(1, 2)[:, :, None]
    q = q.reshape(b, HEADS, -1, WIDTH)
    scores = jnp.einsum("bkgh,bskh->bkgs", q, k.astype(q.dtype)).astype(jnp.float32)
    scores = scores * SCALE * by_key(k_scale)
    seen = jnp.arange(s) < lengths[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    weights = (weights * by_key(v_scale)).astype(q.dtype)
    out = jnp.einsum("bkgs,bskh->bkgh", weights, v.astype(q.dtype))
    return out.reshape(b, 1, QUERIES, WIDTH)


def kernel(config: Any, *args: Any) -> Any:
    """The kernel with a config."""
    given = dict(zip(NAMES, args, strict=True))
    return hopper_stored.forward(**given, **HOW, config=config)


def in_16_bits(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """The kernel for decoding."""
    given = {"q": q, "k": k, "v": v, "kv_lengths": lengths}
    return hopper_decode.forward(**given, scale=SCALE, empty_rows="mean")


def measured(
    b: int, s: int, turns: int, every: bool, stored: str = "int8"
) -> list[dict[str, Any]]:
    """Returns a row for each way to compute a case, the fastest first."""
    sets = [inputs(b, s, seed, stored) for seed in range(2)]
    here = device.attached()
    spec = spec_of(STORED, dict(zip(NAMES, sets[0], strict=True)), HOW)
    configs, _ = worth_measuring(hopper_stored.KERNEL.space, spec, here, 12)
    own = hopper_stored.default(spec, here)
    configs = configs if every else [own]
    ways = [("as written", None, as_written)]
    ways += [("hopper", c, functools.partial(kernel, c)) for c in configs]
    compiled = lambda way: jax.jit(way[2]).lower(*sets[0]).compile()
    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, ways))
    want = programs[0](*sets[0]).astype("float32")
    rows = []
    for (by, config, _), run in zip(ways, programs, strict=True):
        got = run(*sets[0]).astype("float32")
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        rows.append({
            "sequences": b, "tokens": s, "stored": stored, "by": by,
            "differs": float(f"{error:.2g}"),
            "config": dict(settings(config) or ()) if config else None,
            "default": config == own,
        })  # fmt: skip
    times = timing.measure(programs, sets, turns)
    wide = [[x[0], *(y.astype(jnp.bfloat16) for y in x[1:3]), x[5]] for x in sets]
    program = jax.jit(in_16_bits).lower(*wide[0]).compile()
    times += timing.measure([program], wide, turns)
    last = {"sequences": b, "tokens": s, "stored": "bfloat16", "by": "in 16 bits"}
    rows.append(last)
    for row, t in zip(rows, times, strict=True):
        row["us"] = round(1e6 * t.median, 1)
        row["sigma_us"] = round(1e6 * t.sigma, 1)
        size = (
            2
            * b
            * s
            * HEADS
            * WIDTH
            * {"bfloat16": 16, "int4": 4}.get(row["stored"], 8)
            // 8
        )
        if here.bandwidth:
            row["share"] = round(size / t.median / here.bandwidth, 2)
        row["method"] = t.method
    return sorted(rows, key=lambda row: row["us"])


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--first", action="store_true", help="default configs alone")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for case in given.cases.split(";"):
        size, *stored = case.split()
        b, s = map(int, size.split("x"))
        found = measured(b, s, given.turns, not given.first, *stored)
        rows += found
        print(*map(json.dumps, found), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
