"""Plain kernels run on a CPU for bfloat16 rows that a transpose in front of them made.

XLA moves such a transpose into a product after it chose how to compute that.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.soundness.passes import KERNELS

R = np.random.default_rng(0)
M, K, N, GROUPS = 8, 8, 16, 2
SIZES = np.array([3, 5], np.int32)
LABELS = R.integers(0, N, M).astype(np.int32)
NUMBERS = R.integers(-8, 8, (K, N)).astype(np.int8)
UP = R.normal(size=(N, M)).astype(np.float32)


def bf16(*shape: int) -> jax.Array:
    return jnp.asarray(R.normal(size=shape), jnp.bfloat16)


def wide(x: Any, w: Any) -> Any:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def unit(x: Any, w: Any) -> Any:
    return (jax.nn.silu(wide(x, w)) * wide(x, w + 1)).astype(x.dtype)


def loss(x: Any, w: Any) -> Any:
    logits = wide(x, w)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], -1)


def ragged(x: Any, w: Any) -> Any:
    return jax.lax.ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32)


def quantized(x: Any, numbers: Any) -> Any:
    return wide(x, numbers.astype(jnp.bfloat16))


def attention(x: Any, w: Any) -> Any:
    shares = jax.nn.softmax(jnp.einsum("tk,ks->ts", x, w).astype(jnp.float32))
    return jnp.einsum("ts,ks->tk", shares.astype(x.dtype), w)


CASES = {
    "gated_linear_unit": (unit, bf16(K, N)),
    "linear_cross_entropy": (loss, bf16(K, N)),
    "ragged_dot": (ragged, bf16(GROUPS, K, N)),
    "quantized_dot": (quantized, NUMBERS),
    "attention": (attention, bf16(K, N)),
}


@pytest.mark.parametrize("op", CASES)
def test_rows_are_transposed_in_front_of_a_kernel(op: str) -> None:
    function, w = CASES[op]
    own = {name: by for name, by in KERNELS.items() if "latent" not in name}
    fast = rewriter.optimize(function, implementation=own)
    x = bf16(K, M)
    assert fast.report(x.T, w).counts()[op] == 1

    def results(run: Any, x: Any, up: Any) -> Any:
        out, back = jax.vjp(lambda x: run(-x.T, w), x)
        rows = up.T[:, : out.shape[1]]
        return out, back(-rows.astype(out.dtype))[0]

    usual = {"xla_backend_optimization_level": 3}
    got, want = (
        jax.jit(functools.partial(results, run), compiler_options=usual)(x, UP)
        for run in (fast, function)
    )
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=0.05 * abs(b).max())
