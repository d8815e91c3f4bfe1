"""Infinite logits: NaN, infinities and gradients are those of the op's reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.cross_entropy import xla as of_logits
from rewriter.kernels.cross_entropy.reference import reference
from rewriter.kernels.cross_entropy.rows import NAN_AT
from rewriter.kernels.linear_cross_entropy import chunks, xla

INF, CLASSES = np.inf, 12
ROWS = np.random.default_rng(4).normal(size=(9, CLASSES))
for row, at, number in (
    (1, 5, INF), (2, 2, INF), (3, 7, -INF), (4, 4, -INF), (5, slice(None), -INF),
    (6, [1, 3], INF), (7, [0, 1], [INF, 100.0]), (8, [3, 4], [INF, -INF]),
):  # fmt: skip
    ROWS[row, at] = number
Y = jnp.asarray(ROWS, jnp.float32)
LABELS = jnp.asarray([0, 1, 2, 3, 4, 5, 6, -1, CLASSES], jnp.int32)
ODD = {"outside": "zero", "of_log_probabilities": True}


@pytest.mark.parametrize(
    "how",
    [{"nan_at": "both", **ODD}, {"nan_at": "+inf", "label_smoothing": 0.1},
     {"nan_at": "-inf", **ODD}, {"nan_at": "none", "z_loss": 0.01}],
    ids=NAN_AT,
)  # fmt: skip
def test_infinities_are_those_of_the_reference(how, monkeypatch) -> None:
    """By logits, and by products with all classes, and with four at a time."""

    def run(y):
        out, back = jax.vjp(lambda y: reference(logits=y, labels=LABELS, **how), y)
        return out, back(jnp.ones_like(out))[0]

    want = jax.jit(run)(Y)
    _same(jax.jit(lambda y: _of_logits(y, how))(Y), want)
    for size in (1 << 20, 4 * 4 * 4):
        monkeypatch.setattr(chunks, "DEFAULT", chunks.Chunk(size, least=4))
        _same(_of_biases(how), want)


def _of_logits(y, how):
    """The losses, and the gradients of the logits."""
    given = {"logits": y, "labels": LABELS, **how}
    out, saved = of_logits.forward(**given, residuals=True)
    more = {"out": None, "residuals": saved, "cotangent": jnp.ones_like(out)}
    return out, of_logits.backward(**given, **more)["logits"]


def _of_biases(how):
    """The same of logits that are a bias, row by row."""
    zero = {"x": jnp.zeros((1, 2)), "w": jnp.zeros((2, CLASSES))}

    def one(y, label):
        given = {**zero, "bias": y, "labels": label[None], **how}
        out, saved = xla.forward(**given, residuals=True)
        more = {"out": None, "residuals": saved, "cotangent": jnp.ones_like(out)}
        return out[0], xla.backward(**given, **more)["bias"]

    return jax.jit(jax.vmap(one))(Y, LABELS)


def _same(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-6)
