"""What is no cross-entropy with labels."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from tests.spellings.look_alikes.pieces import REFUSED, _add
from tests.spellings.spelling import floats, integers

V = 12
INPUTS = dict(x="btk", w=floats("kv", spread=8**-0.5), labels=integers("bt", 0, V - 1))
ADDERS = [
    _add(REFUSED, op, INPUTS, {}) for op in ("linear_cross_entropy", "cross_entropy")
]


def no_loss(name, reason):
    """A program in which neither op may be found."""

    def add(fn):
        for adder in ADDERS:
            adder(name, reason)(fn)
        return fn

    return add


def take(y, labels):
    return jnp.take_along_axis(y, labels[..., None], -1)[..., 0]


@no_loss("soft_targets", "the targets are probabilities")
def _(x, w, labels):
    y = x @ w
    return -(jax.nn.softmax(2 * y[::-1]) * jax.nn.log_softmax(y)).sum(-1)


@no_loss("distilled", "the targets are another model's")
def _(x, w, labels):
    y = x @ w
    return optax.losses.kl_divergence(jax.nn.log_softmax(y), jax.nn.softmax(y[::-1]))


@no_loss("entropy", "the targets are the probabilities themselves")
def _(x, w, labels):
    y = x @ w
    return -(jax.nn.softmax(y) * jax.nn.log_softmax(y)).sum(-1)


@no_loss("log_sum_exp", "no logit is picked")
def _(x, w, labels):
    return jax.nn.logsumexp(x @ w, -1)


@no_loss("z_loss_alone", "no logit is picked")
def _(x, w, labels):
    return jax.nn.logsumexp(x @ w, -1) ** 2


@no_loss("other_axis", "the softmax is over positions")
def _(x, w, labels):
    return -take(jax.nn.log_softmax(x @ w, axis=1), labels)


@no_loss("binary", "each class has a loss of its own")
def _(x, w, labels):
    return optax.sigmoid_binary_cross_entropy(x @ w, jax.nn.one_hot(labels, V)).sum(-1)


@no_loss("mean_over_classes", "the logarithm is of a mean")
def _(x, w, labels):
    y = x @ w
    return jnp.log(jnp.exp(y).mean(-1)) - take(y, labels)


@no_loss("other_temperature", "the picked logit has another scale")
def _(x, w, labels):
    y = x @ w
    return jax.nn.logsumexp(2 * y, -1) - take(y, labels)


@no_loss("other_logits", "the picked logit is of other rows")
def _(x, w, labels):
    return jax.nn.logsumexp(x @ w, -1) - take(x[::-1] @ w, labels)


@no_loss("next_class", "the class after the label is picked of the sum, not of logits")
def _(x, w, labels):
    y = x @ w
    return jax.nn.logsumexp(y[..., 1:], -1) - take(y, labels)


@no_loss("two_whole_labels", "two logits are subtracted, and one log-sum-exp is there")
def _(x, w, labels):
    y = x @ w
    return jax.nn.logsumexp(y, -1) - (take(y, labels) + take(y, labels[::-1]))


@no_loss("margin", "the label's logit has no margin, and that in the sum has one")
def _(x, w, labels):
    y = x @ w
    lowered = y - 0.3 * jax.nn.one_hot(labels, V)
    return jax.nn.logsumexp(lowered, -1) - take(y, labels)


@no_loss("hard_negatives", "only the largest logits are in the sum")
def _(x, w, labels):
    y = x @ w
    return jax.nn.logsumexp(jax.lax.top_k(y, 4)[0], -1) - take(y, labels)


@no_loss("accuracy", "no loss at all")
def _(x, w, labels):
    return ((x @ w).argmax(-1) == labels).mean()


@no_loss("contrastive", "the labels are positions")
def _(x, w, labels):
    z = x.reshape(-1, 8)
    y = z @ z.T
    return jax.nn.logsumexp(y, -1) - 2 * jnp.diag(y)


@no_loss("filled_with_one", "a label that is no class picks 1")
def _(x, w, labels):
    y = x @ w
    at = dict(mode="fill", fill_value=1)
    return jax.nn.logsumexp(y, -1) - jnp.take_along_axis(
        y, labels[..., None], -1, **at
    ).squeeze(-1)


@no_loss("no_maximum", "exponentials may overflow, and the loss be infinite")
def _(x, w, labels):
    y = x @ w
    return jnp.log(jnp.exp(y).sum(-1)) - take(y, labels)


@no_loss("other_maximum", "exponentials of rows far below the maximum vanish")
def _(x, w, labels):
    y = x @ w
    y = y - jax.lax.stop_gradient(y.max())
    return jnp.log(jnp.exp(y).sum(-1)) - take(y, labels)
