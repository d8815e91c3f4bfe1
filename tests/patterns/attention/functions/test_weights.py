"""Attention whose weights are no softmax: found, and computed in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.kernels.attention.nonzero_window import reach
from tests import slow
from tests.patterns.attention.functions.checks import (
    CONTEXTS,
    FORCED,
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
from tests.spellings.attention.scores import B, Given, H, N, S, T

pytestmark = pytest.mark.once

OP = "scored_attention"
sigmoid, relu = jax.nn.sigmoid, jax.nn.relu


def over_sum(w: Any, a: Given, more: float = 0.0) -> Any:
    """Weights over their sum and a number."""
    return w / (w.sum(keys(a), keepdims=True) + more)


def keys(a: Given) -> int:
    """The axis of the keys."""
    return a.order.index("s")


def of_tokens(x: Any, i: Any, j: Any, a: Given) -> Any:
    seen = jnp.maximum(jnp.minimum(i + 1, S), 1).astype(x.dtype)
    return jnp.where(j <= i, relu(x), 0) / seen


def by_hand(x: Any, i: Any, j: Any, a: Given) -> Any:
    return 1 / (1 + jnp.exp(-(x - math.log(S))))


def in_table(x: Any, i: Any, j: Any, a: Given) -> Any:
    table = a.of_heads(a.arrays["table"][jnp.clip(a.pair(j - i) + 4, 0, 8)])
    return sigmoid(x + table - math.log(S))


def largest(x: Any, i: Any, j: Any, a: Given) -> Any:
    w = jnp.where(j <= i, jnp.square(relu(x)), 0)
    return w / jnp.maximum(w.sum(keys(a), keepdims=True), 0.1)


def where_some(x: Any, i: Any, j: Any, a: Given) -> Any:
    w = jnp.where((j <= i) & (j > i - 9), sigmoid(x * a.per_head), 0)
    total = w.sum(keys(a), keepdims=True)
    return w / jnp.where(total > 0, total, 1)


def inverse(x: Any, i: Any, j: Any, a: Given) -> Any:
    w = jax.nn.softplus(x)
    return w * (1 / (w.sum(keys(a), keepdims=True) + a.per_head))


CASES: dict[str, tuple[Callable[..., Any], str, tuple[str, ...]]] = {
    "sigmoid": (lambda x, i, j, a: sigmoid(x - math.log(S)), "none", ()),
    "sigmoid by hand": (by_hand, "none", ()),
    "sigmoid, a bias per head": (
        lambda x, i, j, a: sigmoid(x + a.per_head), "none", ("per_head",),
    ),
    "sigmoid, causal before": (
        lambda x, i, j, a: sigmoid(jnp.where(j <= i, x, -jnp.inf) - 2), "none", (),
    ),
    "sigmoid, causal after": (
        lambda x, i, j, a: jnp.where(j <= i, sigmoid(x - 2), 0), "none", (),
    ),
    "sigmoid, padded": (
        lambda x, i, j, a: sigmoid(jnp.where(a.per_key > 0.6, x, -1e9)), "none",
        ("per_key",),
    ),
    "sigmoid with slopes": (
        lambda x, i, j, a: sigmoid(x - a.slopes * abs(i - j) - 1), "none", ("slopes",),
    ),
    "sigmoid of a table": (in_table, "none", ("table",)),
    "sigmoid, a temperature per query": (
        lambda x, i, j, a: sigmoid(x / a.per_query), "none", ("per_query",),
    ),
    "relu": (lambda x, i, j, a: relu(x) / S, "none", ()),
    "relu over tokens": (of_tokens, "none", ()),
    "squared relu": (
        lambda x, i, j, a: jnp.square(jnp.maximum(x, 0)) / S, "none", (),
    ),
    "tanh": (lambda x, i, j, a: jnp.tanh(x) * a.scalar, "none", ("scalar",)),
    "gelu": (lambda x, i, j, a: jax.nn.gelu(x) / S, "none", ()),
    "retention": (
        lambda x, i, j, a: jnp.where(j <= i, x * jnp.exp((j - i) * 0.1), 0), "none", (),
    ),
    "sigmoid over its sum": (
        lambda x, i, j, a: over_sum(sigmoid(x), a), "sum", (),
    ),
    "relu over its sum": (
        lambda x, i, j, a: over_sum(relu(x + 0.1), a, 1e-2), "sum", (),
    ),
    "squared relu over its sum, at least": (largest, "sum", ()),
    "sigmoid over its sum, where there is one": (where_some, "sum", ("per_head",)),
    "softplus times an inverse": (inverse, "sum", ("per_head",)),
    "squares over their sum alone": (
        lambda x, i, j, a: x * x / (x * x).sum(keys(a), keepdims=True), "sum", (),
    ),
    "a series over its sum alone": (
        lambda x, i, j, a: (lambda w: w / w.sum(keys(a), keepdims=True))(
            1 + x + x * x / 2
        ),
        "sum", (),
    ),
    "elu over its sum": (
        lambda x, i, j, a: over_sum(jax.nn.elu(x) + 1, a, 1e-3), "sum", (),
    ),
}  # fmt: skip


SPELLINGS = [(name, which) for name in CASES for which in scores.FRAMES]


def spelled(name: str, which: str = "first") -> tuple[Callable[..., Any], list[Any]]:
    """Returns a case in a frame, and its arrays."""
    function, _, names = CASES[name]
    arrays = [scores.Q, scores.K, scores.V, *(scores.ARRAYS[n] for n in names)]
    return scores.FRAMES[which](function, names, softmax=False), arrays


@pytest.mark.parametrize("part", slow.first(1, range(6)))
def test_found_and_right_with_gradients(part: int) -> None:
    """All of a part are compiled as one."""
    some = SPELLINGS[part::6]
    functions, arrays = zip(*(spelled(*one) for one in some), strict=True)
    fast = [rewriter.optimize(f, implementation=FORCED) for f in functions]
    for one, f, given in zip(some, fast, arrays, strict=True):
        (site,) = f.report(*given).sites
        assert (site.form, site.kernel) == (OP, "memory_bounded"), one
        assert site.params["normalisation"] == CASES[one[0]][1], one
        assert "[1,4,24,40]" not in site.shapes, one

    def every(functions: Any, *given: Any) -> Any:
        pairs = zip(functions, given, strict=True)
        return [with_gradients(f)(*x) for f, x in pairs]

    got = jax.jit(lambda *x: every(fast, *x))(*arrays)
    want = exact(lambda *x: every(functions, *x), list(arrays))
    errors = dict(zip(some, map(far, got, want), strict=True))
    assert max(errors.values()) < 3e-5, errors


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "name", slow.first(1, ["sigmoid with slopes", "softplus times an inverse", "relu"])
)
def test_in_contexts(name: str, context: str) -> None:
    check_in_context(context, *spelled(name))


@pytest.mark.parametrize("name", ["sigmoid, causal before", "relu over its sum"])
def test_no_array_of_all_queries_and_keys_is_made(name: str) -> None:
    check_bounded(*spelled(name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_heads(dtype: str) -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        q = q.reshape(B, T, 2, 2, H)
        x = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32) * 0.35
        w = jnp.where(jnp.tril(jnp.ones((T, S), bool)), sigmoid(x - 1), 0)
        out = jnp.einsum("bkgts,bskh->btkgh", w.astype(v.dtype), v)
        return out.reshape(B, T, N, H)

    arrays = [scores.Q, scores.K[:, :, :2], scores.V[:, :, :2]]
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    site = found(f, *arrays)
    assert (site.form, site.kernel) == (OP, "memory_bounded")
    check_gradients(f, arrays)


def test_dividing_behind_the_values() -> None:
    """The sum may divide what the weights have added up."""

    def f(q: Any, k: Any, v: Any) -> Any:
        w = jnp.square(relu(jnp.einsum("btnh,bsnh->bnts", q, k)))
        out = jnp.einsum("bnts,bsnh->btnh", w, v)
        return out / (w.sum(-1).swapaxes(1, 2)[..., None] + 1e-3)

    arrays = [scores.Q, scores.K, scores.V]
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(*arrays).sites
    assert site.params["normalisation"] == "sum"
    got = jax.jit(with_gradients(fast))(*arrays)
    assert far(got, exact(with_gradients(f), arrays)) < 3e-5


# --------------------------------------------------------------------------- the reach
REACHES: dict[str, tuple[Callable[..., Any], tuple[int | None, int | None]]] = {
    "chosen after": (lambda x, i, j: jnp.where(j <= i, sigmoid(x), 0), (None, 0)),
    "chosen before": (
        lambda x, i, j: sigmoid(jnp.where(i >= j, x, -jnp.inf) - 3), (None, 0),
    ),
    "added": (lambda x, i, j: sigmoid(x + jnp.where(j > i, -jnp.inf, 0)), (None, 0)),
    "triangle": (
        lambda x, i, j: jnp.where(jnp.tril(jnp.ones((T, S), bool)), relu(x), 0),
        (None, 0),
    ),
    "multiplied": (lambda x, i, j: sigmoid(x) * jnp.tril(jnp.ones((T, S))), (None, 0)),
    "negated": (lambda x, i, j: jnp.where(~(j < i), 0, relu(x)), (None, -1)),
    "band": (lambda x, i, j: jnp.where((j < i + 3) & (i - j < 7), relu(x), 0), (6, 2)),
    "near": (lambda x, i, j: jnp.where(abs(j - i) <= 5, sigmoid(x), 0), (5, 5)),
    "far": (lambda x, i, j: jnp.where(abs(j - i) > 5, sigmoid(x), 0), (None, None)),
    "a fill that is seen": (
        lambda x, i, j: sigmoid(jnp.where(j <= i, x, -4.0)), (None, None),
    ),
    "a fill that may be lost": (
        lambda x, i, j: sigmoid(x + jnp.where(j <= i, 0, -1e9)), (None, None),
    ),
    "tanh of a fill": (
        lambda x, i, j: jnp.tanh(jnp.where(j <= i, x, -jnp.inf)), (None, None),
    ),
    "halves": (lambda x, i, j: jnp.where(j // 2 <= i, relu(x), 0), (None, None)),
    "scores decide": (lambda x, i, j: jnp.where(x > j - i, relu(x), 0), (None, None)),
    "bytes": (
        lambda x, i, j: sigmoid(x) * (i.astype("u1") >= j.astype("u1")), (None, 0),
    ),
    "halves of 16 bits": (
        lambda x, i, j: sigmoid(x) * (i.astype("f2") >= j.astype("f2")), (None, 0),
    ),
}  # fmt: skip

WRAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "distance in bytes": lambda i, j: away(i, j, "uint8") >= 1,
    "size in bytes": lambda i, j: ~(abs(away(i, j, "uint8")) < 1),
    "distance in 16 bits": lambda i, j: away(i, j, "uint16") < 3,
    "distance in 32 bits": lambda i, j: away(i, j, "uint32") > 2,
    "distance, turned": lambda i, j: away(j, i, "uint32") <= 4,
    "beyond bytes": lambda i, j: (i * 16).astype("int8") >= (j * 16).astype("int8"),
    "times in bytes": lambda i, j: away(i, j, "int8") * jnp.int8(50) <= 0,
    "plus in bytes": lambda i, j: i.astype("int8") + jnp.int8(120) >= j.astype("int8"),
    "negative bytes": lambda i, j: -i.astype("uint8") <= -j.astype("uint8"),
    "rounded": lambda i, j: (i * 99).astype("bfloat16") >= (j * 99).astype("bfloat16"),
    "rounded halves": lambda i, j: (i * 999).astype("f2") >= (j * 999).astype("f2"),
    "rounded sum": lambda i, j: (i + 1000).astype("bfloat16") > (j + 999).astype("f4"),
}
"""Masks of positions that do not fit into their dtype, or round in it."""


def away(i: Any, j: Any, dtype: str) -> Any:
    """The distance of a key behind its query, in a dtype that may wrap around."""
    return i.astype(dtype) - j.astype(dtype)


@pytest.mark.parametrize("name", REACHES)
def test_blocks_that_are_zero_are_skipped(name: str) -> None:
    function, want = REACHES[name]

    def f(q: Any, k: Any, v: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k)
        w = function(x, jnp.arange(T)[:, None], jnp.arange(S)[None])
        return jnp.einsum("bnts,bsnh->btnh", w, v)

    (site,) = rewriter.explain(f)(scores.Q, scores.K, scores.V).sites
    assert reach(site.params["score"], T, S) == want


@pytest.mark.parametrize("kind", ["multiplied", "chosen"])
@pytest.mark.usefixtures("quickly")
def test_positions_that_wrap_around_hide_what_the_program_hides(kind: str) -> None:
    hide = lambda w, m: w * m if kind == "multiplied" else jnp.where(m, w, 0)

    def f(q: Any, k: Any, v: Any) -> dict[str, Any]:
        i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
        w = sigmoid(jnp.einsum("btnh,bsnh->bnts", q, k))
        apart = {n: hide(w, mask(i, j)) for n, mask in WRAPPED.items()}
        return {n: jnp.einsum("bnts,bsnh->btnh", x, v) for n, x in apart.items()}

    arrays = scores.Q, scores.K, scores.V
    fast = rewriter.optimize(f, implementation=FORCED)
    assert len(fast.report(*arrays).sites) == len(WRAPPED)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        fast(*arrays),
        f(*arrays),
    )


# ------------------------------------------------------------------------- look-alikes
def experts(x: Any, up: Any, down: Any) -> Any:
    """Two layers with matrices of their own, for each of several experts."""
    return jnp.einsum("ecf,efd->ecd", relu(jnp.einsum("ecd,edf->ecf", x, up)), down)


def of_heads(x: Any) -> Any:
    return sigmoid(x) / sigmoid(x).sum(1, keepdims=True)


def of_queries(x: Any) -> Any:
    return sigmoid(x) / sigmoid(x).sum(2, keepdims=True)


def of_half(x: Any) -> Any:
    return sigmoid(x) / sigmoid(x)[..., : S // 2].sum(-1, keepdims=True)


def of_squares(x: Any) -> Any:
    return sigmoid(x) / jnp.square(sigmoid(x)).sum(-1, keepdims=True)


def below_largest(x: Any) -> Any:
    return sigmoid(x - x.max(-1, keepdims=True))


def rolled(x: Any) -> Any:
    return sigmoid(x) + sigmoid(jnp.roll(x, 1, -1))


def centred(x: Any) -> Any:
    return relu(x - x.mean(-1, keepdims=True))


def hidden_later(x: Any) -> Any:
    w = sigmoid(x) / sigmoid(x).sum(-1, keepdims=True)
    return jnp.where(jnp.arange(S) < 30, w, 0)


def linear(x: Any) -> Any:
    return (x - 1) / S


def bisected(x: Any) -> Any:
    """The threshold of sparsemax, found by halving."""

    def halved(_: Any, ends: Any) -> Any:
        low, high = ends
        middle = (low + high) / 2
        more = relu(x - middle).sum(-1, keepdims=True) > 1
        return jnp.where(more, middle, low), jnp.where(more, high, middle)

    ends = x.min(-1, keepdims=True) - 1, x.max(-1, keepdims=True)
    return relu(x - lax.fori_loop(0, 8, halved, ends)[0])


LOOK_ALIKES: dict[Callable[..., Any], str] = {
    of_heads: "along another axis",
    of_queries: "along another axis",
    of_half: "a sum of something else",
    of_squares: "a sum of something else",
    below_largest: "other scores of its query",
    rolled: "other scores of its query",
    centred: "other scores of its query",
    hidden_later: "behind their sum",
    linear: "linear attention",
    bisected: "as entmax",
}


@pytest.mark.parametrize("function", LOOK_ALIKES, ids=lambda f: f.__name__)
def test_look_alikes_are_refused(function: Any) -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        w = function(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", w, v)

    report = rewriter.explain(f)(scores.Q, scores.K, scores.V)
    assert not [s for s in report.sites if s.op == "attention"]
    assert not report.failures
    texts = [m.reasons[0].text for m in report.misses]
    assert any(LOOK_ALIKES[function] in text for text in texts), texts


def test_layers_of_a_network_are_none() -> None:
    x, w = np.ones((3, 8, 16), "f4"), np.ones((3, 16, 32), "f4")
    report = rewriter.explain(experts)(x, w, w.swapaxes(1, 2))
    assert not report.sites
    assert not report.misses
    lone = rewriter.explain(lambda x, a, b: relu(x @ a) @ b)(x[0], w[0], w[0].T)
    assert not lone.sites
    assert not lone.misses


def test_heads_whose_keys_and_values_are_projected_alike() -> None:
    """One axis in common is enough, if keys and values are made of one array."""

    def f(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
        q, k, v = (jnp.einsum("td,dnh->nth", x, w) for w in (wq, wk, wv))
        w = sigmoid(jnp.einsum("nth,nsh->nts", q, k) - 3)
        return jnp.einsum("nts,nsh->tnh", w, v)

    w = scores.draw.normal(size=(3, 16, N, H)).astype("f4")
    x = scores.draw.normal(size=(T, 16)).astype("f4")
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(x, *w).sites
    assert site.params["normalisation"] == "none"
    assert far(fast(x, *w), exact(f, [x, *w])) < 3e-5
