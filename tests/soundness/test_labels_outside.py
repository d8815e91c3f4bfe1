"""Labels that are no class: what they pick, and which logits have gradients.

Logits that are indexed by rows and labels promise that there is no such label. XLA then
reads the nearest class, and gives it no gradient. `mode="clip"` gives it one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

pytestmark = pytest.mark.once

M, K, V = 24, 6, 9
DRAW = np.random.default_rng(0)
Y, X = (DRAW.normal(size=s).astype("f4") for s in ((M, V), (M, K)))
W, B = (DRAW.normal(size=s).astype("f4") for s in ((K, V), (V,)))
LABELS = DRAW.integers(0, V, M).astype("i4")
LABELS[::3] = [-100, -V - 1, -V, -1, V, V + 5, 2**31 - 1, -(2**31)]
FORCED = {
    "cross_entropy": ["memory_bounded"],
    "linear_cross_entropy": ["memory_bounded"],
}
Loss = Callable[..., Any]


def logs(y: Any) -> Any:
    return jax.nn.log_softmax(y)


def total(y: Any) -> Any:
    return jax.nn.logsumexp(y, -1)


def shifted(y: Any) -> Any:
    return y - lax.stop_gradient(y.max(-1, keepdims=True))


def sums(y: Any) -> Any:
    return jnp.log(jnp.exp(y).sum(-1))


def at(y: Any, i: Any, **how: Any) -> Any:
    return y.at[jnp.arange(M), i].get(**how)


OF_LOGITS: dict[str, Loss] = {
    "log-probabilities": lambda y, i: -logs(y)[jnp.arange(M), i],
    "log-sum-exp less logit": lambda y, i: total(y) - y[jnp.arange(M), i],
    "logit less log-sum-exp": lambda y, i: -(y[jnp.arange(M), i] - total(y)),
    "mean": lambda y, i: -logs(y)[jnp.arange(M), i].mean(),
    "by hand": lambda y, i: -(shifted(y) - sums(shifted(y))[:, None])[jnp.arange(M), i],
    "shifted": lambda y, i: sums(shifted(y)) - shifted(y)[jnp.arange(M), i],
    "moved labels": lambda y, i: total(y) - y[jnp.arange(M), i - 2],
    "remainders": lambda y, i: total(y) - y[jnp.arange(M), i % V],
    "clipped labels": lambda y, i: total(y) - y[jnp.arange(M), jnp.clip(i, 0, V - 1)],
    "no negative labels": lambda y, i: total(y) - y[jnp.arange(M), jnp.maximum(i, 0)],
    "clips": lambda y, i: total(y) - at(y, i, mode="clip"),
    "log-probabilities, clips": lambda y, i: -at(logs(y), i, mode="clip"),
    "promises": lambda y, i: total(y) - at(y, i, mode="promise_in_bounds"),
    "fills": lambda y, i: total(y) - at(y, i, mode="fill"),
    "fills with 0": lambda y, i: -at(logs(y), i, mode="fill", fill_value=0),
    "vmap": lambda y, i: -jax.vmap(lambda p, j: p[j])(logs(y), i),
    "take": lambda y, i: -jnp.take_along_axis(logs(y), i[:, None], 1)[:, 0],
    "counted": lambda y, i: jnp.where(i != -100, -logs(y)[jnp.arange(M), i], 0).sum(),
    "z loss": lambda y, i: (lambda t: t - y[jnp.arange(M), i] + 0.1 * t**2)(total(y)),
    "smoothing": lambda y, i: -0.9 * logs(y)[jnp.arange(M), i] - 0.1 * logs(y).mean(-1),
    "small labels": lambda y, i: -logs(y)[jnp.arange(M), i.astype("int8")],
    "unsigned labels": lambda y, i: total(y) - y[jnp.arange(M), i.astype("uint32")],
    "unsigned labels, vmap": lambda y, i: (
        -jax.vmap(lambda p, j: p[j])(logs(y), i.astype("uint32"))
    ),
    "unsigned labels, one-hot": lambda y, i: (
        -(jax.nn.one_hot(i.astype("uint32"), V) * logs(y)).sum(-1)
    ),
    "rows of other means": lambda y, i: (lambda z: total(z) - z[jnp.arange(M), i])(
        y - y.mean(-1, keepdims=True)
    ),
    "less the maximum": lambda y, i: (lambda z: sums(z) - z[jnp.arange(M), i])(
        y - y.max(-1, keepdims=True)
    ),
}
OF_PRODUCTS: dict[str, Loss] = {
    "product": lambda x, w, b, i: -logs(x @ w)[jnp.arange(M), i],
    "product and bias": lambda x, w, b, i: (
        total(x @ w + b) - (x @ w + b)[jnp.arange(M), i]
    ),
    "cap": lambda x, w, b, i: -logs(5 * jnp.tanh(x @ w / 5))[jnp.arange(M), i],
    "scale": lambda x, w, b, i: -logs((x @ w + b) * 0.5)[jnp.arange(M), i].sum(),
}


def gradients(f: Loss) -> Loss:
    """A function that gives a loss and its gradients by all floats."""

    def run(*given: Any) -> Any:
        out, pull = jax.vjp(lambda *floats: f(*floats, given[-1]), *given[:-1])
        return out, pull(jnp.cos(jnp.arange(out.size, dtype="f4")).reshape(out.shape))

    return run


def test_labels_that_are_no_class() -> None:
    losses = {n: (f, (Y, LABELS)) for n, f in OF_LOGITS.items()}
    losses |= {n: (f, (X, W, B, LABELS)) for n, f in OF_PRODUCTS.items()}
    fast = lambda f: rewriter.optimize(f, implementation=FORCED, strict=True)
    given = {n: values for n, (_, values) in losses.items()}
    ways = {
        "written": gradients,
        "gradients of the rewritten": lambda f: gradients(fast(f)),
        "rewritten gradients": lambda f: fast(gradients(f)),
    }
    found = {
        way: jax.jit(lambda g, of=of: {n: of(losses[n][0])(*g[n]) for n in g})(given)
        for way, of in ways.items()
    }
    for way in found:
        for name in losses:
            for one, two in zip(
                *(jax.tree.leaves(found[w][name]) for w in ("written", way)),
                strict=True,
            ):
                np.testing.assert_allclose(
                    two, one, 1e-4, 1e-5, err_msg=f"{name}, {way}"
                )
    replaced = [
        name
        for name, (f, values) in losses.items()
        if any(s.replaced for s in fast(f).report(*values).sites)
    ]
    assert len(replaced) >= len(losses) - 3, set(losses) - set(replaced)
