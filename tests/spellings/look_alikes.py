"""Programs that look like an operation and are not, or are only with care.

`REFUSED` must not be found at all; `CAREFUL` may be found, and then the
rewritten program must still give the numbers of the original.
"""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention import (
    GROUPED,
    QKV,
    SCALE,
    SLOPES,
    B,
    E,
    G,
    H,
    K,
    N,
    T,
    attend,
    causal,
    difference,
    dots,
    masked,
    weigh,
)
from tests.spellings.spelling import SIZES, Draw, Input, booleans, floats, given


@dataclass(frozen=True)
class LookAlike:
    """A function in which `op` must not be found, and why."""

    name: str
    fn: Callable
    inputs: Mapping[str, Input]
    op: str
    reason: str
    sizes: Mapping[str, int]
    gradients: bool = True

    def args(self, dtype: object = jnp.float32) -> tuple:
        """Concrete arguments, floats in `dtype`."""
        draw = Draw(self.name, {**SIZES[self.op], **self.sizes}, False)
        arrays = [i.make(draw, draw.shape(i.dims)) for i in self.inputs.values()]
        return tuple(
            jnp.asarray(a, dtype if a.dtype == np.float32 else a.dtype) for a in arrays
        )


REFUSED: list[LookAlike] = []
CAREFUL: list[LookAlike] = []


def _add(where, op, inputs, sizes):
    def look_alike(name, reason, more=None, gradients=True, **other):
        def add(fn):
            found = {
                k: floats(i) if isinstance(i, str) else i
                for k, i in {**(inputs if not other else {}), **(more or {})}.items()
            }
            found.update(
                {k: floats(i) if isinstance(i, str) else i for k, i in other.items()}
            )
            name_ = f"{op}/{name}"
            assert all(x.name != name_ for x in where), name_
            where.append(LookAlike(name_, fn, found, op, reason, sizes, gradients))
            return fn

        return add

    return look_alike


SQUARE = dict(s=T)
WIDTHS = dict(k=8, f=12)
attention = _add(REFUSED, "attention", QKV, SQUARE)
careful = _add(CAREFUL, "attention", QKV, SQUARE)


def scores(q, k):
    return dots(q, k) * SCALE


# --------------------------------------------------------- attention: refused
@attention("softmax_over_queries", "the weights of a row do not add up to one")
def _(q, k, v):
    return weigh(jax.nn.softmax(scores(q, k), axis=2), v)


@attention("softmax_over_heads", "normalised over the heads")
def _(q, k, v):
    return weigh(jax.nn.softmax(scores(q, k), axis=1), v)


@attention("softmax_over_batch", "normalised over the batch")
def _(q, k, v):
    return weigh(jax.nn.softmax(scores(q, k), axis=0), v)


@attention("softmax_over_two_axes", "normalised over heads and keys together")
def _(q, k, v):
    return weigh(jax.nn.softmax(scores(q, k), axis=(1, 3)), v)


@attention("softmax_twice", "softmax of a softmax")
def _(q, k, v):
    return attend(jax.nn.softmax(scores(q, k)), v)


@attention("squared_probabilities", "probabilities are squared")
def _(q, k, v):
    p = jax.nn.softmax(masked(scores(q, k)))
    return weigh(p * p, v)


@attention("root_of_probabilities", "probabilities are rooted")
def _(q, k, v):
    return weigh(jnp.sqrt(jax.nn.softmax(scores(q, k))), v)


@attention("averaged_with_uniform", "probabilities are mixed with others")
def _(q, k, v):
    return weigh(0.9 * jax.nn.softmax(scores(q, k)) + 0.1 / T, v)


@attention("heads_mixed", "heads are mixed after the softmax", dict(w="nk"))
def _(q, k, v, w):
    p = jnp.einsum("bnts,nm->bmts", jax.nn.softmax(scores(q, k)), w)
    return jnp.einsum("bmts,bsme->btme", p, v[:, :, :K])


@attention("mask_times_scores", "the mask multiplies the scores: masked keys keep e⁰")
def _(q, k, v):
    return attend(scores(q, k) * causal(), v)


@attention("masked_scores_are_zero", "the fill is zero: masked keys keep e⁰")
def _(q, k, v):
    return attend(masked(scores(q, k), fill=0.0), v)


@attention(
    "positions_times_scores",
    "scores are multiplied by a factor of position",
    dict(w="ts"),
)
def _(q, k, v, w):
    return attend(scores(q, k) * w, v)


@attention("sigmoid", "sigmoid attention is not normalised")
def _(q, k, v):
    return weigh(jax.nn.sigmoid(scores(q, k)), v)


@attention("relu", "relu attention has no exponential")
def _(q, k, v):
    p = jax.nn.relu(scores(q, k))
    return weigh(p / (p.sum(-1, keepdims=True) + 1e-6), v)


@attention("linear", "feature maps are contracted, not scores exponentiated")
def _(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    kv = jnp.einsum("bsnh,bsne->bnhe", k, v)
    total = jnp.einsum("btnh,bnh->btn", q, k.sum(1))
    return jnp.einsum("btnh,bnhe->btne", q, kv) / total[..., None]


@attention("linear_with_exp", "exponentials of q and of k, not of their product")
def _(q, k, v):
    q, k = jax.nn.softmax(q, -1), jax.nn.softmax(k, 1)
    return jnp.einsum("btnh,bnhe->btne", q, jnp.einsum("bsnh,bsne->bnhe", k, v))


@attention("taylor", "1 + s + s²/2 in place of the exponential")
def _(q, k, v):
    s = scores(q, k)
    p = 1 + s + s * s / 2
    return weigh(p / p.sum(-1, keepdims=True), v)


@attention("squared_scores", "the exponent is a square")
def _(q, k, v):
    s = scores(q, k)
    return attend(s * s, v)


@attention("absolute_scores", "the exponent is √(s²), which is |s|")
def _(q, k, v):
    return attend(jnp.sqrt(jnp.square(scores(q, k)) + 0.0), v)


@attention("distance", "the exponent holds −|k|², which differs by key")
def _(q, k, v):
    d = jnp.sum((q[:, :, None] - k[:, None]) ** 2, -1).transpose(0, 3, 1, 2)
    return attend(-jnp.sqrt(d), v)


@attention("exp_doubled_above", "exp(2s) over the sum of exp(s)")
def _(q, k, v):
    s = scores(q, k)
    return weigh(jnp.exp(2 * s) / jnp.exp(s).sum(-1, keepdims=True), v)


@attention("other_window_below", "normalised over more keys than are summed")
def _(q, k, v):
    e = jnp.exp(scores(q, k))
    wide = jnp.where(difference() >= -3, e, 0)
    return weigh(jnp.where(causal(), e, 0) / wide.sum(-1, keepdims=True), v)


@attention("sum_of_other_scores", "the denominator belongs to other scores")
def _(q, k, v):
    s, other = scores(q, k), scores(k, q)
    return weigh(jnp.exp(s) / jnp.exp(other).sum(-1, keepdims=True), v)


@attention(
    "denominator_plus_half",
    "0.5·Σ + constant in the denominator of one row",
    dict(w="t"),
)
def _(q, k, v, w):
    e = jnp.exp(scores(q, k))
    return weigh(e / (e.sum(-1, keepdims=True) * 0.5 + w[:, None] ** 2), v)


@attention("denominator_plus_much", "what is added to the denominator is no guard")
def _(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return weigh(e / (e.sum(-1, keepdims=True) + 0.25), v)


@attention("not_normalised", "no denominator")
def _(q, k, v):
    return weigh(jnp.exp(scores(q, k)), v)


@attention("divided_by_max", "divided by the largest weight")
def _(q, k, v):
    e = jnp.exp(scores(q, k))
    return weigh(e / e.max(-1, keepdims=True), v)


@attention("max_not_cancelled", "the maximum is subtracted above only")
def _(q, k, v):
    s = scores(q, k)
    top = s.max(-1, keepdims=True)
    return weigh(jnp.exp(s - top) / jnp.exp(s).sum(-1, keepdims=True), v)


@attention("stopped_probabilities", "no gradient reaches q and k")
def _(q, k, v):
    return weigh(lax.stop_gradient(jax.nn.softmax(scores(q, k))), v)


@attention("stopped_denominator", "the denominator's gradient is dropped")
def _(q, k, v):
    e = jnp.exp(scores(q, k))
    return weigh(e / lax.stop_gradient(e.sum(-1, keepdims=True)), v)


@attention("straight_through", "values of one softmax, gradients of another")
def _(q, k, v):
    s = scores(q, k)
    hard, soft = jax.nn.softmax(4.0 * s), jax.nn.softmax(s)
    return weigh(soft + lax.stop_gradient(hard - soft), v)


@jax.custom_vjp
def wrong_softmax(s):
    return jax.nn.softmax(s)


wrong_softmax.defvjp(lambda s: (jax.nn.softmax(s), ()), lambda _, g: (g,))


@attention("rule_of_softmax", "the user's rule is not the softmax's derivative")
def _(q, k, v):
    return weigh(wrong_softmax(scores(q, k)), v)


@jax.custom_jvp
def doubled_gradient(s):
    return s


doubled_gradient.defjvp(lambda s, t: (s[0], 2 * t[0]))


@attention("rule_of_scores", "the user's rule doubles the scores' gradient")
def _(q, k, v):
    return attend(doubled_gradient(scores(q, k)), v)


@attention("clipped_gradient", "the user's rule clips the scores' gradient")
def _(q, k, v):
    @jax.custom_vjp
    def clip(s):
        return s

    clip.defvjp(lambda s: (s, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
    return attend(clip(scores(q, k)), v)


@attention("scores_as_integers", "scores are truncated to integers")
def _(q, k, v):
    return attend(scores(q, k).astype(jnp.int32).astype(jnp.float32), v)


@attention("scores_as_bools", "scores are read as truth values")
def _(q, k, v):
    return attend((scores(q, k) > 0).astype(q.dtype), v)


@attention("reduced_precision", "probabilities lose bits on purpose")
def _(q, k, v):
    p = jax.nn.softmax(scores(q, k))
    return weigh(lax.reduce_precision(p, exponent_bits=4, mantissa_bits=3), v)


@attention("rounded_probabilities", "probabilities are rounded to 1/127")
def _(q, k, v):
    return weigh(jnp.round(jax.nn.softmax(scores(q, k)) * 127) / 127, v)


@attention("sorted_scores", "scores are sorted before the softmax")
def _(q, k, v):
    return attend(jnp.sort(scores(q, k), axis=-1), v)


@attention("sorted_probabilities", "probabilities meet other keys' values")
def _(q, k, v):
    return weigh(jnp.sort(jax.nn.softmax(scores(q, k)), axis=-1), v)


@attention("shifted_probabilities", "probabilities are rolled along the keys")
def _(q, k, v):
    return weigh(jnp.roll(jax.nn.softmax(scores(q, k)), 1, axis=-1)[..., :-1], v[:, 1:])


@attention("accumulated_scores", "scores are summed along the keys")
def _(q, k, v):
    return attend(jnp.cumsum(scores(q, k), axis=-1), v)


@attention("accumulated_transposed", "the same sum along another axis of a transpose")
def _(q, k, v):
    s = jnp.cumsum(scores(q, k).swapaxes(2, 3), axis=-1).swapaxes(2, 3)
    return attend(s, v)


@attention("top_keys_only", "which keys are kept depends on the scores")
def _(q, k, v):
    s = scores(q, k)
    return attend(jnp.where(s >= lax.top_k(s, 5)[0][..., -1:], s, -jnp.inf), v)


@attention("callback_inside", "the host is asked in the middle", gradients=False)
def _(q, k, v):
    s = scores(q, k)
    s = jax.pure_callback(
        lambda x: np.asarray(x), jax.ShapeDtypeStruct(s.shape, s.dtype), s
    )
    return attend(s, v)


@attention("noise_on_scores", "random numbers that depend on the scores' own bits")
def _(q, k, v):
    s = scores(q, k)
    seed = lax.bitcast_convert_type(s[0, 0, 0, :2], jnp.uint32)
    return attend(s + jax.random.normal(jax.random.wrap_key_data(seed), s.shape), v)


@attention("collective_inside", "the denominator is a sum over devices")
def _(q, k, v):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    spec = jax.sharding.PartitionSpec()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    def inner(q, k, v):
        e = jnp.exp(scores(q, k))
        return weigh(e, v) / lax.psum(e.sum(-1), "x").transpose(0, 2, 1)[..., None]

    return inner(q, k, v)


@attention(
    "values_elementwise",
    "the values are multiplied, not contracted",
    q="btnh",
    k="bsnh",
    v="bnts",
)
def _(q, k, v):
    return jax.nn.softmax(scores(q, k)) * v


@attention(
    "pooling_router",
    "a router: softmax between two products, over experts",
    x="btnh",
    w="hk",
    u="kne",
)
def _(x, w, u):
    # Attention over K fixed entries has no keys per position; it is a valid
    # reading only with the weights as keys, and no token meets another.
    p = jax.nn.sigmoid(jnp.einsum("btnh,hk->btnk", x, w))
    return jnp.einsum("btnk,kne->btne", p / p.sum(-1, keepdims=True), u)


@attention("trilinear", "three arrays meet in the scores", dict(r="bsnh"))
def _(q, k, v, r):
    s = jnp.einsum("btnh,bsnh,bsnh->bnts", q, k, r)
    return attend(s * jnp.einsum("btnh,bsnh->bnts", q, r), v)


@attention("inner_constants", "two calls with equal text multiply by other constants")
def _(q, k, v):
    def times(c):
        c = jnp.asarray(c)
        return jax.jit(lambda s: s * c)

    rng = np.random.default_rng(0)
    a = rng.normal(size=(T, T)).astype(np.float32)
    b = rng.normal(size=(T, T)).astype(np.float32)
    s = scores(q, k)
    above, below = jnp.exp(times(a)(s)), jnp.exp(times(b)(s))
    return weigh(above / below.sum(-1, keepdims=True), v)


# --------------------------------------------------------- attention: careful
@careful(
    "scores_mixed",
    "talking heads: scores of several heads are added",
    dict(w=floats("nk")),
)
def _(q, k, v, w):
    s = jnp.einsum("bnts,nm->bmts", scores(q, k), w)
    return jnp.einsum("bmts,bsme->btme", jax.nn.softmax(s), v[:, :, :K])


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


# ---------------------------------------------------------------------- norms
NORM = dict(x="btd", scale="d")
NORM_BIAS = dict(x="btd", scale="d", bias="d")
rms = _add(REFUSED, "rms_norm", NORM, {})
layer = _add(REFUSED, "layer_norm", NORM_BIAS, {})
careful_rms = _add(CAREFUL, "rms_norm", NORM, {})
careful_layer = _add(CAREFUL, "layer_norm", NORM_BIAS, {})
EPS = 1e-5


def ms(x):
    return jnp.mean(x * x, -1, keepdims=True)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


@rms("eps_outside_root", "eps is added to the root")
def _(x, scale):
    return x / (jnp.sqrt(ms(x)) + 0.1) * scale


@rms("eps_by_maximum", "the root is bounded below, not shifted")
def _(x, scale):
    return x / jnp.maximum(jnp.sqrt(ms(x)), 0.5) * scale


@rms("mean_of_absolute", "the mean of |x|")
def _(x, scale):
    return x / (jnp.mean(jnp.abs(x), -1, keepdims=True) + EPS) * scale


@rms("not_inverted", "multiplied by the root")
def _(x, scale):
    return x * jnp.sqrt(ms(x) + EPS) * scale


@rms("fourth_power", "the mean of x⁴")
def _(x, scale):
    return x * (jnp.mean(x**4, -1, keepdims=True) + EPS) ** -0.25 * scale


@rms("no_root", "divided by the mean square itself")
def _(x, scale):
    return x / (ms(x) + EPS) * scale


@rms("largest", "divided by the largest entry")
def _(x, scale):
    return x / (jnp.max(jnp.abs(x), -1, keepdims=True) + EPS) * scale


@rms("of_another", "the statistics are another array's", dict(r="btd"))
def _(x, scale, r):
    return x * lax.rsqrt(ms(r) + EPS) * scale


@rms("of_a_part", "the statistics are of half the entries")
def _(x, scale):
    return x * lax.rsqrt(ms(x[..., :8]) + EPS) * scale


@rms("product_of_two", "the mean of x·r", dict(r="btd"))
def _(x, scale, r):
    return x * lax.rsqrt(jnp.abs(jnp.mean(x * r, -1, keepdims=True)) + EPS) * scale


@rms("layer_norm", "x is centred in the variance only")
def _(x, scale):
    return x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * scale


@rms("unit_length_times_a_number", "of unit length, then scaled by 1/K")
def _(x, scale):
    y = x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)
    return jnp.sin(y * 0.25) * scale


@rms("squared_output", "the output is squared")
def _(x, scale):
    return jnp.square(x) * lax.rsqrt(ms(x) + EPS) * scale


@rms("absolute_output", "√(x²) is |x|")
def _(x, scale):
    return jnp.sqrt(x * x) * lax.rsqrt(ms(x) + EPS) * scale


@rms("stopped_statistics", "no gradient through the statistics")
def _(x, scale):
    return x * lax.stop_gradient(lax.rsqrt(ms(x) + EPS)) * scale


@rms("stopped_under_the_root", "no gradient through the mean square")
def _(x, scale):
    return x * jnp.sqrt(1 / lax.stop_gradient(ms(x) + EPS)) * scale


@rms("running_statistics", "the statistics are given", dict(r="b51"))
def _(x, scale, r):
    return x * lax.rsqrt(r * r + EPS) * scale


@rms("along_tokens_in_turn", "a running mean along the tokens")
def _(x, scale):
    m = jnp.cumsum(x * x, 1) / (jnp.arange(5)[:, None] + 1.0)
    return x * lax.rsqrt(m + EPS) * scale


@rms("inner_constants", "two calls with equal text multiply by other constants")
def _(x, scale):
    rng = np.random.default_rng(1)
    a, b = (jnp.asarray(rng.normal(size=16), jnp.float32) for _ in range(2))
    one, two = jax.jit(lambda y: y * a)(x), jax.jit(lambda y: y * b)(x)
    return x * lax.rsqrt(jnp.abs(mean(one * two)) + EPS) * scale


@rms("scalar_statistics", "one statistic for the whole array, another per row below")
def _(x, scale):
    return x * lax.rsqrt(ms(x) + jnp.mean(x * x) + EPS) * scale


@layer("rms_norm", "x is not centred")
def _(x, scale, bias):
    return x * lax.rsqrt(ms(x) + EPS) * scale + bias


@layer("variance_without_centring", "centred above, not in the variance")
def _(x, scale, bias):
    return (x - mean(x)) * lax.rsqrt(ms(x) + EPS) * scale + bias


@layer("centred_by_other_axis", "the mean is over the tokens")
def _(x, scale, bias):
    var = jnp.var(x, -1, keepdims=True)
    return (x - x.mean(1, keepdims=True)) * lax.rsqrt(var + EPS) * scale + bias


@layer("variance_of_other_axis", "the variance is over the tokens")
def _(x, scale, bias):
    var = jnp.var(x, 1, keepdims=True)
    return (x - mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@layer("variance_of_another", "mean of one array, variance of another", dict(r="btd"))
def _(x, scale, bias, r):
    return (x - mean(x)) * lax.rsqrt(r.var(-1, keepdims=True) + EPS) * scale + bias


@layer("mean_of_another", "centred by another array's mean", dict(r="btd"))
def _(x, scale, bias, r):
    var = jnp.var(x, -1, keepdims=True)
    return (x - mean(r)) * lax.rsqrt(var + EPS) * scale + bias


@layer("eps_outside_root", "eps is added to the standard deviation")
def _(x, scale, bias):
    return (x - mean(x)) / (jnp.std(x, -1, keepdims=True) + 0.1) * scale + bias


@layer("clipped_non_variance", "max(0, ·) of something that may be negative")
def _(x, scale, bias):
    var = jnp.maximum(0.0, ms(x) - 2 * mean(x) ** 2)
    return (x - mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@layer("mean_absolute_deviation", "the mean of |x − μ|")
def _(x, scale, bias):
    centred = x - mean(x)
    return centred / (mean(jnp.abs(centred)) + EPS) * scale + bias


@layer("median", "centred by the median")
def _(x, scale, bias):
    centred = x - jnp.median(x, -1, keepdims=True)
    return centred * lax.rsqrt(ms(centred) + EPS) * scale + bias


@layer("half_centred", "half the mean is subtracted")
def _(x, scale, bias):
    var = jnp.var(x, -1, keepdims=True)
    return (x - 0.5 * mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@layer(
    "batch_norm",
    "statistics over batch and tokens, per channel, given",
    dict(m="d", r="d"),
)
def _(x, scale, bias, m, r):
    return (x - m) * lax.rsqrt(r * r + EPS) * scale + bias


@layer("stopped_mean", "no gradient through the mean")
def _(x, scale, bias):
    mu = lax.stop_gradient(mean(x))
    return (x - mu) * lax.rsqrt(ms(x - mu) + EPS) * scale + bias


@layer("covariance", "the variance is a covariance", dict(r="btd"))
def _(x, scale, bias, r):
    cov = mean((x - mean(x)) * (r - mean(r)))
    return (x - mean(x)) * lax.rsqrt(jnp.abs(cov) + EPS) * scale + bias


@careful_rms("eps_per_row", "eps differs by row", dict(r="b51"))
def _(x, scale, r):
    return x * lax.rsqrt(ms(x) + r * r) * scale


@careful_rms("scale_per_row", "the scale differs by row", dict(r="btd"))
def _(x, scale, r):
    return x * lax.rsqrt(ms(x) + EPS) * r


@careful_rms("eps_negative", "a negative eps")
def _(x, scale):
    return x * lax.rsqrt(ms(x + 3) - 1e-3) * scale


@careful_rms("l2_norm", "eps/K and scale/√K")
def _(x, scale):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 0.1) * scale


@careful_rms("sum_over_other_count", "divided by another number than the width")
def _(x, scale):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / 7 + EPS) * scale


@careful_rms("statistics_of_double", "the statistics are of 2x")
def _(x, scale):
    return x * lax.rsqrt(ms(2 * x) + EPS) * scale


@careful_rms("over_tokens", "normalised over the tokens")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + EPS) * scale


@careful_rms("over_both", "normalised over tokens and channels")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 2), keepdims=True) + EPS) * scale


@careful_rms("of_centred", "a LayerNorm")
def _(x, scale):
    x = x - mean(x)
    return x * lax.rsqrt(ms(x) + EPS) * scale


@careful_rms("equal_sizes", "T = D = B", x="444", scale="4")
def _(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + EPS) * scale[:, None]


@careful_layer("ddof_two", "divided by K − 2")
def _(x, scale, bias):
    var = jnp.var(x, -1, keepdims=True, ddof=2)
    return (x - mean(x)) * lax.rsqrt(var + EPS) * scale + bias


@careful_layer("bias_before_scale", "the bias is scaled")
def _(x, scale, bias):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return (y + bias) * scale


@careful_layer("bias_subtracted", "the bias is subtracted")
def _(x, scale, bias):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * scale - bias


@careful_layer("negative_scale", "the scale is negated")
def _(x, scale, bias):
    y = (mean(x) - x) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * scale + bias


@careful_layer("equal_sizes", "T = D = B", x="444", scale="4", bias="4")
def _(x, scale, bias):
    y = (x - x.mean(0)) * lax.rsqrt(x.var(0) + EPS)
    return y * scale[:, None, None] + bias[:, None, None]


# ----------------------------------------------------------------------- GLUs
W = floats("kf", spread=0.35)
GLU = dict(x="btk", w_gate=W, w_up=W)
glu = _add(REFUSED, "gated_linear_unit", GLU, {})
careful_glu = _add(CAREFUL, "gated_linear_unit", GLU, {})


@glu("gate_after_product", "the activation is taken of the product")
def _(x, w_gate, w_up):
    return jax.nn.silu((x @ w_gate) * (x @ w_up))


@glu("sum_of_branches", "the branches are added")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) + x @ w_up


@glu("other_input", "the branches have different inputs", dict(y="btk"))
def _(x, w_gate, w_up, y):
    return jax.nn.silu(x @ w_gate) * (y @ w_up)


@glu("reversed_input", "one branch reads the rows in reverse")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x[:, ::-1] @ w_up)


@glu("gate_of_value", "the gated value is not a product of x", dict(y="btf"))
def _(x, w_gate, w_up, y):
    return jax.nn.sigmoid(x @ w_gate) * y


@glu("other_cubic", "another cubic coefficient")
def _(x, w_gate, w_up):
    g = x @ w_gate
    t = jnp.tanh(math.sqrt(2 / math.pi) * (g + 0.0535 * g**3))
    return 0.5 * g * (1 + t) * (x @ w_up)


@glu("other_root", "another factor in the tanh")
def _(x, w_gate, w_up):
    g = x @ w_gate
    return 0.5 * g * (1 + jnp.tanh(0.85 * (g + 0.044715 * g**3))) * (x @ w_up)


@glu("other_hard_silu", "bounded at 5 and not at 6")
def _(x, w_gate, w_up):
    g = x @ w_gate
    return g * jnp.clip(g + 3, 0, 5) / 6 * (x @ w_up)


@glu("exponential_above", "an elu the other way round")
def _(x, w_gate, w_up):
    g = x @ w_gate
    return jnp.where(g > 0, jnp.expm1(jnp.minimum(g, 5)), g) * (x @ w_up)


@glu("square_plus", "square_plus is not one of the op's activations")
def _(x, w_gate, w_up):
    return jax.nn.squareplus(x @ w_gate) * (x @ w_up)


@glu("softmax_gate", "the gate is normalised over the features")
def _(x, w_gate, w_up):
    return jax.nn.softmax(x @ w_gate) * (x @ w_up)


@glu("stopped_gate", "no gradient through the gate")
def _(x, w_gate, w_up):
    return lax.stop_gradient(jax.nn.silu(x @ w_gate)) * (x @ w_up)


@glu("straight_through", "values of a step, gradients of a sigmoid")
def _(x, w_gate, w_up):
    g = x @ w_gate
    soft = jax.nn.sigmoid(g)
    hard = (g > 0).astype(g.dtype)
    return (soft + lax.stop_gradient(hard - soft)) * (x @ w_up)


@glu("product_across_rows", "gate and up of different tokens")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * jnp.roll(x @ w_up, 1, axis=1)


@glu("outer_product", "every gate meets every up")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate)[..., None] * (x @ w_up)[..., None, :]


@glu("norm_between", "a norm between gate and activation")
def _(x, w_gate, w_up):
    g = x @ w_gate
    return jax.nn.silu(g * lax.rsqrt(ms(g) + EPS)) * (x @ w_up)


@glu("activation_on_both", "both branches are activated")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * jax.nn.gelu(x @ w_up)


@glu("clip_after_activation", "the activation is clipped, not the gate")
def _(x, w_gate, w_up):
    return jnp.minimum(jax.nn.silu(x @ w_gate), 0.3) * (x @ w_up)


@glu("rounded", "the gate is rounded to integers")
def _(x, w_gate, w_up):
    return jax.nn.silu(jnp.round(x @ w_gate)) * (x @ w_up)


@glu("reduced_precision", "the gate loses bits on purpose")
def _(x, w_gate, w_up):
    return jax.nn.silu(lax.reduce_precision(x @ w_gate, 4, 3)) * (x @ w_up)


@careful_glu(
    "silu_of_other", "x·sigmoid(y): a sigmoid unit, times another product", dict(w=W)
)
def _(x, w_gate, w_up, w):
    return (x @ w_gate) * jax.nn.sigmoid(x @ w) * (x @ w_up)


@careful_glu("swapped", "gate and up are exchanged")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_up) * (x @ w_gate)


@careful_glu("same_weight", "one weight is gate and up")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_gate)


@careful_glu("gelu_erf", "the exact gelu")
def _(x, w_gate, w_up):
    return jax.nn.gelu(x @ w_gate, approximate=False) * (x @ w_up)


@careful_glu("beta_of_1_7", "almost the quick gelu")
def _(x, w_gate, w_up):
    g = x @ w_gate
    return g * jax.nn.sigmoid(1.7 * g) * (x @ w_up)


@careful_glu(
    "traced_beta", "a learned beta", dict(beta=given("", lambda d: np.float32(1.3)))
)
def _(x, w_gate, w_up, beta):
    g = x @ w_gate
    return g * jax.nn.sigmoid(beta * g) * (x @ w_up)


@careful_glu("square_of_product", "the up branch is squared")
def _(x, w_gate, w_up):
    u = x @ w_up
    return jax.nn.silu(x @ w_gate) * u * u


@careful_glu("gate_scaled", "the gate is doubled before the activation")
def _(x, w_gate, w_up):
    return jax.nn.silu(2 * (x @ w_gate)) * (x @ w_up)


@careful_glu("gelu_of_half", "the gate is halved before a gelu")
def _(x, w_gate, w_up):
    return jax.nn.gelu(0.5 * (x @ w_gate)) * (x @ w_up)


@careful_glu("output_scaled", "the product is halved")
def _(x, w_gate, w_up):
    return 0.5 * (jax.nn.silu(x @ w_gate) * (x @ w_up))


@careful_glu("sigmoid_of_up", "act(up)·gate·gate")
def _(x, w_gate, w_up):
    g = x @ w_gate
    return jax.nn.sigmoid(x @ w_up) * g * g


@careful_glu(
    "interleaved_other_way",
    "odd columns are the gate",
    x="btk",
    w=floats("kf", spread=0.35),
)
def _(x, w):
    y = x @ w
    return jax.nn.silu(y[..., 1::2]) * y[..., ::2]


@careful_glu(
    "uneven_slices", "overlapping halves", x="btk", w=floats("kf", spread=0.35)
)
def _(x, w):
    y = x @ w
    return jax.nn.silu(y[..., :7]) * y[..., 5:]


@careful_glu(
    "square_weights",
    "K = F = T: which axis is contracted shows in use only",
    x="444",
    w_gate="44",
    w_up="44",
)
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up.T)


@careful_glu("adapters_exchanged", "each branch has the other's adapter", dict(
    a="k3", b=floats("3f", spread=0.35), c="k2", d=floats("2f", spread=0.35)
))  # fmt: skip
def _(x, w_gate, w_up, a, b, c, d):
    return jax.nn.silu(x @ w_gate + x @ c @ d) * (x @ w_up + 0.5 * (x @ a @ b))


@careful_glu("bias_per_token", "a bias per token", dict(b="tf"))
def _(x, w_gate, w_up, b):
    return jax.nn.silu(x @ w_gate + b) * (x @ w_up)


# ----------------------------------------------------------------- ragged dot
IDS = given("g", lambda d: np.array([7, 5, 9, 3], np.int32))
RAGGED = dict(lhs="mk", rhs="gkn", group_sizes=IDS)
ragged = _add(REFUSED, "ragged_dot", RAGGED, {})
careful_ragged = _add(CAREFUL, "ragged_dot", RAGGED, {})


@ragged("dense_all_experts", "all experts for all rows, then a mask")
def _(lhs, rhs, n):
    y = jnp.einsum("mk,gkn->gmn", lhs, rhs)
    ends = jnp.cumsum(n)
    row = jnp.arange(24)
    keep = (row < ends[:, None]) & (row >= (ends - n)[:, None])
    return jnp.einsum("gmn,gm->mn", y, keep.astype(y.dtype))


@ragged("capacity_drop", "rows past the capacity of an expert are dropped")
def _(lhs, rhs, n):
    ends = jnp.cumsum(n)
    row = jnp.arange(24)
    start = (ends - n)[:, None]
    keep = (row < jnp.minimum(ends[:, None], start + 5)) & (row >= start)
    y = jnp.einsum("mk,gkn->gmn", lhs, rhs)
    return jnp.where(keep[..., None], y, 0).sum(0)


@ragged("batched_product", "each group has as many rows")
def _(lhs, rhs, n):
    return jnp.einsum("gmk,gkn->gmn", lhs.reshape(4, 6, 8), rhs).reshape(24, 10)


@careful_ragged(
    "two_size_vectors",
    "gate and up have other group sizes",
    dict(m=given("g", lambda d: np.array([1, 9, 9, 5], np.int32))),
)
def _(lhs, rhs, n, m):
    gate = lax.ragged_dot(lhs, rhs, n)
    return jax.nn.silu(gate) * lax.ragged_dot(lhs, rhs, m)


@careful_ragged("groups_reversed", "the experts are reversed")
def _(lhs, rhs, n):
    return lax.ragged_dot(lhs, rhs[::-1], n)


@careful_ragged(
    "sizes_too_large",
    "sizes add up to more than the rows",
    lhs="mk",
    rhs="gkn",
    n=given("g", lambda d: np.array([20, 20, 9, 5], np.int32)),
)
def _(lhs, rhs, n):
    return lax.ragged_dot(lhs, rhs, n)


@careful_ragged(
    "square",
    "K = N: which axis is contracted shows in use only",
    lhs="mk",
    rhs="gkk",
    n=IDS,
)
def _(lhs, rhs, n):
    return lax.ragged_dot(lhs, rhs, n) + lax.ragged_dot(lhs, rhs.swapaxes(1, 2), n)
