"""Decoding with keys and values made of a latent: as written, and with numerics "fast".

  python3 -m tests.bench.expanded_latent [--cases "16x4096;32x4096"] [--turns N]
      [--json PATH]

Cases are sequences x tokens. One query of 128 heads for each sequence, a latent of 512
columns and 64 rotary ones, keys and values of 128 for each head, as in DeepSeek V2 and
V3. Times are device time by CUPTI of all kernels of a program. Errors are those of one
sequence's results against float64, in the Frobenius norm.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from rewriter.hardware import timing
from tests.bench import record

COMMAND = "python3 -m tests.bench.expanded_latent"
HEADS, LATENT, ROTARY, WIDE = 128, 512, 64, 128
SCALE = (WIDE + ROTARY) ** -0.5
CASES = "16x4096;32x4096"
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Tuning XLA's Triton products takes minutes."""


def step(q: Any, q_rope: Any, latent: Any, k_rope: Any, w_k: Any, w_v: Any) -> Any:
    """A step of decoding that makes all keys and values."""
    k = jnp.einsum("bsc,cnd->bsnd", latent, w_k)
    v = jnp.einsum("bsc,cne->bsne", latent, w_v)
    scores = jnp.einsum("btnd,bsnd->bnts", q, k)
    scores += jnp.einsum("btnr,bsr->bnts", q_rope, k_rope)
    weights = jax.nn.softmax(scores.astype(jnp.float32) * SCALE).astype(q.dtype)
    return jnp.einsum("bnts,bsne->btne", weights, v)


def inputs(seed: int, b: int, s: int) -> list[jax.Array]:
    """Returns normal queries and latents, and matrices that keep their size."""
    shapes = (
        (b, 1, HEADS, WIDE), (b, 1, HEADS, ROTARY), (b, s, LATENT), (b, s, ROTARY),
        (LATENT, HEADS, WIDE), (LATENT, HEADS, WIDE),
    )  # fmt: skip
    sizes = (1, 1, 1, 1, LATENT**-0.5, LATENT**-0.5)

    @jax.jit
    def draw() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        normal = jax.random.normal
        return [
            (size * normal(keys[i], shape)).astype(jnp.bfloat16)
            for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True))
        ]

    return draw()


def exact(args: list[jax.Array]) -> np.ndarray:
    """Returns the first sequence's result in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(x[:1] if i < 4 else x, "f8") for i, x in enumerate(args)]
        return np.asarray(step(*map(jnp.asarray, wide)))


def measured(b: int, s: int, turns: int) -> list[dict[str, Any]]:
    """Returns a row for the program as written, and as rewritten."""
    sets, rows = [inputs(seed, b, s) for seed in range(2)], []
    fast = rewriter.optimize(step, numerics="fast")
    (site,) = fast.report(*sets[0]).sites
    programs = [
        jax.jit(f).lower(*sets[0]).compile(compiler_options=CUBLAS)
        for f in (step, fast)
    ]
    want = exact(sets[0])
    times = timing.measure(programs, sets, turns)
    for by, program, t in zip(("xla", site.kernel), programs, times, strict=True):
        got = np.asarray(program(*sets[0])[:1], "f8")
        wrong = np.linalg.norm(got - want) / np.linalg.norm(want)
        rows.append({
            "sequences": b, "tokens": s, "by": by, "us": round(1e6 * t.median, 1),
            "sigma_us": round(1e6 * t.sigma, 1), "error": float(f"{wrong:.2g}"),
            "method": t.method,
        })  # fmt: skip
    return rows


def main() -> None:
    """Measures the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for case in given.cases.split(";"):
        rows += measured(*map(int, case.split("x")), given.turns)
        print(*map(json.dumps, rows[-2:]), sep="\n", flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
