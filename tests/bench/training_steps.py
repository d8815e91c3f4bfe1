"""Padded BERT-base and a packed Llama of 1B in plain JAX: as written and rewritten.

  python3 -m tests.bench.training_steps [--small] [--only bert|llama] [--json PATH]

Both follow Hugging Face's Flax modules, equation by equation, but need JAX alone:

- BERT: 12 layers of width 768, 32 sequences of 512 tokens, of which the later half is
  padding in every second one. The mask is an argument, as a tokenizer gives it.
- Llama: 16 layers of width 2048, 16 heads of queries and 8 of keys, one row of 8192
  tokens of packed documents. Segments and positions are arguments.

Layers are written one after the other, in bfloat16. Measured are the loss and its
gradients, with each layer in `jax.checkpoint`; of BERT also without.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tests.bench import packed_decoder, passes, record

Weights = dict[str, Any]
HALF = jnp.bfloat16


@dataclass(frozen=True)
class Size:
    """Layers, their widths, heads, vocabulary, sequences and their tokens."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    tokens: int
    batch: int
    length: int


BERT = Size(12, 768, 3072, 12, 12, 30522, 32, 512)
LLAMA = Size(16, 2048, 5632, 16, 8, 32000, 1, 8192)


def small(size: Size) -> Size:
    """Sizes to try the programs on a CPU."""
    few = 4 if size.heads == size.key_heads else 2
    return dataclasses.replace(
        size, layers=2, width=128, hidden=256, heads=4, key_heads=few, tokens=512,
        batch=2, length=128,
    )  # fmt: skip


# ------------------------------------------------------------- both models' parts
def dense(p: Weights, x: jax.Array) -> jax.Array:
    """A product, with a bias where there is one."""
    out = x @ p["kernel"]
    return out + p["bias"] if "bias" in p else out


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """What `flax.linen.dot_product_attention_weights` computes, times the values."""
    q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) + bias
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, v)


def as_bias(mask: jax.Array) -> jax.Array:
    """Zero where a key is seen, and the least number elsewhere."""
    full = lambda x: jnp.full(mask.shape, x, HALF)
    return jax.lax.select(mask > 0, full(0.0), full(jnp.finfo(HALF).min))


def split(x: jax.Array, heads: int) -> jax.Array:
    """[b, t, n h] as [b, t, n, h]."""
    return x.reshape(*x.shape[:2], heads, -1)


# ------------------------------------------------------------------------ BERT
def layer_norm(p: Weights, x: jax.Array) -> jax.Array:
    """As `flax.linen.LayerNorm`: statistics in float32, the mean of squares."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, (wide * wide).mean(-1, keepdims=True) - mean * mean)
    scale = jax.lax.rsqrt(variance + 1e-12) * p["scale"]
    return ((x - mean) * scale + p["bias"]).astype(HALF)


def bert_layer(p: Weights, x: jax.Array, mask: jax.Array, heads: int) -> jax.Array:
    """One layer; the mask is [b, 1, 1, t], 1 where a token is."""
    q, k, v = (split(dense(p[n], x), heads) for n in ("query", "key", "value"))
    out = attend(q, k, v, as_bias(mask)).reshape(x.shape)
    x = layer_norm(p["norm1"], dense(p["output"], out) + x)
    h = jax.nn.gelu(dense(p["up"], x), approximate=False)
    return layer_norm(p["norm2"], dense(p["down"], h) + x)


def bert_loss(size: Size, checkpointed: bool) -> Callable[..., jax.Array]:
    """Cross entropy of (weights, token ids [b, t + 1], mask [b, t])."""
    layer = lambda p, x, mask: bert_layer(p, x, mask, size.heads)
    layer = jax.checkpoint(layer) if checkpointed else layer

    def loss(weights: Weights, ids: jax.Array, mask: jax.Array) -> jax.Array:
        words = ids[:, :-1]
        places = jnp.broadcast_to(jnp.arange(words.shape[1]), words.shape)
        types = jnp.zeros_like(words)
        x = weights["words"][words] + weights["types"][types]
        x = layer_norm(weights["norm"], x + weights["places"][places])
        for p in weights["layers"]:
            x = layer(p, x, mask[:, None, None, :])
        x = jax.nn.gelu(dense(weights["head"], x), approximate=False)
        x = layer_norm(weights["last"], x)
        return passes.cross_entropy(x @ weights["words"].T + weights["bias"], ids)

    return loss


# ----------------------------------------------------------------------- Llama
def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """As `FlaxLlamaRMSNorm`."""
    variance = jnp.power(x.astype(jnp.float32), 2).mean(-1, keepdims=True)
    return scale * jnp.asarray(x / jnp.sqrt(variance + 1e-6), HALF)


def rotated(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Halves of each head are turned by the angles of its position."""
    both = jnp.concatenate([angles, angles], -1)[:, :, None]
    a, b = jnp.split(x, 2, -1)
    turned = jnp.concatenate([-b, a], -1)
    return (x * jnp.cos(both) + turned * jnp.sin(both)).astype(HALF)


def llama_layer(
    p: Weights, x: jax.Array, mask: jax.Array, positions: jax.Array, size: Size
) -> jax.Array:
    """One layer; the mask is [b, 1, t, t]."""
    h = rms_norm(p["norm1"], x)
    q = split(dense(p["query"], h), size.heads)
    k, v = (split(dense(p[n], h), size.key_heads) for n in ("key", "value"))
    rates = 10000.0 ** -jnp.linspace(0, 1, q.shape[-1] // 2, endpoint=False)
    angles = positions[..., None] * rates
    q, k = rotated(q, angles), rotated(k, angles)
    k, v = (jnp.repeat(y, size.heads // size.key_heads, axis=2) for y in (k, v))
    x = x + dense(p["output"], attend(q, k, v, as_bias(mask)).reshape(x.shape))
    h = rms_norm(p["norm2"], x)
    return x + dense(p["down"], jax.nn.silu(dense(p["gate"], h)) * dense(p["up"], h))


def llama_loss(size: Size, checkpointed: bool) -> Callable[..., jax.Array]:
    """Cross entropy of (weights, token ids [b, t + 1], segments, positions)."""
    layer = lambda p, x, *given: llama_layer(p, x, *given, size)
    layer = jax.checkpoint(layer) if checkpointed else layer

    def loss(
        weights: Weights, ids: jax.Array, segments: jax.Array, positions: jax.Array
    ) -> jax.Array:
        t = segments.shape[1]
        same = (segments[:, :, None] == segments[:, None, :])[:, None]
        causal = jnp.tril(jnp.ones((1, 1, t, t), bool))
        mask = jnp.logical_and(causal, same).astype(jnp.int32)
        x = weights["words"][ids[:, :-1]]
        for p in weights["layers"]:
            x = layer(p, x, mask, positions)
        x = rms_norm(weights["norm"], x)
        return passes.cross_entropy(x @ weights["head"], ids)

    return loss


def restarting(segments: jax.Array) -> jax.Array:
    """Positions within each document, [b, t]."""
    at = jnp.arange(segments.shape[1])
    first = jnp.argmax(segments[:, :, None] == segments[:, None, :], -1)
    return at - first


# --------------------------------------------------------------------- weights
def drawn(shapes: Any) -> Any:
    """Random matrices and rows of ones or zeros, in bfloat16."""
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    make = jax.jit(
        lambda key, s: (jax.random.normal(key, s) / s[-2] ** 0.5).astype(HALF),
        static_argnums=1,
    )
    ones = lambda s: jnp.ones(s, HALF)
    made = [
        make(k, s) if len(s) > 1 else ones(s) for k, s in zip(keys, leaves, strict=True)
    ]
    return tree.unflatten(made)


def bert_weights(size: Size) -> Weights:
    """Weights of BERT by the names that its functions read."""
    d, w = size.width, size.hidden
    linear = lambda a, b: {"kernel": (a, b), "bias": (b,)}
    norm = {"scale": (d,), "bias": (d,)}
    layer = {n: linear(d, d) for n in ("query", "key", "value", "output")}
    layer |= {"up": linear(d, w), "down": linear(w, d), "norm1": norm, "norm2": norm}
    return drawn(
        {
            "words": (size.tokens, d), "types": (2, d), "places": (size.length, d),
            "norm": norm, "last": norm, "head": linear(d, d),
            "bias": (size.tokens,), "layers": [layer] * size.layers,
        }
    )  # fmt: skip


def llama_weights(size: Size) -> Weights:
    """Weights of Llama by the names that its functions read."""
    d, w = size.width, size.hidden
    kept = d // size.heads * size.key_heads
    shapes = {
        "query": (d, d), "key": (d, kept), "value": (d, kept), "output": (d, d),
        "gate": (d, w), "up": (d, w), "down": (w, d),
    }  # fmt: skip
    layer: Weights = {n: {"kernel": s} for n, s in shapes.items()}
    layer |= {"norm1": (d,), "norm2": (d,)}
    words = {"words": (size.tokens, d), "head": (d, size.tokens), "norm": (d,)}
    return drawn({**words, "layers": [layer] * size.layers})


# -------------------------------------------------------------------- measured
def rows_of(name: str, size: Size, repeats: int) -> list[dict[str, Any]]:
    """The rows of a model."""
    b, t = size.batch, size.length
    ids = jax.random.randint(jax.random.key(1), (b, t + 1), 0, size.tokens)
    if name == "bert":
        ends = jnp.where(jnp.arange(b) % 2, t // 2, t)
        mask = (jnp.arange(t) < ends[:, None]).astype(jnp.int32)
        loss, args = bert_loss, (bert_weights(size), ids, mask)
    else:
        segments = packed_decoder.segments_of(b, t)
        loss = llama_loss
        args = (llama_weights(size), ids, segments, restarting(segments))
    cases = [c for c in passes.cases(lambda c: loss(size, c)) if "gradient" in c.what]
    if name == "llama":
        cases = [c for c in cases if "checkpointed" in c.what]  # others fit nowhere
    cases = [dataclasses.replace(c, what=f"{name}, {c.what}") for c in cases]
    return passes.compare(cases, args, repeats)


def main() -> None:
    """Measures every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="to try it on a CPU")
    parser.add_argument("--only", choices=("bert", "llama"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rows = []
    for name, size in (("bert", BERT), ("llama", LLAMA)):
        if given.only in (None, name):
            rows += rows_of(name, small(size) if given.small else size, given.repeats)
            if given.json:
                command = "python3 -m tests.bench.training_steps"
                command += f" --only {given.only}" if given.only else ""
                command += f" --repeats {given.repeats}" + " --small" * given.small
                record.write(given.json, command, results=rows)


if __name__ == "__main__":
    main()
