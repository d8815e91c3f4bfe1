"""Masks that a flag chooses, such as those of layers of which some are local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests import slow

pytestmark = pytest.mark.once

B, T, N, H, LAYERS = 2, 24, 2, 8, 4
RANDOM = np.random.default_rng(0)
FORCED = {"attention": "memory_bounded"}
X = RANDOM.normal(size=(B, T, N * H)).astype(np.float32) / 4
W = RANDOM.normal(size=(LAYERS, 4, N * H, N * H)).astype(np.float32) / 6
SEGMENTS = np.sort(RANDOM.integers(1, 4, (B, T)), 1).astype(np.int32)
KEPT = np.arange(T)[None] < np.array([[17], [24]])
FIRST = np.array([True, False])[:, None, None, None]
LOCAL = np.array([True, True, False, True])
OF_LAYERS = np.concatenate(
    [LOCAL[:, None], np.tile(SEGMENTS.reshape(1, -1), (LAYERS, 1))], 1
)
"""Whether a layer is local, and its segments."""
NUMBERS = np.arange(LAYERS)
PLACES = f"kv_positions i32[1,{T}] first_position i32[1,{T}]"
SEGMENTED = f"q_segments i32[{B},{T}] kv_segments i32[{B},{T}]"


def rows() -> Any:
    return jnp.arange(T)[:, None]


def keys() -> Any:
    return jnp.arange(T)[None]


def causal() -> Any:
    return rows() >= keys()


def local(width: int = 7) -> Any:
    return causal() & (rows() - keys() < width)


def near() -> Any:
    return jnp.abs(rows() - keys()) <= 4


def packed(segments: Any) -> Any:
    return segments[:, None, :, None] == segments[:, None, None]


def added(kept: Any) -> Any:
    return jnp.where(kept, 0.0, -1e30)


def floor(width: int | None) -> Any:
    """As public models add it: the least number above and below a band."""
    least = jnp.full((T, T), jnp.finfo(jnp.float32).min)
    upper = jnp.triu(least, 1)
    return upper if width is None else jnp.minimum(upper, jnp.tril(least, -width))


MASKS: dict[str, tuple[Callable[[Any], Any], np.ndarray, str]] = {
    "where": (lambda f: jnp.where(f, local(), causal()), LOCAL, PLACES),
    "or": (lambda f: causal() & ((rows() - keys() < 7) | ~f), LOCAL, PLACES),
    "width": (
        lambda f: causal() & (rows() - keys() < jnp.where(f, 7, 1 << 30)),
        LOCAL,
        PLACES,
    ),
    "two widths": (
        lambda f: causal() & (keys() > rows() - jnp.where(f, 7, 12)),
        LOCAL,
        PLACES,
    ),
    "number": (
        lambda i: jnp.where((i + 1) % 3 != 0, local(), causal()),
        NUMBERS,
        PLACES,
    ),
    "cond": (lambda f: lax.cond(f, local, causal), LOCAL, PLACES),
    "switch": (
        lambda i: lax.switch(i % 3, [local, causal, lambda: local(3)]),
        NUMBERS,
        PLACES,
    ),
    "cond of added masks": (
        lambda f: lax.cond(f, lambda: floor(7), lambda: floor(None)),
        LOCAL,
        PLACES,
    ),
    "added": (lambda f: jnp.where(f, added(local()), added(causal())), LOCAL, PLACES),
    "least numbers": (lambda f: jnp.where(f, floor(7), floor(None)), LOCAL, PLACES),
    "segments": (
        lambda f: jnp.where(f[0], local(), causal()) & packed(f[1:].reshape(B, T)),
        OF_LAYERS,
        f"{SEGMENTED} {PLACES}",
    ),
    "padding": (
        lambda f: jnp.where(
            f, local() & KEPT[:, None, None], causal() & KEPT[:, None, None]
        ),
        LOCAL,
        f"mask bool[{B},1,1,{T}] {PLACES}",
    ),
    "both sides": (
        lambda f: jnp.where(f, near(), True),
        LOCAL,
        f"prefix i32[1] {PLACES}",
    ),
    "chunks": (
        lambda f: causal() & jnp.where(f, rows() // 8 == keys() // 8, True),
        LOCAL,
        SEGMENTED,
    ),
    "three kinds of layers": (
        lambda i: jnp.where(
            i == 0,
            causal(),
            jnp.where(i == 1, local(), causal() & (rows() // 8 == keys() // 8)),
        ),
        NUMBERS,
        f"{SEGMENTED} {PLACES}",
    ),
    "flag of a sequence": (
        lambda f: jnp.where(FIRST & f, local(), causal()),
        LOCAL,
        f"kv_positions i32[1,{T}] first_position i32[{B},{T}]",
    ),
}  # fmt: skip
"""By name: how a layer's mask is made, of what, and what the site then reads."""
ARRAYS: dict[str, tuple[Callable[[Any], Any], np.ndarray, str]] = {
    "flag of a head": (
        lambda f: jnp.where(jnp.arange(N)[:, None, None] == f, local(), causal()),
        LOCAL,
        f"mask bool[1,{N},{T},{T}]",
    ),
    "flag of a query": (
        lambda f: jnp.where((jnp.arange(T) % 2 == f)[:, None], local(), causal()),
        LOCAL,
        f"mask bool[1,1,{T},{T}]",
    ),
    "flag of a key": (
        lambda f: jnp.where(jnp.arange(T) % 2 == f, local(), causal()),
        LOCAL,
        f"mask bool[1,1,{T},{T}]",
    ),
    "nothing or a window": (
        lambda f: causal() & (f | (rows() - keys() < 7)) & (~f | (keys() > 3)),
        LOCAL,
        "",
    ),
}
"""Choices that are no bound of each query: they stay arrays, at least in part."""


def layer(x: Any, w: Any, mask: Any) -> Any:
    q, k, v = ((x @ w[i]).reshape(B, T, N, H) for i in range(3))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    kept = mask.dtype == bool
    scores = jnp.where(mask, scores, -2e38) if kept else scores + mask
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return x + out.reshape(x.shape) @ w[3]


def step_of(make: Callable[[Any], Any], checkpoint: bool) -> Any:
    def turn(x: Any, given: Any) -> Any:
        w, flag = given
        return layer(x, w, make(flag)), None

    body = jax.checkpoint(turn) if checkpoint else turn
    loss = lambda x, w, flags: (lax.scan(body, x, (w, flags))[0] ** 2).mean()
    return jax.value_and_grad(loss, (0, 1))


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    slow.unless(
        lambda name, checkpoint: checkpoint,
        [(name, kept) for name in MASKS | ARRAYS for kept in (True, False)],
        several=True,
    ),
)
def test_a_choice_of_masks_is_a_bound_of_each_query(name, checkpoint):
    make, flags, reads = (MASKS | ARRAYS)[name]
    step = step_of(make, checkpoint)
    fast = rewriter.optimize(step, implementation=FORCED)
    sites = [s for s in fast.report(X, W, flags).sites if s.op == "attention"]
    assert all(s.replaced for s in sites)
    assert sum(s.repeats for s in sites if s.backward) == LAYERS
    for site in sites if reads else ():
        assert site.shapes.endswith(f" v f32[{B},{T},{N},{H}] {reads}")
    got = jax.tree.leaves(fast(X, W, flags))
    with jax.enable_x64(True):
        wide = X.astype(np.float64), W.astype(np.float64), flags
        exact = [np.asarray(x) for x in jax.tree.leaves(jax.jit(step)(*wide))]
    for one, other in zip(got, exact, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
