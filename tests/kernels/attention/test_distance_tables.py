"""Gradients of tables that are added to scores by distance, by the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention.hopper import distance_tables
from rewriter.kernels.attention.xla import scored as xla
from tests.kernels.attention.test_hopper import (
    LIMITS,
    error,
    needs_hopper,
    operands,
)
from tests.spellings.attention.scores import bucket
from tests.support.kernels import simulator
from tests.support.kernels.float64 import float64

B, T, S, N, H = 2, 100, 140, 2, 32
SCALE = 0.3
TABLE = np.random.default_rng(3).normal(size=(32, N)).astype(np.float32)


def _table(table: Any, i: Any, j: Any) -> Any:
    return jnp.transpose(table[bucket(j - i, 32, 128)], (2, 0, 1))


def _program(of: Callable[..., Any]) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, table: Any) -> Any:
        wide = jnp.promote_types(q.dtype, jnp.float32)
        x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide)
        i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
        weights = jax.nn.softmax(of(x * SCALE, i, j, table))
        return jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v)

    return attend


def _added(x: Any, i: Any, j: Any, table: Any) -> Any:
    return x + _table(table, i, j)


def _site(of: Callable[..., Any]) -> tuple[dict[str, Any], Any]:
    """The operands and parameters of a program's site, and the result's cotangent."""
    q, k, v, up = operands((B, T, S, N, N, H, H), "bfloat16")
    forced = {"scored_attention": "memory_bounded"}
    report = rewriter.optimize(_program(of), implementation=forced)
    (site,) = report.report(q, k, v, TABLE).sites
    given = {"q": q, "k": k, "v": v, "table_0": jnp.asarray(TABLE.T[None])}
    params = {n: x for n, x in site.params.items() if n != "out_dtype"}
    return given | params, up


def _hidden(x: Any, i: Any, j: Any, table: Any) -> Any:
    """Keys ahead of a query's 20th are hidden, and those behind its 90th."""
    seen = (j <= i + 20) & (j > i - 90)
    return jnp.where(seen, _added(x, i, j, table), -jnp.inf)


def _bent(x: Any, i: Any, j: Any, table: Any) -> Any:
    return 5 * jnp.tanh(x / 5) + _table(table, i, j)


SEEN = {"all": _added, "some": _hidden, "bent": _bent}


@pytest.mark.once
@pytest.mark.parametrize("name", SEEN)
def test_the_table_of_buckets(name: str) -> None:
    """The kernels' code, run by threads, beside float64."""
    of = SEEN[name]
    given, up = _site(of)
    with float64():
        wide = [np.asarray(x, np.float64) for x in (*(given[n] for n in "qkv"), TABLE)]
        _, back = jax.vjp(_program(of), *wide)
        want = np.asarray(back(np.asarray(up, np.float64))[3]).T[None]
    out, residuals = xla.forward(**given, residuals=True)
    with simulator.simulated():
        got = distance_tables.of_distances(
            given | {"out": out, "residuals": residuals, "cotangent": up}
        )
    assert got.keys() == {"table_0"}
    assert error(got["table_0"], want) <= 3 * LIMITS["bfloat16"]


OTHERS: dict[str, Callable[..., Any]] = {
    "multiplied": lambda x, i, j, table: x * _table(table, i, j),
    "bent together": lambda x, i, j, table: jnp.tanh(x + _table(table, i, j)),
    "negative": lambda x, i, j, table: x - _table(table, i, j),
    "both": lambda x, i, j, table: (
        jnp.exp(_table(table, i, j)) * x + _table(table, i, j)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_use_the_number_otherwise(name: str) -> None:
    given, _ = _site(OTHERS[name])
    assert distance_tables.of_distances(given) == {}


@pytest.mark.once
def test_the_gradient_of_a_rewritten_program_has_the_kernel() -> None:
    """Lowered for a GPU: forward, dk and dv, dq, and the bias's cotangent."""
    fast = rewriter.optimize(
        _program(_added), implementation={"scored_attention": "hopper"}
    )

    def loss(table: Any, *qkv: Any) -> Any:
        return fast(*qkv, table).astype(jnp.float32).sum()

    q, k, v, _ = operands((B, T, S, N, N, H, H), "bfloat16")
    text = jax.export.export(jax.jit(jax.grad(loss)), platforms=["cuda"])(
        TABLE, q, k, v
    ).mlir_module()
    assert text.count("mosaic_gpu_v2") >= 2
    assert f"tensor<{B}x{N}x{T}x{S}xf32>" not in text


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("name", SEEN)
def test_the_table_of_buckets_on_a_gpu(name: str) -> None:
    """As near to float64 as the program as written, or nearer."""
    program = _program(SEEN[name])
    q, k, v, up = operands((B, T, S, N, N, H, H), "bfloat16")
    kernels = {"scored_attention": "hopper"}
    fast = rewriter.optimize(program, implementation=kernels)

    def gradient(f: Callable[..., Any], *qkv: Any, up: Any = up) -> Any:
        return jax.jit(jax.grad(lambda r: (f(*qkv, r) * up).sum()))

    got, own = (gradient(f, q, k, v)(TABLE) for f in (fast, program))
    with float64():
        wide = [np.asarray(x, np.float64) for x in (q, k, v)]
        more = np.asarray(up, np.float64)
        want = np.asarray(
            gradient(program, *wide, up=more)(np.asarray(TABLE, np.float64))
        )
    limit = max(2 * LIMITS["bfloat16"], 1.5 * error(own, want))
    assert error(got, want) <= limit
