"""Attention with any function of its scores: found, and computed in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from tests import slow
from tests.patterns.attention.functions.checks import (
    CONTEXTS,
    FORCED,
    OP,
    check_bounded,
    check_gradients,
    check_in_context,
    exact,
    far,
    found,
    with_gradients,
)
from tests.patterns.attention.functions.checks import quickly as quickly
from tests.spellings.attention import scores
from tests.spellings.attention.scores import CASES, B, Case, H, N, T

pytestmark = pytest.mark.once


def spelled(case: Case, which: str) -> Callable[..., Any]:
    """Returns one of a case's two spellings."""
    function = case.one if which == "first" else case.other
    return scores.FRAMES[which](function, case.arrays)


def given(case: Case) -> list[Any]:
    """Returns the arrays that a case's attention takes."""
    return [scores.Q, scores.K, scores.V, *(scores.ARRAYS[n] for n in case.arrays)]


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


SPELLINGS = [(case, which) for case in CASES for which in scores.FRAMES]
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


# ------------------------------------------------------------------- around the site
BY_NAME = {case.name: case for case in CASES}


def one(name: str) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a case's first spelling, and its arrays."""
    return spelled(BY_NAME[name], "first"), given(BY_NAME[name])


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "name", slow.first(1, ["decay per head", "gelu", "mask before a cap"])
)
def test_in_contexts(name: str, context: str) -> None:
    check_in_context(context, *one(name))


@pytest.mark.parametrize("name", ["t5 buckets, capped", "decay per head"])
def test_no_array_of_all_queries_and_keys_is_made(name: str) -> None:
    check_bounded(*one(name))


def test_equal_functions_are_equal() -> None:
    first, again = (found(*_flat(one("kerple log"))).params["score"] for _ in range(2))
    other = found(*_flat(one("log alibi"))).params["score"]
    assert first == again
    assert hash(first) == hash(again)
    assert first != other
    assert "log1p" in str(first)


def _flat(pair: tuple[Any, list[Any]]) -> list[Any]:
    return [pair[0], *pair[1]]


def test_attention_is_read_as_before_where_that_is_all() -> None:
    def plain(x: Any, i: Any, j: Any, a: Any) -> Any:
        return jnp.where(j <= i, 3 * jnp.tanh(x / 3), -jnp.inf)

    f = scores.first_frame(plain, ())
    site = found(f, scores.Q, scores.K, scores.V)
    assert not site.form
    assert site.params["softcap"] == 3
    forced = {"attention": "memory_bounded"}
    f, arrays = one("t5 buckets, capped")
    (site,) = rewriter.optimize(f, implementation=forced).report(*arrays).sites
    assert not site.form
    assert "bias f32[1,4,24,40]" in site.shapes


def test_a_mask_around_a_function_is_read_as_a_mask() -> None:
    def padded(x: Any, i: Any, j: Any, a: Any) -> Any:
        x = jnp.where(j < 30, jnp.sin(x) - jnp.log1p(abs(i - j)), -1e9)
        return jnp.where((j <= i + 3) & (j > i - 9), x, -1e9)

    for frame in scores.FRAMES.values():
        f = frame(padded, ())
        site = found(f, scores.Q, scores.K, scores.V)
        assert site.form == OP
        assert site.params["window"] == (8, 3)
        arrays = [scores.Q, scores.K, scores.V]
        fast = rewriter.optimize(f, implementation=FORCED)
        got = jax.jit(with_gradients(fast))(*arrays)
        assert far(got, exact(with_gradients(f), arrays)) < 3e-5


def sink(x: Any, sinks: Any) -> Any:
    """A softmax with one more score of each head, which has no key."""
    more = jnp.broadcast_to(sinks[None, :, None, None], (*x.shape[:3], 1))
    return jax.nn.softmax(jnp.concatenate([x, more], -1), -1)[..., :-1]


def test_a_function_before_a_softmax_with_sinks() -> None:
    def f(q: Any, k: Any, v: Any, sinks: Any, heat: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k)
        x = jnp.arctan(x) * heat[:, None, None]
        return jnp.einsum("bnts,bsnh->btnh", sink(x, sinks), v)

    arrays = [scores.Q, scores.K, scores.V]
    arrays += [scores.ARRAYS["slopes"], scores.ARRAYS["per_head"]]
    site = found(f, *arrays)
    assert site.form == OP
    assert "sinks" in site.shapes
    fast = rewriter.optimize(f, implementation=FORCED)
    got = jax.jit(with_gradients(fast))(*arrays)
    assert far(got, exact(with_gradients(f), arrays)) < 3e-5


def test_rows_of_nothing_but_infinities_are_nan_as_written() -> None:
    def added(x: Any, i: Any, j: Any, a: Any) -> Any:
        return jnp.sin(x) + jnp.where((i < 2) | (j > i), -jnp.inf, 0.0)

    def chosen(x: Any, i: Any, j: Any, a: Any) -> Any:
        return 2 * jnp.where((i < 2) | (j > i), -jnp.inf, jnp.sin(x))

    arrays = [scores.Q, scores.K, scores.V]
    for function in (added, chosen):
        f = scores.first_frame(function, ())
        assert found(f, *arrays).form == OP
        fast = rewriter.optimize(f, implementation=FORCED)
        got, want = (jax.jit(with_gradients(g))(*arrays) for g in (fast, f))
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
        assert np.isnan(got[0]).any()
        assert not np.isnan(got[0]).all()


# --------------------------------------------------------------------- look-alikes
def of_sums(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.tanh(x) * x.mean(-1, keepdims=True)


def of_heads(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.tanh(x) + x.sum(1, keepdims=True)


def counted(x: Any, i: Any, j: Any, a: Any) -> Any:
    return x - jnp.cumsum(jax.nn.sigmoid(x), -1)


def in_order(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.tanh(jnp.sort(x, -1))


def permuted(x: Any, i: Any, j: Any, a: Any) -> Any:
    places = jnp.argsort(x[0, 0, 0])
    return jnp.tanh(x)[..., places]


def reversed_keys(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.tanh(x) + x[..., ::-1]


def shifted(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.tanh(x) + jnp.roll(x, 1, -1)


def normalised(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.sin((x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-6))


def of_the_largest(x: Any, i: Any, j: Any, a: Any) -> Any:
    return jnp.where(x > x.max(-1, keepdims=True) - 1, jnp.sin(x), -1e9)


LOOK_ALIKES = (
    of_sums, of_heads, counted, in_order, permuted, reversed_keys, shifted, normalised,
    of_the_largest,
)  # fmt: skip


SILENT = (in_order, permuted, shifted)
"""Which are not even near."""


@pytest.mark.parametrize("function", LOOK_ALIKES, ids=lambda f: f.__name__)
def test_look_alikes_are_refused(function: Any) -> None:
    f = scores.first_frame(function, ())
    report = rewriter.explain(f)(scores.Q, scores.K, scores.V)
    assert not report.sites
    assert not report.failures
    assert report.misses or function in SILENT


def test_a_guard_behind_infinities_is_refused() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        x = jnp.log(jax.nn.relu(jnp.einsum("btnh,bsnh->bnts", q, k)))
        largest = x.max(-1, keepdims=True)
        e = jnp.exp(x - jnp.where(jnp.isfinite(largest), largest, 0))
        weights = e / jnp.maximum(e.sum(-1, keepdims=True), 1e-9)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    report = rewriter.explain(f)(scores.Q, scores.K, scores.V)
    assert not report.sites


def test_a_bias_that_is_an_argument_is_a_bias() -> None:
    def f(q: Any, k: Any, v: Any, bias: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), v)

    bias = np.ones((N, T, scores.S), "float32")
    site = found(f, scores.Q, scores.K, scores.V, bias)
    assert not site.form
    assert "bias f32[1,4,24,40]" in site.shapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_heads(dtype: str) -> None:
    def f(q: Any, k: Any, v: Any, heat: Any) -> Any:
        q = q.reshape(B, T, 2, 2, H)
        x = jnp.einsum("btkgh,bskh->bkgts", q, k) * jnp.asarray(0.35, q.dtype)
        x = jax.nn.softplus(x) * heat.reshape(2, 2)[:, :, None, None]
        x = jnp.where(jnp.tril(jnp.ones((T, scores.S), bool)), x, -jnp.inf)
        weights = jax.nn.softmax(x.astype(jnp.float32)).astype(v.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)

    arrays = [scores.Q, scores.K[:, :, :2], scores.V[:, :, :2]]
    arrays = [jnp.asarray(x, dtype) for x in (*arrays, scores.ARRAYS["per_head"])]
    site = found(f, *arrays)
    assert site.form == OP
    assert site.params["window"] == (None, 0)
    assert f"score_0 {'f32' if dtype == 'float32' else 'bf16'}[1,4,1,1]" in site.shapes
    check_gradients(f, arrays)


@pytest.mark.parametrize("mode", [None, "clip", "fill"])
def test_places_outside_of_a_table(mode: str | None) -> None:
    """Without a mode, such a place has the nearest number, and gives no gradient."""
    at = np.arange(12)[:, None] - np.arange(12)
    q, k, v = (np.random.default_rng(i).normal(size=(1, 12, 2, 8)) for i in range(3))
    table = np.random.default_rng(3).normal(size=(2, 9))

    def f(q: Any, k: Any, v: Any, table: Any) -> Any:
        places = jnp.asarray(at) + (12 if mode == "fill" else 0)
        s = jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k))
        more = table.at[:, places].get(mode=mode) if mode else table[:, places]
        weights = jax.nn.softmax(s + jnp.nan_to_num(more))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    args = [x.astype("float32") for x in (q, k, v, table)]
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(*args).sites
    assert site.replaced
    total = lambda f: lambda *a: (f(*a) * jnp.arange(8.0)).sum()
    got, want = (jax.grad(total(g), (0, 1, 2, 3))(*args) for g in (fast, f))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-4)


def test_a_mask_that_is_added_is_no_function() -> None:
    """Both are found; attention with a window reads no more."""

    def f(q: Any, k: Any, v: Any) -> Any:
        t = jnp.arange(q.shape[1])
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        s = s + jnp.where(t[:, None] < t, -1e9, 0.0)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    x = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.float32)
    (site,) = rewriter.explain(f)(x, x, x).sites
    assert site.params["window"] == (None, 0)
