"""Losses over classes, log Σ exp y - y[label], as people write them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.spellings.spelling import collect, floats, integers

SPELLINGS, spelling = collect("linear_cross_entropy")

B, T, K, V = 2, 5, 8, 12
W = floats("kv", spread=K**-0.5)
LABELS = integers("bt", 0, V - 1)
PLAIN = dict(x="btk", w=W, labels=LABELS)
BIASED = dict(x="btk", w=W, bias="v", labels=LABELS)
NAMES = "x w labels"
integer_loss = optax.softmax_cross_entropy_with_integer_labels


def loss(name, inputs=PLAIN, operands=NAMES, **more):
    return spelling(
        f"loss/{name}", inputs=inputs, operands=operands, **{"out": "bt", **more}
    )


def of_logits(name, fn, **more):
    """A loss as a function of logits and labels."""

    @loss(name, **more)
    def _(x, w, labels):
        return fn(x @ w, labels)


def take(y, labels):
    return jnp.take_along_axis(y, labels[..., None], -1)[..., 0]


def hot(labels):
    return jax.nn.one_hot(labels, V)


LOGS = dict(of_log_probabilities=True)
ZERO = dict(outside="zero")
HOT = dict(**LOGS, **ZERO)

# ---------------------------------------------------------------- one entry of a row
of_logits("log_softmax_take", lambda y, c: -take(jax.nn.log_softmax(y), c), **LOGS)
of_logits(
    "log_softmax_squeeze",
    lambda y, c: (
        -jnp.take_along_axis(
            jax.nn.log_softmax(y, axis=-1), jnp.expand_dims(c, -1), axis=-1
        ).squeeze(-1)
    ),
    **LOGS,
)
of_logits("logsumexp_take", lambda y, c: jax.nn.logsumexp(y, -1) - take(y, c))
of_logits("take_first", lambda y, c: -take(y, c) + jax.nn.logsumexp(y, axis=-1))
of_logits(
    "take_clip",
    lambda y, c: (
        jax.nn.logsumexp(y, -1)
        - jnp.take_along_axis(y, c[..., None], -1, mode="clip")[..., 0]
    ),
    outside="clip",
)
of_logits(
    "filled_with_zero",
    lambda y, c: (
        -jnp.take_along_axis(
            jax.nn.log_softmax(y), c[..., None], -1, mode="fill", fill_value=0
        )[..., 0]
    ),
    **LOGS,
    outside="zero",
)
of_logits(
    "indexed",
    lambda y, c: -jax.nn.log_softmax(y)[jnp.arange(B)[:, None], jnp.arange(T)[None], c],
    outside="promise",
    **LOGS,
)
of_logits(
    "indexed_flat",
    lambda y, c: (
        -jax.nn.log_softmax(y.reshape(-1, V))[jnp.arange(B * T), c.reshape(-1)]
    ),
    read=lambda out: out.reshape(B, T),
    out="",
    outside="promise",
    **LOGS,
)
of_logits(
    "vmapped_index",
    lambda y, c: jax.vmap(jax.vmap(lambda p, i: -p[i]))(jax.nn.log_softmax(y), c),
    also=[dict(operands=NAMES, outside="clip", **LOGS)],
    **LOGS,
)
of_logits("optax", integer_loss)
of_logits("optax_vmapped", lambda y, c: jax.vmap(integer_loss)(y, c))
of_logits(
    "flattened",
    lambda y, c: integer_loss(y.reshape(-1, V), c.reshape(-1)).reshape(c.shape),
)
of_logits("jitted", lambda y, c: jax.jit(integer_loss)(y, c))
of_logits("kept_axis", lambda y, c: _kept_axis(y, c))
of_logits("unsigned", lambda y, c: integer_loss(y, c.astype("uint8")))


def _kept_axis(y, labels):
    total = jax.nn.logsumexp(y, axis=-1, keepdims=True)
    return (total - jnp.take_along_axis(y, labels[..., None], -1))[..., 0]


# ------------------------------------------------------------------- one-hot rows
of_logits("one_hot", lambda y, c: -(hot(c) * jax.nn.log_softmax(y)).sum(-1), **HOT)
of_logits("optax_one_hot", lambda y, c: optax.softmax_cross_entropy(y, hot(c)), **HOT)
of_logits(
    "one_hot_einsum",
    lambda y, c: -jnp.einsum("btv,btv->bt", jax.nn.log_softmax(y), hot(c)),
    **HOT,
)
of_logits(
    "one_hot_of_logits",
    lambda y, c: jax.nn.logsumexp(y, -1) - (hot(c) * y).sum(-1),
    **ZERO,
)
of_logits(
    "one_hot_by_comparing",
    lambda y, c: (
        -jnp.sum((c[..., None] == jnp.arange(V)) * jax.nn.log_softmax(y), axis=-1)
    ),
    **HOT,
)
of_logits(
    "chosen_and_summed",
    lambda y, c: (
        jax.nn.logsumexp(y, -1) - jnp.where(jnp.arange(V) == c[..., None], y, 0).sum(-1)
    ),
    **ZERO,
)
of_logits(
    "negative_one_hot", lambda y, c: (-hot(c) * jax.nn.log_softmax(y)).sum(-1), **HOT
)

# ----------------------------------------------------------------- the log-sum-exp
of_logits(
    "plain_exponentials",
    lambda y, c: jnp.log(jnp.exp(y).sum(-1)) - take(y, c),
    assume=("finite",),
)
of_logits(
    "bounded_exponentials",
    lambda y, c: _plain(5 * jnp.tanh(y / 5), c),
    soft_cap=5.0,
)
of_logits("maximum_by_hand", lambda y, c: _by_hand(y, c))
of_logits("shifted_first", lambda y, c: _shifted(y, c), **HOT)
of_logits("scipy", lambda y, c: jax.scipy.special.logsumexp(y, -1) - take(y, c))


def _plain(y, labels):
    return jnp.log(jnp.exp(y).sum(-1)) - take(y, labels)


def _by_hand(y, labels):
    top = lax.stop_gradient(y.max(-1, keepdims=True))
    y = y - top
    return jnp.log(jnp.exp(y).sum(-1)) - take(y, labels)


def _shifted(y, labels):
    y = y - lax.stop_gradient(jnp.max(y, axis=-1, keepdims=True))
    logs = y - jnp.log(jnp.sum(jnp.exp(y), axis=-1, keepdims=True))
    return -jnp.sum(hot(labels) * logs, axis=-1)


# ------------------------------------------------------- smoothing, z-loss, soft cap
of_logits(
    "smoothed",
    lambda y, c: optax.softmax_cross_entropy(y, optax.smooth_labels(hot(c), 0.1)),
    label_smoothing=0.1,
    **HOT,
)
of_logits(
    "smoothed_by_choice",
    lambda y, c: (
        -(jnp.where(hot(c) > 0, 0.9, 0.1 / (V - 1)) * jax.nn.log_softmax(y)).sum(-1)
    ),
    label_smoothing=0.1 * V / (V - 1),
    **HOT,
)
of_logits(
    "smoothed_with_mean",
    lambda y, c: 0.9 * integer_loss(y, c) - 0.1 * jax.nn.log_softmax(y).mean(-1),
    label_smoothing=0.1,
)
of_logits(
    "z_loss",
    lambda y, c: integer_loss(y, c) + 0.01 * jax.nn.logsumexp(y, -1) ** 2,
    z_loss=0.01,
)
of_logits("z_loss_maxtext", lambda y, c: _maxtext(y, c), z_loss=0.01, **HOT)
of_logits(
    "z_loss_and_smoothing",
    lambda y, c: (
        0.8 * integer_loss(y, c)
        - 0.2 * jax.nn.log_softmax(y).mean(-1)
        + 0.01 * jnp.square(jax.nn.logsumexp(y, -1))
    ),
    z_loss=0.01,
    label_smoothing=0.2,
)
of_logits(
    "soft_cap", lambda y, c: integer_loss(30 * jnp.tanh(y / 30), c), soft_cap=30.0
)
of_logits(
    "soft_cap_and_z_loss",
    lambda y, c: _maxtext(jnp.tanh(y / 5) * 5, c),
    soft_cap=5.0,
    z_loss=0.01,
    **HOT,
)


def _maxtext(y, labels):
    total = jax.scipy.special.logsumexp(y, axis=-1, keepdims=True)
    own = -jnp.sum(hot(labels) * (y - total), axis=-1)
    return own + 0.01 * lax.square(jnp.squeeze(total, axis=-1))


# ------------------------------------------------------------------------ logits
of_logits("scaled", lambda y, c: integer_loss(y / 0.7, c), scale=1 / 0.7)
of_logits("scaled_by_root", lambda y, c: integer_loss(y * K**-0.5, c), scale=K**-0.5)
of_logits("cast", lambda y, c: integer_loss(y.astype(jnp.float32), c))
of_logits("constrained", lambda y, c: integer_loss(lax.optimization_barrier(y), c))


@loss("einsum")
def _(x, w, labels):
    return integer_loss(jnp.einsum("btk,kv->btv", x, w), labels)


@loss("scaled_rows", scale=K**-0.5)
def _(x, w, labels):
    return integer_loss((x * K**-0.5) @ w, labels)


@loss("wide_product")
def _(x, w, labels):
    return integer_loss(jnp.matmul(x, w, preferred_element_type=jnp.float32), labels)


@loss("cast_before")
def _(x, w, labels):
    return integer_loss(x.astype(jnp.float32) @ w.astype(jnp.float32), labels)


@loss("two_axes", dict(x="btnh", w=floats("nhv", spread=K**-0.5), labels=LABELS),
      bind=lambda x, w, labels: dict(
          x=x.reshape(B, T, 8), w=w.reshape(8, V), labels=labels),
      sizes=dict(n=2, h=4))  # fmt: skip
def _(x, w, labels):
    return integer_loss(jnp.einsum("btnh,nhv->btv", x, w), labels)


@loss("tied", dict(x="btk", w=floats("vk", spread=K**-0.5), labels=LABELS))
def _(x, w, labels):
    return integer_loss(x @ w.T, labels)


@loss("tied_einsum", dict(x="btk", w=floats("vk", spread=K**-0.5), labels=LABELS))
def _(x, w, labels):
    return integer_loss(jnp.einsum("btk,vk->btv", x, w), labels)


@loss("attend", dict(x="btk", w=floats("vk", spread=K**-0.5), labels=LABELS))
def _(x, w, labels):
    table = {"params": {"embedding": w}}
    return integer_loss(nn.Embed(V, K).apply(table, x, method="attend"), labels)


@loss("biased", BIASED, "x w bias labels")
def _(x, w, bias, labels):
    return integer_loss(x @ w + bias, labels)


@loss("dense", BIASED, "x w bias labels")
def _(x, w, bias, labels):
    of = {"params": {"kernel": w, "bias": bias}}
    return integer_loss(nn.Dense(V).apply(of, x), labels)


def _half(x, w, bias, labels):
    return dict(x=x, w=w, bias=bias / 2, labels=labels)


def _next(x, w, labels):
    return dict(x=x[:, :-1], w=w, labels=labels[:, 1:])


@loss("biased_then_scaled", BIASED, "x w bias labels", scale=0.5, bind=_half, **LOGS)
def _(x, w, bias, labels):
    return -take(jax.nn.log_softmax((x @ w + bias) / 2), labels)


@loss("biased_and_capped", BIASED, "x w bias labels", soft_cap=5.0)
def _(x, w, bias, labels):
    return integer_loss(5 * jnp.tanh((x @ w + bias) / 5), labels)


# --------------------------------------------------------------- around the loss
@loss("shifted_by_one", bind=_next)
def _(x, w, labels):
    return integer_loss((x @ w)[:, :-1], labels[:, 1:])


@loss("shifted_and_flat", read=lambda out: out.reshape(B, T - 1), bind=_next)
def _(x, w, labels):
    logits = (x @ w)[..., :-1, :].reshape(-1, V)
    return integer_loss(logits, labels[..., 1:].reshape(-1))


@loss("in_chunks", read=lambda out: out.swapaxes(0, 1), out="")
def _(x, w, labels):
    one = lambda part: integer_loss(part[0] @ w, part[1])
    return lax.map(one, (x.swapaxes(0, 1), labels.swapaxes(0, 1)))


@loss("checkpointed")
def _(x, w, labels):
    return jax.checkpoint(lambda x, w: integer_loss(x @ w, labels))(x, w)
