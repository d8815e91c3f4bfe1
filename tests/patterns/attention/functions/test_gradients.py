"""Gradients of attention by a function of its scores, where the program has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests import slow
from tests.patterns.attention.functions.checks import (
    FORCED,
    OP,
    UP,
    exact,
    far,
    quickly,
)
from tests.spellings.attention import scores
from tests.spellings.attention.scores import CASES, T

pytestmark = [pytest.mark.once, pytest.mark.usefixtures(quickly.__name__)]

SPELLINGS = [(case, which) for case in CASES for which in scores.FRAMES]
BY_NAME = {case.name: case for case in CASES}
PARTS = 22
Function = Callable[..., Any]


def spelled(name: str, which: str = "first") -> tuple[Function, list[Any]]:
    """Returns a case's spelling, and its arrays and a cotangent."""
    case = BY_NAME[name]
    function = case.one if which == "first" else case.other
    own = [scores.ARRAYS[n] for n in case.arrays]
    arrays = [scores.Q, scores.K, scores.V, *own, UP]
    return scores.FRAMES[which](function, case.arrays), arrays


def in_bfloat16(name: str, which: str) -> tuple[Function, list[Any]]:
    """Returns a case whose products and softmax alone are in float32."""
    case = BY_NAME[name]
    function = case.one if which == "first" else case.other

    def attend(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        i, j = jnp.arange(T)[None, None, :, None], jnp.arange(scores.S)
        given = scores.Given("bnts", dict(zip(case.arrays, arrays, strict=True)))
        x = function(x * 0.3, i, j[None, None, None], given)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x).astype(v.dtype), v)

    narrow = [jnp.asarray(x, "bfloat16") for x in (scores.Q, scores.K, scores.V)]
    return attend, [*narrow, *(scores.ARRAYS[n] for n in case.arrays), UP]


def with_gradients(f: Function, count: int = 3) -> Function:
    """Returns a function that gives the result, and gradients of some first arrays.

    Its last argument is the cotangent.
    """

    def both(*given: Any) -> Any:
        *arrays, up = given
        some = lambda *first: f(*first, *arrays[count:])
        out, back = jax.vjp(some, *arrays[:count])
        return out, back(up.astype(out.dtype))

    return both


def contractions(jaxpr: Any) -> int:
    """Returns how many contractions are outside of sites."""
    found = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "rewriter_site":
            continue
        found += eqn.primitive.name == "dot_general"
        for value in jax.tree.leaves(eqn.params):
            inner = getattr(value, "jaxpr", value)
            found += contractions(inner) if hasattr(inner, "eqns") else 0
    return found


def left(f: Function, arrays: list[Any]) -> str:
    """Returns what is left of a program beside a site with its gradients, or ``""``."""
    fast = rewriter.optimize(f, implementation=FORCED)
    (site,) = fast.report(*arrays).sites
    if (site.form, site.backward) != (OP, True):
        return f"{site.form or site.op}, gradients {site.backward}"
    count = contractions(fast.jaxpr(*arrays).jaxpr)
    return f"{count} contractions" if count else ""


@pytest.mark.parametrize("part", slow.first(1, range(PARTS)))
def test_all_gradients_are_found(part: int) -> None:
    found = {
        (case.name, which): left(with_gradients(f), arrays)
        for case, which in SPELLINGS[part::PARTS]
        for f, arrays in [in_bfloat16(case.name, which)]
    }
    assert not {name: what for name, what in found.items() if what}


OF_THE_DERIVATIVE = (
    "arctan", "power law of a head", "checkerboard", "temperature per batch", "mish",
    "log alibi", "bucketed scores", "sigmoid of squares",
)  # fmt: skip
"""Functions of which only the equations of the derivative are compared, and others."""


@pytest.mark.parametrize("name", slow.first(1, OF_THE_DERIVATIVE))
def test_their_numbers(name: str) -> None:
    f, arrays = spelled(name, "second")
    both = with_gradients(f)
    assert not left(both, arrays)
    fast = rewriter.optimize(both, implementation=FORCED)
    assert far(jax.jit(fast)(*arrays), exact(both, arrays)) < 3e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fire", "temperature per key", "gated by content"])
def test_gradients_of_small_arrays_too(name: str) -> None:
    f, arrays = spelled(name)
    both = with_gradients(f, len(arrays) - 1)
    assert not left(both, arrays)
    fast = rewriter.optimize(both, implementation=FORCED)
    assert far(jax.jit(fast)(*arrays), exact(both, arrays)) < 3e-5


def layers(f: Function) -> Function:
    """Returns three layers with one function."""

    def every(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        for c in (0.5, 1.0, 0.7):
            q = q + f(q, k * c, v * c, *arrays)
        return q

    return every


def scanned(f: Function) -> Function:
    """Returns the same in a loop."""

    def every(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        step = lambda x, c: (x + f(x, k * c, v * c, *arrays), None)
        return jax.lax.scan(step, q, jnp.array([0.5, 1.0, 0.7], q.dtype))[0]

    return every


CONTEXTS = {"layers": layers, "scan": scanned, "checkpoint": jax.checkpoint}


NAMES = "mish", "arctan", "checkerboard"


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", slow.first(1, NAMES))
def test_they_are_found_in_contexts(name: str, context: str) -> None:
    f, arrays = spelled(name)
    both = with_gradients(CONTEXTS[context](f))
    fast = rewriter.optimize(both, implementation=FORCED)
    sites = fast.report(*arrays).sites
    assert {(s.form, s.backward) for s in sites} == {(OP, True)}
    assert not contractions(fast.jaxpr(*arrays).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", NAMES)
def test_their_numbers_in_contexts(name: str, context: str) -> None:
    f, arrays = spelled(name)
    both = with_gradients(CONTEXTS[context](f))
    fast = rewriter.optimize(both, implementation=FORCED)
    assert far(jax.jit(fast)(*arrays), exact(both, arrays)) < 3e-5


def test_a_bias_stays_where_the_gradient_of_its_table_is_asked_for() -> None:
    f, arrays = spelled("t5 buckets, capped")
    for count, form in ((3, OP), (4, "")):
        both = with_gradients(f, count)
        fast = rewriter.optimize(both, implementation=FORCED)
        site = fast.report(*arrays).sites[0]
        assert (site.form, site.backward) == (form, True)


def sloped(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    i, j = jnp.arange(T)[:, None], jnp.arange(scores.S)
    x = jnp.einsum("btnh,bsnh->bnts", q, k) + slopes[:, None, None] * (j - i)
    x = jnp.where(j <= i, x, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(x), v)


@pytest.mark.parametrize("count", [0, 3])
def test_slopes_are_attentions_own(count: int) -> None:
    arrays = [scores.Q, scores.K, scores.V, scores.ARRAYS["slopes"], UP]
    f = with_gradients(sloped, count) if count else lambda *x: sloped(*x[:-1])
    (site,) = rewriter.optimize(f, implementation=FORCED).report(*arrays).sites
    assert not site.form
    assert "alibi f32[4]" in site.shapes


# --------------------------------------------------------------------- look-alikes
def other_slope(x: Any) -> Any:
    """Returns a function with the derivative of another one."""

    @jax.custom_jvp
    def bent(x: Any) -> Any:
        return jnp.arctan(x)

    bent.defjvp(lambda p, t: (jnp.arctan(p[0]), t[0] / (1 + jnp.abs(p[0]))))
    return bent(x)


def test_gradients_of_another_function_are_not_taken() -> None:
    f = scores.first_frame(lambda x, i, j, a: 2 * other_slope(x), ())
    arrays = [scores.Q, scores.K, scores.V, UP]
    both = with_gradients(f)
    fast = rewriter.optimize(both, implementation=FORCED)
    assert contractions(fast.jaxpr(*arrays).jaxpr) >= 2
