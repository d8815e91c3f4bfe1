"""A checkpoint does not save a norm's bias, on which no gradient depends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import rewriter

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(0)
FORCED = {"layer_norm": "memory_bounded"}
POLICIES = jax.checkpoint_policies


def normal(*shape: int) -> np.ndarray:
    return 0.5 * RANDOM.normal(size=shape).astype(np.float32)


X, W, G, H = normal(2, 3, 8), normal(2, 8, 8), normal(2, 8), normal(2, 8)


def norm(x: Any, g: Any, h: Any) -> Any:
    d = x - x.mean(-1, keepdims=True)
    return d * lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-6) * g + h


def layer(x: Any, w: Any, g: Any, h: Any) -> Any:
    """The norm comes last, as in the first transformers."""
    return norm(x + jnp.tanh(x @ w), g, h)


def named(x: Any, w: Any, g: Any, h: Any) -> Any:
    y = checkpoint_name(layer(x, w, g, h), "result")
    return y + jnp.sin(y)


def unrolled(f: Any) -> Any:
    def layers(x: Any, w: Any, g: Any, h: Any) -> Any:
        for i in range(2):
            x = f(x, w[i], g[i], h[i])
        return x

    return layers


def scanned(f: Any) -> Any:
    def layers(x: Any, *weights: Any) -> Any:
        return lax.scan(lambda c, p: (f(c, *p), None), x, weights)[0]

    return layers


PROGRAMS = {
    "one after the other": (unrolled(jax.checkpoint(layer)), 2),
    "scan": (scanned(jax.checkpoint(layer)), 1),
    "products are saved": (
        scanned(jax.checkpoint(layer, policy=POLICIES.dots_saveable)),
        1,
    ),
    "the result is saved": (
        unrolled(
            jax.checkpoint(named, policy=POLICIES.save_only_these_names("result"))
        ),
        2,
    ),
    "the norm alone": (
        unrolled(lambda x, w, g, h: x @ w + jax.checkpoint(norm)(x, g, h)),
        2,
    ),
    "in a branch": (
        unrolled(
            lambda x, *p: lax.cond(
                x.sum() > -1e9, jax.checkpoint(layer), lambda x, *_: x, x, *p
            )
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_replaced(name: str) -> None:
    f, count = PROGRAMS[name]
    args = X, W, G, H
    both = jax.value_and_grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2, 3))
    fast = rewriter.optimize(both, implementation=FORCED)
    report = fast.report(*args)
    assert report.counts(repeats=False, backward=True)["layer_norm"] == count
    assert all(site.replaced for site in report.sites)
    with jax.enable_x64(True):
        exact = jax.jit(both)(*(a.astype(float) for a in args))
    for one, other in zip(*map(jax.tree.leaves, (fast(*args), exact)), strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-4, atol=3e-5)


def test_the_gradient_of_a_scale_alone_needs_no_scale() -> None:
    def loss(x: Any, g: Any, h: Any) -> Any:
        return jnp.sin(jax.checkpoint(norm)(x, g, h)).sum()

    step = jax.grad(loss, 1)
    fast = rewriter.optimize(step, implementation=FORCED)
    assert fast.report(X, G[0], H[0]).counts(backward=True)["layer_norm"] == 1
    got, wanted = (f(X, G[0], H[0]) for f in (fast, jax.jit(step)))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def unit(weights: Any, x: Any) -> Any:
    gate, up, down = weights
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def test_weights_that_do_not_learn_leave_no_room_in_a_checkpoint_of_products():
    """Their gradients read no x, so that the policy saves none. The report says why."""
    shapes = (1024, 4096), (1024, 4096), (4096, 1024)
    weights = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    x = jax.ShapeDtypeStruct((4, 2048, 1024), jnp.bfloat16)

    def report(wrt: Any) -> str:
        layer = jax.checkpoint(unit, policy=POLICIES.dots_saveable)
        total = lambda w, x: jnp.sin(layer(w, jnp.tanh(x))).astype(jnp.float32).sum()
        step = jax.grad(total, wrt)
        return str(rewriter.explain(step, target="NVIDIA H100 80GB HBM3")(weights, x))

    why = "a checkpoint would save more bytes for them than it does as written"
    assert why in report(1)
    assert why not in report((0, 1))
