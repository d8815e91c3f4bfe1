"""Single ops before and after, as written by most people.

  python3 -m tests.bench.ops [--pairs N] [--write]

Prints time and temporary memory; ``--write`` keeps the figures for the README.
"""

from __future__ import annotations

import argparse
import json
import os
import platform

import jax
import jax.numpy as jnp

import rewriter
from rewriter.tools import demo
from tests.bench import record


def attention(q, k, v):
    """Causal attention over [b, t, n, h]."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def attention_inputs():
    """1 x 4096 tokens, 8 heads of 64, float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, 4096, 8, 64)) for key in keys)


def ragged_inputs():
    """2048 rows of 512 for 64 experts of 512 x 512, float32."""
    x, w, sizes = jax.random.split(jax.random.key(0), 3)
    chosen = jax.random.randint(sizes, (2048,), 0, 64)
    return (
        jax.random.normal(x, (2048, 512)),
        jax.random.normal(w, (64, 512, 512)) / 512**0.5,
        jnp.bincount(chosen, length=64).astype(jnp.int32),
    )


def layer(p, x):
    """A decoder layer: RMS norms, causal attention, SwiGLU."""
    h = norm(x) * p["scale1"]
    q, k, v = ((h @ p[w]).reshape(1, *x.shape[1:-1], 8, -1) for w in "qkv")
    x = x + attention(q, k, v).reshape(x.shape) @ p["o"]
    h = norm(x) * p["scale2"]
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def norm(x):
    """RMS norm without a scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def training_step(params, x):
    """Loss and gradients of layers in a scan, differentiated before optimizing."""

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)
        return jnp.mean(x**2)

    return jax.value_and_grad(loss)(params, x)


def training_inputs(d: int = 256, layers: int = 3):
    """1 x 2048 tokens of width 256 and three layers' weights, float32."""
    shapes = {
        "scale1": (d,), "scale2": (d,), "q": (d, d), "k": (d, d), "v": (d, d),
        "o": (d, d), "gate": (d, 4 * d), "up": (d, 4 * d), "down": (4 * d, d),
    }  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 1))
    params = {
        n: jax.random.normal(next(keys), (layers, *s)) * (0.05 if len(s) > 1 else 1)
        for n, s in shapes.items()
    }
    return params, jax.random.normal(next(keys), (1, 2048, d))


CASES = {
    "a differentiated scan of 3 layers, 2048 tokens": (
        lambda: (training_step, training_inputs()), "forward",
    ),
    "the demo's transformer, 2048 tokens": (demo.build, "both"),
    "causal attention 1×4096×8×64": (lambda: (attention, attention_inputs()), "both"),
    "ragged_dot 2048×512 by 64 experts": (
        lambda: (jax.lax.ragged_dot, ragged_inputs()), "forward",
    ),
}  # fmt: skip


def main() -> None:
    """Measures every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = []
    for name, (make, mode) in CASES.items():
        fn, args = make()
        result = rewriter.benchmark(fn, mode=mode, pairs=given.pairs)(*args)
        print(f"{name}\n{result}", flush=True)
        rows += [{"what": name, **row} for row in json.loads(result.json())["rows"]]
    if given.write:
        about = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}"
        command = f"python3 -m tests.bench.ops --pairs {given.pairs} --write"
        record.write(record.named("ops"), command, about=about, rows=rows)


if __name__ == "__main__":
    main()
