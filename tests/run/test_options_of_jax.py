"""Options of JAX that users set do not hinder a rewrite."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest

import rewriter
from rewriter.errors import RewriterWarning
from tests import slow
from tests.spellings.corpus import SPELLINGS
from tests.spellings.metamorphic import with_gradients
from tests.spellings.spelling import Spelling

pytestmark = pytest.mark.once

OPTIONS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "leaks": jax.checking_leaks,
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
}
OPS = ("attention", "gated_linear_unit", "rms_norm", "layer_norm", "ragged_dot")
EVERYWHERE = dict.fromkeys(OPS, "memory_bounded")
BY_NAME = {s.name: s for s in SPELLINGS}
NAMES = (
    "decode/linen_cache",  # lengths
    "softmax/sink_column_max_twice",
    "glu/einsum_weight_first",
    "rms/mean_of_square",
    "ragged/gate_up_down",
)


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> Iterator[None]:
    with OPTIONS[request.param](), warnings.catch_warnings():
        warnings.simplefilter("error", RewriterWarning)
        yield


def allowed(name: str) -> Spelling:
    """The spelling, if the option lets it be as it is written."""
    spelling = BY_NAME[name]
    try:
        jax.eval_shape(spelling.fn, *spelling.args())
    except Exception as refused:
        pytest.skip(f"not allowed as it is written: {type(refused).__name__}")
    return spelling


def optimized(fn: Callable) -> Callable:
    return rewriter.optimize(fn, implementation=EVERYWHERE, strict=True)


def close(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("option")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_the_program_takes(name: str) -> None:
    spelling = allowed(name)
    step, args = with_gradients(spelling)
    fast = optimized(step)
    close(fast(*args), jax.jit(step)(*args))
    assert spelling.op in {s.op for s in fast.report().sites if s.replaced}


@pytest.mark.usefixtures("option")
@pytest.mark.parametrize("name", slow.first(2, NAMES))
def test_gradients_of_what_was_rewritten(name: str) -> None:
    spelling = allowed(name)
    step, args = with_gradients(spelling)
    fast = dataclasses.replace(spelling, fn=optimized(spelling.fn))
    close(with_gradients(fast)[0](*args), jax.jit(step)(*args))
