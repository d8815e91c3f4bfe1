"""Functions of attention's scores, each written in two ways.

A function gets the scaled products x, the numbers i and j of query and key, and the
arrays of the case, all of which broadcast. A `Frame` is how the attention around it is
written: in which layout, and by which softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B, T, S, N, H = 2, 24, 40, 4, 8
KEYS = 2
"""Key heads of a grouped case."""

draw = np.random.default_rng(0)
Q = draw.normal(size=(B, T, N, H)).astype("float32")
K = draw.normal(size=(B, S, N, H)).astype("float32")
V = draw.normal(size=(B, S, N, H)).astype("float32")

SHAPES = {
    "per_head": (N,), "per_query": (B, T), "per_key": (B, S), "scalar": (),
    "per_batch": (B,), "table": (9, N), "shared": (12,), "window": (9, 9, N),
    "slopes": (N,), "content": (B, N, T), "memory": (B, N, S),
}  # fmt: skip
AXES = {
    "per_head": "n", "slopes": "n", "per_query": "bt", "per_key": "bs", "scalar": "",
    "per_batch": "b", "content": "bnt", "memory": "bns",
}  # fmt: skip
ARRAYS = {
    name: draw.uniform(0.4, 1.4, size=shape).astype("float32")
    for name, shape in SHAPES.items()
}


@dataclass(frozen=True)
class Given:
    """What a function may read beside the products, in a frame's layout.

    Attributes:
        order: The letters of the products' axes.
        arrays: The arrays of the case.
    """

    order: str
    arrays: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """Returns an array with an axis of size 1 for each letter that it lacks."""
        if name.startswith("_"):
            raise AttributeError(name)
        x, axes = self.arrays[name], AXES[name]
        kept = [c for c in self.order if c in axes]
        x = jnp.transpose(x, [axes.index(c) for c in kept])
        sizes = dict(zip(kept, x.shape, strict=True))
        return x.reshape([sizes.get(c, 1) for c in self.order])

    def of_heads(self, x: Any) -> Any:
        """Returns [t, s, n] in the frame's layout."""
        if self.order == "bnts":
            return jnp.transpose(x, (2, 0, 1))[None]
        return x[None]

    def of_all(self, x: Any) -> Any:
        """Returns [t, s] in the frame's layout."""
        return x[None, None] if self.order == "bnts" else x[None, :, :, None]

    def of_all_scores(self, x: Any) -> Any:
        """Returns numbers of a table, one for each score by its size."""
        places = jnp.clip(jnp.floor(x * 2 + 6), 0, 11).astype(jnp.int32)
        return self.arrays["shared"][places]

    def pair(self, x: Any) -> Any:
        """Returns [t, s] of what broadcasts in the frame's layout."""
        x = jnp.asarray(x)
        return x[0, 0] if self.order == "bnts" else x[0, :, :, 0]


Function = Callable[[Any, Any, Any, Given], Any]


@dataclass(frozen=True)
class Case:
    """A function of scores in two spellings, and the arrays that it reads."""

    name: str
    one: Function
    other: Function
    arrays: tuple[str, ...] = ()


def first_frame(
    function: Function, names: tuple[str, ...], softmax: bool = True
) -> Callable[..., Any]:
    """Heads before positions, and JAX's softmax, or the function as the weights."""

    def attention(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k) * (1 / math.sqrt(H))
        i = jnp.arange(T)[None, None, :, None]
        j = jnp.arange(S)[None, None, None, :]
        given = Given("bnts", dict(zip(names, arrays, strict=True)))
        weights = function(x, i, j, given)
        if softmax:
            weights = jax.nn.softmax(weights, axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return attention


def second_frame(
    function: Function, names: tuple[str, ...], softmax: bool = True
) -> Callable[..., Any]:
    """Heads last, and a softmax by hand that divides behind the values, or none."""

    def attention(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        q = q / jnp.asarray(math.sqrt(H), q.dtype)
        x = jnp.einsum("btnh,bsnh->btsn", q, k)
        i = lax.broadcasted_iota(jnp.int32, (1, T, 1, 1), 1)
        j = lax.broadcasted_iota(jnp.int32, (1, 1, S, 1), 2)
        given = Given("btsn", dict(zip(names, arrays, strict=True)))
        x = function(x, i, j, given)
        if not softmax:
            return jnp.einsum("btsn,bsnh->btnh", x, v)
        weights = jnp.exp(x - lax.stop_gradient(x.max(2, keepdims=True)))
        out = jnp.einsum("btsn,bsnh->btnh", weights, v)
        return out / weights.sum(2)[..., None]

    return attention


FRAMES = {"first": first_frame, "second": second_frame}


# ------------------------------------------------------------------ what they share
def bucket(distance: Any, buckets: int = 9, largest: int = 32) -> Any:
    """T5's buckets of distances, in both directions."""
    half = buckets // 2
    ahead = jnp.where(distance > 0, half, 0)
    away = jnp.abs(distance)
    exact = half // 2
    far = jnp.log(jnp.maximum(away, 1).astype(jnp.float32) / exact)
    far = exact + (far / math.log(largest / exact) * (half - exact)).astype(jnp.int32)
    return ahead + jnp.where(away < exact, away, jnp.minimum(far, half - 1))


def bucket_otherwise(distance: Any, buckets: int = 9, largest: int = 32) -> Any:
    """The same with other equations."""
    half = buckets // 2
    away = jnp.where(distance < 0, -distance, distance)
    exact = half // 2
    ratio = jnp.maximum(away, 1).astype(jnp.float32) / exact
    far = jnp.log(ratio) / math.log(largest / exact) * (half - exact)
    far = jnp.minimum(far.astype(jnp.int32) + exact, half - 1)
    return jnp.where(away < exact, away, far) + (distance > 0) * half


def clipped(i: Any, j: Any, reach: int = 4) -> Any:
    """Distances up to a reach, from 0 on."""
    return jnp.clip(j - i, -reach, reach) + reach


WIDTH = 8


def swin(i: Any, j: Any) -> Any:
    """The distances of two places of a picture, 8 wide, along both of its axes."""
    down = jnp.clip(i // WIDTH - j // WIDTH, -4, 4) + 4
    right = jnp.clip(i % WIDTH - j % WIDTH, -4, 4) + 4
    return down, right


SWIN = (
    np.clip(np.arange(T)[:, None] // WIDTH - np.arange(S)[None] // WIDTH, -4, 4) * 2
    + np.clip(np.arange(T)[:, None] % WIDTH - np.arange(S)[None] % WIDTH, -4, 4) % 9
)
SWIN = (np.abs(SWIN) % 9).astype("int32")


def one_hot_bias(index: Any, table: Any) -> Any:
    """Rows [t, s, n] of a table by a product with one-hot rows, as flax's T5 does."""
    hot = (index[..., None] == jnp.arange(table.shape[0])).astype(table.dtype)
    return lax.dot_general(hot, table, (((2,), (0,)), ((), ())))


def away(i: Any, j: Any) -> Any:
    return jnp.abs(i - j).astype(jnp.float32)


def sandwich(i: Any, j: Any) -> Any:
    distance = (i - j).astype(jnp.float32)
    waves = (jnp.cos(distance / 10000 ** (2 * m / 8)) for m in range(4))
    return sum(waves)


def sandwich_backwards(i: Any, j: Any) -> Any:
    distance = (j - i).astype(jnp.float32)
    total = jnp.zeros(())
    for m in range(4):
        total = total + jnp.cos(distance * 10000 ** (-m / 4))
    return total


def gelu(x: Any) -> Any:
    return x * 0.5 * (1 + lax.erf(x / math.sqrt(2)))


CASES: list[Case] = []


def add(name: str, one: Function, other: Function, *arrays: str) -> None:
    CASES.append(Case(name, one, other, arrays))


# fmt: off
# ------------------------------------------------------------- functions of scores
add("tanh cap inside", lambda x, i, j, a: 5 * jnp.tanh((x + 0.1 * away(i, j)) / 5),
    lambda x, i, j, a: jnp.tanh((x + away(i, j) / 10) * 0.2) * 5)
add("traced cap", lambda x, i, j, a: a.scalar * jnp.tanh(x / a.scalar),
    lambda x, i, j, a: jnp.tanh(x / a.scalar) * a.scalar, "scalar")
add("cap per head", lambda x, i, j, a: a.per_head * jnp.tanh(x / a.per_head),
    lambda x, i, j, a: jnp.tanh(x * (1 / a.per_head)) * a.per_head, "per_head")
add("softplus", lambda x, i, j, a: jax.nn.softplus(x),
    lambda x, i, j, a: jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0))
add("gelu", lambda x, i, j, a: jax.nn.gelu(x, approximate=False),
    lambda x, i, j, a: gelu(x))
add("gelu by tanh", lambda x, i, j, a: jax.nn.gelu(x),
    lambda x, i, j, a: x * (0.5 * (1 + jnp.tanh(
        math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))))
add("relu", lambda x, i, j, a: jax.nn.relu(x),
    lambda x, i, j, a: jnp.where(x > 0, x, 0))
add("leaky relu", lambda x, i, j, a: jax.nn.leaky_relu(x, 0.2),
    lambda x, i, j, a: jnp.where(x >= 0, x, 0.2 * x))
add("elu", lambda x, i, j, a: jax.nn.elu(x),
    lambda x, i, j, a: jnp.where(x > 0, x, jnp.expm1(jnp.where(x > 0, 0.0, x))))
add("silu", lambda x, i, j, a: jax.nn.silu(x), lambda x, i, j, a: x * jax.nn.sigmoid(x))
add("sigmoid of squares", lambda x, i, j, a: 4 * jax.nn.sigmoid(x * x),
    lambda x, i, j, a: 4 / (1 + jnp.exp(-jnp.square(x))))
add("square", lambda x, i, j, a: x * x, lambda x, i, j, a: jnp.square(x))
add("cube", lambda x, i, j, a: x**3 / 8, lambda x, i, j, a: x * x * x * 0.125)
add("squared relu", lambda x, i, j, a: jnp.square(jax.nn.relu(x)),
    lambda x, i, j, a: jnp.where(x > 0, x * x, 0.0))
add("arctan", lambda x, i, j, a: 2 * jnp.arctan(x),
    lambda x, i, j, a: jnp.arctan(x) * 2)
add("arcsinh", lambda x, i, j, a: jnp.arcsinh(x),
    lambda x, i, j, a: jnp.sign(x) * jnp.log(jnp.abs(x) + jnp.sqrt(x * x + 1)))
add("softsign", lambda x, i, j, a: jax.nn.soft_sign(x),
    lambda x, i, j, a: x / (1 + jnp.abs(x)))
add("signed root", lambda x, i, j, a: jnp.sign(x) * jnp.sqrt(jnp.abs(x) + 1e-2),
    lambda x, i, j, a: jnp.where(x < 0, -1.0, 1.0) * (jnp.abs(x) + 0.01) ** 0.5)
add("sine", lambda x, i, j, a: jnp.sin(x) + x / 2,
    lambda x, i, j, a: 0.5 * x + jnp.sin(x))
add("error function", lambda x, i, j, a: 3 * lax.erf(x / 3),
    lambda x, i, j, a: lax.erf(x * (1 / 3)) * 3)
add("clipped", lambda x, i, j, a: jnp.clip(x, -0.7, 0.9),
    lambda x, i, j, a: jnp.minimum(jnp.maximum(x, -0.7), 0.9))
add("shrunk", lambda x, i, j, a: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.2, 0),
    lambda x, i, j, a: jnp.where(x > 0.2, x - 0.2, jnp.where(x < -0.2, x + 0.2, 0.0)))
add("hard tanh", lambda x, i, j, a: jax.nn.hard_tanh(x),
    lambda x, i, j, a: jnp.where(x > 1, 1.0, jnp.where(x < -1, -1.0, x)))
add("mish", lambda x, i, j, a: jax.nn.mish(x),
    lambda x, i, j, a: x * jnp.tanh(jax.nn.softplus(x)))
add("log of squares", lambda x, i, j, a: jnp.log(x * x + 1),
    lambda x, i, j, a: jnp.log1p(jnp.square(x)))
add("rational", lambda x, i, j, a: x / (1 + 0.1 * x * x),
    lambda x, i, j, a: x / (x * x / 10 + 1))

# ---------------------------------------------------------- temperatures and factors
add("temperature per head", lambda x, i, j, a: jnp.tanh(x) * a.per_head,
    lambda x, i, j, a: a.per_head * jnp.tanh(x), "per_head")
add("exponential temperature", lambda x, i, j, a: jnp.tanh(x) * jnp.exp(a.per_head),
    lambda x, i, j, a: jnp.exp(a.per_head) * jnp.tanh(x), "per_head")
add("capped temperature",
    lambda x, i, j, a: jnp.sin(x) * jnp.minimum(jnp.exp(a.per_head), 3.0),
    lambda x, i, j, a: jnp.clip(jnp.exp(a.per_head), None, 3.0) * jnp.sin(x),
    "per_head")
add("temperature per query", lambda x, i, j, a: jnp.tanh(x) / a.per_query,
    lambda x, i, j, a: jnp.tanh(x) * (1 / a.per_query), "per_query")
add("temperature per key", lambda x, i, j, a: jnp.arctan(x) * a.per_key,
    lambda x, i, j, a: a.per_key * jnp.arctan(x), "per_key")
add("temperature per batch", lambda x, i, j, a: jnp.arctan(x) / a.per_batch,
    lambda x, i, j, a: jnp.arctan(x) / a.per_batch, "per_batch")
add("gated by content", lambda x, i, j, a: jax.nn.softplus(x) * a.content + a.memory,
    lambda x, i, j, a: a.memory + a.content * jax.nn.softplus(x), "content", "memory")
add("scaled by log length", lambda x, i, j, a: x * jnp.log(i + 2.0) + jnp.sin(x),
    lambda x, i, j, a: jnp.sin(x) + jnp.log(2.0 + i) * x)
add("power of positions", lambda x, i, j, a: x * (i + j + 1.0) ** -0.3,
    lambda x, i, j, a: x * jnp.power(1.0 + j + i, -0.3))

# -------------------------------------------------------------- decay and masks
add("exponential decay", lambda x, i, j, a: x * jnp.exp(-0.05 * away(i, j)),
    lambda x, i, j, a: jnp.exp(away(j, i) * -0.05) * x)
add("decay per head", lambda x, i, j, a: x * jnp.exp(-a.per_head * away(i, j) * 0.1),
    lambda x, i, j, a: jnp.exp(away(i, j) * 0.1 * -a.per_head) * x, "per_head")
add("power law decay", lambda x, i, j, a: x * (1 + away(i, j)) ** -0.5,
    lambda x, i, j, a: x / jnp.sqrt(1 + away(i, j)))
add("power law of a head", lambda x, i, j, a: x * (1 + away(i, j)) ** -a.per_head,
    lambda x, i, j, a: x * jnp.exp(-a.per_head * jnp.log(1 + away(i, j))), "per_head")
add("gaussian window", lambda x, i, j, a: x - jnp.square(away(i, j) / 6),
    lambda x, i, j, a: x - (i - j) ** 2 / 36)
add("multiplied mask", lambda x, i, j, a: x * (j <= i + 9),
    lambda x, i, j, a: jnp.where(j <= i + 9, x, 0.0))
add("multiplied padding", lambda x, i, j, a: jnp.tanh(x) * (a.per_key > 0.7),
    lambda x, i, j, a: jnp.where(a.per_key > 0.7, jnp.tanh(x), 0.0), "per_key")
add("strided mask", lambda x, i, j, a: jnp.where((i - j) % 3 == 0, jnp.sin(x), -1e9),
    lambda x, i, j, a: jnp.where(jnp.mod(i - j, 3) != 0, -1e9, jnp.sin(x)))
add("checkerboard", lambda x, i, j, a: jnp.where((i + j) % 2 == 0, x, x / 2),
    lambda x, i, j, a: x * jnp.where((i + j) % 2 == 0, 1.0, 0.5))
add("soft window",
    lambda x, i, j, a: x + jnp.log(jax.nn.sigmoid(6 - away(i, j)) + 1e-6),
    lambda x, i, j, a: x + jnp.log(1e-6 + 1 / (1 + jnp.exp(away(i, j) - 6))))
add("mask before a cap",
    lambda x, i, j, a: 3 * jnp.tanh(jnp.where(j <= i, x, -9.0) / 3),
    lambda x, i, j, a: jnp.tanh(jnp.where(j > i, -9.0, x) / 3) * 3)
add("causal and bent", lambda x, i, j, a: jnp.where(j <= i, jnp.sin(x), -jnp.inf),
    lambda x, i, j, a: jnp.where(j > i, -jnp.inf, jnp.sin(x)))
add("threshold", lambda x, i, j, a: jnp.where(x > 0.1, x, -2.0),
    lambda x, i, j, a: jnp.where(x <= 0.1, -2.0, x))

# ---------------------------------------------------------------------- distances
add("quadratic alibi", lambda x, i, j, a: x - a.slopes * jnp.square(away(i, j)) * 0.01,
    lambda x, i, j, a: x - 0.01 * a.slopes * away(i, j) * away(i, j), "slopes")
add("log alibi", lambda x, i, j, a: x - a.slopes * jnp.log1p(away(i, j)),
    lambda x, i, j, a: x + jnp.log(1 + away(i, j)) * -a.slopes, "slopes")
add("root alibi", lambda x, i, j, a: jnp.tanh(x) - a.slopes * jnp.sqrt(away(i, j) + 1),
    lambda x, i, j, a: jnp.tanh(x) - (away(i, j) + 1) ** 0.5 * a.slopes, "slopes")
add("kerple log", lambda x, i, j, a: x - a.slopes * jnp.log1p(a.per_head * away(i, j)),
    lambda x, i, j, a: x - a.slopes * jnp.log(1 + a.per_head * away(i, j)),
    "slopes", "per_head")
add("kerple power",
    lambda x, i, j, a: x - a.slopes * (away(i, j) + 1e-3) ** a.per_head,
    lambda x, i, j, a: x - a.slopes * jnp.power(away(i, j) + 1e-3, a.per_head),
    "slopes", "per_head")
add("sandwich", lambda x, i, j, a: jnp.tanh(x) + sandwich(i, j) * 0.25,
    lambda x, i, j, a: jnp.tanh(x) + 0.25 * sandwich_backwards(i, j))
add("rotary bias", lambda x, i, j, a: x * jnp.cos(0.2 * (i // 8 - j // 8)) * jnp.cos(
        0.3 * (i % 8 - j % 8)),
    lambda x, i, j, a: x * (jnp.cos(0.3 * (jnp.mod(j, 8) - jnp.mod(i, 8))) * jnp.cos(
        0.2 * (jnp.floor_divide(j, 8) - jnp.floor_divide(i, 8)))))
add("same block", lambda x, i, j, a: jnp.where(i // 8 == j // 8, x, 0.5 * jnp.tanh(x)),
    lambda x, i, j, a: jnp.where(i // 8 != j // 8, jnp.tanh(x) * 0.5, x))
add("fire", lambda x, i, j, a: x + a.per_head * jnp.log1p(0.5 * away(i, j)) / jnp.log1p(
        0.5 * jnp.maximum(i, 8.0)),
    lambda x, i, j, a: x + jnp.log1p(away(i, j) / 2) * a.per_head / jnp.log1p(
        jnp.maximum(i, 8.0) / 2), "per_head")
add("distance and content", lambda x, i, j, a: x - a.per_query * jnp.log1p(away(i, j)),
    lambda x, i, j, a: x - jnp.log1p(away(i, j)) * a.per_query, "per_query")

# ------------------------------------------------------------------------- tables
add("t5 buckets, capped",
    lambda x, i, j, a: jnp.tanh(x) + a.of_heads(a.arrays["table"][
        bucket(a.pair(j - i))]),
    lambda x, i, j, a: jnp.tanh(x) + a.of_heads(jnp.take(
        a.arrays["table"], bucket_otherwise(a.pair(j - i)), axis=0)), "table")
add("t5 by one-hot rows",
    lambda x, i, j, a: jnp.sin(x) + a.of_heads(one_hot_bias(
        bucket(a.pair(j - i)), a.arrays["table"])),
    lambda x, i, j, a: jnp.sin(x) + a.of_heads(one_hot_bias(
        bucket_otherwise(a.pair(j - i)), a.arrays["table"])), "table")
add("clipped distances",
    lambda x, i, j, a: x * a.of_heads(a.arrays["table"][clipped(a.pair(i), a.pair(j))]),
    lambda x, i, j, a: a.of_heads(a.arrays["table"].at[
        clipped(a.pair(i), a.pair(j))].get(mode="clip")) * x, "table")
add("table of all heads",
    lambda x, i, j, a: x + jnp.tanh(x) * a.of_all(a.arrays["shared"][
        jnp.minimum(jnp.abs(a.pair(i - j)), 11)]),
    lambda x, i, j, a: x + jnp.tanh(x) * a.of_all(a.arrays["shared"].at[
        jnp.abs(a.pair(i - j))].get(mode="clip")), "shared")
add("filled outside",
    lambda x, i, j, a: jnp.tanh(x) + a.of_all(a.arrays["shared"].at[
        jnp.abs(a.pair(i - j))].get(mode="fill", fill_value=0.25)),
    lambda x, i, j, a: jnp.tanh(x) + a.of_all(jnp.where(
        jnp.abs(a.pair(i - j)) < 12, a.arrays["shared"][
            jnp.minimum(jnp.abs(a.pair(i - j)), 11)], 0.25)), "shared")
add("swin by two indices",
    lambda x, i, j, a: jnp.tanh(x) + a.of_heads(a.arrays["window"][
        swin(a.pair(i), a.pair(j))]),
    lambda x, i, j, a: jnp.tanh(x) + a.of_heads(a.arrays["window"].reshape(81, N)[
        swin(a.pair(i), a.pair(j))[0] * 9 + swin(a.pair(i), a.pair(j))[1]]), "window")
add("swin by an array of indices",
    lambda x, i, j, a: jnp.tanh(x) + a.of_heads(a.arrays["table"][SWIN]),
    lambda x, i, j, a: jnp.tanh(x) + a.of_heads(jnp.take(
        a.arrays["table"], SWIN.reshape(-1), axis=0).reshape(T, S, N)), "table")
add("bucketed scores",
    lambda x, i, j, a: x + a.of_all_scores(x),
    lambda x, i, j, a: a.of_all_scores(x) + x, "shared")
# fmt: on
