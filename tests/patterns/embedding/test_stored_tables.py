"""Lookups in tables of 4 and 8 bits: XLA widens those rows alone that ids name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

V, D = 4096, 64
RNG = np.random.default_rng(7)
IDS = RNG.integers(0, V, (2, 5)).astype(np.int32)
BY_ROW = RNG.uniform(0.5, 1.5, (V, 1)).astype(np.float32) / 100
BY_GROUP = RNG.uniform(0.5, 1.5, (V, D // 32)).astype(np.float32) / 100
NARROW = jnp.bfloat16


def stored(dtype: str) -> jax.Array:
    """A table of numbers of few bits."""
    if "float" in dtype:
        return jnp.asarray(RNG.normal(size=(V, D)), dtype)
    low = 0 if dtype.startswith("u") else -8
    return jnp.asarray(RNG.integers(low, low + 16, (V, D)), dtype)


def rows_first(t: Any, s: Any, ids: Any) -> Any:
    return t[ids].astype(NARROW) * s[ids].astype(NARROW)


def rows_last(t: Any, s: Any, ids: Any) -> Any:
    return (t.astype(NARROW) * s.astype(NARROW))[ids]


def taken(t: Any, s: Any, ids: Any) -> Any:
    return jnp.take(t.astype(jnp.float32) * s, ids, axis=0).astype(NARROW)


def with_zeros(t: Any, s: Any, ids: Any) -> Any:
    return ((t.astype(jnp.float32) - 8) * s)[ids]


def one_scale(t: Any, s: Any, ids: Any) -> Any:
    return jnp.take(t.astype(NARROW), ids, axis=0, mode="clip") * s[0, 0]


def of_groups(t: Any, s: Any, ids: Any) -> Any:
    groups = t.astype(jnp.float32).reshape(V, -1, 32) * s[..., None]
    return groups.reshape(V, D)[ids].astype(NARROW)


def repeated(t: Any, s: Any, ids: Any) -> Any:
    return t[ids].astype(NARROW) * jnp.repeat(s, 32, axis=1)[ids].astype(NARROW)


def joined(t: Any, s: Any, ids: Any) -> Any:
    return rows_last(t, s, ids) + rows_last(t[:8], s[:8], jnp.arange(5))


def under_vmap(t: Any, s: Any, ids: Any) -> Any:
    return jax.vmap(lambda i: rows_last(t, s, i))(ids)


def under_jit(t: Any, s: Any, ids: Any) -> Any:
    return jax.jit(rows_last)(t, s, ids)


CASES = [
    (rows_first, "int8", BY_ROW), (rows_first, "int4", BY_ROW),
    (rows_last, "int8", BY_ROW), (rows_last, "float8_e4m3fn", BY_ROW),
    (rows_last, "int4", BY_ROW), (taken, "float8_e5m2", BY_ROW),
    (with_zeros, "uint8", BY_ROW), (with_zeros, "uint4", BY_ROW),
    (one_scale, "int8", BY_ROW), (of_groups, "int8", BY_GROUP),
    (repeated, "int4", BY_GROUP), (joined, "int8", BY_ROW),
    (under_vmap, "int8", BY_ROW), (under_jit, "int8", BY_ROW),
]  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("written", "dtype", "scale"), CASES)
@pytest.mark.parametrize("target", [None, "h200"])
def test_rows_and_gradients_are_the_programs(
    written: Any, dtype: str, scale: np.ndarray, target: str | None
) -> None:
    table, weights = stored(dtype), RNG.normal(size=(2, 5, D)).astype(np.float32)
    with rewriter.config(target=target) if target else rewriter.config():
        fast = rewriter.optimize(written)
        got = fast(table, scale, IDS)
        total = lambda f: lambda s: (f(table, s, IDS) * weights).sum()
        slope = jax.grad(total(fast))(jnp.asarray(scale))
    np.testing.assert_array_equal(got, jax.jit(written)(table, scale, IDS))
    want = jax.grad(total(written))(jnp.asarray(scale))
    assert np.linalg.norm(slope - want) <= 2**-6 * np.linalg.norm(want)
    exact = np.asarray(written(table.astype(jnp.float32), scale, IDS), np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-6)


@pytest.mark.parametrize("written", [rows_first, rows_last, taken])
def test_no_table_is_widened(written: Any) -> None:
    """Nothing as large as the table is written: 262144 bytes of 8 bits."""
    fast = rewriter.optimize(written)
    shapes = (
        jax.ShapeDtypeStruct((V, D), "int8"), jax.ShapeDtypeStruct((V, 1), "float32"),
        jax.ShapeDtypeStruct(IDS.shape, "int32"),
    )  # fmt: skip
    compiled = jax.jit(fast).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < V * D
