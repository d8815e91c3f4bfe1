"""Sums of rows by the distance of two positions: how they are written.

A table is read at `f(j - i)` for a query i and a key j; its gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.spellings.attention.scores import bucket

T, S, V, D = 12, 20, 32, 3
FORCED = {"embedding": "by_distance"}
RNG = np.random.default_rng(7)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)
WEIGHTS = RNG.normal(size=(T, S, D)).astype(np.float32)
OFFSET = np.int32(5)

Ids = Callable[..., Any]


def _positions(dtype: Any = jnp.int32) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(T, dtype=dtype)[:, None], jnp.arange(S, dtype=dtype)[None]


def _buckets(start: Any) -> jax.Array:
    i, j = _positions()
    return bucket(j - i, 32, 128)


def _one_way(start: Any) -> jax.Array:
    """T5's decoder: exact distances, then their logarithms."""
    i, j = _positions()
    away = -jnp.minimum(j - i, 0)
    far = 8 + (jnp.log(away.astype(jnp.float32) / 8 + 1e-6) / 2.8 * 8).astype(jnp.int32)
    return jnp.where(away < 8, away, jnp.minimum(far, V - 1))


def _clipped(start: Any) -> jax.Array:
    i, j = _positions()
    return jnp.clip(i - j, -8, 8) + 8


def _moved(start: Any) -> jax.Array:
    """Queries begin at a position that is an argument."""
    i, j = _positions()
    return jnp.clip(j - (i + start), -10, 10) + 10


def _in_float32(start: Any) -> jax.Array:
    i, j = _positions(jnp.float32)
    return jnp.clip(jnp.round(jnp.abs(j - i) * 0.7), 0, V - 1).astype(jnp.int32)


def _by_iota(start: Any) -> jax.Array:
    i, j = (lax.broadcasted_iota(jnp.int32, (T, S), k) for k in (0, 1))
    return jnp.where(j > i, 16, 0) + jnp.minimum(jnp.abs(j - i), 15)


def _turned(start: Any) -> jax.Array:
    """Keys first, and transposed."""
    i, j = _positions()
    return jnp.abs(i.T - j.T).T % V


def _by_numpy(start: Any) -> jax.Array:
    return jnp.asarray(np.abs(np.arange(S)[None] - np.arange(T)[:, None]) % V)


def _negated(start: Any) -> jax.Array:
    i, j = _positions()
    return jnp.abs(-i + j) // 2


def _called(start: Any) -> jax.Array:
    i, j = _positions()
    return jax.jit(lambda x: jnp.floor_divide(jnp.abs(x), 3))(jnp.subtract(i, j))


SPELLINGS: dict[str, Ids] = {
    "buckets": _buckets, "one way": _one_way, "clipped": _clipped, "moved": _moved,
    "float32": _in_float32, "iota": _by_iota, "turned": _turned, "numpy": _by_numpy,
    "negated": _negated, "called": _called,
}  # fmt: skip


def _other(of: Callable[..., Any], dtype: Any = jnp.int32) -> Ids:
    return lambda start: (of(*_positions(dtype), start) % V).astype(jnp.int32)


LOOK_ALIKES: dict[str, Ids] = {
    "sum": _other(lambda i, j, start: i + j),
    "query alone": _other(lambda i, j, start: i + 0 * j),
    "twice": _other(lambda i, j, start: jnp.abs(2 * j - i)),
    "halves": _other(lambda i, j, start: jnp.abs(j // 2 - i // 2)),
    "product": _other(lambda i, j, start: i * j),
    "order": _other(lambda i, j, start: i * S + j),
    "chosen": _other(lambda i, j, start: jnp.where(i > 3, j - i, 0)),
    "clipped alone": _other(lambda i, j, start: jnp.minimum(j, 9) - i + T),
    "bfloat16": _other(lambda i, j, start: jnp.abs(300 + j - (300 + i)), jnp.bfloat16),
    "tenths": _other(lambda i, j, start: jnp.abs(j * 0.1 - i * 0.1) * 10, jnp.float32),
    "far in float32": _other(
        lambda i, j, start: jnp.abs(
            (j + (start << 24)).astype("float32")
            - (i + (start << 24)).astype("float32")
        )
    ),
    "of data": _other(lambda i, j, start: jnp.abs(j - i * start)),
    "numpy": lambda start: jnp.asarray((np.arange(T * S) % V).reshape(T, S)),
}


def _few(count: int, names: Iterable[str]) -> list[Any]:
    """Names of which those behind the first ones run once in a while."""
    once = lambda name: pytest.param(name, marks=pytest.mark.once)
    return [x if i < count else once(x) for i, x in enumerate(names)]


def _gradient(ids: Ids) -> Callable[..., Any]:
    def program(table: Any, weights: Any, start: Any) -> Any:
        read = lambda table: (table[ids(start)] * weights).sum()
        return jax.grad(read)(table)

    return program


def _across(ids: Ids) -> list[int]:
    """What is proved of the sums of a program."""
    report = rewriter.optimize(_gradient(ids)).report(TABLE, WEIGHTS, OFFSET)
    return [x.params.get("across", 0) for x in report.sites if x.op == "embedding"]


@pytest.mark.parametrize("name", _few(3, SPELLINGS))
def test_rows_of_a_distance_are_added_first(name: str) -> None:
    program = _gradient(SPELLINGS[name])
    fast = rewriter.optimize(program, implementation=FORCED)
    (site,) = fast.report(TABLE, WEIGHTS, OFFSET).sites
    assert (site.kernel, site.params["across"]) == ("by_distance", S)
    got = fast(TABLE, WEIGHTS, OFFSET)
    ids = np.asarray(SPELLINGS[name](OFFSET))
    want = np.zeros((V, D))
    np.add.at(want, ids, WEIGHTS.astype(np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", _few(4, LOOK_ALIKES))
def test_other_ids_are_not_those_of_distances(name: str) -> None:
    assert _across(LOOK_ALIKES[name]) in ([0], [])


def test_the_gradient_of_a_bias_in_attention() -> None:
    """The sums read what attention's gradient gives, and agree with float64."""

    def loss(table: Any, q: Any, k: Any) -> Any:
        bias = table[_buckets(0)].transpose(2, 0, 1)
        scores = jnp.einsum("tnh,snh->nts", q, k) + bias
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), k).sum()

    q, k = (RNG.normal(size=(n, D, 8)).astype(np.float32) for n in (T, S))
    fast = rewriter.optimize(jax.grad(loss), implementation=FORCED)
    sites = {x.op: x.kernel for x in fast.report(TABLE, q, k).sites}
    assert sites["embedding"] == "by_distance"
    with jax.enable_x64(True):
        want = jax.grad(loss)(*(np.asarray(x, np.float64) for x in (TABLE, q, k)))
    np.testing.assert_allclose(fast(TABLE, q, k), want, rtol=1e-4, atol=1e-5)
