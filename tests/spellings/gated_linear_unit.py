"""Gated linear units: act(x·w_gate + b_gate) * (x·w_up + b_up), as people write it."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.spelling import (
    Input,
    booleans,
    collect,
    floats,
    key,
    positive,
)

SPELLINGS, spelling = collect("gated_linear_unit")

B, T, K, F = 2, 5, 8, 12
W = floats("kf", spread=K**-0.5)
SEPARATE = dict(x="btk", w_gate=W, w_up=W)
BIASED = dict(**SEPARATE, b_gate="f", b_up="f")
PLAIN = "x w_gate w_up"
BOTH = "x w_gate w_up b_gate b_up"


def glu(name, inputs=SEPARATE, operands=PLAIN, **more):
    return spelling(
        f"glu/{name}",
        inputs=inputs,
        operands=operands,
        **{"out": "btf", "activation": "silu", **more},
    )


# ------------------------------------------------------------- activations
def activated(name, act, activation="silu", **more):
    @glu(f"act_{name}", activation=activation, **more)
    def fn(x, w_gate, w_up):
        return act(x @ w_gate) * (x @ w_up)


C = math.sqrt(2 / math.pi)
activated("silu", jax.nn.silu)
activated("swish_library", jax.nn.swish)
activated("silu_by_sigmoid", lambda g: g * jax.nn.sigmoid(g))
activated("silu_sigmoid_first", lambda g: jax.nn.sigmoid(g) * g)
activated("silu_by_logistic", lambda g: g * lax.logistic(g))
activated("silu_divided", lambda g: g / (1 + jnp.exp(-g)))
activated("silu_reciprocal", lambda g: g * (1 / (1 + jnp.exp(-g))))
activated("silu_tanh", lambda g: 0.5 * g * (1 + jnp.tanh(0.5 * g)))
activated("silu_exp", lambda g: g * jnp.exp(g) / (1 + jnp.exp(g)))
activated("silu_upcast", lambda g: jax.nn.silu(g.astype(jnp.float32)).astype(g.dtype))
activated("silu_jitted", lambda g: jax.jit(lambda y: y * jax.nn.sigmoid(y))(g))

AS_QUICK = [dict(operands=PLAIN, activation="swish", beta=1.702)]
activated("swish_beta", lambda g: g * jax.nn.sigmoid(1.3 * g), "swish", beta=1.3)
activated(
    "gelu_quick", lambda g: g * jax.nn.sigmoid(1.702 * g), "gelu_quick", also=AS_QUICK
)
activated(
    "gelu_quick_divided",
    lambda g: g / (1 + jnp.exp(-1.702 * g)),
    "gelu_quick",
    also=AS_QUICK,
)

activated("gelu_tanh", jax.nn.gelu, "gelu_tanh")
activated(
    "gelu_tanh_written",
    lambda g: 0.5 * g * (1 + jnp.tanh(C * (g + 0.044715 * g**3))),
    "gelu_tanh",
)
activated(
    "gelu_tanh_products",
    lambda g: (
        g * 0.5 * (1.0 + jnp.tanh(0.7978845608028654 * g * (1 + 0.044715 * g * g)))
    ),
    "gelu_tanh",
)
activated(
    "gelu_tanh_power",
    lambda g: (
        0.5
        * g
        * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (g + 0.044715 * jnp.power(g, 3))))
    ),
    "gelu_tanh",
)
activated(
    "gelu_tanh_float_power",
    lambda g: (
        0.5
        * g
        * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * jnp.power(g, 3.0))))
    ),
    "gelu_tanh",
    count=None,
)
activated(
    "gelu_tanh_cdf",
    lambda g: g * (0.5 * (1.0 + jnp.tanh(C * (g + 0.044715 * (g * g * g))))),
    "gelu_tanh",
)
activated(
    "gelu_tanh_sigmoid",
    lambda g: g * jax.nn.sigmoid(2 * C * (g + 0.044715 * g**3)),
    "gelu_tanh",
)
activated("gelu_erf", lambda g: jax.nn.gelu(g, approximate=False), "gelu_erf")
activated(
    "gelu_erf_written", lambda g: 0.5 * g * (1 + lax.erf(g / math.sqrt(2))), "gelu_erf"
)
activated(
    "gelu_erf_jax_scipy",
    lambda g: g * 0.5 * (1.0 + jax.scipy.special.erf(g * 0.7071067811865476)),
    "gelu_erf",
)
activated(
    "gelu_erfc_written", lambda g: 0.5 * g * lax.erfc(-g * math.sqrt(0.5)), "gelu_erf"
)
activated(
    "gelu_normal_cdf",
    lambda g: g * jax.scipy.stats.norm.cdf(g.astype(jnp.float32)).astype(g.dtype),
    "gelu_erf",
)

activated("relu", jax.nn.relu, "relu")
activated("relu_maximum", lambda g: jnp.maximum(g, 0), "relu")
activated("relu_maximum_left", lambda g: jnp.maximum(0.0, g), "relu")
activated(  # where g is NaN it gives 0, as max(g, 0) does not
    "relu_select", lambda g: jnp.where(g > 0, g, 0), "relu", assume=("finite",)
)
activated("relu_times_predicate", lambda g: g * (g > 0), "relu_by_product")
activated("relu_clip", lambda g: jnp.clip(g, min=0), "relu")
activated("relu_half_absolute", lambda g: 0.5 * (g + jnp.abs(g)), "relu", count=None)
activated("relu_squared", lambda g: jnp.square(jax.nn.relu(g)), "relu2")
activated("relu_squared_power", lambda g: jnp.maximum(g, 0.0) ** 2, "relu2")
activated("relu_squared_product", lambda g: jax.nn.relu(g) * jax.nn.relu(g), "relu2")
activated("sigmoid", jax.nn.sigmoid, "sigmoid")
activated("sigmoid_written", lambda g: 1 / (1 + jnp.exp(-g)), "sigmoid")
activated("sigmoid_tanh", lambda g: 0.5 * (jnp.tanh(g / 2) + 1), "sigmoid")
activated("tanh", jnp.tanh, "tanh")
activated("relu6", jax.nn.relu6, "relu6")
activated("relu6_clip", lambda g: jnp.clip(g, 0, 6), "relu6", also=[
    dict(operands=PLAIN, activation="identity", clip_gate=(0.0, 6.0))
])  # fmt: skip
activated("hard_sigmoid", jax.nn.hard_sigmoid, "hard_sigmoid")
activated("hard_silu", jax.nn.hard_silu, "hard_silu")
activated("hard_silu_clip", lambda g: g * jnp.clip(g / 6 + 0.5, 0, 1), "hard_silu")
activated("elu", jax.nn.elu, "elu")
activated("elu_alpha", lambda g: jax.nn.elu(g, 0.3), "elu", beta=0.3)
activated(
    "relu_select_not", lambda g: jnp.where(~(g > 0), 0, g), "relu", assume=("finite",)
)
activated("elu_written", lambda g: jnp.where(g > 0, g, jnp.exp(g) - 1), "elu")
activated("selu", jax.nn.selu, "selu")
activated("celu", jax.nn.celu, "celu")
activated("celu_alpha", lambda g: jax.nn.celu(g, 0.7), "celu", beta=0.7)
activated("leaky_relu", jax.nn.leaky_relu, "leaky_relu", beta=0.01)
activated(
    "leaky_relu_maximum", lambda g: jnp.maximum(g, 0.2 * g), "leaky_relu", beta=0.2
)
activated("softplus", jax.nn.softplus, "softplus")
activated("softplus_written", lambda g: jnp.logaddexp(g, 0.0), "softplus")
activated("mish", jax.nn.mish, "mish")
activated("identity", lambda g: g, "identity", count=None)


# --------------------------------------------------------- order and layout
@glu("up_first")
def _(x, w_gate, w_up):
    return (x @ w_up) * jax.nn.silu(x @ w_gate)


@glu("weights_exchanged", dict(x="btk", w_up=W, w_gate=W))
def _(x, w_up, w_gate):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


@glu("einsum")
def _(x, w_gate, w_up):
    gate = jnp.einsum("btk,kf->btf", x, w_gate)
    return jax.nn.silu(gate) * jnp.einsum("btk,kf->btf", x, w_up)


@glu("one_projection_compiled")
def _(x, w_gate, w_up):
    project = jax.jit(lambda x, w: jnp.einsum("btk,kf->btf", x, w))
    return jax.nn.silu(project(x, w_gate)) * project(x, w_up)


@glu("einsum_weight_first")
def _(x, w_gate, w_up):
    gate = jnp.einsum("kf,btk->btf", w_gate, x)
    return jax.nn.silu(gate) * jnp.einsum("kf,btk->btf", w_up, x)


@glu("dot_general", out="btf")
def _(x, w_gate, w_up):
    numbers = (((2,), (0,)), ((), ()))
    gate = lax.dot_general(x, w_gate, numbers)
    return jax.nn.silu(gate) * lax.dot_general(x, w_up, numbers)


@glu(
    "weights_transposed",
    dict(x="btk", w_gate=floats("fk", spread=0.35), w_up=floats("fk", spread=0.35)),
)
def _(x, w_gate, w_up):
    # Torch's linear layer.
    return jax.nn.silu(x @ w_gate.T) * (x @ w_up.T)


@glu(
    "vmapped_rows",
    dict(x="btk", w_gate=floats("fk", spread=0.35), w_up=floats("fk", spread=0.35)),
)
def _(x, w_gate, w_up):
    # Equinox: a linear layer takes one vector.
    def one(row):
        return jax.nn.silu(w_gate @ row) * (w_up @ row)

    return jax.vmap(jax.vmap(one))(x)


@glu("one_row", dict(x="k", w_gate=W, w_up=W), out="f")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


@glu("rows", dict(x="tk", w_gate=W, w_up=W), out="tf")
def _(x, w_gate, w_up):
    return jax.nn.silu(jnp.dot(x, w_gate)) * jnp.dot(x, w_up)


@glu("flattened_rows")
def _(x, w_gate, w_up):
    rows = x.reshape(-1, K)
    return (jax.nn.silu(rows @ w_gate) * (rows @ w_up)).reshape(B, T, F)


@glu("reversed_twice")
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x[:, ::-1][:, ::-1] @ w_up)


@glu("hidden_first", out="fbt")
def _(x, w_gate, w_up):
    gate = jnp.einsum("btk,kf->fbt", x, w_gate)
    return jax.nn.silu(gate) * jnp.einsum("btk,kf->fbt", x, w_up)


@glu("product_transposed_once", out="fbt")
def _(x, w_gate, w_up):
    gate, up = x @ w_gate, jnp.einsum("btk,kf->fbt", x, w_up)
    return jax.nn.silu(gate).transpose(2, 0, 1) * up


@glu(
    "features_in_heads",
    dict(x="btk", w_gate=floats("k34", spread=0.35), w_up=floats("k34", spread=0.35)),
    bind=lambda x, g, u: dict(x=x, w_gate=g.reshape(K, F), w_up=u.reshape(K, F)),
    read=lambda o: o.reshape(B, T, F),
    out="",
)
def _(x, w_gate, w_up):
    gate = jnp.einsum("btk,khd->bthd", x, w_gate)
    return jax.nn.silu(gate) * jnp.einsum("btk,khd->bthd", x, w_up)


@glu(
    "two_contracted_axes",
    dict(x="bt24", w_gate=floats("24f", spread=0.35), w_up=floats("24f", spread=0.35)),
    bind=lambda x, g, u: dict(
        x=x.reshape(B, T, K), w_gate=g.reshape(K, F), w_up=u.reshape(K, F)
    ),
)
def _(x, w_gate, w_up):
    gate = jnp.einsum("btij,ijf->btf", x, w_gate)
    return jax.nn.silu(gate) * jnp.einsum("btij,ijf->btf", x, w_up)


@glu("preferred_element_type")
def _(x, w_gate, w_up):
    gate = jnp.dot(x, w_gate, preferred_element_type=jnp.float32)
    up = jnp.dot(x, w_up, preferred_element_type=jnp.float32)
    return (jax.nn.silu(gate) * up).astype(x.dtype)


@glu("cast_between")
def _(x, w_gate, w_up):
    gate = jax.nn.silu((x @ w_gate).astype(jnp.float32))
    return (gate.astype(x.dtype) * (x @ w_up)).astype(x.dtype)


@glu("input_upcast")
def _(x, w_gate, w_up):
    x = x.astype(jnp.float32)
    return jax.nn.silu(x @ w_gate.astype(x.dtype)) * (x @ w_up.astype(x.dtype))


@glu("named", activation="silu")
def _(x, w_gate, w_up):
    from jax.ad_checkpoint import checkpoint_name

    gate = checkpoint_name(x @ w_gate, "gate")
    return checkpoint_name(jax.nn.silu(gate), "act") * checkpoint_name(x @ w_up, "up")


# -------------------------------------------------- weights packed together
def split_bind(x, w):
    a, b = jnp.split(w, 2, axis=-1)
    return dict(x=x, w_gate=a, w_up=b)


CONCATENATED = dict(x="btk", w=floats("kf", spread=0.35))
PACKED = dict(bind=split_bind, sizes=dict(f=2 * F), out="", read=lambda o: o)


@glu("concatenated_split", CONCATENATED, **PACKED)
def _(x, w):
    gate, up = jnp.split(x @ w, 2, axis=-1)
    return jax.nn.silu(gate) * up


@glu("concatenated_slice", CONCATENATED, **PACKED)
def _(x, w):
    y = x @ w
    return jax.nn.silu(y[..., :F]) * y[..., F:]


@glu("concatenated_dynamic_slice", CONCATENATED, **PACKED)
def _(x, w):
    y = x @ w
    gate = lax.dynamic_slice_in_dim(y, 0, F, axis=-1)
    return jax.nn.silu(gate) * lax.dynamic_slice_in_dim(y, F, F, axis=-1)


@glu(
    "concatenated_gate_second",
    CONCATENATED,
    **{**PACKED, "bind": lambda x, w: dict(x=x, w_gate=w[:, F:], w_up=w[:, :F])},
)
def _(x, w):
    up, gate = jnp.split(x @ w, 2, axis=-1)
    return up * jax.nn.silu(gate)


@glu("weight_split", CONCATENATED, **PACKED)
def _(x, w):
    gate, up = jnp.split(w, 2, axis=-1)
    return jax.nn.silu(x @ gate) * (x @ up)


@glu("weights_concatenated", operands=PLAIN)
def _(x, w_gate, w_up):
    y = x @ jnp.concatenate([w_gate, w_up], axis=-1)
    return jax.nn.silu(y[..., :F]) * y[..., F:]


@glu("weights_stacked")
def _(x, w_gate, w_up):
    gate, up = jnp.einsum("btk,zkf->zbtf", x, jnp.stack([w_gate, w_up]))
    return jax.nn.silu(gate) * up


@glu(
    "library_glu",
    CONCATENATED,
    activation="sigmoid",
    **{**PACKED, "bind": lambda x, w: dict(x=x, w_gate=w[:, F:], w_up=w[:, :F])},
)
def _(x, w):
    return jax.nn.glu(x @ w, axis=-1)


@glu(
    "three_way_split",
    dict(x="btk", w=floats("kf", spread=0.35)),
    bind=lambda x, w: dict(x=x, w_gate=w[:, F : 2 * F], w_up=w[:, 2 * F :]),
    sizes=dict(f=3 * F),
    out="",
    read=lambda o: o[0],
)
def _(x, w):
    a, gate, up = jnp.split(x @ w, 3, axis=-1)
    return jax.nn.silu(gate) * up, a


STACKED = dict(x="btk", w=floats("2kf", spread=0.35))


def stacked_bind(x, w):
    return dict(x=x, w_gate=w[0], w_up=w[1])


@glu("stacked_einsum", STACKED, bind=stacked_bind)
def _(x, w):
    y = jnp.einsum("btk,zkf->zbtf", x, w)
    return jax.nn.silu(y[0]) * y[1]


@glu("stacked_einsum_middle", STACKED, bind=stacked_bind, activation="gelu_tanh")
def _(x, w):
    # Gemma's gating_einsum.
    y = jnp.einsum("btk,zkf->btzf", x, w)
    return jax.nn.gelu(y[..., 0, :]) * y[..., 1, :]


@glu("stacked_indexed", STACKED, bind=stacked_bind, activation="gelu_tanh")
def _(x, w):
    return jax.nn.gelu(jnp.dot(x, w[0])) * jnp.dot(x, w[1])


@glu(
    "stacked_hidden_axis",
    dict(x="btk", w=floats("k2f", spread=0.35)),
    bind=lambda x, w: dict(x=x, w_gate=w[:, 0], w_up=w[:, 1]),
)
def _(x, w):
    y = jnp.einsum("btk,kzf->btzf", x, w)
    gate, up = y[:, :, 0], y[:, :, 1]
    return jax.nn.silu(gate) * up


@glu(
    "stacked_last_axis",
    dict(x="btk", w=floats("kf2", spread=0.35)),
    bind=lambda x, w: dict(x=x, w_gate=w[..., 0], w_up=w[..., 1]),
)
def _(x, w):
    y = jnp.einsum("btk,kfz->btfz", x, w)
    return jax.nn.silu(y[..., 0]) * y[..., 1]


def interleaved_bind(x, w):
    return dict(x=x, w_gate=w[:, ::2], w_up=w[:, 1::2])


INTERLEAVED = {**PACKED, "bind": interleaved_bind}


@glu("interleaved", CONCATENATED, **INTERLEAVED)
def _(x, w):
    y = x @ w
    return jax.nn.silu(y[..., ::2]) * y[..., 1::2]


@glu("interleaved_reshape", CONCATENATED, **INTERLEAVED)
def _(x, w):
    y = (x @ w).reshape(B, T, F, 2)
    return jax.nn.silu(y[..., 0]) * y[..., 1]


@glu("interleaved_split", CONCATENATED, **INTERLEAVED)
def _(x, w):
    gate, up = jnp.split((x @ w).reshape(B, T, F, 2), 2, axis=-1)
    return (jax.nn.silu(gate) * up).squeeze(-1)


# --------------------------------------------------------- biases and clips
@glu("biases", BIASED, BOTH)
def _(x, w_gate, w_up, b_gate, b_up):
    return jax.nn.silu(x @ w_gate + b_gate) * (x @ w_up + b_up)


@glu("biases_first", BIASED, BOTH, activation="gelu_erf")
def _(x, w_gate, w_up, b_gate, b_up):
    gate = jax.nn.gelu(b_gate + x @ w_gate, approximate=False)
    return (b_up + x @ w_up) * gate


@glu("bias_on_gate", dict(**SEPARATE, b_gate="f"), "x w_gate w_up b_gate")
def _(x, w_gate, w_up, b_gate):
    return jax.nn.silu(x @ w_gate + b_gate) * (x @ w_up)


@glu("bias_on_up", dict(**SEPARATE, b_up="f"), "x w_gate w_up b_up")
def _(x, w_gate, w_up, b_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up + b_up[None, None])


@glu("biases_broadcast", BIASED, BOTH)
def _(x, w_gate, w_up, b_gate, b_up):
    gate = x @ w_gate + jnp.broadcast_to(b_gate, (B, T, F))
    return jax.nn.silu(gate) * (x @ w_up + b_up.reshape(1, 1, F))


@glu(
    "bias_concatenated",
    dict(**CONCATENATED, b="f"),
    BOTH,
    sizes=dict(f=2 * F),
    out="",
    read=lambda o: o,
    bind=lambda x, w, b: dict(
        x=x, w_gate=w[:, :F], w_up=w[:, F:], b_gate=b[:F], b_up=b[F:]
    ),
)
def _(x, w, b):
    gate, up = jnp.split(x @ w + b, 2, axis=-1)
    return jax.nn.silu(gate) * up


@glu(
    "alphafold_gate",
    dict(**BIASED, mask=booleans("bt1", dtype=np.float32)),
    BOTH,
    activation="sigmoid",
    read=lambda o: o[1],
    out="",
    bind=lambda x, g, u, a, b, m: dict(x=x, w_gate=g, w_up=u, b_gate=a, b_up=b),
)
def _(x, w_gate, w_up, b_gate, b_up, mask):
    out = (x @ w_up + b_up) * jax.nn.sigmoid(x @ w_gate + b_gate)
    return mask * out, out


@glu(
    "clamped",
    BIASED,
    BOTH,
    activation="swish",
    beta=1.702,
    clip_gate=(None, 1.0),
    clip_up=(-1.0, 1.0),
    up_shift=1.0,
    also=[
        dict(
            operands=BOTH,
            activation="gelu_quick",
            clip_gate=(None, 1.0),
            clip_up=(-1.0, 1.0),
            up_shift=1.0,
        )
    ],
)
def _(x, w_gate, w_up, b_gate, b_up):
    # GPT-OSS, with a limit of one in place of seven.
    gate = jnp.minimum(x @ w_gate + b_gate, 1.0)
    up = jnp.clip(x @ w_up + b_up, -1.0, 1.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


@glu(
    "clamped_interleaved",
    dict(**CONCATENATED, b="f"),
    BOTH,
    sizes=dict(f=2 * F),
    out="",
    read=lambda o: o,
    activation="swish",
    beta=1.702,
    clip_gate=(None, 1.0),
    clip_up=(-1.0, 1.0),
    up_shift=1.0,
    also=[
        dict(
            operands=BOTH,
            activation="gelu_quick",
            clip_gate=(None, 1.0),
            clip_up=(-1.0, 1.0),
            up_shift=1.0,
        )
    ],
    bind=lambda x, w, b: dict(
        x=x, w_gate=w[:, ::2], w_up=w[:, 1::2], b_gate=b[::2], b_up=b[1::2]
    ),
)
def _(x, w, b):
    y = x @ w + b
    gate = jnp.clip(y[..., ::2], None, 1.0)
    up = jnp.clip(y[..., 1::2], -1.0, 1.0)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * 1.702))


@glu("clipped_both_sides", clip_gate=(-1.0, 1.0))
def _(x, w_gate, w_up):
    return jax.nn.silu(jnp.clip(x @ w_gate, -1.0, 1.0)) * (x @ w_up)


@glu("up_shifted", up_shift=1.0)
def _(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (1 + x @ w_up)


# ------------------------------------------------------------- surroundings
@glu(
    "down_projection",
    dict(**SEPARATE, w_down="fk"),
    read=lambda o: o[1],
    out="",
    bind=lambda x, g, u, d: dict(x=x, w_gate=g, w_up=u),
)
def _(x, w_gate, w_up, w_down):
    hidden = jax.nn.silu(x @ w_gate) * (x @ w_up)
    return hidden @ w_down, hidden


@glu(
    "norm_and_residual",
    dict(**SEPARATE, w_down="fk", s="k"),
    read=lambda o: o[1],
    out="",
    bind=lambda x, g, u, d, s: dict(
        x=x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * s, w_gate=g, w_up=u
    ),
)
def _(x, w_gate, w_up, w_down, s):
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * s
    hidden = jax.nn.silu(y @ w_gate) * (y @ w_up)
    return x + hidden @ w_down, hidden


@glu(
    "dropout_after",
    dict(**SEPARATE, key=key()),
    read=lambda o: o[1],
    out="",
    bind=lambda x, g, u, k: dict(x=x, w_gate=g, w_up=u),
)
def _(x, w_gate, w_up, bits):
    out = jax.nn.silu(x @ w_gate) * (x @ w_up)
    keep = jax.random.bernoulli(bits, 0.9, out.shape)
    return jnp.where(keep, out / 0.9, 0.0), out


@glu(
    "weights_quantised",
    dict(
        x="btk",
        w_gate=Input("kf", lambda d, s: d.rng.integers(-9, 9, s).astype(np.int8)),
        w_up=Input("kf", lambda d, s: d.rng.integers(-9, 9, s).astype(np.int8)),
        gs=positive("f", 0.01, 0.1),
        us=positive("f", 0.01, 0.1),
    ),
    bind=lambda x, g, u, a, b: dict(x=x, w_gate=g * a, w_up=u * b),
)
def _(x, w_gate, w_up, gs, us):
    gate = x @ (w_gate.astype(x.dtype) * gs)
    return jax.nn.silu(gate) * (x @ (w_up.astype(x.dtype) * us))


@glu(
    "low_rank_update",
    dict(**SEPARATE, a="k3", b="3f"),
    "x w_gate w_up rows_gate",
    bind=lambda x, g, u, a, b: dict(x=x, w_gate=g, w_up=u, rows_gate=x @ a @ b),
)
def _(x, w_gate, w_up, a, b):
    return jax.nn.silu(x @ w_gate + x @ a @ b) * (x @ w_up)


@glu(
    "low_rank_updates_of_both",
    dict(**BIASED, a="k3", b="3f", c="k2", d="2f"),
    f"{BOTH} rows_gate rows_up",
    bind=lambda x, g, u, bg, bu, a, b, c, d: dict(
        x=x, w_gate=g, w_up=u, b_gate=bg, b_up=bu,
        rows_gate=2 * (x @ a @ b), rows_up=0.5 * (x @ c @ d),
    ),
)  # fmt: skip
def _(x, w_gate, w_up, b_gate, b_up, a, b, c, d):
    gate = x @ w_gate + b_gate + 2.0 * ((x @ a) @ b)
    return jax.nn.silu(gate) * (0.5 * (x @ c @ d) + x @ w_up + b_up)


@glu(
    "bias_per_token",
    dict(**SEPARATE, r="btf"),
    "x w_gate w_up rows_gate",
    bind=lambda x, g, u, r: dict(x=x, w_gate=g, w_up=u, rows_gate=r),
    activation="gelu_tanh",
)
def _(x, w_gate, w_up, r):
    return jax.nn.gelu(r + x @ w_gate) * (x @ w_up)


@glu(
    "products_dequantised",
    dict(
        x="btk",
        w_gate=Input("kf", lambda d, s: d.rng.integers(-9, 9, s).astype(np.int8)),
        w_up=Input("kf", lambda d, s: d.rng.integers(-9, 9, s).astype(np.int8)),
        gs=positive("f", 0.01, 0.1),
        us=positive("f", 0.01, 0.1),
        b_gate="f",
        b_up="f",
    ),
    BOTH,
    bind=lambda x, g, u, a, c, bg, bu: dict(
        x=x, w_gate=g * a, w_up=u * c, b_gate=bg, b_up=bu
    ),
)
def _(x, w_gate, w_up, gs, us, b_gate, b_up):
    gate = (x @ w_gate.astype(x.dtype)) * gs + b_gate
    return jax.nn.silu(gate) * ((x @ w_up.astype(x.dtype)) * us + b_up)


@glu(
    "low_rank_update_of_weight",
    dict(**SEPARATE, a="k3", b="3f"),
    bind=lambda x, g, u, a, b: dict(x=x, w_gate=g + a @ b, w_up=u),
)
def _(x, w_gate, w_up, a, b):
    return jax.nn.silu(x @ (w_gate + a @ b)) * (x @ w_up)


@glu(
    "convolution_of_width_one",
    dict(x="btk", w_gate=floats("1kf", spread=0.35), w_up=floats("1kf", spread=0.35)),
    bind=lambda x, g, u: dict(x=x, w_gate=g[0], w_up=u[0]),
    count=None,
)
def _(x, w_gate, w_up):
    def conv(w):
        return lax.conv_general_dilated(
            x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )

    return jax.nn.silu(conv(w_gate)) * conv(w_up)


@glu(
    "experts_dense",
    dict(x="btk", w_gate=floats("nkf", spread=0.35), w_up=floats("nkf", spread=0.35)),
    count=None,
    out="",
    bind=lambda x, g, u: dict(
        x=x,
        w_gate=g.transpose(1, 0, 2).reshape(K, -1),
        w_up=u.transpose(1, 0, 2).reshape(K, -1),
    ),
    read=lambda o: o.transpose(1, 2, 0, 3).reshape(B, T, -1),
)
def _(x, w_gate, w_up):
    gate = jnp.einsum("btk,ekf->ebtf", x, w_gate)
    return jax.nn.silu(gate) * jnp.einsum("btk,ekf->ebtf", x, w_up)


@glu(
    "experts_batched",
    dict(x="ntk", w_gate=floats("nkf", spread=0.35), w_up=floats("nkf", spread=0.35)),
    count=None,
    out="",
    bind=lambda x, g, u: dict(x=x[0], w_gate=g[0], w_up=u[0]),
    read=lambda o: o[0],
)
def _(x, w_gate, w_up):
    gate = jnp.einsum("etk,ekf->etf", x, w_gate)
    return jax.nn.silu(gate) * jnp.einsum("etk,ekf->etf", x, w_up)
