"""Attention under masks and biases, as this checkout computes it and as another does.

  python3 -m tests.bench.masked_attention [--against FOLDER] [--heads 64]
      [--small] [--json PATH]

Each row is written in plain JAX. `--against` names another checkout of this project,
whose times are taken in turns with those of this one. A time is the least of several
rounds of calls, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., jax.Array]
ROUNDS, CALLS, SECONDS = 5, 10, 0.05
"""How often times are taken, of how many calls at least, and for how long."""
SIZES = ((4, 4096, 16, 128), (4, 4096, 16, 64))
"""Batches, tokens, heads and their width."""
SMALL = ((2, 256, 2, 64),)


def weighted(scores: jax.Array, v: jax.Array) -> jax.Array:
    """Values by the softmax of scores [b, n, t, s]."""
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def scores_of(q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled products in float32, [b, n, t, s]."""
    return jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5


def masked(keep: Callable[..., jax.Array], fill: float = -1e30) -> Function:
    """Attention that keeps the pairs for which a function of its data is true."""
    return lambda q, k, v, *data: weighted(
        jnp.where(keep(q.shape[1], *data), scores_of(q, k), fill), v
    )


def causal(t: int) -> jax.Array:
    """Whether each of t tokens comes before another, [t, t]."""
    return jnp.tril(jnp.ones((t, t), bool))


def within_last(t: int, window: jax.Array) -> jax.Array:
    """Whether each of t tokens is among the last `window` ones before another."""
    distance = jnp.arange(t)[:, None] - jnp.arange(t)
    return (distance >= 0) & (distance < window)


def restarted(documents: np.ndarray) -> np.ndarray:
    """The position of each token within its document, [b, t] of [b, t]."""
    at = np.arange(documents.shape[1])
    first = [np.searchsorted(row, row) for row in documents]
    return (at - np.stack(first)).astype("int32")


def alibi(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array) -> jax.Array:
    """Causal attention with a slope for each head."""
    at = jnp.arange(q.shape[1])
    bias = slopes[:, None, None] * (at[None] - at[:, None])
    return weighted(jnp.where(causal(q.shape[1]), scores_of(q, k) + bias, -jnp.inf), v)


def capped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention under a soft cap."""
    scores = 30 * jnp.tanh(scores_of(q, k) / 30)
    return weighted(jnp.where(causal(q.shape[1]), scores, -1e30), v)


def rows(b: int, t: int, n: int) -> dict[str, tuple[Function, tuple[Any, ...]]]:
    """By name: a function of q, k, v and data, and the data."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(t // 4, t + 1, b).astype("int32")
    padding = np.arange(t) < lengths[:, None]
    documents = np.sort(draw.integers(0, 8, (b, t)), -1).astype("int32")
    table = draw.random((b, 1, t, t)) < 0.9
    bias = draw.normal(size=(1, n, t, t)).astype(jnp.bfloat16)
    same = lambda s: (s[:, :, None] == s[:, None, :])[:, None]
    within = lambda t: causal(t) & ~jnp.tril(jnp.ones((t, t), bool), -(t // 4))
    return {
        "causal": (masked(causal), ()),
        "padding": (masked(lambda t, p: p[:, None, None]), (padding,)),
        "padding, causal": (
            masked(lambda t, p: causal(t) & p[:, None, None], -1e9),
            (padding,),
        ),
        "lengths": (
            masked(lambda t, n: (jnp.arange(t) < n[:, None])[:, None, None]),
            (lengths,),
        ),
        "documents": (masked(lambda t, s: causal(t) & same(s)), (documents,)),
        "window of data": (masked(within_last), (np.int32(t // 4),)),
        "positions that restart": (
            masked(lambda t, at, s: (at[:, :, None] >= at[:, None])[:, None] & same(s)),
            (restarted(documents), documents),
        ),
        "boolean array": (masked(lambda t, m: m, -jnp.inf), (table,)),
        "window": (masked(within), ()),
        "slopes": (alibi, (np.float32(-(2.0 ** -np.arange(1, n + 1))),)),
        "soft cap": (capped, ()),
        "bias": (lambda q, k, v, x: weighted(scores_of(q, k) + x, v), (bias,)),
    }


def milliseconds(fn: Function, args: Sequence[Any]) -> float:
    """The least time of a compiled function's calls."""
    jax.block_until_ready(fn(*args))
    calls, found = CALLS, []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready([fn(*args) for _ in range(calls)])
        took = (time.perf_counter() - start) / calls
        found.append(1e3 * took)
        calls = max(CALLS, int(SECONDS / took))
    return min(found)


def measured(small: bool, heads: int | None) -> dict[str, float]:
    """Times of all rows, of the checkout that this process runs."""
    import rewriter

    found = {}
    for b, t, n, h in SMALL if small else SIZES:
        if heads not in (None, h):
            continue
        q, k, v, d = (
            jax.random.normal(jax.random.key(i), (b, t, n, h), jnp.bfloat16)
            for i in range(4)
        )
        for name, (fn, data) in rows(b, t, n).items():
            data = tuple(map(jnp.asarray, data))
            forward = jax.jit(rewriter.optimize(fn))

            def step(q, k, v, d, *data, fn=fn):
                out, back = jax.vjp(lambda *x: fn(*x, *data), q, k, v)
                return out, back(d)

            row = f"{name}, {b}x{t}x{n}x{h}"
            found[row] = milliseconds(forward, (q, k, v, *data))
            both = jax.jit(rewriter.optimize(step))
            found[f"{row}, with gradients"] = milliseconds(both, (q, k, v, d, *data))
            print(row, found[row], found[f"{row}, with gradients"], flush=True)
    return found


def of_checkout(folder: pathlib.Path, options: Sequence[str]) -> dict[str, float]:
    """Times of all rows, of the project in a folder."""
    words = [sys.executable, __file__, "--inside", *options]
    given = {**os.environ, "PYTHONPATH": str(folder)}
    text = subprocess.run(
        words, env=given, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(text, flush=True)
    return json.loads(text.splitlines()[-1])


def main() -> None:
    """Measures, compares, and writes a record if one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=pathlib.Path, help="another checkout")
    parser.add_argument("--small", action="store_true", help="for a try without a GPU")
    parser.add_argument("--heads", type=int, help="only heads of this width")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measured(options.small, options.heads)))
        return
    words = ["--small"] if options.small else []
    words += ["--heads", str(options.heads)] if options.heads else []
    here = pathlib.Path(__file__).resolve().parents[2]
    folders = {"ms": here}
    if options.against:
        folders = {"other_ms": options.against.resolve(), "ms": here}
    turns = [
        (name, of_checkout(folder, words))
        for _ in range(2 if options.against else 1)
        for name, folder in folders.items()
    ]
    found: dict[str, dict[str, float]] = {}
    for name, times in turns:
        for row, ms in times.items():
            own = found.setdefault(row, {})
            own[name] = min(own.get(name, ms), ms)
    for row, own in found.items():
        share = own["ms"] / own["other_ms"] if "other_ms" in own else 1.0
        print(f"{row:48s} {own['ms']:9.3f} ms {share:6.3f}")
    if options.json:
        from tests.bench import record

        command = "python3 -m tests.bench.masked_attention --against FOLDER"
        record.write(options.json, command, rows=found)


if __name__ == "__main__":
    main()
