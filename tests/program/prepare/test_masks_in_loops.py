"""Masks of blocks that JAX makes before a loop over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter.program.prepare.masks_in_loops import compute_masks_in_loops
from tests import slow

pytestmark = pytest.mark.once

B, T, N, H, C, LAYERS = 2, 8, 2, 4, 4, 2
FORCED = {"attention": "memory_bounded"}
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(B, T, N * H)).astype(np.float32)
W = (RANDOM.normal(size=(LAYERS, 3, N * H, N * H)) / 3).astype(np.float32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3], [1, 1, 1, 1, 1, 2, 2, 2]], np.int32)
BIAS = RANDOM.normal(size=(T, T)).astype(np.float32)
Keep = Callable[[Any, Any, Any], Any]


def causal(rows: Any, block: Any, whole: Any) -> Any:
    return rows[:, None] >= jnp.arange(T)


def packed(rows: Any, block: Any, whole: Any) -> Any:
    return causal(rows, block, whole) & (
        block[:, None, :, None] == whole[:, None, None]
    )


MASKS: dict[str, tuple[Keep, str]] = {
    "causal": (causal, "offset"),
    "packed": (packed, "q_segments"),
}
"""By name: the mask of a block, and what the site reads."""


def step_of(keep: Keep, around: Callable[[Any], Any] = jax.checkpoint) -> Any:
    """The gradients of layers in a loop, each with a map over blocks of queries."""

    def layer(x: Any, w: Any, segments: Any) -> Any:
        q, k, v = ((x @ w[i]).reshape(B, T, N, H) for i in range(3))
        cut = lambda y: jnp.moveaxis(y.reshape(B, T // C, C, *y.shape[2:]), 1, 0)

        @around
        def queries(given: Any) -> Any:
            q, i, block = given
            s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
            kept = keep(i * C + jnp.arange(C), block, segments)
            s = jnp.where(kept, s, -1e30) if kept.dtype == bool else s + kept
            return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

        out = lax.map(queries, (cut(q), jnp.arange(T // C), cut(segments)))
        return x + jnp.moveaxis(out, 0, 1).reshape(x.shape)

    def loss(x: Any, w: Any, segments: Any) -> Any:
        turn = lambda x, w: (layer(x, w, segments), None)
        return (lax.scan(turn, x, w)[0] ** 2).mean()

    return jax.value_and_grad(loss, (0, 1))


@pytest.mark.parametrize("name", slow.first(1, MASKS))
def test_structure_is_read_in_both_passes(name: str) -> None:
    keep, structure = MASKS[name]
    step, args = step_of(keep), (X, W, SEGMENTS)
    fast = rewriter.optimize(step, implementation=FORCED)
    sites = fast.report(*args).sites
    assert all(s.replaced and structure in s.shapes for s in sites)
    assert sum(s.repeats for s in sites if s.backward) == LAYERS * T // C
    with jax.enable_x64(True):
        wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in args]
        want = [np.asarray(a) for a in jax.tree.leaves(jax.jit(step)(*wide))]
    for x, y in zip(jax.tree.leaves(fast(*args)), want, strict=True):
        assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y)


def test_the_program_gives_the_same_numbers() -> None:
    program = jax.make_jaxpr(step_of(packed, lambda f: f))(X, W, SEGMENTS)
    other = compute_masks_in_loops(program)
    assert str(other).count("scan[") < str(program).count("scan[")
    args = X, W, SEGMENTS
    one, two = (jax.jit(jaxpr_as_fun(p))(*args) for p in (program, other))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_array_equal(x, y)


def stacks(make: Callable[[Any], Any], read: Callable[[Any, Any], Any]) -> Any:
    """A map, and a loop that reads what it stacks."""

    def program(x: Any, numbers: Any) -> Any:
        made = lax.map(make, numbers)
        return lax.scan(lambda c, m: (read(c, m), None), x, made)[0]

    return program


def test_what_is_no_mask_stays() -> None:
    """Floats that are data, much work, and stacks that are returned or read whole."""
    whole, floats = np.arange(4, dtype=np.int32), X[0, :4, 0]
    add = lambda c, m: c + m.sum()
    same = [
        (stacks(lambda x: x * jnp.ones(3), add), floats),
        (stacks(lambda i: jnp.sin(i * jnp.arange(3.0)), add), whole),
        (stacks(lambda i: jnp.cumsum(i >= jnp.arange(3)), add), whole),
    ]
    for program, numbers in same:
        closed = jax.make_jaxpr(program)(0.0, numbers)
        assert compute_masks_in_loops(closed) is closed
    mask = lambda i: i >= jnp.arange(3)
    moved = jax.make_jaxpr(stacks(mask, add))(0.0, whole)
    assert compute_masks_in_loops(moved) is not moved

    def reading_whole(x: Any, numbers: Any) -> Any:
        made = lax.map(mask, numbers)
        return lax.scan(lambda c, _: (c + made.sum(), None), x, None, length=4)[0]

    closed = jax.make_jaxpr(reading_whole)(0.0, whole)
    assert compute_masks_in_loops(closed) is closed
