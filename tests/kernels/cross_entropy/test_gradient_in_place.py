"""The weights' gradient in place of cotangents: on the simulator, and what it needs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.linear_cross_entropy import hopper_of_weights, in_place
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.linear_cross_entropy.in_place import Known
from rewriter.kernels.shared import pallas_gpu, work_stealing
from tests.support.kernels import simulator
from tests.support.kernels.simulated_gpu import launch, machine


def given(rows: tuple[int, ...], k: int = 256, v: int = 576) -> tuple[Any, list[Any]]:
    rng = np.random.default_rng(0)
    make = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16))
    n = k + sum(rows)
    return make(n, k), [make(r, v) for r in (k, *rows)]


def run(
    x: Any, parts: list[Any], column: int = 0, width: int | None = None,
    programs: int = 3, together: bool = True,
) -> Any:  # fmt: skip
    width = parts[0].shape[1] - column if width is None else width
    with simulator.simulated_ragged_dot(), pytest.MonkeyPatch.context() as patch:
        at_once = functools.partial(launch.run_kernel, together=together)
        patch.setattr(pallas_gpu, "kernel", at_once)
        first, *others = parts
        return hopper_of_weights.put(x, first, others, column, width, programs)


def expected(x: Any, parts: list[Any]) -> Any:
    every = np.concatenate(parts).astype(np.float64)
    return x.astype(np.float64).T @ every


def close(got: Any, want: Any) -> bool:
    return np.abs(got.astype(np.float64) - want).max() <= 0.01 * np.abs(want).max()


@pytest.mark.parametrize(("rows", "programs"), [((), 2), ((64,), 3), ((128, 64), 5)])
def test_gradient(rows: tuple[int, ...], programs: int) -> None:
    x, parts = given(rows)
    assert close(run(x, parts, programs=programs), expected(x, parts))


def test_columns_one_after_the_other() -> None:
    """Cotangents of the last rows are of the replaced columns alone."""
    x, (first, held, again) = given((128, 64))
    want, made = expected(x, [first, held, again]), first
    for column, width in ((0, 512), (512, 64)):
        some = again[:, column : column + width]
        before = made.copy()
        made = run(x, [made, held, some], column, width)
        rest = np.r_[:column, column + width : first.shape[1]]
        assert (made[:, rest] == before[:, rest]).all()
    assert close(made, want)


def test_blocks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that stores at once destroys what other tiles have not yet read."""
    x, parts = given((64,), k=512, v=256)
    monkeypatch.setattr(machine, "wait_for_count", lambda cell, least: None)
    made = run(x, parts, programs=4, together=False)
    assert not close(made, expected(x, parts))


def test_blocks_must_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, parts = given((64,))
    monkeypatch.setattr(machine, "PATIENCE_S", 0.2)
    with pytest.raises(machine.Stuck):
        run(x, parts, together=False)
    with pytest.raises(AssertionError, match="wait for itself"):
        run(x, parts, programs=1)
    with pytest.raises(AssertionError, match="other columns"):
        run(x, parts, 0, 64)


@pytest.mark.parametrize(("column", "width"), [(0, 576), (128, 320), (512, 64)])
def test_product_of_some_columns(column: int, width: int) -> None:
    x, (w, _) = given((64,), k=192)
    x = x[:, :192]
    with simulator.simulated_ragged_dot():
        made = hopper_of_weights.product(x, w, column, width, 3)
    want = x.astype(np.float64) @ w.astype(np.float64)[:, column : column + width]
    assert made.shape == (256, width)
    assert close(made, want)


@pytest.mark.parametrize("others", [0, 64])
def test_as_by_products(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cotangents of the last rows are computed again, for some classes at a time."""
    v = 576
    x, (first, held) = given((64 + others,), v=v)
    held = held[:64]
    w = np.asarray(jnp.asarray(0.1 * first, jnp.bfloat16))
    kinds = jnp.dtype("bfloat16"), jnp.dtype("float32"), jnp.dtype("bfloat16")
    head = Head(jnp.asarray(w), None, 0.5, 0.0, None, *kinds, end=v - 70)
    rng, known = np.random.default_rng(1), None
    if others:
        column = lambda: jnp.asarray(rng.normal(size=others), jnp.float32)
        labels = jnp.asarray(rng.integers(0, v, others))
        known = Known(labels, column(), (column(), column(), column()))
    last = x[x.shape[0] - others :]
    like = [jnp.asarray(a) for a in (x, first, held, last)]
    want = in_place.of_weights(head, like[0], like[1:3], like[3], known, 256)

    def simulated(name: str) -> Any:
        real = getattr(hopper_of_weights, name)

        def call(*given: Any) -> Any:
            arrays = jax.tree.map(lambda a: np.array(a) if np.ndim(a) else a, given)
            with simulator.simulated_ragged_dot():
                return jnp.asarray(real(*arrays))

        return call

    at_once = functools.partial(launch.run_kernel, together=True)
    monkeypatch.setattr(launch, "run_kernel", at_once)
    few = dataclasses.replace(hopper_of_weights.TILES, programs=2)
    monkeypatch.setattr(hopper_of_weights, "TILES", few)
    monkeypatch.setattr(hopper_of_weights, "CHUNK", 1)
    for name in ("put", "product"):
        call = simulated(name)
        monkeypatch.setattr(hopper_of_weights, name, lambda *a, f=call: f(*a, 2))
    made = hopper_of_weights.of_weights(head, *like[:1], like[1:3], like[3], known, 0)
    assert close(np.asarray(made), np.asarray(want).astype(np.float64))


@pytest.mark.skipif(not work_stealing.AVAILABLE, reason="jax has no such references")
def test_lowers_for_hopper() -> None:
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    f = lambda x, a, b: hopper_of_weights.put(x, a, [b], 0, 1024, 132)
    traced = jax.jit(f).trace(like(384, 256), like(256, 1024), like(128, 1024))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert hopper_of_weights.NAME in text
