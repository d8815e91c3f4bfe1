"""Several norms of one value, such as one with a scale and one without."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter

pytestmark = pytest.mark.once

RANDOM = np.random.default_rng(0)
FORCED = dict.fromkeys(("rms_norm", "layer_norm"), "memory_bounded")


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


X, G, H, W = normal(2, 3, 8), normal(8), normal(8), normal(8, 8)


def rms(x: Any, g: Any = None) -> Any:
    y = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    return y if g is None else y * g


def layer(x: Any, g: Any = None, h: Any = None) -> Any:
    d = x - x.mean(-1, keepdims=True)
    y = d * lax.rsqrt((d**2).mean(-1, keepdims=True) + 1e-6)
    y = y if g is None else y * g
    return y if h is None else y + h


def both(x: Any, g: Any, w: Any) -> Any:
    return jnp.tanh(rms(x, g) @ w + rms(x) @ w.T)


PROGRAMS = {
    "scaled first": (lambda x, g: (rms(x, g), rms(x)), (X, G), 2),
    "scaled last": (lambda x, g: (rms(x), rms(x, g)), (X, G), 2),
    "two scales": (lambda x, g, h: (rms(x, g), rms(x, h)), (X, G, H), 2),
    "three": (lambda x, g, h: (rms(x), rms(x, g), rms(x, h)), (X, G, H), 3),
    "a number": (lambda x, g: (rms(x, g), rms(x) * 0.25), (X, G), 2),
    "read by products": (both, (X, G, W), 2),
    "residual": (lambda x, g, w: x + both(x, g, w), (X, G, W), 2),
    "centred": (lambda x, g, h: (layer(x, g, h), layer(x)), (X, G, H), 2),
    "without bias": (lambda x, g, h: (layer(x, g, h), layer(x, g)), (X, G, H), 2),
    "checkpoint": (jax.checkpoint(both), (X, G, W), 2),
    "scan": (
        lambda x, g, w: lax.scan(lambda c, _: (both(c, g, w), None), x, None, 2)[0],
        (X, G, W),
        2,
    ),
    "stacked": (
        lambda x, g, w: lax.scan(lambda c, _: (rms(c, g) @ w, rms(c)), x, None, 2),
        (X, G, W),
        2,
    ),
    "vmap": (
        lambda x, g: jax.vmap(lambda x: (rms(x, g), rms(x)))(x),
        (X, G),
        2,
    ),
    "layers": (lambda x, g, w: both(both(x, g, w), g, w), (X, G, W), 4),
}


def total(f: Any) -> Any:
    def loss(*args: Any) -> Any:
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*args)))

    return loss


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_is_found_with_its_gradient(name: str) -> None:
    f, args, count = PROGRAMS[name]
    op = "layer_norm" if name in ("centred", "without bias") else "rms_norm"
    assert rewriter.explain(f)(*args).counts(repeats=False)[op] == count
    gradient = jax.grad(total(f), tuple(range(len(args))))
    fast = rewriter.optimize(gradient, implementation=FORCED)
    assert fast.report(*args).counts(repeats=False, backward=True)[op] == count
    got = fast(*args)
    with jax.enable_x64(True):
        exact = jax.jit(gradient)(*(a.astype(float) for a in args))
    for one, other in zip(got, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_no_statistics_are_left() -> None:
    fast = rewriter.optimize(lambda x, g: (rms(x, g), rms(x)), implementation=FORCED)
    assert "rsqrt" not in str(fast.report(X, G).after)


def test_a_norm_and_its_product_with_the_scale_have_one_gradient() -> None:
    """Their cotangents are added before the norm: there is one site, the norm."""

    def f(x: Any, g: Any) -> Any:
        y = rms(x)
        return y, y * g

    report = rewriter.explain(jax.grad(total(f), (0, 1)))(X, G)
    assert report.counts(backward=True)["rms_norm"] == 1
    assert report.counts()["rms_norm"] == 1


@pytest.mark.parametrize("uses", [1, 3])
def test_what_only_gradients_read_is_no_second_norm(uses: int) -> None:
    def f(x: Any, g: Any, w: Any) -> Any:
        y = rms(x, g)
        return sum(y @ (w * k) for k in range(uses))

    report = rewriter.explain(jax.grad(total(f), (0, 1, 2)))(X, G, W)
    assert report.counts()["rms_norm"] == 1
