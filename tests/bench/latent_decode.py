"""Decoding against a latent cache on a Hopper GPU: XLA as written beside ours.

  python3 -m tests.bench.latent_decode [--cases "A;B"] [--by "A,B"] [--turns 10]
      [--json PATH]

One query of 128 heads for each sequence, keys of 512 + 64 columns for all heads, values
of the first 512, as in DeepSeek V2 and V3. Microseconds are the device's by CUPTI, all
kernels of a run added up, medians of runs that take turns on two sets of normal
bfloat16 operands. Lengths are operands: full ones, and ones drawn from 1 to all keys.
TF/s count two products of the keys before those lengths, and TB/s their bytes, once.
Shares are of the device's rates in `rewriter.ops.device`. Errors are relative ones of
two sequences' results against float64.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.hardware import timing
from rewriter.kernels.attention.hopper_latent import decode
from rewriter.kernels.attention.hopper_latent.config import Programs
from rewriter.kernels.attention.reference import reference
from rewriter.ops import device
from tests.bench import record

COMMAND = "python3 -m tests.bench.latent_decode"
HEADS, WIDE, ROTARY = 128, 512, 64
SCALE = 192**-0.5
CASES = {
    "64 x 4k": (64, 4096), "64 x 32k": (64, 32768), "128 x 4k": (128, 4096),
    "128 x 8k": (128, 8192), "128 x 32k": (128, 32768),
}  # fmt: skip
"""Sequences and keys, by name."""

PAGE = 64
"""Keys of a page."""

SETS = 2
SAMPLE = np.array([0, -1])
"""Sequences whose results are checked."""


def operands(key: Any, b: int, s: int) -> dict[str, jax.Array]:
    """Returns normal queries and a cache, in two arrays, in one, and in pages."""
    keys = jax.random.split(key, 5)
    normal = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.bfloat16)
    made = {
        "q": normal(0, b, 1, HEADS, WIDE), "q_rope": normal(1, b, 1, HEADS, ROTARY),
        "latent": normal(2, b, s, WIDE), "k_rope": normal(3, b, s, ROTARY),
    }  # fmt: skip
    made["whole"] = jnp.concatenate([made["latent"], made["k_rope"]], -1)
    count = b * s // PAGE
    place = jax.random.permutation(keys[4], count).astype(jnp.int32)
    made["table"] = place.reshape(b, -1)
    pages = made["whole"].reshape(count, PAGE, -1)
    made["pages"] = jnp.zeros_like(pages).at[place].set(pages)
    return made


def as_written(x: dict[str, jax.Array], lengths: jax.Array) -> jax.Array:
    """Returns a step of decoding, as models write it in plain JAX."""
    scores = jnp.einsum("bthc,bsc->bhts", x["q"], x["latent"])
    scores += jnp.einsum("bthr,bsr->bhts", x["q_rope"], x["k_rope"])
    seen = jnp.arange(scores.shape[-1]) < lengths[:, None, None, None]
    scores = jnp.where(seen, scores.astype(jnp.float32) * SCALE, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
    return jnp.einsum("bhts,bsc->bthc", weights, x["latent"])


def ours(**how: Any) -> Callable[..., jax.Array]:
    """Returns the kernel on some of the operands, renamed."""

    def run(x: dict[str, jax.Array], lengths: jax.Array) -> jax.Array:
        latent, k_rope = x[how.get("latent", "latent")], x.get(how.get("k_rope", ""))
        table = x.get(how.get("table", ""))
        return decode.attend(
            x["q"], x["q_rope"], latent, k_rope, how.get("config", Programs()),
            table=table, kv_lengths=lengths, scale=SCALE,
        )  # fmt: skip

    return run


PROGRAMS = {
    "xla": as_written,
    "two arrays": ours(k_rope="k_rope"),
    "one array": ours(latent="whole"),
    "pages of 64": ours(latent="pages", table="table"),
}


def compiled(run: Callable[..., jax.Array], *given: Any) -> Any:
    """Returns the compiled program, or why there is none."""
    try:
        program = jax.jit(run).lower(*given).compile()
        jax.block_until_ready(program(*given))
        return program
    except Exception as problem:
        return str(problem)[:300]


def exact(x: dict[str, jax.Array], lengths: np.ndarray) -> np.ndarray:
    """Returns the sample's result in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        given = {n: np.asarray(x[n][SAMPLE], np.float64) for n in x if n != "table"}
        q = np.concatenate([given["q"], given["q_rope"]], -1)
        k, v = given["whole"][:, :, None], given["latent"][:, :, None]
        more = {"kv_lengths": lengths[SAMPLE], "scale": SCALE}
        return np.asarray(reference(q, k, v, **more))


def measured(
    name: str, by: list[str], turns: int, several: bool
) -> list[dict[str, Any]]:
    """Returns a row for each program of a case and kind of lengths."""
    b, s = CASES[name]
    make = jax.jit(operands, static_argnums=(1, 2))
    sets = [make(jax.random.key(i), b, s) for i in range(SETS if several else 1)]
    drawn = np.random.default_rng(0).integers(1, s + 1, b).astype(np.int32)
    on = device.attached()
    first = sets[0], jnp.asarray(drawn)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda x: compiled(PROGRAMS[x], *first), by))
    made = dict(zip(by, made, strict=True))
    programs = {by: p for by, p in made.items() if not isinstance(p, str)}
    rows = [
        {"case": name, "by": by, "failed": p}
        for by, p in made.items()
        if isinstance(p, str)
    ]
    for kind, lengths in (("full", np.full(b, s, np.int32)), ("drawn", drawn)):
        inputs = [(x, jnp.asarray(lengths)) for x in sets]
        times = timing.measure(list(programs.values()), inputs, turns)
        want = exact(sets[0], lengths)
        for (by, program), t in zip(programs.items(), times, strict=True):
            got = program(*inputs[0])
            got = np.asarray(got[SAMPLE], np.float64)
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            keys = int(lengths.sum())
            tfs = 2 * keys * HEADS * (2 * WIDE + ROTARY) / t.median
            tbs = 2 * keys * (WIDE + ROTARY) / t.median
            rows.append({
                "case": name, "lengths": kind, "by": by,
                "us": round(t.median * 1e6, 1),
                "sigma_percent": round(100 * t.sigma / t.median, 1),
                "tf_per_s": round(tfs / 1e12, 1),
                "share_of_tf": round(tfs / on.flops, 3),
                "tb_per_s": round(tbs / 1e12, 3),
                "share_of_tb": round(tbs / on.bandwidth, 3),
                "error": float(f"{error:.1e}"), "method": t.method,
            })  # fmt: skip
    return rows


def main() -> None:
    """Prints a line per measurement; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--by", default=",".join(PROGRAMS))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name in given.cases.split(";"):
        b, s = CASES[name]
        for row in measured(name, given.by.split(","), given.turns, b * s < 1 << 22):
            print(*(f"{k}={v}" for k, v in row.items()), sep="  ", flush=True)
            rows.append(row)
        if given.json:
            record.write(given.json, COMMAND, cases=CASES, page=PAGE, results=rows)


if __name__ == "__main__":
    main()
