"""Windows whose length is a value: first and last keys of each query, no mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

T = 40


def attention(mask):
    def f(q, k, v, w):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.3
        at = jnp.arange(k.shape[1], dtype=jnp.int32)  # wraps in a float64 run, too
        t, at = at[:, None], at[None]
        s = jnp.where(mask(t, at, w), s, -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v)

    return f


WINDOWS = {
    "difference": lambda t, s, w: (s <= t) & (t - s < w),
    "from": lambda t, s, w: (s <= t) & (s > t - w),
    "inclusive": lambda t, s, w: (s <= t) & (s >= t - w),
    "not before": lambda t, s, w: (s <= t) & ~(t - s >= w),
    "clamped": lambda t, s, w: (s <= t) & (s >= jnp.maximum(t - w, 0)),
    "both sides": lambda t, s, w: jnp.abs(t - s) < w,
    "to the right": lambda t, s, w: (s >= t) & (s < t + w),
    "one of each": lambda t, s, w: (s <= t + w) & (s >= t - 3),
    "of each sequence": lambda t, s, w: (s <= t) & (t - s < w[:, None, None, None]),
}
LOOK_ALIKES = {
    "by a condition": lambda t, s, w: (s <= t) & jnp.where(w > 3, t - s < w, s > w),
    "dilated": lambda t, s, w: (s <= t) & ((t - s) % w == 0),
    "blocks": lambda t, s, w: (s <= t) & (t // w == s // w),
    "twice as far": lambda t, s, w: (s <= t) & (2 * s > t - w),
}


def given(name):
    r = np.random.default_rng(0)
    q, k, v = (jnp.asarray(r.normal(size=(2, T, 2, 8)), jnp.float32) for _ in range(3))
    w = jnp.array([4, 7]) if name == "of each sequence" else jnp.int32(5)
    return q, k, v, w


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_read_without_a_mask_of_pairs(name):
    (site,) = rewriter.explain(attention(WINDOWS[name]))(*given(name)).sites
    assert "first_position" in site.shapes or "last_position" in site.shapes
    assert f"{T},{T}]" not in site.shapes


@pytest.mark.once
@pytest.mark.parametrize("name", [*WINDOWS, *LOOK_ALIKES])
def test_values_and_gradients(name):
    """Of lengths at which sums wrap around, too; rows may have no keys."""
    f = attention({**WINDOWS, **LOOK_ALIKES}[name])
    fast = rewriter.optimize(f, implementation={"attention": "memory_bounded"})
    both = lambda f: jax.jit(
        jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    )
    *qkv, w = given(name)
    quick, plain = both(fast), both(f)
    for length in (1, 7, T, 2**31 - 1, -3, -(2**31)):
        w = jnp.full(w.shape, length, jnp.int32)
        with jax.enable_x64(True):
            exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in qkv]
            want = plain(*exact, w)
        for x, y in zip(
            jax.tree.leaves(quick(*qkv, w)), jax.tree.leaves(want), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
