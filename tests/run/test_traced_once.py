"""What the first call imports changes nothing in the keys of JAX's caches.

JAX asks a list of settings whether it knows a traced or a compiled program. Some of
Pallas' modules add a setting when they are imported. A program that was traced before
would be traced, rewritten and compiled again at its second call.
"""

from __future__ import annotations

import builtins
import subprocess
import sys

import pytest

import rewriter
from rewriter._jax import values

CALLS = """
import jax, jax.numpy as jnp, rewriter

counts = {"traced": 0, "compiled": 0}

def compiled(name, seconds, **more):
    counts["compiled"] += "backend_compile" in name

jax.monitoring.register_event_duration_secs_listener(compiled)

def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

def layer(x, w, v):
    counts["traced"] += 1
    y = jax.nn.softmax(jnp.einsum("bth,bsh->bts", x, x) * 0.1) @ x
    y = norm(x + y)
    return jax.nn.silu(y @ w) * (y @ v)

def loss(x, w, v):
    logits = layer(x, w, v).astype(jnp.float32)
    picked = jax.nn.log_softmax(logits)[..., 3]
    return -jnp.mean(picked)

x, w = jnp.ones((2, 1024, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)
for fn in (layer, jax.value_and_grad(loss)):
    fast = rewriter.optimize(fn)
    jax.block_until_ready(fast(x, w, w))
    counts.update(traced=0, compiled=0)
    jax.block_until_ready(fast(x, w, w))
    assert fast.report(x, w, w).sites
    print(counts)
"""
"""Two programs, called twice: what the second call does."""


def test_a_second_call_is_neither_traced_nor_compiled() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CALLS], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == ["{'traced': 0, 'compiled': 0}"] * 2


def test_on_a_tpu_the_settings_of_its_kernels_are_there_before_anything_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    found = lambda name, *more: asked.append(name) or real(name, *more)
    real = builtins.__import__
    monkeypatch.setattr(values, "tpu_is_attached", lambda: True)
    values.settings_of_kernels.cache_clear()
    with monkeypatch.context() as watched:
        watched.setattr(builtins, "__import__", found)
        rewriter.optimize(lambda x: x)
    values.settings_of_kernels.cache_clear()
    assert "jax.experimental.pallas.tpu" in asked
