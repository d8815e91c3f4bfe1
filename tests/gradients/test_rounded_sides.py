"""Gradients beside values that the program rounds, as a dropout mask in 16 bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.measure.oracle import in_float64

pytestmark = pytest.mark.once

B, T, N, H = 2, 8, 2, 4
RANDOM = np.random.default_rng(0)
QKV = RANDOM.normal(size=(3, B, T, N, H)).astype(np.float32)
KEEP = RANDOM.random((B, N, T, T)) < 0.9

DROPPED = {
    "quotient": lambda w, keep: w * (keep.astype(w.dtype) / jnp.asarray(0.9, w.dtype)),
    "for all heads": lambda w, keep: w * (keep[:1, :1] / jnp.asarray(0.9, w.dtype)),
    "chosen": lambda w, keep: jnp.where(keep, w / jnp.asarray(0.9, w.dtype), 0),
    "product": lambda w, keep: w * keep / 0.9,
}


def attention(drop: Any, q: Any, k: Any, v: Any, keep: Any) -> Any:
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * 0.5
    weights = drop(jax.nn.softmax(scores), keep)
    return jnp.einsum("bnqk,bknh->bqnh", weights, v)


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_has_its_gradients(name, dtype):
    def loss(q: Any, k: Any, v: Any, keep: Any) -> Any:
        out = attention(DROPPED[name], q, k, v, keep)
        return (out.astype(jnp.float32) ** 2).sum()

    args = (*(x.astype(dtype) for x in QKV), KEEP)
    step = jax.grad(loss, (0, 1, 2))
    fast = rewriter.optimize(step, implementation={"attention": "memory_bounded"})
    got = fast(*args)
    (site,) = fast.report().sites
    assert site.replaced
    assert site.backward
    want, _ = in_float64(jax.make_jaxpr(step)(*args), args)
    limit = 1e-6 if dtype == "float32" else 2e-2
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= limit * np.linalg.norm(
            b
        )
