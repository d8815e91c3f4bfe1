"""Masks with numbers far from all positions, and sums in which they cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.support.arrays import normal

pytestmark = pytest.mark.once

B, T = 4, 300
MOST = 2**31 - 1
Q, K, V = (normal(B, T, 2, 64, seed=i) for i in range(3))
FORCED = {"attention": "memory_bounded"}


def attention(visible: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Attention with a mask of (positions of queries, of keys, numbers of batches)."""

    def f(q: jax.Array, k: jax.Array, v: jax.Array, *given: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8
        rows, columns = jnp.arange(T)[:, None], jnp.arange(T)
        mask = visible(rows, columns, *(x[:, None, None, None] for x in given))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return f


def check(f: Callable[..., jax.Array], *given: Any) -> None:
    fast = rewriter.optimize(f, implementation=FORCED)
    args = Q, K, V, *map(jnp.asarray, given)
    (site,) = fast.report(*args).sites
    assert site.op == "attention"
    np.testing.assert_allclose(fast(*args), f(*args), atol=2e-6)


BOUNDS = {
    "up to": lambda rows, columns, n: columns <= n,
    "before": lambda rows, columns, n: columns < n,
    "the least": lambda rows, columns, n: columns < jnp.minimum(n, rows[-1] - 3),
    "ahead": lambda rows, columns, n: columns - rows <= n,
    "behind": lambda rows, columns, n: rows - columns <= n,
    "prefix": lambda rows, columns, n: (columns <= rows) | (columns < n),
}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int32", (MOST, 5, 299, MOST - 2)),
        ("int32", (-MOST - 1, -3, 300, -MOST)),
        ("int8", (127, 5, 0, -128)),
        ("uint8", (255, 5, 0, 254)),
        ("uint32", (MOST, 5, 299, MOST - 2)),
        ("uint32", (2**32 - 1, MOST + 1, 2**32 - 299, 7)),  # negative as int32
    ],
)
def test_numbers_beyond_all_positions(bound: str, dtype: str, values: Any) -> None:
    """As programs have them where there is no limit; kernels add positions to them."""
    check(attention(BOUNDS[bound]), np.asarray(values, dtype))


PLACES = {
    "up to": lambda keys, p: keys <= p,
    "before": lambda keys, p: keys < p,
    "from": lambda keys, p: keys >= p,
    "after": lambda keys, p: keys > p,
    "from further on": lambda keys, p: keys >= p + 3,
    "up to earlier": lambda keys, p: p - jnp.asarray(3, p.dtype) >= keys,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int32", (MOST, -MOST - 1, 3, 7, 290)),
        ("uint32", (2**32 - 1, MOST + 1, MOST, 3, 290)),
        ("uint16", (2**16 - 1, 2**15, 3, 290)),
        ("int64", (2**40, -(2**40), MOST + 1, MOST, -MOST - 1, 5, 290)),
        ("uint64", (2**63, 2**32 + 5, MOST + 1, 3, 290)),
    ],
)
def test_positions_of_queries_beyond_all_keys(
    place: str, dtype: str, values: Any
) -> None:
    """Each query compares a number of its own with the positions of keys."""
    compared = PLACES[place]
    with jax.enable_x64(dtype in ("int64", "uint64")):
        p = jnp.asarray(np.resize(np.array(values, dtype), (T,)))

        def f(q: Any, k: Any, v: Any, places: Any) -> jax.Array:
            mask = compared(jnp.arange(T, dtype=dtype), places[:, None])
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            return jnp.einsum("bnts,bsnh->btnh", weights, v)

        fast = rewriter.optimize(f, implementation=FORCED)
        args = Q[:1], K[:1], V[:1], p
        np.testing.assert_allclose(fast(*args), f(*args), atol=2e-6)


@pytest.mark.parametrize("seen", ["lengths", "prefix"])
def test_negative_numbers_compared_without_a_sign(seen: str) -> None:
    """As unsigned they are beyond all positions."""
    before = lambda columns, n: columns.astype("uint32") < n.astype("uint32")
    forms = {
        "lengths": lambda rows, columns, n: before(columns, n),
        "prefix": lambda rows, columns, n: (columns <= rows) | before(columns, n),
    }
    check(attention(forms[seen]), np.array([-1, 7, -MOST, 300], "int32"))


def test_several_lengths_beyond_all_positions() -> None:
    one, other = np.array([MOST, 7, MOST, 20]), np.array([9, MOST, MOST, -MOST])
    both = lambda rows, columns, n, m: (columns <= n) & (columns < m)
    check(attention(both), one.astype("int32"), other.astype("int32"))


@pytest.mark.parametrize("power", [10, 19, 20, 24, 30])
def test_large_numbers_that_cancel(power: int) -> None:
    """What is left of them is as exact as they were: here one position."""
    large, n = 2**power, np.array([1, 20, 299, 300], "int32")
    check(attention(lambda rows, columns, n: columns + large <= n + (large - 1)), n)
    check(attention(lambda rows, columns, n: columns + (large - 1) < n + large), n)
    least = lambda rows, columns, n: (
        columns < jnp.minimum(n + 0 * rows, columns + large)
    )
    check(attention(least), n)


@pytest.mark.parametrize(
    "visible",
    [
        lambda rows, columns: rows + MOST >= columns,
        lambda rows, columns: rows + (MOST - 100) >= columns,
        lambda rows, columns: rows * 2**30 >= columns,
        lambda rows, columns: rows - MOST - 50 <= columns,
        lambda rows, columns: rows.astype("int8") >= columns,
        lambda rows, columns: (rows // 3).astype("int8") * jnp.int8(2) >= columns,
    ],
)
def test_positions_that_wrap_around(visible: Callable[..., Any]) -> None:
    """Whole numbers of a size do so, and what they then are is what counts."""
    check(attention(visible))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_small_numbers_that_wrap_around(dtype: str) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    n, one = np.array([5, most, least, most - 9], dtype), np.asarray(50, dtype)
    check(attention(lambda rows, columns, n: columns <= n + one), n)
    check(attention(lambda rows, columns, n: columns <= rows - (n - one)), n)
    check(attention(lambda rows, columns, n: columns <= -n), n)
    check(attention(lambda rows, columns, n: columns <= n * one), n)


@pytest.mark.parametrize("far", [MOST, MOST - 200])
def test_windows_wider_than_all_positions(far: int) -> None:
    check(attention(lambda rows, columns: columns - rows <= far))
    check(attention(lambda rows, columns: (rows - columns < far) & (columns <= rows)))
    check(attention(lambda rows, columns: jnp.abs(rows - columns) <= far))
