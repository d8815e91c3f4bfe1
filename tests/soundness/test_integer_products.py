"""Products of integers that are summed in few bits wrap around, and are no scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.soundness.passes import KERNELS

pytestmark = pytest.mark.once

T, N, H = 24, 2, 8
DRAW = np.random.default_rng(0)
Program = Callable[..., Any]


def drawn(*shape: int) -> np.ndarray:
    return DRAW.integers(-128, 128, shape).astype("i1")


Q, K, X, A, B, LATENT = (
    drawn(*s) for s in ((1, T, N, H),) * 2 + ((16, 64), (64, 24), (64, 24), (2, T, 32))
)  # fmt: skip
V = DRAW.normal(size=(1, T, N, H)).astype("f4")
ROWS, SIZES = drawn(3, 64, 24), np.array([5, 6, 5], "i4")


def scored(score: Program) -> Program:
    """Attention by a function of queries and keys."""
    return lambda: jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(score(*map(jnp.asarray, (Q, K)))), V
    )


def dots(q: Any, k: Any, **more: Any) -> jax.Array:
    return jnp.einsum("btnh,bsnh->bnts", q, k, **more)


def pairs(q: Any, k: Any) -> tuple[jax.Array, jax.Array]:
    q, k = jnp.asarray(q), jnp.asarray(k)
    return q.swapaxes(1, 2)[:, :, :, None], k.swapaxes(1, 2)[:, :, None]


def added(x: jax.Array) -> jax.Array:
    return lax.reduce(x, np.int8(0), lax.add, (4,))


WRAPS: dict[str, Program] = {
    "int8": scored(lambda q, k: dots(q, k) * 0.1),
    "cast behind": scored(lambda q, k: dots(q, k).astype(jnp.float32) * 0.1),
    "matrices": scored(
        lambda q, k: (q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)) * jnp.float32(0.1)
    ),
    "uint8": scored(lambda q, k: dots(q.view("u1"), k.view("u1")) * 0.1),
    "int16": scored(lambda q, k: dots(q * np.int16(99), k * np.int16(99)) * 1e-4),
    "into int16": scored(
        lambda q, k: dots(q, k, preferred_element_type=jnp.int16) * 1e-3
    ),
    "int32": scored(lambda q, k: dots(q * np.int32(9999), k * np.int32(9999)) * 1e-9),
    "then int8": scored(
        lambda q, k: dots(q, k, preferred_element_type=jnp.int32).astype(jnp.int8) * 0.1
    ),
    "a sum of int8": scored(
        lambda q, k: added((lambda a, b: (a // 16) * (b // 16))(*pairs(q, k))) * 0.1
    ),
    "latents": lambda: jnp.einsum(
        "bhts,bsc->bthc",
        jax.nn.softmax(jnp.einsum("bthc,bsc->bhts", LATENT[:, :4, None], LATENT) * 0.1),
        LATENT.astype("f4"),
    ),
    "unit": lambda: jax.nn.silu((jnp.asarray(X) @ A) * 0.01) * ((X @ B) * 0.01),
    "norm": lambda: (
        X * lax.rsqrt(jnp.einsum("td,td->t", X, X)[:, None].astype("float32") + 129)
    ),
    "loss": lambda: (
        lambda y: jax.nn.logsumexp(y, -1) - y[jnp.arange(16), jnp.arange(16)]
    )((jnp.asarray(X) @ A) * 0.01),
    "ragged": lambda: lax.ragged_dot(X, ROWS, SIZES).astype(jnp.float32),
}
RIGHT: dict[str, Program] = {
    "into int32": scored(
        lambda q, k: dots(q, k, preferred_element_type=jnp.int32) * 1e-3
    ),
    "cast to int32": scored(
        lambda q, k: dots(q.astype("int32"), k.astype("int32")) * 1e-3
    ),
    "cast to floats": scored(
        lambda q, k: dots(q.astype("float32"), k.astype("float32")) * 1e-3
    ),
}
"""Sums that no number of 8 bits takes out of 32."""


@pytest.mark.parametrize("name", [*WRAPS, *RIGHT])
def test_sums_of_products_are_the_machines(name: str) -> None:
    program = (WRAPS | RIGHT)[name]
    fast = rewriter.optimize(program, implementation=KERNELS, strict=True)
    want, got = (np.asarray(f()) for f in (jax.jit(program), fast))
    np.testing.assert_allclose(got, want, 1e-4, 1e-5 * np.nanmax(abs(want)))
    if name in RIGHT:
        assert [s.replaced for s in fast.report().sites] == [True]
