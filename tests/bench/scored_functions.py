"""Functions of scores and masks that are timed, for JAX and for FlexAttention.

Each is written twice: for arrays of products in JAX, and for one product in PyTorch's
FlexAttention, which is imported where it is called. Numbers of heads are positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.spellings.attention.scores import bucket

HEADS = 16
WINDOW, PREFIX, DOCUMENTS = 1024, 1024, 8

Score = Callable[..., Any]
Draw = np.random.Generator


def _causal(i: Any, j: Any, *arrays: Any) -> Any:
    return j <= i


def _causal_one(b: Any, h: Any, i: Any, j: Any, *arrays: Any) -> Any:
    return j <= i


@dataclass(frozen=True)
class Function:
    """A function of scores, and what is seen.

    Attributes:
        of: Takes products [b, n, t, s], numbers of queries [t, 1] and of keys [1, s],
            and the arrays.
        flex: FlexAttention's: product, batch, head, query, key, arrays.
        arrays: Draws the arrays, by batch entries and tokens.
        op: What the function is read as.
        sees: Which keys are seen: queries, keys, arrays. Nothing: all.
        flex_sees: FlexAttention's: batch, head, query, key, arrays.
        learned: Whether the gradient of the array is asked for too.
    """

    of: Score
    flex: Score
    arrays: Callable[[Draw, int, int], tuple[np.ndarray, ...]] = lambda draw, b, t: ()
    op: str = "scored_attention"
    sees: Score | None = _causal
    flex_sees: Score | None = _causal_one
    learned: bool = False


def _by_heads(draw: Draw, b: int, t: int) -> tuple[np.ndarray, ...]:
    return (draw.uniform(0.1, 1.1, HEADS).astype("float32"),)


def _buckets(draw: Draw, b: int, t: int) -> tuple[np.ndarray, ...]:
    return (draw.normal(size=(32, HEADS)).astype("float32"),)


def _pairs(draw: Draw, b: int, t: int) -> tuple[np.ndarray, ...]:
    of_query, of_key = (draw.normal(size=(HEADS, t)).astype("float32") for _ in "qk")
    return ((of_query[:, :, None] + of_key[:, None]).astype(jnp.bfloat16),)


def _segments(draw: Draw, b: int, t: int) -> tuple[np.ndarray, ...]:
    """Eight documents on average in each sequence, of any lengths."""
    begins = draw.random((b, t)) < (DOCUMENTS - 1) / t
    return (np.cumsum(begins, 1).astype("int32"),)


def _prefixes(draw: Draw, b: int, t: int) -> tuple[np.ndarray, ...]:
    return (np.full((b,), PREFIX, "int32"),)


def _heads(r: Any) -> Any:
    return r[:, None, None]


def _torch() -> Any:
    import torch

    return torch


def _torch_bucket(distance: Any) -> Any:
    torch = _torch()
    half, exact, largest = 16, 8, 128
    ahead = torch.where(distance > 0, half, 0)
    away = torch.abs(distance)
    far = torch.log(torch.clamp(away, min=1).float() / exact)
    far = exact + (far / math.log(largest / exact) * (half - exact)).to(torch.int32)
    return ahead + torch.where(away < exact, away, torch.clamp(far, max=half - 1))


def _table(r: Any, i: Any, j: Any) -> Any:
    return jnp.transpose(r[bucket(j - i, 32, 128)], (2, 0, 1))


def _same(x: Any, *rest: Any) -> Any:
    return x


FUNCTIONS = {
    "cap (menu)": Function(
        lambda x, i, j: 30 * jnp.tanh(x / 30),
        lambda x, b, h, i, j: 30 * _torch().tanh(x / 30), op="attention",
    ),
    "cap of each head": Function(
        lambda x, i, j, r: _heads(r) * jnp.tanh(x / _heads(r)),
        lambda x, b, h, i, j, r: r[h] * _torch().tanh(x / r[h]), _by_heads,
    ),
    "ALiBi (menu)": Function(
        lambda x, i, j, r: x + _heads(r) * (j - i),
        lambda x, b, h, i, j, r: x + r[h] * (j - i), _by_heads, "attention",
    ),
    "T5's buckets (menu)": Function(
        lambda x, i, j, r: x + _table(r, i, j),
        lambda x, b, h, i, j, r: x + r[_torch_bucket(j - i), h],
        _buckets, "attention", None, None, learned=True,
    ),
    "documents (menu)": Function(
        _same, _same, _segments, "attention",
        lambda i, j, r: (j <= i) & (r[:, None, :, None] == r[:, None, None]),
        lambda b, h, i, j, r: (j <= i) & (r[b, i] == r[b, j]),
    ),
    "prefix (menu)": Function(
        _same, _same, _prefixes, "attention",
        lambda i, j, r: (j <= i) | (j < r[:, None, None, None]),
        lambda b, h, i, j, r: (j <= i) | (j < r[b]),
    ),
    "window (menu)": Function(
        _same, _same, op="attention",
        sees=lambda i, j: (j <= i) & (i - j < WINDOW),
        flex_sees=lambda b, h, i, j: (j <= i) & (i - j < WINDOW),
    ),
    "tanh and bias": Function(
        lambda x, i, j, r: jnp.tanh(x) + r,
        lambda x, b, h, i, j, r: _torch().tanh(x) + r[h, i, j],
        _pairs, sees=None, flex_sees=None,
    ),
    "log of distance": Function(
        lambda x, i, j, r: x - _heads(r) * jnp.log1p(jnp.abs(i - j).astype("float32")),
        lambda x, b, h, i, j, r: x - r[h] * _torch().log1p(_torch().abs(i - j).float()),
        _by_heads,
    ),
    "decay": Function(
        lambda x, i, j, r: x * jnp.exp(-_heads(r) * jnp.abs(i - j).astype("float32")),
        lambda x, b, h, i, j, r: x * _torch().exp(-r[h] * _torch().abs(i - j).float()),
        _by_heads,
    ),
    "softplus": Function(
        lambda x, i, j: jax.nn.softplus(x),
        lambda x, b, h, i, j: _torch().nn.functional.softplus(x),
        sees=None, flex_sees=None,
    ),
    "T5's buckets, capped": Function(
        lambda x, i, j, r: jnp.tanh(x) + _table(r, i, j),
        lambda x, b, h, i, j, r: _torch().tanh(x) + r[_torch_bucket(j - i), h],
        _buckets, sees=None, flex_sees=None,
    ),
    "tanh and distance": Function(
        lambda x, i, j, r: jnp.tanh(x) - _heads(r) * jnp.abs(i - j),
        lambda x, b, h, i, j, r: _torch().tanh(x) - r[h] * _torch().abs(i - j),
        _by_heads,
    ),
}  # fmt: skip
"""By name; those of a menu have an operand or a window of attention's own."""
