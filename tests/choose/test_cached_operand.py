"""Norms whose rows were just written are left to XLA if a GPU's cache holds them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.choose.cached_operand import WHY
from tests.bench.choices import layer, rms

D = 1024


def alone(x: Any, w: Any, scale: Any) -> Any:
    del w
    return rms(x, scale)


def behind(x: Any, w: Any, scale: Any) -> Any:
    h = x + x @ w
    return h, rms(h, scale)


def centred(x: Any, w: Any, scale: Any) -> Any:
    return layer(x @ w, scale, scale)


def gradients(x: Any, w: Any, scale: Any) -> Any:
    total = lambda *args: jnp.sum(behind(*args)[1].astype(jnp.float32) ** 2)
    return jax.grad(total, (0, 2))(x, w, scale)


@pytest.mark.parametrize(
    ("fn", "rows", "kernel"),
    [
        (alone, 16384, "hopper"), (behind, 16384, "xla"), (centred, 16384, "xla"),
        (behind, 24576, "hopper"), (centred, 24576, "hopper"),
        (gradients, 16384, "hopper"),
    ],
)  # fmt: skip
def test_what_is_chosen_on_an_h200(fn: Any, rows: int, kernel: str) -> None:
    shapes = ((rows, D), jnp.bfloat16), ((D, D), jnp.bfloat16), ((D,), jnp.float32)
    specs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    (site,) = rewriter.explain(fn, target="h200", tune="off")(*specs).sites
    assert site.kernel == kernel
    why = dict(site.not_chosen).get("hopper", "")
    assert (why == WHY) == (kernel == "xla")
