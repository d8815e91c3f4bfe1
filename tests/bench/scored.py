"""Times attention with functions of scores: as written, and tile by tile.

    python3 -m tests.bench.scored [--size 1024] [--heads 8] [--dtype float32]

It prints milliseconds and temporary memory, forward and with gradients, by
function. The same command serves a CPU and a GPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter
from tests.spellings.attention.scores import bucket

H = 64


def bent(x: Any, i: Any, j: Any, table: Any) -> Any:
    """An activation, and a distance."""
    return jax.nn.softplus(x) - jnp.log1p(jnp.abs(i - j))


def causal(x: Any, i: Any, j: Any, table: Any) -> Any:
    """Decay by head, under a causal mask: half of the tiles are hidden."""
    x = x * jnp.exp(-table[0][:, None, None] * jnp.abs(i - j))
    return jnp.where(j <= i, x, -jnp.inf)


def buckets(x: Any, i: Any, j: Any, table: Any) -> Any:
    """T5's table of distances, behind a cap."""
    return jnp.tanh(x) + jnp.transpose(table[bucket(j - i)], (2, 0, 1))


FUNCTIONS = (bent, causal, buckets)


def attention(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns attention with a function of scores."""

    def attend(q: Any, k: Any, v: Any, table: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
        i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
        x = function(x, i, j, table)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), v)

    return attend


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=5)
    asked = parser.parse_args()
    draw = np.random.default_rng(0)
    shape = asked.batch, asked.size, asked.heads, H
    given = [jnp.asarray(draw.normal(size=shape), asked.dtype) for _ in range(3)]
    given.append(jnp.asarray(draw.uniform(size=(9, asked.heads)), asked.dtype))
    names = {"attention": "memory_bounded", "scored_attention": "memory_bounded"}
    for function in FUNCTIONS:
        fast = rewriter.optimize(attention(function), implementation=names)
        print(function.__name__)
        print(rewriter.benchmark(fast, pairs=asked.pairs)(*given), flush=True)


if __name__ == "__main__":
    main()
