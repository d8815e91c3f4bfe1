"""A transformer from flax's own layers, and what the rewriter makes of it.

Nothing in the model knows about this package. Attention is `nnx.MultiHeadAttention`
under a causal mask, and norms are `nnx.RMSNorm`. The feed-forward is a SwiGLU of
`nnx.Linear`. In every second block each token goes to two of its experts, through
`jax.lax.ragged_dot`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Size:
    """Widths of the demo model.

    Attributes:
        tokens: Sequence length.
        width: Model width.
        heads: Attention heads.
        hidden: Width inside the feed-forward, and inside each expert.
        experts: Experts per expert block.
        blocks: Number of blocks.
        vocabulary: Number of token ids.
    """

    tokens: int = 2048
    width: int = 128
    heads: int = 4
    hidden: int = 256
    experts: int = 16
    blocks: int = 2
    vocabulary: int = 512


SMALL = Size(tokens=64, width=32, heads=4, hidden=48, experts=4, blocks=2)


class SwiGLU(nnx.Module):
    """The feed-forward ``down(silu(gate x) * up x)``."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(size.width, size.hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(size.width, size.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(size.hidden, size.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [b, t, d] to [b, t, d]."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Two experts per token: sort by expert, ragged products, sort back."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(size.width, size.experts, use_bias=False, rngs=rngs)
        init, shape = nnx.initializers.lecun_normal(), (size.width, size.hidden)
        for name, s in (("gate", shape), ("up", shape), ("down", shape[::-1])):
            value = init(rngs.params(), (size.experts, *s))
            setattr(self, name, nnx.Param(value))
        self.experts = size.experts

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [b, t, d] to [b, t, d]."""
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = jax.lax.top_k(nnx.softmax(self.router(rows)), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.experts)
        inside = rows[order // 2]
        gate = jax.lax.ragged_dot(inside, self.gate[...], sizes)
        up = jax.lax.ragged_dot(inside, self.up[...], sizes)
        out = jax.lax.ragged_dot(nnx.silu(gate) * up, self.down[...], sizes)
        back = jnp.zeros_like(out).at[order].set(out).reshape(*chosen.shape, -1)
        return jnp.einsum("rk,rkd->rd", weights, back).reshape(x.shape)


class Block(nnx.Module):
    """Attention and a feed-forward, each after a norm and around a residual."""

    def __init__(self, size: Size, experts: bool, rngs: nnx.Rngs) -> None:
        self.before = nnx.RMSNorm(size.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            size.heads, size.width, use_bias=False, decode=False, rngs=rngs
        )
        self.between = nnx.RMSNorm(size.width, rngs=rngs)
        self.feed_forward = (Experts if experts else SwiGLU)(size, rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps [b, t, d] to [b, t, d]; the mask is [b, 1, t, t]."""
        x = x + self.attention(self.before(x), mask=mask)
        return x + self.feed_forward(self.between(x))


class Transformer(nnx.Module):
    """A causal language model."""

    def __init__(self, size: Size, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(size.vocabulary, size.width, rngs=rngs)
        self.count = size.blocks
        for i in range(size.blocks):
            setattr(self, f"block_{i}", Block(size, i % 2 == 1, rngs))
        self.last = nnx.RMSNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps token ids [b, t] to logits [b, t, vocabulary]."""
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for i in range(self.count):
            x = getattr(self, f"block_{i}")(x, mask)
        return self.embed.attend(self.last(x))


def build(size: Size = Size()) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
    """Returns ``loss(parameters, tokens)`` and example arguments.

    The parameters are a plain dict, so that the program can be exported.

    Args:
        size: Widths of the model.
    """
    graph, state = nnx.split(Transformer(size, nnx.Rngs(0)))
    paths, leaves, tree = _flat(state)

    def loss(parameters: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        leaves = [parameters[path] for path in paths]
        model = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
        logits = jax.nn.log_softmax(model(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))

    shape = (1, size.tokens + 1)
    tokens = jax.random.randint(jax.random.key(1), shape, 0, size.vocabulary)
    return loss, (dict(zip(paths, leaves, strict=True)), tokens)


def _flat(state: Any) -> tuple[list[str], list[jax.Array], Any]:
    pairs, tree = jax.tree_util.tree_flatten_with_path(state)
    paths = [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in pairs]
    return [p.removesuffix(".value") for p in paths], [x for _, x in pairs], tree
