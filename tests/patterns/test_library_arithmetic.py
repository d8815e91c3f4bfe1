"""Arithmetic of public libraries that is easy to miss, or to read wrongly.

Each function is written as a library writes it; the count is what must be found,
and the op's numbers are compared with the function's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.support.arrays import normal

pytestmark = pytest.mark.once

T, H = 16, 8


def attend(scores: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)


def dots(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(normal(*shape, seed=seed))


def heads(count: int) -> list[np.ndarray]:
    return [drawn(2, T, 4, H, seed=i) for i in range(count)]


LENGTHS = jax.device_put(np.array([16, 8], np.int32))
PADDING = np.arange(T)[None] < np.array([[16], [8]])
CASES: dict[str, tuple[Callable[..., Any], list[jax.Array], dict[str, int]]] = {}


def case(args: list[Any], **counts: int):
    def register(fn):
        CASES[fn.__name__] = fn, [jax.device_put(np.asarray(a)) for a in args], counts
        return fn

    return register


@case([*heads(3), drawn(2, T, 4, 5, 3), drawn(2, T, 4, 5, 3, seed=1), drawn(4)],
      attention=1)  # fmt: skip
def distances_of_points(q, k, v, of_q, of_k, weight):
    """Invariant point attention: learned weights of distances are softplus."""
    apart = ((of_q[:, :, None] - of_k[:, None]) ** 2).sum((-1, -2))
    added = -0.5 * (jax.nn.softplus(weight) * apart).transpose(0, 3, 1, 2)
    return attend(dots(q, k) + added, v)


@case([*heads(3), PADDING.astype(np.int32)], attention=1)
def padding_and_window_both_added(q, k, v, pad):
    """Rows whose window is padding weigh all keys that one of the masks leaves."""
    i = jnp.arange(T)
    distance = i[:, None] - i
    window = (distance >= 0) & (distance < 4)
    mask = (1 - pad[:, None, None].astype(jnp.float32)) * -1e9
    return attend(dots(q, k) + mask + (1 - window.astype(jnp.float32)) * -1e9, v)


@case([*heads(3), PADDING], attention=1)
def padding_and_window_both_selected_and_added(q, k, v, pad):
    i = jnp.arange(T)
    window = jnp.abs(i[:, None] - i) < 3
    mask = jnp.where(window, 0, -1e9) + jnp.where(pad, 0, -1e9)[:, None, None]
    return attend(dots(q, k) + mask, v)


@case([*heads(3), PADDING], attention=1)
def padding_or_diagonal(q, k, v, pad):
    mask = 1 - (pad[:, None, None] | (jnp.eye(T) > 0)).astype(jnp.float32)
    return attend(dots(q, k) + mask * -3e4, v)


INFINITE = np.where(np.arange(T) < 12, 0.0, -np.inf).astype(np.float32)


@case(heads(3), attention=1)
def maximum_never_below_a_large_number(q, k, v):
    """Over the reals 1e30 cancels; in floats it would absorb the scores."""
    s = jnp.where(jnp.tril(jnp.ones((T, T), bool)), dots(q, k) / 2, -jnp.inf)
    e = jnp.exp(s - jnp.maximum(s.max(-1, keepdims=True), -1e30))
    return jnp.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v)


@case([*heads(3), INFINITE], attention=1)
def infinite_bias_replaced_where_infinite(q, k, v, bias):
    """The bias holds infinities, which its test for them must see."""
    finite = jnp.where(jnp.isfinite(bias), bias, -2.0)
    return attend(dots(q, k) + finite, v)


@case([*heads(3), INFINITE], attention=1)
def infinite_bias_read_as_a_mask(q, k, v, bias):
    return attend(jnp.where(bias == -jnp.inf, -1e30, dots(q, k)), v)


@case(heads(3), attention=1)
def logarithm_of_a_mask_tested(q, k, v):
    bias = jnp.log(jnp.tril(jnp.ones((T, T))))
    return attend(dots(q, k) + jnp.where(jnp.isfinite(bias), bias, -3.0), v)


@case([*heads(3), PADDING], attention=1)
def fills_of_unlike_size_added(q, k, v, pad):
    """The smaller fill is not nothing beside the larger one."""
    padding = jnp.where(pad, 0.0, -1e9)[:, None, None]
    causal = jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, -1e30)
    return attend(dots(q, k) + padding + causal, v)


@case([*heads(3), PADDING], attention=1)
def small_fill_added_under_a_larger_one(q, k, v, pad):
    s = dots(q, k) + jnp.where(pad, 0.0, -1e9)[:, None, None]
    return attend(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30), v)


@case([*heads(3), np.arange(T) < 2], attention=1)
def infinite_bias_under_a_finite_fill(q, k, v, pad):
    """Rows that see only padding weigh what the causal mask hides: a function does."""
    s = dots(q, k) + jnp.where(pad, -jnp.inf, 0.0)
    return attend(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e30), v)


DROPPED = np.random.default_rng(3).random((2, 4, T, T)) < 0.9


@case([*heads(3), DROPPED], attention=1)
def dropout_of_rows_without_keys(q, k, v, keep):
    """Such a row is the mean of what dropout leaves."""
    row = jnp.arange(T)[:, None] != 5
    w = jax.nn.softmax(jnp.where(row, dots(q, k), -1e9)) * keep / 0.9
    return jnp.einsum("bnts,bsnh->btnh", w, v)


@case([*heads(3), DROPPED], attention=1)
def dropout_selected_of_rows_without_keys(q, k, v, keep):
    row = jnp.arange(T)[:, None] != 5
    w = jax.nn.softmax(jnp.where(row, dots(q, k), -1e30))
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, w / 0.9, 0), v)


@case([*heads(3), drawn(4), np.arange(2 * T).reshape(2, T) % 3], attention=1)
def sinks_with_rows_masked(q, k, v, sinks, segments):
    seen = (segments != 0)[:, None, :, None] & (segments != 0)[:, None, None]
    s = jnp.where(seen, dots(q, k), -1e30)
    sink = jnp.broadcast_to(sinks[:, None, None], (2, 4, T, 1))
    w = jax.nn.softmax(jnp.concatenate([s, sink], -1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", w, v)


@case([drawn(2, 4, 1, H), *[drawn(2, 2, T, H, seed=i) for i in (1, 2)], drawn(4)],
      attention=1)  # fmt: skip
def sinks_of_groups_with_one_query(q, k, v, sinks):
    s = jnp.einsum("bkgth,bksh->bkgts", q.reshape(2, 2, 2, 1, H), k)
    sink = jnp.broadcast_to(sinks[:, None, None], (2, 4, 1, 1))
    w = jax.nn.softmax(jnp.concatenate([s.reshape(2, 4, 1, T), sink], -1))[..., :-1]
    return jnp.einsum("bkgts,bksh->bkgth", w.reshape(2, 2, 2, 1, T), v)


@case([*heads(3), *[np.arange(T) % n != 1 for n in (3, 5, 7, 11, 13)]], attention=1)
def mask_of_five_conditions(q, k, v, *conditions):
    a, b, c, d, e = conditions
    return attend(jnp.where(a & b & c & d & e, dots(q, k), -jnp.inf), v)


@case([heads(1)[0], (50 * drawn(2, T, 4, H)).astype(np.int8), drawn(2, T, 4) / 50,
       heads(1)[0]], attention=1)  # fmt: skip
def integer_keys_with_scales_on_the_scores(q, k, scales, v):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * scales.transpose(0, 2, 1)[:, :, None]
    return attend(s, v)


GROUPS = [drawn(2, T, 2, 2, H), *[drawn(2, T, 2, H, seed=i) for i in (1, 2)]]
SEEN = np.random.default_rng(4).random((2, 2, 2, T, T)) < 0.2
EACH = SEEN & (np.arange(T)[:, None] != 3)  # row 3 sees no key


def attend_in_groups(q, k, v, mask):
    s = jnp.einsum("btkgh,bskh->bkgts", q, k)
    s = jnp.where(mask, s, -1e30).reshape(2, 4, T, T)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True).transpose(0, 2, 1, 3)
    o = jnp.einsum("bkgts,bskh->btkgh", e.reshape(2, 2, 2, T, T), v)
    return o.reshape(2, T, 4, H) / total


@case([*GROUPS, EACH], attention=1)
def mask_of_groups_of_heads_joined_afterwards(q, k, v, mask):
    """As a loop over layers gets it that reads a mask made before it."""
    return attend_in_groups(q, k, v, mask)


@case([*GROUPS, EACH[:, 0]], attention=1)
def mask_read_at_both_digits_of_heads(q, k, v, mask):
    """Which of the two hides a key of a row is left to a function of the scores."""
    return attend_in_groups(q, k, v, mask[:, None] & mask[:, :, None])


@case([*heads(3), np.int32(4)], attention=1)
def causal_window_of_traced_width(q, k, v, width):
    i = jnp.arange(T)
    seen = (i[:, None] >= i) & (i[:, None] - i < width)
    return attend(jnp.where(seen, dots(q, k), -1e30), v)


def bare_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


@case([drawn(2, T, H), np.arange(T)], rms_norm=1)
def norm_of_queries_that_grow_with_their_positions(x, position):
    return bare_norm(x) * (1 + jnp.log(jnp.floor(position / 4) + 1))[:, None]


@case([drawn(2, T, H), drawn(T)], rms_norm=0)
def norm_with_a_scale_of_each_position(x, scale):
    return bare_norm(x) * scale[:, None]


@case([drawn(2, T, H)], rms_norm=1)
def norm_of_queries_over_the_root_of_their_width(x):
    """All of it is an L2 norm too; what is scaled is not."""
    return bare_norm(x) * H**-0.5


@case([*heads(3), drawn(T) ** 2], attention=1)
def mask_of_numbers_times_a_large_one(q, k, v, m):
    return attend(dots(q, k) + m * -1e4, v)


@case([*heads(3), drawn(4)], attention=1)
def scores_times_a_sum(q, k, v, temperature):
    return attend(dots(q, k) * (1 + temperature)[:, None, None], v)


@case(heads(3))
def scores_kept_below_a_large_number(q, k, v):
    """Infinite scores become finite."""
    return attend(jnp.clip(dots(q, k), -1e8, 1e8), v)


def test_bounds_that_finite_scores_do_not_reach() -> None:
    fn, args, _ = CASES["scores_kept_below_a_large_number"]
    (miss,) = rewriter.explain(fn)(*args).misses
    assert "assume=('finite',)" in miss.suggestion
    assert rewriter.explain(fn, assume="finite")(*args).counts()["attention"] == 1


def divided_by_at_least(least, q, k, v, mask=None, after=None, peak=None):
    s = dots(q, k) if mask is None else jnp.where(mask, dots(q, k), -jnp.inf)
    e = jnp.exp(s - (s if peak is None else peak(s)).max(-1, keepdims=True))
    e = e if after is None else e * after
    total = jnp.maximum(e.sum(-1, keepdims=True), least)
    return jnp.einsum("bnts,bsnh->btnh", e / total, v)


@case([*heads(3), PADDING], attention=1)
def total_of_weights_kept_above_a_small_number(q, k, v, pad):
    """The largest weight is one, so the total is not below."""
    return divided_by_at_least(1e-9, q, k, v, pad[:, None, None])


@case(heads(3), attention=0)
def total_of_weights_kept_above_two(q, k, v):
    return divided_by_at_least(2.0, q, k, v)


@case([*heads(3), PADDING], attention=0)
def total_of_weights_masked_afterwards_kept_above_a_number(q, k, v, pad):
    """The largest weight may be masked, and those left may be small."""
    return divided_by_at_least(1e-3, 9 * q, k, v, after=pad[:, None, None])


@case(heads(3), attention=0)
def total_of_weights_less_another_maximum_kept_above_a_number(q, k, v):
    return divided_by_at_least(0.5, q, k, v, peak=lambda s: s + 3)


@case([*heads(3), PADDING], attention=0)
def mean_of_masked_scores_subtracted(q, k, v, pad):
    """Over the reals it cancels; in floats it absorbs the scores."""
    s = jnp.where(pad[:, None, None], dots(q, k), -1e30)
    return attend(s - s.mean(-1, keepdims=True), v)


@case([drawn(T, T, H), drawn(H, 2), drawn(5, T, 2, H)], attention=0)
def pair_weighted_average(pair, w, v):
    """Keys of its own for every query: as attention, all values would be repeated."""
    weights = jax.nn.softmax((pair @ w).transpose(2, 0, 1))
    return jnp.einsum("hqk,bkhc->bqhc", weights, v)


@case([drawn(2, T, 32), drawn(32, 12), drawn(2, 6, T, 2, H)], attention=0)
def deformable_attention(x, w, samples):
    a = jax.nn.softmax((x @ w).reshape(2, T, 2, 6))
    return jnp.einsum("bqhp,bpqhe->bqhe", a, samples)


@case([drawn(T, H), drawn(3, H, 12), drawn(3, H, 12, seed=1)], gated_linear_unit=0)
def gates_of_all_experts(x, w, u):
    gate = jnp.einsum("td,edf->tef", x, w)
    return jax.nn.silu(gate) * jnp.einsum("td,edf->tef", x, u)


@case([*heads(3), LENGTHS], attention=1)
def length_truncated_from_float(q, k, v, n):
    keep = jnp.arange(T)[None] < (n / 4.0 + 1).astype(jnp.int32)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=keep[:, None, None])


@case(heads(4), attention=1)
def relative_by_shift(q, k, v, r):
    """Conformer: the second product is shifted by padding and reshaping."""
    y = dots(q, r)
    y = jnp.pad(y, ((0, 0), (0, 0), (0, 0), (1, 0)))
    y = y.reshape(2, 4, T + 1, T)[:, :, 1:].reshape(2, 4, T, T)
    return attend(dots(q, k) + y, v)


@case(
    [*heads(3), drawn(2 * T, 4, H), drawn(4, H, seed=5), drawn(4, H, seed=6)],
    attention=1,
)
def relative_by_reshape(q, k, v, r, u, w):
    """Transformer-XL: positions of twice the length, content and position biases."""
    y = jnp.einsum("btnh,snh->bnts", q + w, r) * H**-0.5
    y = y.reshape(2, 4, 2 * T, T)[:, :, 1:].reshape(2, 4, T, 2 * T - 1)[..., :T]
    return attend(dots(q + u, k) + y, v)


@case(
    [*heads(3), drawn(2, 4, H), drawn(4, H, seed=5), drawn(2, T, T, seed=7)],
    attention=1,
)
def relative_segments(q, k, v, segments, w, same):
    """XLNet: one of two products with the query, by segment."""
    e = jnp.einsum("btnh,snh->bnts", q + w, segments) * H**-0.5
    picked = jnp.where((same > 0)[:, None], e[..., 1:], e[..., :1])
    return attend(dots(q, k) + picked, v)


@case([*heads(3), drawn(2 * T - 1, 4, H), drawn(T, T, seed=9)], attention=1)
def relative_by_shift_then_selected(q, k, v, r, m):
    """Praxis's XL attention: shifted scores inside of a selecting mask."""
    y = jnp.einsum("btnh,lnh->bntl", q, r).reshape(2, 4, T * (2 * T - 1))
    y = jnp.pad(y, ((0, 0), (0, 0), (0, T))).reshape(2, 4, T, 2 * T)
    y = y[:, :, :, T - 1 :: -1] * H**-0.5
    return attend(jnp.where(m > 0, dots(q, k) + y, -1e30), v)


@case([drawn(2, T, 32), drawn(32, 4), drawn(2, T, 4, seed=1)], attention=0)
def router(x, w, chosen):
    """The gate of the chosen expert: all rows share the keys and not the values."""
    return jnp.einsum("bte,bte->bt", jax.nn.softmax(x @ w, -1), chosen)


@case(
    [drawn(2, T, 32), drawn(32, 4), drawn(4, 32, 64), drawn(4, 64, 32)],
    attention=0,
)
def dense_experts(x, w_router, w_in, w_out):
    hidden = jax.nn.relu(jnp.einsum("btd,edh->bteh", x, w_in))
    y = jnp.einsum("bteh,ehd->bted", hidden, w_out)
    return jnp.einsum("bte,bted->btd", jax.nn.softmax(x @ w_router, -1), y)


def windows(x: jax.Array) -> jax.Array:
    b, h, w, c = x.shape
    x = x.reshape(b, h // 4, 4, w // 4, 4, c).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, 16, c)


@case([drawn(2, 16, 16, 16), drawn(16, 48), drawn(2, 16, 16)], attention=1)
def shifted_windows(x, u, position):
    """Swin: the mask of -100 is added to scores that are reshaped by window."""
    qkv = windows(jnp.roll(x, (-2, -2), (1, 2))) @ u
    q, k, v = qkv.reshape(-1, 16, 3, 2, 8).transpose(2, 0, 3, 1, 4)
    i = jnp.arange(16)
    part = jnp.where(i < 12, 0, jnp.where(i < 14, 1, 2))
    image = windows((part[:, None] * 3 + part[None])[None, :, :, None])[..., 0]
    mask = (image[:, None] != image[:, :, None]).astype(jnp.float32) * -100.0
    s = (q * 8**-0.5) @ k.swapaxes(-1, -2) + position
    s = (s.reshape(-1, 16, 2, 16, 16) + mask[None, :, None]).reshape(-1, 2, 16, 16)
    return (jax.nn.softmax(s, -1) @ v).transpose(0, 2, 1, 3).reshape(-1, 16, 16)


def moments(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


@case(
    [drawn(2, 24, 32), *(drawn(32, seed=i) for i in range(4))],
    layer_norm=2,
)
def two_norms_of_one_value(x, a, b, c, d):
    """Parallel attention and MLP blocks: one pair of moments, two scales."""
    return jnp.tanh(moments(x) * a + b), jnp.sin(moments(x) * c + d)


@case([drawn(2, 24, 32), drawn(32, seed=1), drawn(32, seed=2)], layer_norm=1)
def norm_before_gelu(x, scale, bias):
    """Read twice, once divided by a root: one norm, and not its multiple."""
    return jax.nn.gelu(moments(x) * scale + bias, approximate=False)


@case([drawn(2, 24, 4, 8), drawn(8, seed=1), drawn(24, 4, seed=2)], rms_norm=1)
def norm_before_repeated_rotary(x, scale, cos):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return y * jnp.repeat(cos, 2, -1)[None, :, None]


@case([drawn(2, 64, 16), drawn(16), drawn(16, seed=1), drawn(2, 8, 8, 16)],
      layer_norm=1)  # fmt: skip
def norm_before_reshaped_residual(x, scale, bias, z):
    return moments(x) * scale + bias + jnp.tanh(z).reshape(2, 64, 16)


@case([drawn(2, 61, 32), drawn(32), drawn(32, seed=1)], group_norm=1, layer_norm=0)
def group_norm_of_one_group(x, scale, bias):
    centred = x - x.mean((1, 2), keepdims=True)
    y = centred * jax.lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-6)
    return y * scale + bias


@case([drawn(16, 24), drawn(24, seed=1)], rms_norm=0)
def weight_norm(v, g):
    """A direction of length one, times a length: no mean, so no RMS norm."""
    return v * jax.lax.rsqrt(jnp.sum(v * v, -1, keepdims=True)) * g


SIZES = np.array([5, 9, 0, 10], np.int32)


@case([drawn(24, 16), drawn(4, 12, 16), SIZES], ragged_dot=1)
def ragged_weights_transposed(x, w, n):
    return jax.lax.ragged_dot(x, w.swapaxes(1, 2), n)


@case([drawn(2, 12, 16), drawn(4, 16, 12), SIZES], ragged_dot=1)
def ragged_tokens_flattened(x, w, n):
    return jax.lax.ragged_dot(x.reshape(24, 16), w, n)


@case([drawn(24, 16), drawn(4, 2, 8, 16), SIZES], ragged_dot=1)
def ragged_weights_of_two_axes(x, w, n):
    w = jnp.transpose(w, (0, 3, 1, 2)).reshape(4, 16, 16)
    return jax.lax.ragged_dot(x, w, n)


@case([drawn(24, 16), drawn(4, 16, 8), drawn(4, 16, 8, seed=1), SIZES], ragged_dot=1)
def ragged_weights_interleaved(x, w, u, n):
    return jax.lax.ragged_dot(x, jnp.stack([w, u], -1).reshape(4, 16, 16), n)


@case([drawn(2, 24, 16), drawn(16, 12), drawn(16, 12, seed=1)],
      gated_linear_unit=1)  # fmt: skip
def gated_by_unstacking(x, w, u):
    gate, up = jnp.einsum("btk,zkf->zbtf", x, jnp.stack([w, u]))
    return jax.nn.silu(gate) * up


@jax.custom_jvp
def doubled(y: jax.Array) -> jax.Array:
    return 2 * y


doubled.defjvp(lambda p, t: (doubled(p[0]), t[0]))


@case([drawn(2, 24, 4, 8), drawn(8, seed=1)], rms_norm=1)
def norm_before_a_rule_of_its_own(x, scale):
    """A multiple of the result, inside of a call that has its own derivative."""
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return doubled(y)


PAIRS = [
    drawn(12, 12, 8),
    (drawn(12, 12, seed=3) > 0).astype(np.float32),
    *(drawn(8, 16, seed=i) for i in (1, 2)),
]


@case(PAIRS, gated_linear_unit=1)
def masked_gate_of_pairs(x, mask, w, u):
    """AlphaFold's triangle multiplication: a masked projection, times a gate."""
    return mask[..., None] * (x @ w + 0.5) * jax.nn.sigmoid(x @ u)


@case(PAIRS, gated_linear_unit=0)
def selected_gate_of_pairs(x, mask, w, u):
    """A pair that is not selected is 0, though its product is infinite."""
    return jnp.where(mask[..., None] > 0, x @ w, 0) * jax.nn.sigmoid(x @ u)


@case(PAIRS, gated_linear_unit=0)
def gate_of_another_value(x, mask, w, u):
    """A gated output: the other factor is no contraction of the same value."""
    y = jnp.einsum("ijc,kjc->ikc", x, x) @ w
    return mask[..., None] * y * jax.nn.sigmoid(x @ u)


@case([drawn(2, 24, 32), drawn(32, seed=1)], rms_norm=1)
def norm_of_scaled_value_under_remat(x, scale):
    """The scale of embeddings is outside of the first block, whose norm is inside."""

    @jax.checkpoint
    def block(h):
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * scale

    return block(x * jnp.sqrt(32.0).astype(x.dtype))


@pytest.mark.parametrize("name", CASES)
def test_found_and_the_same_numbers(name: str) -> None:
    fn, args, expected = CASES[name]
    report = rewriter.explain(fn)(*args)
    assert not report.failures
    counts = report.counts(repeats=False)
    assert {k: v for k, v in counts.items() if v} == {
        k: v for k, v in expected.items() if v
    }
    forced = dict.fromkeys(expected, "reference")
    new = rewriter.optimize(fn, implementation=forced)(*args)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(fn(*args)), strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0)


def test_a_selected_gate_is_found_if_numbers_are_promised_finite() -> None:
    fn, args, _ = CASES["selected_gate_of_pairs"]
    report = rewriter.explain(fn, assume=("finite",))(*args)
    assert report.counts()["gated_linear_unit"] == 1


@pytest.mark.parametrize("weight", [-200.0, 90.0, 200.0])
def test_a_softplus_of_large_numbers_stays_finite(weight: float) -> None:
    """The logarithm of a sum of exponentials, of which float32 holds none past 88."""
    fn, (q, k, v, of_q, of_k, drawn), _ = CASES["distances_of_points"]
    scale = 1e-3  # so that scores with such weights still tell keys apart
    args = [q, k, v, scale * of_q, of_k * scale, drawn.at[1:3].set(weight)]
    loss = lambda f: lambda *a: (f(*a) ** 2).sum()
    fast = rewriter.optimize(fn, implementation={"attention": "reference"})
    assert fast.report(*args).counts()["attention"] == 1
    np.testing.assert_allclose(fast(*args), fn(*args), atol=2e-6)
    every = tuple(range(len(args)))
    step = jax.grad(loss(fn), every)
    rewritten = rewriter.optimize(step, implementation={"attention": "reference"})
    for got in (jax.grad(loss(fast), every), rewritten):
        for a, b in zip(got(*args), step(*args), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()))


def test_fast_lets_rows_without_keys_change() -> None:
    """Two finite masks: no hard mask weighs the keys of a row that sees none."""

    def fn(q, k, v, pad):
        i = jnp.arange(T)
        scores = jnp.where(jnp.abs(i[:, None] - i) < 3, dots(q, k), -1e9)
        return attend(scores + jnp.where(pad, 0, -1e9)[:, None, None], v)

    args = [*heads(3), PADDING]
    forced = {"attention": "reference"}
    exact = rewriter.optimize(fn, implementation=forced)
    assert "score" in exact.report(*args).sites[0].params  # that keeps every row
    np.testing.assert_allclose(exact(*args), fn(*args), atol=2e-6)
    report = rewriter.explain(fn, numerics="fast")(*args)
    assert "score" not in report.sites[0].params
    assert any("rows without keys" in note for note in report.sites[0].numerics)
    fast = rewriter.optimize(fn, numerics="fast", implementation=forced)(*args)
    # A query sees two keys back, so it sees one that is not padding.
    seen = np.concatenate([np.ones((2, 2), bool), np.asarray(PADDING)[:, :-2]], 1)
    np.testing.assert_allclose(
        np.asarray(fast)[seen], np.asarray(fn(*args))[seen], atol=2e-6
    )


@pytest.mark.parametrize("dropped", [False, True])
def test_rows_without_keys_under_two_added_masks(dropped: bool) -> None:
    """Where one mask is in the other, their sum tells keys of empty rows apart."""
    q, k, v = (normal(2, 24, 6, 8, seed=i) for i in range(3))
    t, s = jnp.arange(24)[:, None], jnp.arange(24)[None]

    def attention(q, k, v, first, second):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3
        scores += jnp.where(first, 0.0, -1e9) + (1.0 - second) * -1e9
        weights = jax.nn.softmax(scores)
        if dropped:
            weights = jnp.where(jnp.cos(scores) > -0.9, weights / 0.9, 0.0)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    for behind, ahead in ((5, 0), (5, 3), (0, 0)):
        masks = t - s >= behind, (t - s >= ahead).astype(jnp.float32)
        fn = lambda q, k, v, masks=masks: attention(q, k, v, *masks)
        fast = rewriter.optimize(fn, implementation={"attention": "reference"})
        np.testing.assert_allclose(fast(q, k, v), fn(q, k, v), atol=1e-5)
