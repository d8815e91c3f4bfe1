"""Losses of rows with two labels, each with a share of the target."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.linear_cross_entropy import chunks as of_chunks
from rewriter.kernels.linear_cross_entropy import xla
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.site import site
from tests.support import transforms

KERNELS = (("default", "memory_bounded"),)
LINEAR = {"x": (6, 4), "w": (4, 11), "labels": (6,), "bias": (11,)}
GIVEN = {"logits": (2, 3, 11), "labels": (2, 3)}
TERMS = {"label_smoothing": 0.1, "z_loss": 0.01}
SETTINGS = [
    {"outside": o, "of_log_probabilities": logs, **terms}
    for o, logs, terms in itertools.product(
        ("nan", "zero", "clip", "promise"), (False, True), ({}, TERMS)
    )
]
RNG = np.random.default_rng(4)
X, W, BIAS = (RNG.normal(size=s) for s in ((7, 5), (5, 11), (11,)))
LABELS = np.array([0, -1, 3, 11, -100, 9, 4])
OTHER = np.array([0, 2, 11, 11, 5, 1, 4])
SHARE = np.array([0.25, 0.5, 0.9, 0.1, 0.0, 1.0, 0.7])
COTANGENT = RNG.normal(size=7)
BLOCKS = {
    "four rows": of_chunks.Chunk(4 * 4 * 11, least=4),
    "all rows": of_chunks.Chunk(),
    "chunks of classes": of_chunks.Chunk(4 * 4 * 4, least=4),
    "padded": of_chunks.Chunk(4 * 4 * 16, 4, True, 8, True),
    "in place": of_chunks.Chunk(9 * 4 * 4, least=4, beside=2),
}


def made(name: str, shapes: dict[str, Any], params: dict[str, Any]) -> Any:
    op = registry().op(name)
    rows = shapes["labels"]
    shapes = {**shapes, "other": rows, "share": rows}
    specs = {
        n: jax.ShapeDtypeStruct(s, "int32" if n in ("labels", "other") else "float32")
        for n, s in shapes.items()
    }
    operands = op.sample(jax.random.key(2), specs, params)
    given = lambda args: dict(zip(shapes, args, strict=True))
    bound = lambda *args: site.bind(op, given(args), params, KERNELS)
    plain = lambda *args: op.reference(**given(args), **params)
    return bound, plain, [operands[n] for n in shapes]


@pytest.mark.parametrize("transform", transforms.EACH)
def test_every_transform_of_a_linear_loss(
    transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_chunks, "DEFAULT", BLOCKS["chunks of classes"])
    transforms.check(transform, *made("linear_cross_entropy", LINEAR, TERMS))


@pytest.mark.parametrize("transform", ["jit_grad", "vmap_of_grad"])
def test_transforms_of_a_loss_of_logits(transform: str) -> None:
    transforms.check(transform, *made("cross_entropy", GIVEN, TERMS))


def arrays(dtype: Any) -> dict[str, jax.Array]:
    wide = {"x": X, "w": W, "bias": BIAS, "share": SHARE}
    found = {n: jnp.asarray(a, dtype) for n, a in wide.items()}
    labels = {"labels": LABELS, "other": OTHER}
    return found | {n: jnp.asarray(a, jnp.int32) for n, a in labels.items()}


def all_settings(of: Any, dtype: Any) -> Any:
    """Values and gradients of every setting, at once."""

    @jax.jit
    def run(given: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        floats = {n: given[n] for n in ("x", "w", "bias", "share")}
        rest = {n: given[n] for n in ("labels", "other")}
        found = []
        for params in SETTINGS:
            loss = lambda f, p=params: of(**f, **rest, **p)
            out, back = jax.vjp(loss, floats)
            found.append((out, *jax.tree.leaves(back(cotangent))))
        return found

    return run(arrays(dtype), jnp.asarray(COTANGENT, dtype))


@pytest.mark.parametrize("config", BLOCKS)
def test_every_setting_against_float64(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels that are no class give NaN where they should, and shares of 0 and 1."""
    monkeypatch.setattr(of_chunks, "DEFAULT", BLOCKS[config])
    op = registry().op("linear_cross_entropy")

    def bound(**given: Any) -> jax.Array:
        own = {n: given.pop(n) for n in op.names if n in given}
        return site.bind(op, own, given, KERNELS)

    got = all_settings(bound, jnp.float32)
    with jax.enable_x64(True):
        true = all_settings(op.reference, jnp.float64)
    for params, ours, theirs in zip(SETTINGS, got, true, strict=True):
        for g, t in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(g, t, rtol=5e-5, atol=5e-5, err_msg=str(params))


@pytest.mark.parametrize("config", BLOCKS)
def test_results_and_gradients_together(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_chunks, "DEFAULT", BLOCKS[config])
    op = registry().op("linear_cross_entropy")
    given, cotangent = arrays(jnp.float32), jnp.asarray(COTANGENT, jnp.float32)
    given = given | {"labels": jnp.abs(given["labels"]) % 11}
    out, grads = jax.jit(lambda g: xla.together(**g, cotangent=cotangent, **TERMS))(
        given
    )
    names = ("x", "w", "bias", "share")
    rest = {n: given[n] for n in ("labels", "other")} | TERMS
    loss = lambda f: op.reference(**f, **rest)
    want, back = jax.vjp(loss, {n: given[n] for n in names})
    np.testing.assert_allclose(out, want, rtol=1e-5)
    (wanted,) = back(cotangent)
    for name in names:
        np.testing.assert_allclose(grads[name], wanted[name], rtol=2e-4, atol=2e-5)


def test_what_kernels_take() -> None:
    """No kernel takes a label without a share; that of TPUs takes one label only."""
    op = registry().op("linear_cross_entropy")
    given = arrays(jnp.float32)
    for name, takes in (("memory_bounded", True), ("mosaic_tpu", False)):
        kernel = registry().kernel(op.name, name)
        assert kernel.supports(spec_of(op, given, {})).ok == takes
        alone = {n: a for n, a in given.items() if n != "share"}
        assert not kernel.supports(spec_of(op, alone, {})).ok
