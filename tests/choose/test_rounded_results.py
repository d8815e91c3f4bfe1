"""Norms whose result is only rounded to few bits: left to XLA on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rewriter

SHAPE = (8192, 4096)
BF, F32 = jnp.bfloat16, jnp.float32
Y = jax.ShapeDtypeStruct(SHAPE, BF)
W = jax.ShapeDtypeStruct(SHAPE[1:], BF)


def norm(x: Any, w: Any) -> Any:
    x = x.astype(F32)
    return (x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)).astype(BF) * w


def rounded(y: Any, axis: int = -1) -> tuple[Any, Any]:
    scale = jnp.max(jnp.abs(y), axis, keepdims=True).astype(F32) / 127
    q = jnp.clip(jnp.round(y.astype(F32) / scale), -127, 127)
    return q.astype(jnp.int8), scale


E4 = jnp.float8_e4m3fn
W8 = jnp.ones((SHAPE[1], 8), BF)
ROUNDED: dict[str, Callable[..., Any]] = {
    "by rows": rounded,
    "by a known scale": lambda y: jnp.clip(y, -448, 448).astype(E4),
    "by parts of rows": lambda y: rounded(y.reshape(-1, 32, 128)),
    "a history too": lambda y: (
        jnp.clip(y, -448, 448).astype(E4), jnp.abs(y).astype(F32).max()
    ),
}  # fmt: skip
READ: dict[str, Callable[..., Any]] = {
    "not rounded": lambda y: y,
    "a result too": lambda y: (rounded(y), y),
    "a product too": lambda y: (rounded(y), y @ W8),
    "to 16 bits": lambda y: jnp.clip(y, -2, 2),
}


def kernel(f: Callable[..., Any], **how: Any) -> tuple[str, str]:
    program = lambda x, w: f(norm(x, w))
    (site,) = rewriter.explain(program, **{"target": "h200", **how})(Y, W).sites
    return site.kernel, str(site.not_chosen)


@pytest.mark.once
@pytest.mark.parametrize("name", ROUNDED)
def test_left_to_xla(name: str) -> None:
    chosen, why = kernel(ROUNDED[name])
    assert chosen == "xla"
    assert "only numbers of few bits are kept" in why


@pytest.mark.once
@pytest.mark.parametrize("name", READ)
def test_read_for_something_else(name: str) -> None:
    chosen, why = kernel(READ[name])
    assert chosen == "hopper"
    assert "few bits" not in why


@pytest.mark.once
def test_a_forced_kernel_stays() -> None:
    forced = {"rms_norm": "hopper"}
    assert kernel(ROUNDED["by rows"], implementation=forced)[0] == "hopper"
