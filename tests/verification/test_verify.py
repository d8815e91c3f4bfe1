"""verify: a float64 replay, honest errors, gradients, failures."""

from __future__ import annotations

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.measure import oracle
from rewriter.program import trace
from rewriter.rewrite.rewritten import Rewritten
from tests.support.programs import FORCED, block, inputs

engine = importlib.import_module("rewriter.run.analysis")


def test_table():
    result = rewriter.verify(block, grad=True, implementation=FORCED)(*inputs())
    assert result.ok
    names = [r.name for r in result.rows]
    assert "out" in names
    assert "grad.params['qkv']" in names
    assert all(0 < r.original < 1e-5 for r in result.rows)
    assert str(result).startswith("rewriter.verify(block)   float32 against f64")
    assert json.loads(result.json())["ok"] is True
    assert result.check() is result


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types(dtype):
    result = rewriter.verify(block, implementation=FORCED)(*inputs(dtype=dtype))
    assert result.ok, str(result)
    assert result.rows[0].original > 1e-4


def test_wrong_numbers_are_found(monkeypatch):
    def wrong(closed, *others):
        del others
        run = jax.extend.core.jaxpr_as_fun(closed)
        return Rewritten(
            jax.make_jaxpr(lambda *a: run(*a)[0] * 1.001)(*closed.in_avals)
        )

    monkeypatch.setattr(engine, "rewrite", wrong)
    result = rewriter.verify(lambda x: jnp.sin(x))(jnp.arange(3.0))
    assert not result.ok
    assert "OFF" in str(result)
    with pytest.raises(rewriter.VerificationFailed, match=r"error 1\.0e-03; exp"):
        result.check()


def test_new_nans_are_found(monkeypatch):
    def wrong(closed, *others):
        del others
        return Rewritten(jax.make_jaxpr(lambda x: x / 0 * 0)(*closed.in_avals))

    monkeypatch.setattr(engine, "rewrite", wrong)
    assert not rewriter.verify(lambda x: x * 1.0)(jnp.arange(3.0)).ok


def test_a_function_that_does_not_trace():
    with pytest.raises(rewriter.TraceError):
        rewriter.verify(lambda x: x if x > 0 else -x)(jnp.float32(1))


PROGRAMS = {
    "scatter": lambda x, i: jnp.zeros((8, 4)).at[i].add(x),
    "gather": lambda x, i: x[i],
    "sort": lambda x, i: jax.lax.sort(x, dimension=0),
    "top_k": lambda x, i: jax.lax.top_k(x, 2)[0],
    "while": lambda x, i: jax.lax.fori_loop(0, i[0], lambda _, c: jnp.tanh(c), x),
    "scan": lambda x, i: jax.lax.scan(lambda c, r: (c + r, c.sum()), x[0], x),
    "cond": lambda x, i: jax.lax.cond(i[0] > 0, jnp.sin, jnp.cos, x),
    "remat": lambda x, i: jax.grad(lambda y: jax.checkpoint(jax.nn.gelu)(y).sum())(x),
    "custom": lambda x, i: jax.nn.relu(x) + jax.nn.silu(x),
    "casts": lambda x, i: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32),
    "random": lambda x, i: x + jax.random.normal(jax.random.key(0), x.shape),
    "ragged": lambda x, i: jax.lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([1, 3])),
    "conv": lambda x, i: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "solve": lambda x, i: jnp.linalg.inv(x + 4 * jnp.eye(4)),
    "window": lambda x, i: jax.lax.cumsum(x) + jax.lax.cumlogsumexp(x),
    "fft": lambda x, i: jnp.abs(jnp.fft.fft(x)),
    "norm": lambda x, i: jax.nn.standardize(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_replay_in_float64(name):
    x, i = jax.random.normal(jax.random.key(0), (4, 4)), jnp.array([1, 2, 3, 3])
    fn = jax.jit(PROGRAMS[name])
    exact, note = oracle.in_float64(trace.trace(fn, (x, i)).closed_jaxpr, [x, i])
    assert "compared" not in note
    tolerance = 1e-2 if name == "casts" else 1e-5
    for got, want in zip(jax.tree.leaves(fn(x, i)), exact, strict=True):
        assert oracle.error(got, want) < tolerance
        if np.issubdtype(want.dtype, np.floating):
            assert want.dtype == np.float64


def test_replay_is_more_exact():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    fn = jax.jit(lambda x: jax.nn.softmax(x @ x.T) @ x)
    exact, _ = oracle.in_float64(trace.trace(fn, (x,)).closed_jaxpr, [x])
    y = np.asarray(x, np.float64)
    scores = np.exp(y @ y.T - (y @ y.T).max(-1, keepdims=True))
    want = scores / scores.sum(-1, keepdims=True) @ y
    assert np.abs(exact[0] - want).max() < 1e-13


def test_error():
    assert oracle.error(np.ones(3), np.ones(3)) == 0
    assert oracle.error(np.array([1, np.nan]), np.ones(2)) == float("inf")
    assert oracle.error(np.array([1, 2]), np.array([1, 3])) == 0.5
    assert oracle.error(np.ones(2), np.ones(3)) == float("inf")
    assert oracle.allowed("int32") == 0.0


def test_benchmark():
    result = rewriter.benchmark(block, pairs=2)(*inputs())
    assert [r.mode for r in result.rows] == ["forward", "forward_and_vjp"]
    assert result.rows[0].original.temp_bytes >= 0
    assert "2 interleaved pairs" in str(result)
    assert json.loads(result.json())["rows"][0]["speedup"] > 0
    with pytest.raises(rewriter.ConfigError, match="Choose forward, vjp, forward_and"):
        rewriter.benchmark(block, mode="both ways")
