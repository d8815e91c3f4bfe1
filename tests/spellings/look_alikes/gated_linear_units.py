"""What is no gated linear unit, or only with care."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.look_alikes.norms import EPS, ms
from tests.spellings.look_alikes.pieces import CAREFUL, REFUSED, _add
from tests.spellings.spelling import floats, given

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
