"""Grouped matrix products on `lax.ragged_dot`, and expert layers built on them."""

# ruff: noqa: C408 (dict(q="btnh") is easier to read in a table of letters)
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.spellings.spelling import collect, floats, given, positive

SPELLINGS, spelling = collect("ragged_dot")

M, K, N, G, F = 24, 8, 10, 4, 12


def sizes(values):
    return given("g", lambda draw: np.array(values, np.int32))


FULL = sizes([7, 5, 9, 3])
SHORT = sizes([6, 0, 9, 2])
DOT = dict(lhs="mk", rhs="gkn", group_sizes=FULL)
NAMES = "lhs rhs group_sizes"


def ragged(name, inputs=DOT, **more):
    return spelling(
        f"ragged/{name}",
        inputs=inputs,
        operands=NAMES,
        **{**({"out": "mn"} if "read" not in more else {}), **more},
    )


def numbers(contracting, ragged_dims, group):
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracting, ([], [])),
        lhs_ragged_dimensions=ragged_dims,
        rhs_group_dimensions=group,
    )


@ragged("plain")
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs, group_sizes)


@ragged("rows_left_over", dict(lhs="mk", rhs="gkn", group_sizes=SHORT))
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs, group_sizes)


@ragged("empty_groups", dict(lhs="mk", rhs="gkn", group_sizes=sizes([0, 20, 0, 4])))
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs, group_sizes)


@ragged(
    "one_group",
    sizes=dict(g=1),
    inputs=dict(lhs="mk", rhs="gkn", group_sizes=sizes([24])),
)
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs, group_sizes)


@ragged("jitted")
def _(lhs, rhs, group_sizes):
    return jax.jit(lax.ragged_dot)(lhs, rhs, group_sizes)


@ragged("precision")
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs, group_sizes, precision=lax.Precision.HIGHEST)


@ragged("preferred_element_type")
def _(lhs, rhs, group_sizes):
    out = lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=jnp.float32)
    return out.astype(lhs.dtype)


@ragged("general")
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot_general(lhs, rhs, group_sizes, numbers(([1], [1]), [0], [0]))


@ragged(
    "general_transposed",
    dict(lhs="mk", rhs="gnk", group_sizes=FULL),
    mode="transposed",
    bind=lambda a, b, n: dict(lhs=a, rhs=b, group_sizes=n),
    also=[dict(operands=NAMES, mode="forward")],
)
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot_general(lhs, rhs, group_sizes, numbers(([1], [2]), [0], [0]))


@ragged(
    "rhs_transposed_before",
    dict(lhs="mk", rhs="gnk", group_sizes=FULL),
    mode="transposed",
    bind=lambda a, b, n: dict(lhs=a, rhs=b, group_sizes=n),
    also=[dict(operands=NAMES, mode="forward")],
)
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot(lhs, rhs.swapaxes(1, 2), group_sizes)


@ragged(
    "general_contracting",
    dict(lhs="mk", rhs="mn", group_sizes=FULL),
    mode="contracting",
    bind=lambda a, b, n: dict(lhs=a, rhs=b, group_sizes=n),
    read=lambda o: o,
    gradients=False,
)
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot_general(lhs, rhs, group_sizes, numbers(([0], [0]), [0], []))


@ragged(
    "general_contracting_empty",
    dict(lhs="mk", rhs="mn", group_sizes=sizes([4, 0, 11, 9])),
    mode="contracting",
    bind=lambda a, b, n: dict(lhs=a, rhs=b, group_sizes=n),
    read=lambda o: o,
    gradients=False,
)
def _(lhs, rhs, group_sizes):
    return lax.ragged_dot_general(lhs, rhs, group_sizes, numbers(([0], [0]), [0], []))


def experts(x, ids, weights):
    """Rows sorted by expert, and how many each expert gets."""
    order = jnp.argsort(ids)
    return x[order], jnp.bincount(ids, length=weights.shape[0]), order


IDS = given("m", lambda draw: draw.rng.integers(0, 4, draw.sizes["m"], dtype=np.int32))


def sorted_bind(x, ids, w):
    rows, counts, _ = experts(x, ids, w)
    return dict(lhs=rows, rhs=w, group_sizes=counts)


ROUTED = dict(x="mk", ids=IDS, w="gkn")


def routed(name, **more):
    return ragged(name, ROUTED, bind=sorted_bind, **more)


@routed("sorted_by_expert")
def _(x, ids, w):
    rows, counts, _ = experts(x, ids, w)
    return lax.ragged_dot(rows, w, counts)


@routed("counts_by_one_hot")
def _(x, ids, w):
    counts = jax.nn.one_hot(ids, G, dtype=jnp.int32).sum(0)
    return lax.ragged_dot(x[jnp.argsort(ids)], w, counts)


@routed("counts_by_segment_sum")
def _(x, ids, w):
    counts = jax.ops.segment_sum(jnp.ones_like(ids), ids, num_segments=G)
    return lax.ragged_dot(jnp.take(x, jnp.argsort(ids), axis=0), w, counts)


@routed("counts_by_search")
def _(x, ids, w):
    order = jnp.argsort(ids)
    ends = jnp.searchsorted(ids[order], jnp.arange(G), side="right")
    counts = jnp.diff(ends, prepend=0).astype(jnp.int32)
    return lax.ragged_dot(x[order], w, counts)


@routed("unsorted_again", read=lambda o: o[1])
def _(x, ids, w):
    rows, counts, order = experts(x, ids, w)
    y = lax.ragged_dot(rows, w, counts)
    return y[jnp.argsort(order)], y


@routed("unsorted_by_scatter", read=lambda o: o[1])
def _(x, ids, w):
    rows, counts, order = experts(x, ids, w)
    y = lax.ragged_dot(rows, w, counts)
    return jnp.zeros_like(y).at[order].set(y), y


GATED = dict(
    x="mk",
    w_gate=floats("gkf", spread=0.35),
    w_up=floats("gkf", spread=0.35),
    w_down=floats("gfn", spread=0.3),
    group_sizes=FULL,
)


def gated_bind(x, w_gate, w_up, w_down, n):
    gate, up = lax.ragged_dot(x, w_gate, n), lax.ragged_dot(x, w_up, n)
    return dict(lhs=jax.nn.silu(gate) * up, rhs=w_down, group_sizes=n)


def gated(name, count=3, **more):
    return ragged(name, GATED, bind=gated_bind, count=count, **more)


@gated("gate_up_down")
def _(x, w_gate, w_up, w_down, n):
    hidden = jax.nn.silu(lax.ragged_dot(x, w_gate, n)) * lax.ragged_dot(x, w_up, n)
    return lax.ragged_dot(hidden, w_down, n)


@gated("gate_and_up_concatenated", count=2)
def _(x, w_gate, w_up, w_down, n):
    y = lax.ragged_dot(x, jnp.concatenate([w_gate, w_up], -1), n)
    gate, up = jnp.split(y, 2, axis=-1)
    return lax.ragged_dot(jax.nn.silu(gate) * up, w_down, n)


@gated("rows_masked_between")
def _(x, w_gate, w_up, w_down, n):
    hidden = jax.nn.silu(lax.ragged_dot(x, w_gate, n)) * lax.ragged_dot(x, w_up, n)
    valid = jnp.arange(M)[:, None] < n.sum()
    return lax.ragged_dot(jnp.where(valid, hidden, 0), w_down, n)


def top_two(x, router):
    probs = jax.nn.softmax(x @ router, axis=-1)
    weights, ids = lax.top_k(probs, 2)
    return weights / weights.sum(-1, keepdims=True), ids


LAYER = dict(
    x="tk",
    router=floats("kg", spread=0.5),
    w_gate=GATED["w_gate"],
    w_up=GATED["w_up"],
    w_down=GATED["w_down"],
)


def layer_lhs(x, router, w_gate, w_up, w_down):
    _, ids = top_two(x, router)
    order = jnp.argsort(ids.reshape(-1))
    n = jnp.bincount(ids.reshape(-1), length=G)
    rows = x[order // 2]
    gate, up = lax.ragged_dot(rows, w_gate, n), lax.ragged_dot(rows, w_up, n)
    return dict(lhs=jax.nn.silu(gate) * up, rhs=w_down, group_sizes=n)


def expert_layer(name, count=3):
    return ragged(name, LAYER, bind=layer_lhs, count=count, read=lambda o: o[1])


@expert_layer("mixture_of_experts")
def _(x, router, w_gate, w_up, w_down):
    weights, ids = top_two(x, router)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    n = jnp.bincount(flat, length=G)
    rows = x[order // 2]
    hidden = jax.nn.silu(lax.ragged_dot(rows, w_gate, n))
    y = lax.ragged_dot(hidden * lax.ragged_dot(rows, w_up, n), w_down, n)
    back = y[jnp.argsort(order)].reshape(*ids.shape, N)
    return jnp.einsum("tc,tcn->tn", weights, back), y


@expert_layer("mixture_of_experts_scattered", count=2)
def _(x, router, w_gate, w_up, w_down):
    weights, ids = top_two(x, router)
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    n = jnp.zeros(G, jnp.int32).at[flat].add(1)
    rows = jnp.repeat(x, 2, axis=0)[order]
    both = lax.ragged_dot(rows, jnp.concatenate([w_gate, w_up], -1), n)
    y = lax.ragged_dot(jax.nn.silu(both[:, :F]) * both[:, F:], w_down, n)
    weighted = y * weights.reshape(-1)[order][:, None]
    return jnp.zeros((x.shape[0], N), y.dtype).at[order // 2].add(weighted), y


@ragged(
    "expert_bias",
    dict(lhs="mk", rhs="gkn", group_sizes=FULL, b="gn"),
    bind=lambda a, b, n, c: dict(lhs=a, rhs=b, group_sizes=n),
    read=lambda o: o[1],
)
def _(lhs, rhs, n, b):
    y = lax.ragged_dot(lhs, rhs, n)
    return y + jnp.repeat(b, n, axis=0, total_repeat_length=M), y


@ragged(
    "quantised_experts",
    dict(
        lhs="mk",
        rhs=given(
            "gkn", lambda d: d.rng.integers(-9, 9, d.shape("gkn")).astype(np.int8)
        ),
        group_sizes=FULL,
        scale=positive("g1n", 0.01, 0.1),
    ),
    bind=lambda a, b, n, s: dict(lhs=a, rhs=b * s, group_sizes=n),
)
def _(lhs, rhs, n, scale):
    return lax.ragged_dot(lhs, rhs.astype(lhs.dtype) * scale, n)


@ragged(
    "shared_expert_added",
    dict(lhs="mk", rhs="gkn", group_sizes=FULL, w="kn"),
    bind=lambda a, b, n, w: dict(lhs=a, rhs=b, group_sizes=n),
    read=lambda o: o[1],
)
def _(lhs, rhs, n, w):
    y = lax.ragged_dot(lhs, rhs, n)
    return y + lhs @ w, y
