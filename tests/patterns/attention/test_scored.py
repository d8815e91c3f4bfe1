"""Attention with any function of its scores: found, and computed in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention.xla import config
from tests import slow
from tests.spellings.attention import scores
from tests.spellings.attention.scores import CASES, B, Case, H, N, T

pytestmark = pytest.mark.once

FORCED = {"attention": "memory_bounded", "scored_attention": "memory_bounded"}
OP = "scored_attention"
UP = np.cos(np.arange(B * T * N * H)).reshape(B, T, N, H).astype("float32")
FRAMES = {"first": scores.first_frame, "second": scores.second_frame}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several tiles for small shapes, and code that compiles fast."""
    monkeypatch.setattr(config, "DEFAULT", config.Blocks(8, 16, 1 << 9, 1 << 9))
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def spelled(case: Case, which: str) -> Callable[..., Any]:
    """Returns one of a case's two spellings."""
    function = case.one if which == "first" else case.other
    return FRAMES[which](function, case.arrays)


def given(case: Case) -> list[Any]:
    """Returns the arrays that a case's attention takes."""
    return [scores.Q, scores.K, scores.V, *(scores.ARRAYS[n] for n in case.arrays)]


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives the result, and gradients of all arrays."""

    def both(*arrays: Any) -> Any:
        out, back = jax.vjp(f, *arrays)
        return out, back(UP.astype(out.dtype))

    return both


def far(got: Any, want: Any) -> float:
    """Returns the largest error of arrays, by the size of the largest number."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(g - w).max() / (np.abs(w).max() + 1e-2)) for g, w in pairs)


def exact(f: Callable[..., Any], arrays: list[Any]) -> Any:
    """Returns what a function gives in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arrays)
        return jax.tree.map(np.asarray, jax.jit(f)(*wide))


def wrong(cases: list[tuple[Case, str]]) -> dict[str, float]:
    """Returns the errors of spellings that are too large; all compiled as one."""
    functions = [spelled(*one) for one in cases]
    arrays = [given(case) for case, _ in cases]
    fast = [rewriter.optimize(f, implementation=FORCED) for f in functions]

    def every(*given: Any) -> Any:
        return [with_gradients(f)(*x) for f, x in zip(fast, given, strict=True)]

    def plain(*given: Any) -> Any:
        return [with_gradients(f)(*x) for f, x in zip(functions, given, strict=True)]

    got, want = jax.jit(every)(*arrays), exact(plain, arrays)
    errors = zip(cases, map(far, got, want), strict=True)
    return {f"{c.name}, {which}": e for (c, which), e in errors if not e < 3e-5}


def found(f: Callable[..., Any], *arrays: Any) -> Any:
    """Returns the only site of a function."""
    (site,) = rewriter.optimize(f, implementation=FORCED).report(*arrays).sites
    return site


SPELLINGS = [(case, which) for case in CASES for which in FRAMES]
PARTS = 12


@pytest.mark.parametrize("part", slow.first(2, range(PARTS)))
def test_each_function_is_found_in_both_spellings(part: int) -> None:
    assert len(CASES) >= 60
    for case, which in SPELLINGS[part::PARTS]:
        site = found(spelled(case, which), *given(case))
        assert (site.form, site.kernel) == (OP, "memory_bounded"), (case.name, which)
        assert " score_0 f32[1,4,24,40]" not in site.shapes, (case.name, which)


@pytest.mark.parametrize("part", slow.first(1, range(PARTS)))
def test_numbers_and_gradients(part: int) -> None:
    assert not wrong(SPELLINGS[part::PARTS])
