"""Masks that compare positions of keys and queries that are data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests.spellings.check import differs, explain, operand_names

pytestmark = pytest.mark.once

B, T, S, N, H = 2, 6, 12, 2, 4
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
RANDOM = np.random.default_rng(0)
Q, K, V = (RANDOM.normal(size=(B, n, N, H)).astype(np.float32) for n in (T, S, S))
ENDS = np.array([LEAST, LEAST + 1, LEAST + 6, -3, 0, 2, 5, 7, MOST - 6, MOST - 1, MOST])
OF_KEYS = RANDOM.choice(ENDS, (B, S)).astype(np.int32)
OF_QUERIES = RANDOM.choice(ENDS, (B, T)).astype(np.int32)
STARTS = np.array([LEAST, 3], np.int32)
IDS = RANDOM.integers(0, 2, (B, S)).astype(np.int32)
KEYS, ROWS = np.arange(S), np.arange(T)


def keys(x: Any) -> Any:
    return x[:, None, None]


def rows(x: Any) -> Any:
    return x[:, None, :, None]


def each(x: Any) -> Any:
    return x[:, None, None, None]


def near(p: Any, q: Any) -> Any:
    return (keys(p) <= rows(q)) & (keys(p) > rows(q) - 5)


def before(at: Any) -> Any:
    return at + jnp.arange(T)[:, None]


def between(x: Any, first: Any, end: Any) -> Any:
    return (x >= first) & (x < end)


AT = np.int32(4)
LAST, BOTH = "kv_positions last_position", "kv_positions first_position last_position"
SEGMENTS = "q_segments kv_segments"
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
CASES: dict[str, Case] = {
    "one key": (SEGMENTS, lambda n: jnp.arange(S) == each(n), (STARTS + 4,)),
    "one key, by its negation": (
        SEGMENTS,
        lambda n: ~(jnp.arange(S) != -each(n)),
        (STARTS,),
    ),
    "up to the query": (LAST, lambda p, q: keys(p) <= rows(q), (OF_KEYS, OF_QUERIES)),
    "turned": (LAST, lambda p, q: ~(rows(q) < keys(p)), (OF_KEYS, OF_QUERIES)),
    "from the query on": (
        "kv_positions first_position",
        lambda p, q: keys(p) >= rows(q),
        (OF_KEYS, OF_QUERIES),
    ),
    "a window": (f"mask {BOTH}", near, (OF_KEYS, OF_QUERIES)),
    "a window of counted ones": (
        BOTH,
        lambda p, q: near(jnp.clip(p, 0, 99), jnp.clip(q, 0, 99)),
        (OF_KEYS, OF_QUERIES),
    ),
    "written slots of a cache": (
        f"mask {LAST}",
        lambda p, q: (keys(p) <= rows(q)) & (keys(p) >= 0),
        (OF_KEYS, OF_QUERIES),
    ),
    "slots in order": (LAST, lambda q: rows(q) >= KEYS, (OF_QUERIES,)),
    "slots before a count": (LAST, lambda q: rows(q) > KEYS, (OF_QUERIES,)),
    "documents": (
        f"{SEGMENTS} {LAST}",
        lambda p, q, i: (keys(p) <= rows(q)) & (keys(i) == rows(i[:, :T])),
        (OF_KEYS, OF_QUERIES, IDS),
    ),
    "documents of two arrays": (
        f"{SEGMENTS} {LAST}",
        lambda p, q, i, j: (keys(p) <= rows(q)) & (keys(i) == rows(j)),
        (OF_KEYS, OF_QUERIES, IDS, IDS[:, 3 : 3 + T]),
    ),
    "counted from a mask": (
        f"mask {LAST}",
        lambda m: (lambda p: (keys(p) <= rows(p[:, -T:])) & (keys(m) > 0))(
            jnp.cumsum(m, -1) - 1
        ),
        (IDS,),
    ),
    "prefixes by a sum": (
        LAST,
        lambda m: (lambda c: keys(c) <= rows(c[:, :T]))(jnp.cumsum(m, -1)),
        (IDS,),
    ),
    "left padding, moved": (
        LAST,
        lambda s, at: before(at) >= KEYS - each(s),
        (STARTS, AT),
    ),
    "a ring by its start": (
        f"mask {LAST}",
        lambda s, at: before(at) >= (KEYS - each(s)) % S,
        (STARTS, AT),
    ),
    "left padding": (
        f"{SEGMENTS} offset",
        lambda s, at: (each(s) <= KEYS) & (before(at) >= KEYS),
        (STARTS, AT),
    ),
    # ------------------------------------------------ what stays a table
    "a ring by its age": (
        "mask",
        lambda at: (lambda age: (age < 5) & (before(at) - age >= 0))(
            (before(at) - KEYS) % S
        ),
        (AT,),
    ),
    "documents by their ends": (
        "mask",
        lambda ends: functools.reduce(
            lambda a, b: a | b,
            [between(ROWS, *e)[:, None] & between(KEYS, *e) for e in ends],
        ),
        (np.array([[0, 2], [2, 3], [3, 11]], np.int32),),
    ),
    "floats": (
        "mask",
        lambda p, q: keys(p) * 0.5 <= rows(q) * 0.25,
        (OF_KEYS, OF_QUERIES),
    ),
    "before the query": (  # one before the least integer is none
        "mask",
        lambda p, q: keys(p) < rows(q),
        (OF_KEYS, OF_QUERIES),
    ),
    "a difference that may wrap around": (
        "mask",
        lambda p, q: rows(q) - keys(p) < 5,
        (OF_KEYS, OF_QUERIES),
    ),
    "one or the other": (
        "mask",
        lambda p, q, i: (keys(p) <= rows(q)) | (keys(i) == rows(i[:, :T])),
        (OF_KEYS, OF_QUERIES, IDS),
    ),
}
"""By name: the operands beside q, k and v; the mask; and its data."""


def attention(keep: Any) -> Callable[..., Any]:
    def fn(q: Any, k: Any, v: Any, *data: Any) -> Any:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5
        weights = jax.nn.softmax(jnp.where(keep(*data), scores, -1e30))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    return fn


@pytest.mark.parametrize("name", CASES)
def test_read(name: str) -> None:
    operands, keep, data = CASES[name]
    (site,) = explain(attention(keep), (Q, K, V, *data), "attention")
    assert operand_names(site)[3:] == operands.split()
    assert (f"1,{T},{S}]" in site.shapes) == (operands == "mask")


@pytest.mark.parametrize("kernel", ["reference", "memory_bounded"])
@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, kernel: str) -> None:
    _, keep, data = CASES[name]
    fn = attention(keep)
    new = rewriter.optimize(fn, implementation={"attention": kernel}, strict=True)
    args = (Q, K, V, *data)
    assert not differs((jax.jit(fn)(*args), ()), (new(*args), ()))


def test_no_table_is_left() -> None:
    """Nothing of the size of queries times keys is made, forward and backward."""
    _, keep, data = CASES["documents"]
    fn = attention(keep)
    step = jax.grad(lambda q, *rest: fn(q, *rest).sum())
    report = rewriter.explain(step, implementation={"attention": "memory_bounded"})
    assert f"{T},{S}" not in str(report(Q, K, V, *data).after)
