"""Steps of decoding that take one row of a mask, at starts inside and out of it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.spellings.check import differs, explain, operand_names
from tests.support.arrays import normal

B, S, N, H = 2, 24, 2, 4
LOWEST = np.finfo(np.float32).min
ENDS = np.iinfo(np.int32)
STARTS = (
    ENDS.min,
    ENDS.max,
    -2000,
    -S - 1,
    -S,
    -S + 1,
    -9,
    -1,
    0,
    1,
    7,
    S - 2,
    S - 1,
    S,
    S + 1,
    2000,
)
Q, K, V = (normal(B, t, N, H, seed=i) for i, t in enumerate((1, S, S)))

Keep = Callable[[jax.Array], jax.Array]


def causal() -> jax.Array:
    return jnp.arange(S)[:, None] >= jnp.arange(S)


def seen(i: jax.Array) -> jax.Array:
    return jnp.arange(S) < i + 1


def sliced(mask: jax.Array, i: jax.Array, rows: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(mask, i, rows)


def step(keep: Keep) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def attention(q: jax.Array, i: jax.Array) -> jax.Array:
        s = jnp.einsum("btnh,bsnh->bnts", q, K) * 0.5
        p = jax.nn.softmax(jnp.where(keep(i), s, LOWEST))
        return jnp.einsum("bnts,bsnh->btnh", p, V)

    return attention


def per_sequence(i: jax.Array) -> jax.Array:
    return jax.vmap(lambda at: sliced(causal(), at))(jnp.stack([i, i - 3]))[:, None]


LENGTHS = "q k v kv_lengths"
CASES: dict[str, tuple[str, Keep]] = {
    "row": (LENGTHS, lambda i: sliced(causal(), i)),
    "row and what is written": (LENGTHS, lambda i: sliced(causal(), i) & seen(i)),
    "row of numbers": (LENGTHS, lambda i: sliced(causal().astype(int), i) > 0),
    "indexed": (LENGTHS, lambda i: causal()[i]),
    "two axes": (LENGTHS, lambda i: jnp.tile(causal(), (3, 1, 1))[i, i]),
    "taken, filled": ("q k v mask", lambda i: jnp.take(causal(), i, axis=0)),
    "filled with false": (
        LENGTHS,
        lambda i: causal().at[i].get(mode="fill", fill_value=False),
    ),
    "clipped": (LENGTHS, lambda i: causal().at[i].get(mode="clip")),
    "start moved inside": (LENGTHS, lambda i: sliced(causal(), jnp.clip(i, 0, S - 1))),
    "per sequence": (LENGTHS, per_sequence),
    "window": (
        "q k v kv_lengths offset",
        lambda i: sliced(jnp.triu(causal(), -6), i) & seen(i),
    ),
    "window and a length": (
        "q k v kv_lengths offset",
        lambda i: sliced(jnp.triu(causal(), -6), i) & seen(i) & (jnp.arange(S) < 17),
    ),
    "window alone": ("q k v mask", lambda i: sliced(jnp.triu(causal(), -6), i)),
    "column": ("q k v mask", lambda i: causal()[:, i]),
    "both directions": (
        "q k v mask",
        lambda i: sliced(jnp.abs(jnp.arange(S)[:, None] - jnp.arange(S)) < 5, i),
    ),
    "blocks": (
        "q k v mask",
        lambda i: sliced(jnp.arange(S)[:, None] // 4 >= jnp.arange(S) // 4, i),
    ),
    "another row for every key": (
        "q k v mask",
        lambda i: causal()[(jnp.arange(S) * 7 + i) % S, jnp.arange(S)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_read(name: str) -> None:
    operands, keep = CASES[name]
    (site,) = explain(step(keep), (Q, jnp.int32(3)), "attention")
    assert sorted(operand_names(site)) == sorted(operands.split())


def test_two_rows_begin_at_an_offset() -> None:
    q = jnp.concatenate([Q, Q + 1], 1)
    fn = step(lambda i: sliced(causal(), i, 2))
    (site,) = explain(fn, (q, jnp.int32(3)), "attention")
    assert operand_names(site) == ["q", "k", "v", "offset"]
    fast = rewriter.optimize(fn, implementation={"attention": "memory_bounded"})
    for i in map(jnp.int32, STARTS):  # a slice is moved into the array
        np.testing.assert_allclose(fast(q, i), fn(q, i), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_numbers_at_every_start(name: str) -> None:
    fn = step(CASES[name][1])
    new = rewriter.optimize(fn, implementation={"attention": "reference"}, strict=True)
    starts = jnp.array(STARTS, jnp.int32)
    before, after = (
        jax.jit(lambda i, f=f: lax.map(lambda x: f(Q, x), i)) for f in (fn, new)
    )
    assert not differs((before(starts), ()), (after(starts), ()))


def test_a_counter_is_no_less_than_its_start() -> None:
    """So a row has a key, and nothing need be said of rows without."""

    def steps(q: jax.Array) -> jax.Array:
        turn = lambda i, q: step(lambda i: jnp.arange(S) <= i)(q, i)
        return lax.fori_loop(0, S, turn, q)

    (site,) = explain(steps, (Q,), "attention")
    assert operand_names(site) == LENGTHS.split()
    assert "empty_rows" not in site.params


def blocks_of_queries(q: jax.Array) -> jax.Array:
    """Causal, by blocks of queries that are mapped."""

    def block(q: jax.Array, i: jax.Array) -> jax.Array:
        rows = i * 6 + jnp.arange(6)[:, None]
        return step(lambda _: rows >= jnp.arange(S))(q, i)

    parts = q.reshape(B, 4, 6, N, H)
    return jax.vmap(block, (1, 0), 1)(parts, jnp.arange(4)).reshape(q.shape)


def test_mapped_blocks_of_queries_are_in_one_order() -> None:
    program = jax.value_and_grad(lambda q: (blocks_of_queries(q) ** 2).sum())
    new = rewriter.optimize(program, implementation={"attention": "memory_bounded"})
    before, after = (f(K) for f in (jax.jit(program), new))
    assert not differs((before, ()), (after, ()))
    (site,) = new.report().sites
    assert site.backward
    assert site.params["window"] == (None, 0)
    assert operand_names(site) == ["q", "k", "v"]


def test_start_that_is_a_negative_number() -> None:
    fn = step(lambda i: sliced(causal(), -S - 1 + 0 * i))
    new = rewriter.optimize(fn, implementation={"attention": "reference"})
    i = jnp.int32(0)
    assert not differs((fn(Q, i), ()), (new(Q, i), ()))
