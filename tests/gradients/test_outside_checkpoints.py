"""Operands that are scaled, laid out or cut outside of the checkpoint around an op."""

from __future__ import annotations

from collections.abc import Callable
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
QKV = tuple(RANDOM.normal(size=(3, B, T, N, H)).astype(np.float32))
OPS = ("attention", "rms_norm", "gated_linear_unit")
FORCED = dict.fromkeys(OPS, "memory_bounded")


@jax.checkpoint
def attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * 0.5
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v)


@jax.checkpoint
def norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


@jax.checkpoint
def unit(x: Any, gate: Any, up: Any) -> Any:
    return jax.nn.silu(x @ gate) * (x @ up)


def in_blocks(q: Any, k: Any, v: Any) -> Any:
    parts = jnp.moveaxis(q.reshape(B, 4, -1, N, H), 1, 0)
    out = jnp.stack([attention(part, k, v) for part in parts])
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def in_mapped_blocks(q: Any, k: Any, v: Any) -> Any:
    parts = q.reshape(B, 4, -1, N, H)
    out = jax.vmap(lambda part: attention(part, k, v), 1, 1)(parts)
    return out.reshape(q.shape)


def turned(x: Any) -> Any:
    return x.swapaxes(1, 2).reshape(B, N, T, H).swapaxes(1, 2)


def flat(x: Any) -> Any:
    return x.reshape(B * T, -1)


PROGRAMS: dict[str, tuple[str, int, Callable[..., Any]]] = {
    "scaled queries": ("attention", 1, lambda q, k, v: attention(q * 2, k, v)),
    "scaled values": ("attention", 1, lambda q, k, v: attention(q, k, v * 2)),
    "all scaled": ("attention", 1, lambda q, k, v: attention(q * 2, k / 2, v * 3)),
    "laid out": (
        "attention",
        1,
        lambda q, k, v: attention(q.reshape(B, T, -1).reshape(q.shape), k, v),
    ),
    "turned": (
        "attention",
        1,
        lambda q, k, v: attention(q, *map(turned, (k, v))),
    ),
    "repeated heads": (
        "attention",
        1,
        lambda q, k, v: attention(q, *(jnp.repeat(x[:, :, :1], N, 2) for x in (k, v))),
    ),
    "scaled by a layer's number": (
        "attention",
        2,
        lambda q, k, v: attention(q * 2, k, v) + attention(q * 3, k, v),
    ),
    "blocks of queries": ("attention", 4, in_blocks),
    "mapped blocks of queries": ("attention", 1, in_mapped_blocks),
    "a norm": ("rms_norm", 1, lambda q, k, v: norm(q * 2, k[0, 0, 0]) + v),
    "a unit": (
        "gated_linear_unit",
        1,
        lambda q, k, v: unit(flat(q) * 2, flat(k)[: N * H], flat(v)[: N * H]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_found_in_the_checkpoint(name):
    op, count, program = PROGRAMS[name]
    step = jax.value_and_grad(lambda *x: (program(*x) ** 2).mean(), (0, 1, 2))
    fast = rewriter.optimize(step, implementation=FORCED)
    got = jax.tree.leaves(fast(*QKV))
    sites = [s for s in fast.report().sites if s.op == op]
    assert sum(s.repeats for s in sites if s.backward and s.replaced) == count
    want, _ = in_float64(jax.make_jaxpr(step)(*QKV), QKV)
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * max(np.linalg.norm(b), 1e-3)
