"""What is attention only with care."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.bias import SLOPES
from tests.spellings.attention.masks import difference
from tests.spellings.attention.pieces import (
    GROUPED,
    SCALE,
    B,
    E,
    G,
    H,
    K,
    N,
    T,
    attend,
    causal,
    dots,
    masked,
    weigh,
)
from tests.spellings.look_alikes.pieces import careful, scores
from tests.spellings.spelling import booleans, floats, given


@careful(
    "scores_mixed",
    "talking heads: scores of several heads are added",
    dict(w=floats("nk")),
)
def _(q, k, v, w):
    s = jnp.einsum("bnts,nm->bmts", scores(q, k), w)
    return jnp.einsum("bmts,bsme->btme", jax.nn.softmax(s), v[:, :, :K])


@careful("taylor", "1 + s + s²/2 in place of the exponential: a function of scores")
def _(q, k, v):
    s = scores(q, k)
    p = 1 + s + s * s / 2
    return weigh(p / p.sum(-1, keepdims=True), v)


@careful("values_by_query", "the values differ by query", v="btsne", q="btnh", k="bsnh")
def _(v, q, k):
    return jnp.einsum("bnts,btsne->btne", jax.nn.softmax(scores(q, k)), v)


@careful(
    "keys_by_query", "additive relative keys: the keys differ by query", dict(r="tsh")
)
def _(q, k, v, r):
    s = scores(q, k) * jnp.einsum("btnh,tsh->bnts", q, r)
    return attend(s, v)


@careful("keys_reshaped_across_heads", "the keys' token and head axes are mixed")
def _(q, k, v):
    s = jnp.einsum("btnh,bnsh->bnts", q, k.reshape(B, N, T, H)) * SCALE
    return attend(masked(s), v)


@careful("values_reshaped_across_heads", "the values' axes are mixed")
def _(q, k, v):
    p = jax.nn.softmax(masked(scores(q, k)))
    return jnp.einsum("bnts,bnse->btne", p, v.reshape(B, N, T, E))


@careful("keys_permuted", "the heads of k are in another order")
def _(q, k, v):
    return attend(masked(scores(q, k[:, :, np.array([2, 0, 1, 5, 4, 3])])), v)


@careful("keys_rolled", "the tokens of k are rolled")
def _(q, k, v):
    return attend(masked(scores(q, jnp.roll(k, 1, axis=1))), v)


@careful("keys_reversed", "the tokens of k are reversed")
def _(q, k, v):
    return attend(masked(scores(q, k[:, ::-1])), v)


@careful("width_permuted", "the width of k is reversed, q's is not")
def _(q, k, v):
    return attend(masked(scores(q, k[..., ::-1])), v)


@careful("keys_accumulated", "k is a running sum along the tokens")
def _(q, k, v):
    return attend(masked(scores(q, jnp.cumsum(k, axis=1))), v)


@careful("keys_accumulated_transposed", "k is a running sum along the heads")
def _(q, k, v):
    k = jnp.cumsum(k.swapaxes(1, 2), axis=1).swapaxes(1, 2)
    return attend(masked(scores(q, k)), v)


@careful("batch_shifted", "keys of the neighbouring batch entry")
def _(q, k, v):
    return attend(masked(scores(q, jnp.roll(k, 1, axis=0))), v)


@careful("scores_capped", "masked scores are cut off at 0.4, which is no tanh")
def _(q, k, v):
    return attend(jnp.minimum(masked(scores(q, k), fill=-3e38), 0.4), v)


@careful("scores_capped_runtime_scale", "the same, with a scale computed at run time")
def _(q, k, v):
    s = dots(q / jnp.sqrt(H).astype(q.dtype), k)
    return attend(jnp.minimum(masked(s, fill=jnp.finfo(s.dtype).min), 0.4), v)


@careful("scores_capped_before_mask", "scores are cut off, then masked")
def _(q, k, v):
    return attend(masked(jnp.minimum(scores(q, k), 0.4), fill=-3e38), v)


@careful("scores_clamped_from_above", "scores are cut off at 0.4, then masked")
def _(q, k, v):
    return attend(masked(lax.clamp(-jnp.inf, scores(q, k), 0.4), fill=-3e38), v)


@careful("scores_bounded_below", "masked scores are bounded below by −1")
def _(q, k, v):
    return attend(jnp.maximum(masked(scores(q, k)), -1.0), v)


@careful("squared_width_only", "the contraction weighs the width", dict(w="h"))
def _(q, k, v, w):
    return attend(jnp.einsum("btnh,bsnh,h->bnts", q, k, w), v)


@careful("swapped_roles", "q and k are exchanged, the mask is not")
def _(q, k, v):
    return attend(masked(scores(k, q)), v)


@careful("swapped_roles_transposed", "scores are transposed before the mask")
def _(q, k, v):
    return attend(masked(scores(k, q).swapaxes(2, 3)), v)


@careful("mask_transposed", "the triangle is the other one")
def _(q, k, v):
    return attend(masked(scores(q, k), causal().T), v)


@careful("strictly_causal_lowest", "the first row is empty and gives the mean")
def _(q, k, v):
    return attend(jnp.where(difference() > 0, scores(q, k), -3e38), v)


@careful("off_by_two", "every row but two sees later keys")
def _(q, k, v):
    return attend(jnp.where(difference() >= -2, scores(q, k), -jnp.inf), v)


@careful("window_200000", "a window wider than the sequence")
def _(q, k, v):
    keep = (difference() >= 0) & (difference() <= 200000)
    return attend(jnp.where(keep, scores(q, k), -jnp.inf), v)


@careful("window_200001", "a window one wider")
def _(q, k, v):
    keep = (difference() >= 0) & (difference() < 200001)
    return attend(jnp.where(keep, scores(q, k), -jnp.inf), v)


@careful("window_of_one", "each token sees itself only")
def _(q, k, v):
    return attend(jnp.where(difference() == 0, scores(q, k), -jnp.inf), v)


@careful("window_without_diagonal", "rows at the start are empty")
def _(q, k, v):
    keep = (difference() > 2) & (difference() < 9)
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful("empty_by_construction", "no row has a key")
def _(q, k, v):
    return attend(jnp.where(difference() > 100, scores(q, k), -1e30), v)


@careful("bias_added_twice", "the bias counts twice", dict(bias="nts"))
def _(q, k, v, bias):
    return attend(scores(q, k) + bias + bias, v)


@careful("moderate_fill_twice", "a fill of −2 stays visible")
def _(q, k, v):
    return attend(scores(q, k) + 2 * jnp.where(causal(), 0.0, -1.0), v)


@careful("small_fill", "a fill of −5 does not dominate")
def _(q, k, v):
    return attend(jnp.where(causal(), scores(q, k), -5.0), v)


@careful("positive_fill", "the fill wins over all scores")
def _(q, k, v):
    return attend(jnp.where(causal(), scores(q, k), 50.0), v)


@careful("mask_after_softmax", "rows no longer add up to one: a mask as dropout")
def _(q, k, v):
    return weigh(jnp.where(causal(), jax.nn.softmax(scores(q, k)), 0.0), v)


@careful("mask_differs_below", "denominator over other keys: a mask as dropout")
def _(q, k, v):
    e = jnp.exp(scores(q, k))
    total = jnp.where(causal(), e, 0).sum(-1, keepdims=True)
    return weigh(jnp.where(difference() >= 2, e, 0) / total, v)


@careful("softcap_after_mask", "the cap is applied to the fill too")
def _(q, k, v):
    return attend(5 * jnp.tanh(masked(scores(q, k), fill=-1e9) / 5), v)


@careful("softcap_uneven", "7·tanh(s/5) has scale 7/5 as well")
def _(q, k, v):
    return attend(masked(7 * jnp.tanh(scores(q, k) / 5)), v)


@careful("arctan_cap", "a cap that is not tanh")
def _(q, k, v):
    return attend(masked(5 * jnp.arctan(scores(q, k) / 5)), v)


@careful("sink_of_two", "two extra entries in the denominator")
def _(q, k, v):
    e = jnp.exp(scores(q, k))
    return weigh(e / (2 + e.sum(-1, keepdims=True)), v)


@careful("sink_per_query", "the extra term differs by query", dict(w="t"))
def _(q, k, v, w):
    e = jnp.exp(scores(q, k))
    return weigh(e / (jnp.exp(w)[:, None] + e.sum(-1, keepdims=True)), v)


@careful(
    "sink_with_value", "the extra entry has a value of its own", dict(w="n", u="ne")
)
def _(q, k, v, w, u):
    column = jnp.broadcast_to(w[:, None, None], (B, N, T, 1))
    p = jax.nn.softmax(jnp.concatenate([scores(q, k), column], -1))
    return weigh(p[..., :-1], v) + p[..., -1].transpose(0, 2, 1)[..., None] * u


@careful("sink_after_max", "e^(w − m) lacks the maximum", dict(w="n"))
def _(q, k, v, w):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1, keepdims=True) + jnp.exp(w)[:, None, None]
    return weigh(e / total, v)


@careful("alibi_reversed", "the slope's sign is the other one")
def _(q, k, v):
    s = scores(q, k) + SLOPES[:, None, None] * difference()
    return attend(masked(s), v)


@careful("alibi_quadratic", "the distance is squared")
def _(q, k, v):
    s = scores(q, k) - SLOPES[:, None, None] * 0.1 * difference() ** 2
    return attend(masked(s), v)


@careful("alibi_per_batch", "slopes per batch entry", dict(w="b"))
def _(q, k, v, w):
    return attend(masked(scores(q, k) + w[:, None, None, None] * difference()), v)


@careful("bias_of_scores", "the bias is computed from q", dict(r="tsh"))
def _(q, k, v, r):
    return attend(scores(q, k) + jnp.einsum("btnh,tsh->bnts", q, r), v)


@careful("two_score_products", "a second product of q and k is added")
def _(q, k, v):
    return attend(scores(q, k) + 0.1 * dots(jnp.sin(q), jnp.cos(k)), v)


@careful("keys_equal_values", "one array is k and v", q="btnh", k="bsnh")
def _(q, k):
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(masked(scores(q, k))), k)


@careful("queries_equal_keys", "one array is q and k", q="btnh", v="btne")
def _(q, v):
    return attend(masked(scores(q, q)), v)


@careful("output_transposed", "heads and tokens of the output are exchanged")
def _(q, k, v):
    return attend(masked(scores(q, k)), v).swapaxes(1, 2)


@careful("output_heads_reversed", "heads of the output are reversed")
def _(q, k, v):
    return attend(masked(scores(q, k)), v)[:, :, ::-1]


@careful("traced_scale_per_row", "the temperature differs by query", dict(w="t"))
def _(q, k, v, w):
    return attend(masked(scores(q, k) * w[:, None]), v)


@careful("traced_scale_per_key", "the temperature differs by key", dict(w="s"))
def _(q, k, v, w):
    return attend(masked(scores(q, k) * w), v)


@careful("scale_on_denominator", "a factor on the normalised output")
def _(q, k, v):
    return attend(masked(scores(q, k)), v) * 3.0


@careful(
    "segments_and_offset",
    "ids are compared with the ids plus one",
    dict(ids=given("bt", lambda d: d.rng.integers(0, 3, (2, 24)).astype(np.int32))),
)
def _(q, k, v, ids):
    keep = ids[:, None, :, None] == ids[:, None, None, :] + 1
    return attend(jnp.where(keep | (difference() == 0), scores(q, k), -1e30), v)


@careful(
    "segments_greater",
    "later segments see earlier ones",
    dict(ids=given("bt", lambda d: d.rng.integers(0, 3, (2, 24)).astype(np.int32))),
)
def _(q, k, v, ids):
    keep = ids[:, None, :, None] >= ids[:, None, None, :]
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful(
    "lengths_inclusive",
    "s ≤ length",
    dict(n=given("b", lambda d: np.array([5, 11], np.int32))),
)
def _(q, k, v, n):
    return attend(
        jnp.where(jnp.arange(T) <= n[:, None, None, None], scores(q, k), -1e30), v
    )


@careful(
    "lengths_of_queries",
    "the length bounds the queries",
    dict(n=given("b", lambda d: np.array([5, 11], np.int32))),
)
def _(q, k, v, n):
    keep = jnp.arange(T)[:, None] < n[:, None, None, None]
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful(
    "lengths_or_causal",
    "the two masks are joined by or",
    dict(n=given("b", lambda d: np.array([5, 11], np.int32))),
)
def _(q, k, v, n):
    keep = (jnp.arange(T) < n[:, None, None, None]) | (difference() >= 0)
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful("mask_xor", "the two masks are joined by exclusive or", dict(m=booleans("bs")))
def _(q, k, v, m):
    keep = m[:, None, None] ^ (difference() >= 0)
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful("mask_per_head_group", "some heads are causal, the others are not")
def _(q, k, v):
    keep = (difference() >= 0) | (jnp.arange(N)[:, None, None] < 2)
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful("constant_mask_with_hole", "a triangle with one entry missing")
def _(q, k, v):
    keep = np.tril(np.ones((T, T), bool))
    keep[9, 4] = False
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful("constant_mask_with_extra", "a triangle with one entry more")
def _(q, k, v):
    keep = np.tril(np.ones((T, T), bool))
    keep[3, 17] = True
    return attend(jnp.where(keep, scores(q, k), -1e30), v)


@careful("iota_scaled", "2i ≥ j is no triangle")
def _(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)
    return attend(jnp.where(2 * i >= j, scores(q, k), -1e30), v)


@careful("iota_of_floats_halved", "i ≥ j/2 after rounding")
def _(q, k, v):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)
    return attend(jnp.where(i >= j // 2, scores(q, k), -1e30), v)


@careful(
    "all_sizes_equal",
    "T = S = H = N: axes are told apart by use alone",
    q="4444",
    k="4444",
    v="4444",
)
def _(q, k, v):
    s = jnp.einsum("bhtn,bhsn->bnts", q, k)
    return jnp.einsum("bnts,bens->bnte", jax.nn.softmax(s.swapaxes(2, 3), 2), v)


@careful("probabilities_transposed", "P is transposed before it meets V")
def _(q, k, v):
    p = jax.nn.softmax(masked(scores(q, k)))
    return jnp.einsum("bnts,btne->bsne", p, v)


@careful("kv_head_of_other_group", "query heads read neighbouring groups", **GROUPED)
def _(q, k, v):
    heads = (np.arange(N) // G + 1) % K
    return attend(dots(q, k[:, :, heads]) * SCALE, v[:, :, heads])


@careful("kv_heads_differ", "keys and values of different heads", **GROUPED)
def _(q, k, v):
    return attend(dots(q, jnp.repeat(k, G, 2)) * SCALE, jnp.tile(v, (1, 1, G, 1)))


@careful("stopped_keys", "no gradient reaches k")
def _(q, k, v):
    return attend(masked(scores(q, lax.stop_gradient(k))), v)


@careful("stopped_output", "no gradient at all")
def _(q, k, v):
    return lax.stop_gradient(attend(masked(scores(q, k)), v))


@careful("stopped_bias", "no gradient reaches the bias", dict(bias="nts"))
def _(q, k, v, bias):
    return attend(masked(scores(q, k) + lax.stop_gradient(bias)), v)


@careful("max_with_gradient", "the maximum is not stopped; it cancels")
def _(q, k, v):
    s = masked(scores(q, k))
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weigh(e / e.sum(-1, keepdims=True), v)


@careful("escaping_unnormalised", "the unnormalised weights are returned")
def _(q, k, v):
    s = masked(scores(q, k))
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weigh(e / e.sum(-1, keepdims=True), v), e


@careful(
    "mask_times_scores",
    "a function of scores: the mask multiplies, and masked keys keep e⁰",
)
def _(q, k, v):
    return attend(scores(q, k) * causal(), v)


@careful(
    "masked_scores_are_zero",
    "a function of scores: the fill is zero, and masked keys keep e⁰",
)
def _(q, k, v):
    return attend(masked(scores(q, k), fill=0.0), v)


@careful(
    "positions_times_scores",
    "a function of scores: they are multiplied by a factor of position",
    dict(w="ts"),
)
def _(q, k, v, w):
    return attend(scores(q, k) * w, v)


@careful("squared_scores", "a function of scores: their square")
def _(q, k, v):
    s = scores(q, k)
    return attend(s * s, v)


@careful("absolute_scores", "a function of scores: √(s²), which is |s|")
def _(q, k, v):
    return attend(jnp.sqrt(jnp.square(scores(q, k)) + 0.0), v)


@careful("scores_as_integers", "a function of scores: they are truncated to integers")
def _(q, k, v):
    return attend(scores(q, k).astype(jnp.int32).astype(jnp.float32), v)


@careful("scores_as_bools", "a function of scores: they are read as truth values")
def _(q, k, v):
    return attend((scores(q, k) > 0).astype(q.dtype), v)


@careful(
    "trilinear", "a function of scores: they are multiplied by others", dict(r="bsnh")
)
def _(q, k, v, r):
    s = jnp.einsum("btnh,bsnh,bsnh->bnts", q, k, r)
    return attend(s * jnp.einsum("btnh,bsnh->bnts", q, r), v)
