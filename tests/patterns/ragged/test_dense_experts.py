"""Experts that are no ragged dots are near misses with advice; others are not."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import rewriter

T, D, F, E, K = 12, 8, 16, 4, 2
X = jnp.ones((T, D))
W1, W2 = jnp.ones((E, D, F)), jnp.ones((E, F, D))
ROUTER = jnp.arange(D * E, dtype=jnp.float32).reshape(D, E) / 32


def routed(x):
    return jax.lax.top_k(jax.nn.softmax(x @ ROUTER), K)


def all_experts_then_masked(x):
    gates, chosen = routed(x)
    weight = (jax.nn.one_hot(chosen, E) * gates[..., None]).sum(1)
    h = jax.nn.relu(jnp.einsum("td,edf->tef", x, W1))
    return jnp.einsum("tef,efd,te->td", h, W2, weight)


def all_experts_by_vmap(x):
    gates, chosen = routed(x)
    y = jax.vmap(lambda a, b: jax.nn.relu(x @ a) @ b)(W1, W2)
    weight = jnp.zeros((T, E)).at[jnp.arange(T)[:, None], chosen].add(gates)
    return (y * weight.T[:, :, None]).sum(0)


def one_hot_dispatch(x, capacity=8):
    gates, chosen = routed(x)
    hot = jax.nn.one_hot(chosen[:, 0], E)
    place = (jnp.cumsum(hot, 0) - 1) * hot
    slot = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    dispatch = hot[:, :, None] * slot[:, None, :]
    rows = jnp.einsum("tec,td->ecd", dispatch, x)
    h = jnp.einsum(
        "ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", rows, W1)), W2
    )
    return jnp.einsum("tec,ecd->td", dispatch * gates[:, :1, None], h)


def weights_gathered(x):
    gates, chosen = routed(x)
    h = jax.nn.relu(jnp.einsum("td,tkdf->tkf", x, W1[chosen]))
    return jnp.einsum("tkf,tkfd,tk->td", h, W2[chosen], gates)


def largest(x):
    """Argmax for one expert a token."""
    hot = jax.nn.one_hot(jnp.argmax(x @ ROUTER, -1), E)
    return jnp.einsum("te,tef->tf", hot, jnp.einsum("td,edf->tef", x, W1))


DENSE: dict[Callable, str] = {
    all_experts_then_masked: "all 4 experts are computed",
    all_experts_by_vmap: "all 4 experts are computed",
    one_hot_dispatch: "one-hot contractions",
    weights_gathered: "gathered for every token",
    largest: "all 4 experts are computed",
}


@pytest.mark.parametrize("fn", DENSE, ids=lambda f: f.__name__)
def test_a_near_miss_with_what_would_make_it_match(fn) -> None:
    report = rewriter.explain(fn)(X)
    (miss,) = [m for m in report.misses if m.op == "ragged_dot"]
    assert DENSE[fn] in miss.reasons[0].text
    assert "ragged_dot(" in miss.suggestion
    assert "test_dense_experts.py" in miss.where
    assert not report.counts()["ragged_dot"]


def sorted_experts(x):
    gates, chosen = routed(x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=E)
    h = jax.nn.relu(jax.lax.ragged_dot(x[order // K], W1, sizes))
    y = jax.lax.ragged_dot(h, W2, sizes)[jnp.argsort(order)]
    return (y.reshape(T, K, D) * gates[..., None]).sum(1)


def sampling(x):
    """A choice of tokens among logits, in a program with matrices of rank three."""
    y = jnp.einsum("td,edf->tef", x, W1).sum((1, 2))
    return jax.lax.top_k(y @ jnp.ones((T, E)), K)


@pytest.mark.parametrize("fn", [sorted_experts, sampling])
def test_no_near_miss(fn) -> None:
    assert not [m for m in rewriter.explain(fn)(X).misses if m.op == "ragged_dot"]
