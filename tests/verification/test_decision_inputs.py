"""Which inputs only comparisons read, so that no rounding excuses other pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rewriter.verification.decision_inputs import only_deciding

PAIRS = {
    "compared": lambda t: t[:, None] >= t,
    "difference": lambda t: t[:, None] - t < 0.3,
    "scaled": lambda t: (t * 0.02)[:, None] >= t * 0.02,
    "clipped": lambda t: jnp.clip(t, 0, 3)[:, None] >= t,
    "chosen": lambda t: jnp.where(t > 0, t, 0.0)[:, None] >= t,
    "to integers": lambda t: t.astype(jnp.int32)[:, None] // 4 == t.astype(jnp.int32),
    "as a number": lambda t: (t[:, None] >= t).astype(jnp.float32) > 0,
    "in a call": jax.jit(lambda t: t[:, None] - t < 0.3),
    "in two calls": jax.jit(lambda t: jax.jit(lambda x: -x)(t)[:, None] <= -t),
    "floor": lambda t: jnp.floor(t)[:, None] >= t,
    "finite": lambda t: jnp.isfinite(t)[:, None] & (t == t),
    "sorted": lambda t: jnp.sort(t)[:, None] >= t,
}
ROUNDED = {
    "product and sum": lambda t: t[:, None] * 0.3 - t < 0.3,
    "product behind a layout": lambda t: jnp.stack([t * 0.3, t])[0][:, None] - t < 0.3,
    "exponential": lambda t: jnp.exp(t)[:, None] >= t,
    "softmax": lambda t: jax.nn.softmax(t)[:, None] >= 1e-3,
    "sum of all": lambda t: t.sum() > t[:, None],
    "quotient": lambda t: (t / 3)[:, None] >= t,
    "in 16 bits": lambda t: t.astype(jnp.bfloat16)[:, None] >= t,
    "in a call": jax.jit(lambda t: jnp.sin(t)[:, None] >= t),
    "product of a call": lambda t: jax.jit(lambda x: x * 0.3)(t)[:, None] - t < 0.3,
    "in a loop": lambda t: jax.lax.fori_loop(0, 2, lambda _, x: -x, t)[:, None] >= t,
}


def masked(mask):
    return lambda t, x: jnp.where(mask(t), x, 0.0) * 2


@pytest.mark.parametrize("name", PAIRS)
def test_what_only_comparisons_read_does_not_move(name):
    program = jax.make_jaxpr(masked(PAIRS[name]))(jnp.ones(8), jnp.ones((8, 8)))
    assert only_deciding(program) == [True, False]


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_on_its_way_moves(name):
    program = jax.make_jaxpr(masked(ROUNDED[name]))(jnp.ones(8), jnp.ones((8, 8)))
    assert only_deciding(program) == [False, False]


def test_what_is_read_elsewhere_too_moves():
    both = lambda t: jnp.where(t[:, None] >= t, t, 0.0)
    assert only_deciding(jax.make_jaxpr(both)(jnp.ones(8))) == [False]
