"""Causal attention with its scores in 16 bits, optimized and nothing else done.

``--json PATH`` writes the figures, as kept in ``results/at_once_h200.json``.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp

import rewriter
from tests.bench import record

T = 4096


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention over [b, t, n, h], as one writes it."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    keep = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def main() -> None:
    """Measures it as written and optimized."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=T)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    q, k, v = (
        jax.random.normal(jax.random.key(i), (4, given.tokens, 16, 128)).astype(
            "bfloat16"
        )
        for i in range(3)
    )
    result = rewriter.benchmark(attention)(q, k, v)
    print(result)
    print(result.report)
    if given.json:
        (site,) = result.report.sites
        record.write(
            given.json,
            "python3 -m tests.bench.at_once",
            kernel=f"{site.kernel} [{site.origin}]",
            rows=json.loads(result.json())["rows"],
        )


if __name__ == "__main__":
    main()
