"""Masks whose parts are read are made from parts of what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rewriter.program.prepare.masks_in_shards import make_masks_in_shards

B, T, ROWS = 2, 96, 5
RANDOM = np.random.default_rng(0)
IDS = np.sort(RANDOM.integers(0, 3, (B, T))).astype(np.int32)
TABLE = np.tril(np.ones((T, T), bool))
LEAST, MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
STARTS = (0, 7, T - ROWS, T - 1, T, -1, -T, -T - 1, LEAST, MOST)
AT = jnp.arange(T)


def causal() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def same(ids: Any) -> Any:
    return ids[:, :, None] == ids[:, None]


MASKS: dict[str, Callable[[Any], Any]] = {
    "causal": lambda ids: causal(),
    "a table": lambda ids: jnp.asarray(TABLE),
    "a window": lambda ids: causal() & (AT[:, None] - AT < 9),
    "packed": lambda ids: causal() & same(ids),
    "turned": lambda ids: (causal() & same(ids)).swapaxes(1, 2),
    "a fill": lambda ids: jnp.where(causal() & same(ids), 0.0, -1e30)[:, None],
    "positions that are floats": lambda ids: jnp.arange(1.0 * T)[:, None] * jnp.ones(T),
    "a number for each": lambda ids: AT[:, None] * 3 + AT // 2,
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "a table without a formula": lambda ids: jnp.asarray(
        TABLE & (RANDOM.random(T) > 0.5)
    ),
    "running sums": lambda ids: jnp.cumsum(causal(), 0),
}
"""What stays as it is: its parts are no parts of something smaller."""


def rows_of(mask: Callable[[Any], Any]) -> Callable[..., Any]:
    def rows(ids: Any, at: Any) -> Any:
        whole = mask(ids)
        return lax.dynamic_slice_in_dim(whole, at, ROWS, whole.ndim - 2)

    return rows


def sizes(body: Any) -> set[int]:
    """The sizes of all values of a program, also in its calls."""
    found = {v.aval.size for eqn in body.eqns for v in eqn.outvars}
    for eqn in body.eqns:
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found |= sizes(inner)
    return found


def compiled(program: Any) -> Callable[..., Any]:
    return jax.jit(jax.extend.core.jaxpr_as_fun(program))


@pytest.mark.parametrize("name", MASKS)
def test_rows(name: str) -> None:
    """The whole is not made, and each row is what JAX reads at any start."""
    rows = rows_of(MASKS[name])
    program = jax.make_jaxpr(rows)(IDS, jnp.int32(0))
    new = make_masks_in_shards(program)
    assert new is not program
    assert max(sizes(new.jaxpr)) < T * T
    made, wanted = map(compiled, (new, program))
    for start in STARTS:
        (a,), (b,) = (f(IDS, jnp.int32(start)) for f in (made, wanted))
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    program = jax.make_jaxpr(rows_of(OTHERS[name]))(IDS, jnp.int32(0))
    assert make_masks_in_shards(program) is program


def test_programs_without_parts_stay() -> None:
    for f in (lambda ids: causal() & same(ids), lambda ids: same(ids)[:, 3:9]):
        program = jax.make_jaxpr(f)(IDS)
        assert make_masks_in_shards(program) is program


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint, jax.jit])
def test_in_a_shard_map(wrapped: Callable[..., Any]) -> None:
    """A mask that is split is made inside, of the split sequences' numbers."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = RANDOM.normal(size=(B, T, T)).astype(np.float32)

    def masked(x: Any, keep: Any) -> Any:
        return jnp.einsum("bts,bus->btu", jnp.where(keep, x, 0), x)

    split = jax.shard_map(
        masked, mesh=mesh, in_specs=(jax.P("d"),) * 2, out_specs=jax.P("d")
    )

    def program(x: Any, ids: Any) -> Any:
        return wrapped(split)(x, causal() & same(ids))

    closed = jax.make_jaxpr(program)(x, IDS)
    new = make_masks_in_shards(closed)
    assert not any(v.aval.dtype == bool for e in new.eqns for v in e.outvars)
    np.testing.assert_array_equal(*compiled(new)(x, IDS), *compiled(closed)(x, IDS))
