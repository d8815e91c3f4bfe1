"""Masks made of data, in the programs in which people train: checkpoints and loops.

A mask is made once outside the layers, or in each of them; layers are one after the
other or in a scan, under a checkpoint or not; and the whole is differentiated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow

B, T, N, H, LAYERS = 2, 16, 2, 4, 3
FORCED = {"attention": "memory_bounded"}


# ---------------------------------------------------------------------- masks
def positions() -> Any:
    return jnp.arange(T)


def causal() -> Any:
    return positions()[:, None] >= positions()[None]


def packed(segments: Any) -> Any:
    return (causal() & (segments[:, :, None] == segments[:, None]))[:, None]


def prefixed(prefix: Any) -> Any:
    return (causal() | (positions()[None, None] < prefix[:, None, None]))[:, None]


def ordered(where: Any) -> Any:
    return (where[:, :, None] >= where[:, None])[:, None]


RANDOM = np.random.default_rng(0)
IDS = np.where(positions()[None] < np.array([[9], [14]]), 5, 0).astype(np.int32)
SEGMENTS = (np.arange(T)[None] // np.array([[5], [7]])).astype(np.int32)
MASKS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "padding": (lambda ids: (ids != 0)[:, None, None], IDS, "mask bool[2,1,1,16]"),
    "packed": (packed, SEGMENTS, "q_segments i32[2,16] kv_segments i32[2,16]"),
    "prefix": (prefixed, np.array([3, 6], np.int32), "prefix i32[2]"),
    "positions": (
        ordered,
        np.stack([np.r_[:9, :7], np.r_[:16]]).astype(np.int32),
        "mask bool[2,1,16,16]",
    ),
    "array": (lambda m: m, RANDOM.random((B, 1, T, T)) > 0.3, "mask bool[2,1,16,16]"),
    "bias": (
        lambda b: b,
        RANDOM.normal(size=(1, N, T, T)).astype(np.float32),
        "bias f32[1,2,16,16]",
    ),
}
"""By name: how a mask is made, of what, and what the site then reads."""


# ------------------------------------------------------------------- programs
def layer(x: Any, w: Any, mask: Any) -> Any:
    q, k, v = ((x @ w[i]).reshape(B, T, N, H) for i in range(3))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    kept = mask.dtype == bool
    scores = jnp.where(mask, scores, -1e30) if kept else scores + mask
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return x + out.reshape(x.shape) @ w[3]


def loss(
    x: Any, w: Any, data: Any, *, make: Any, scan: bool, wrap: Any, outside: bool = True
) -> Any:
    given = make(data) if outside else data
    step = wrap(lambda x, w, m: layer(x, w, m if outside else make(m)))
    if scan:
        x, _ = jax.lax.scan(lambda x, w: (step(x, w, given), None), x, w)
    else:
        for one in w:
            x = step(x, one, given)
    return (x**2).mean()


WRAPS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "plain": (False, lambda f: f),
    "checkpoint": (False, jax.checkpoint),
    "scan": (True, lambda f: f),
    "scan+checkpoint": (True, jax.checkpoint),
}


def step_of(name: str, context: str, outside: bool = True, wrap: Any = None) -> Any:
    """The gradients, of a bias too."""
    scan, usual = WRAPS[context]
    program = functools.partial(
        loss, make=MASKS[name][0], scan=scan, wrap=wrap or usual, outside=outside
    )
    return jax.value_and_grad(program, (0, 1, 2) if name == "bias" else (0, 1))


@functools.cache
def arguments(name: str) -> tuple[Any, ...]:
    random = np.random.default_rng(1)
    x = random.normal(size=(B, T, N * H)).astype(np.float32)
    w = random.normal(size=(LAYERS, 4, N * H, N * H)).astype(np.float32) / 3
    return x, w, MASKS[name][1]


@functools.cache
def in_float64(name: str) -> list[Any]:
    """What all contexts compute, in float64."""
    with jax.enable_x64(True):
        wide = [
            a.astype(np.float64) if a.dtype == np.float32 else a
            for a in arguments(name)
        ]
        return [np.asarray(a) for a in jax.tree.leaves(step_of(name, "plain")(*wide))]


def read_by(step: Any, args: Any) -> set[str]:
    """What sites read beside queries, keys and values; all have gradients."""
    report = rewriter.explain(step, implementation=FORCED)(*args)
    assert not report.failures
    assert not report.misses
    sites = [s for s in report.sites if s.op == "attention"]
    assert all(s.replaced and s.backward for s in sites), report
    assert sum(s.repeats for s in sites) == LAYERS
    return {s.shapes.split(f"v f32[{B},{T},{N},{H}] ")[-1] for s in sites}


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("context", WRAPS)
def test_every_layer_is_replaced_with_its_gradient(context, name):
    args = arguments(name)
    for outside in (True, False):
        assert read_by(step_of(name, context, outside), args) == {MASKS[name][2]}


@pytest.mark.parametrize(
    ("context", "name"),
    slow.unless(
        lambda context, name: context != "plain" and name in ("packed", "bias"),
        itertools.product(WRAPS, MASKS),
        several=True,
    ),
)
def test_gradients_are_those_in_float64(context, name):
    fast = rewriter.optimize(step_of(name, context), implementation=FORCED)
    for got, want in zip(
        jax.tree.leaves(fast(*arguments(name))), in_float64(name), strict=True
    ):
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)
