"""A pattern with kernels that end, hang or fail the process they run in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rewriter


@rewriter.pattern(dims="x: m k, w: k n -> m n")
def gated(x, w):
    return jnp.sin(x @ w) * (x @ w)


def calling(function: Callable[[], Any], x: Any, w: Any) -> jax.Array:
    """The result, by way of a function that is called when it runs."""

    def call(y: np.ndarray) -> np.ndarray:
        function()
        return y

    y = program(x, w)
    return jax.pure_callback(call, jax.ShapeDtypeStruct(y.shape, y.dtype), y)


def program(x, w):
    y = x @ w
    return jnp.sin(y) * y


def fail() -> None:
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


@gated.kernel()
def aborts(x, w):
    return calling(os.abort, x, w)


@gated.kernel()
def good(x, w):
    print("this is not an answer")
    return program(x, w)


@gated.kernel()
def fails(x, w):
    return calling(fail, x, w)


@gated.kernel()
def hangs(x, w):
    return calling(lambda: time.sleep(3600), x, w)


@gated.kernel()
def also_good(x, w):
    return program(x, w)
