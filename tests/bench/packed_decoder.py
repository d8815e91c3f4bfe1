"""A decoder of a billion parameters on packed sequences, as written and rewritten.

  python3 -m tests.bench.packed_decoder [--small] [--repeats N] [--json PATH]

The model of `tests.bench.decoder` on 8192 tokens of packed documents: a token sees
those before it in its own document. The segments are an argument, the mask is made
outside of the layers, and each layer is in `jax.checkpoint`, under `lax.scan`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tests.bench import decoder, passes, record
from tests.bench.decoder import Weights

DOCUMENTS = (0.31, 0.05, 0.22, 0.12, 0.3)
"""The share of tokens of each document."""


def attention(p: Weights, x: jax.Array, heads: int, keep: jax.Array) -> jax.Array:
    """Attention under a mask [b, 1, t, t], [b, t, d] to [b, t, d]."""
    b, t, d = x.shape
    q, k, v = ((x @ p[w]).reshape(b, t, heads, d // heads) for w in ("q", "k", "v"))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k).astype(jnp.float32)
    scores = jnp.where(keep, scores / (d // heads) ** 0.5, -1e30)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(b, t, d) @ p["o"]


def loss_of(heads: int, checkpointed: bool) -> Callable[..., jax.Array]:
    """Cross entropy of (weights, token ids [b, t + 1], segments [b, t])."""

    def loss(weights: Weights, ids: jax.Array, segments: jax.Array) -> jax.Array:
        t = segments.shape[1]
        same = segments[:, :, None] == segments[:, None, :]
        keep = (same & jnp.tril(jnp.ones((t, t), bool)))[:, None]
        attend = lambda p, x, heads: attention(p, x, heads, keep)
        one = lambda p, x: decoder.layer(p, x, heads, attend, decoder.norm)
        one = jax.checkpoint(one) if checkpointed else one
        x = weights["embed"][ids[:, :-1]]
        x, _ = jax.lax.scan(lambda x, p: (one(p, x), None), x, weights["layers"])
        logits = decoder.norm(x, weights["last"]) @ weights["embed"].T
        return passes.cross_entropy(logits, ids)

    return loss


def segments_of(b: int, t: int) -> jax.Array:
    """Documents of some lengths, numbered from 1: [b, t]."""
    ends = jnp.cumsum(jnp.asarray(DOCUMENTS)) * t
    of = 1 + (jnp.arange(t)[:, None] >= ends[:-1]).sum(1)
    return jnp.broadcast_to(of, (b, t)).astype(jnp.int32)


def main() -> None:
    """Measures every row."""
    given = passes.arguments(__doc__)
    d = decoder
    size, heads, (b, t) = (d.LAYERS, d.WIDTH, d.HIDDEN, d.TOKENS), d.HEADS, (1, 8192)
    if given.small:
        size, heads, (b, t) = (2, 128, 256, 512), 2, (1, 256)
    ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, size[-1])
    args = d.weights_of(*size), ids, segments_of(b, t)
    cases = passes.cases(lambda checkpointed: loss_of(heads, checkpointed))
    rows = passes.compare(cases, args, given.repeats)
    if given.json:
        command = f"python3 -m tests.bench.packed_decoder --repeats {given.repeats}"
        record.write(given.json, command + " --small" * given.small, results=rows)


if __name__ == "__main__":
    main()
