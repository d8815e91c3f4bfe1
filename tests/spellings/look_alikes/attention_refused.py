"""What is not attention."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.attention.masks import difference
from tests.spellings.attention.pieces import K, T, attend, causal, masked, weigh
from tests.spellings.look_alikes.pieces import attention, scores


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


@attention("sigmoid_over_queries", "each key's weights add up to one, not each row's")
def _(q, k, v):
    p = jax.nn.sigmoid(scores(q, k))
    return weigh(p / p.sum(2, keepdims=True), v)


@attention("relu_over_more", "the sum has other weights than the values")
def _(q, k, v):
    p = jax.nn.relu(scores(q, k))
    return weigh(p / (jnp.square(p).sum(-1, keepdims=True) + 1e-6), v)


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


@attention("taylor", "a series of the scores is divided by that of their halves")
def _(q, k, v):
    p = lambda s: 1 + s + s * s / 2
    s = scores(q, k)
    return weigh(p(s) / p(s / 2).sum(-1, keepdims=True), v)


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
