"""A decoder of a billion parameters in plain JAX, as written and rewritten.

  python3 -m tests.bench.decoder [--small] [--repeats N] [--json PATH]

Sixteen layers of width 2048 under `lax.scan`: 16 heads of 128, softmax attention by
einsum under `where(tril)`, SwiGLU of 5632, 32000 tokens, bfloat16. It runs forward, and
as a whole step with gradients (`rewriter.optimize(jax.value_and_grad(loss))`). Then
every layer is in `jax.checkpoint`: as it is, and with some memory to keep what
checkpoints compute again, less than what scores took.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.bench import passes, record

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS = 16, 2048, 16, 5632, 32000
BATCHES = ((2, 4096), (1, 8192))
KEPT = {4096: 9 << 28, 8192: 11 << 29}
"""Bytes to keep what checkpoints compute again, by tokens."""
Weights = dict[str, Any]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm in float32."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * root).astype(x.dtype) * scale


def attention(p: Weights, x: jax.Array, heads: int) -> jax.Array:
    """Causal attention, [b, t, d] to [b, t, d]."""
    b, t, d = x.shape
    q, k, v = ((x @ p[w]).reshape(b, t, heads, d // heads) for w in ("q", "k", "v"))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32)
    scores = scores / (d // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(b, t, d) @ p["o"]


def by_hand(p: Weights, x: jax.Array, heads: int) -> jax.Array:
    """The same by a call of cuDNN's kernel."""
    b, t, d = x.shape
    q, k, v = ((x @ p[w]).reshape(b, t, heads, d // heads) for w in ("q", "k", "v"))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return out.reshape(b, t, d) @ p["o"]


Attend = Callable[[Weights, jax.Array, int], jax.Array]
Norm = Callable[[jax.Array, jax.Array], jax.Array]


def layer(
    p: Weights, x: jax.Array, heads: int, attend: Attend, norm: Norm
) -> jax.Array:
    """One decoder layer."""
    x = x + attend(p, norm(x, p["n1"]), heads)
    h = norm(x, p["n2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss_of(
    heads: int, checkpointed: bool = False, attend: Attend = attention,
    norm: Norm = norm,
) -> Callable[..., jax.Array]:  # fmt: skip
    """Cross entropy of (weights, token ids [b, t + 1])."""
    one = lambda p, x: layer(p, x, heads, attend, norm)
    if checkpointed:
        one = jax.checkpoint(one)

    def loss(weights: Weights, ids: jax.Array) -> jax.Array:
        x = weights["embed"][ids[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (one(p, x), None), x, weights["layers"])
        logits = norm(x, weights["last"]) @ weights["embed"].T
        return passes.cross_entropy(logits, ids)

    return loss


def weights_of(layers: int, d: int, hidden: int, tokens: int) -> Weights:
    """Random weights in bfloat16."""
    shapes = {
        "q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "gate": (d, hidden),
        "up": (d, hidden), "down": (hidden, d),
    }  # fmt: skip
    key = jax.random.key(0)
    normal = lambda i, s: (
        jax.random.normal(jax.random.fold_in(key, i), s) / s[-2] ** 0.5
    ).astype(jnp.bfloat16)
    stacked = {n: normal(i, (layers, *s)) for i, (n, s) in enumerate(shapes.items())}
    ones = jnp.ones((layers, d), jnp.bfloat16)
    return {
        "layers": {**stacked, "n1": ones, "n2": ones},
        "last": jnp.ones(d, jnp.bfloat16),
        "embed": normal(99, (tokens, d)),
    }


def main() -> None:
    """Measures every row."""
    given = passes.arguments(__doc__)
    size, heads, batches = (LAYERS, WIDTH, HIDDEN, TOKENS), HEADS, BATCHES
    if given.small:
        size, heads, batches = (2, 128, 256, 512), 2, ((1, 256),)
    weights = weights_of(*size)
    rows = []
    for b, t in batches:
        cases = passes.cases(
            lambda checkpointed: loss_of(heads, checkpointed),
            lambda checkpointed: loss_of(heads, checkpointed, by_hand),
            KEPT.get(t, 1 << 20),
        )
        ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, size[-1])
        rows += passes.compare(cases, (weights, ids), given.repeats)
    if given.json:
        command = f"python3 -m tests.bench.decoder --repeats {given.repeats}"
        record.write(given.json, command + " --small" * given.small, results=rows)


if __name__ == "__main__":
    main()
