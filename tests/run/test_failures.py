"""A failure inside the rewriter costs the site that it is about, and no other."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.choose import planner
from rewriter.errors import RewriterError, RewriterWarning
from rewriter.rewrite import replace
from rewriter.rewrite.fragments import Fragments
from rewriter.run import steps
from rewriter.run.program import Program
from rewriter.site.facts import Facts
from rewriter.support.failing import failing
from tests.support.programs import FORCED, attention, rms_norm

X = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
SCALE = 1 + jnp.arange(8) / 8
KEYS = jax.random.normal(jax.random.key(1), (3, 1, 16, 2, 8))


def model(x, scale, keys):
    """A norm, a loop of attention, and another norm."""

    def turn(x, k):
        return x + attention(x, k, k), x.sum()

    y, sums = jax.lax.scan(turn, rms_norm(x, scale), keys)
    return rms_norm(y, scale)[0, :, 0].sum() + sums[0]


def gradient():
    """The model's gradient, as a function that nothing knows."""
    return jax.value_and_grad(lambda *given: model(*given), (0, 1, 2))


def always(*args, **kwargs):
    raise KeyError("inside")


def of_op(name, old):
    """A function of splices or of kernels that fails for one op."""

    def call(*args, **kwargs):
        found = [getattr(getattr(a, "match", a), "op", None) for a in args]
        splices = [getattr(op, "name", "") for op in found]
        kernels = [k.op for a in args if isinstance(a, tuple) for k in a]
        if name in splices + kernels:
            raise KeyError("inside")
        return old(*args, **kwargs)

    return call


def outcome(monkeypatch, where, name, broken):
    """The report of the gradient where a function of the rewriter fails."""
    monkeypatch.setattr(where, name, broken)
    fast = rewriter.optimize(gradient(), implementation=FORCED)
    with pytest.warns(RewriterWarning, match="a part is left as written: .*inside"):
        return fast, fast.report(X, SCALE, KEYS)


def ops(report, replaced=True):
    return sorted({s.op for s in report.sites if s.replaced == replaced})


@pytest.mark.parametrize("name", ["attention", "rms_norm"])
@pytest.mark.parametrize(
    ("where", "function"),
    [
        (Fragments, "forward"),
        (Fragments, "gradients"),
        (planner, "choose"),
        (planner, "residuals_place"),
    ],
)
def test_a_site_that_fails_is_left_alone(monkeypatch, where, function, name):
    broken = of_op(name, getattr(where, function))
    _, report = outcome(monkeypatch, where, function, broken)
    (other,) = {"attention", "rms_norm"} - {name}
    assert ops(report) == [other]
    assert ops(report, replaced=False) == [name]
    (failure,) = report.failures
    assert failure.text == f"{name}: KeyError: 'inside'"
    assert "programs.py" in failure.where
    why = [w for s in report.sites if s.op == name for _, w in s.not_chosen]
    assert "rewriting it failed, KeyError: 'inside'" in why


def test_a_loop_that_fails_costs_its_sites(monkeypatch):
    fast, report = outcome(monkeypatch, replace, "traced", always)
    assert ops(report) == ["rms_norm"]
    want = gradient()(X, SCALE, KEYS)
    for a, b in zip(*map(jax.tree.leaves, (fast(X, SCALE, KEYS), want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["fuse_residual_adds", "search_gradients"])
def test_an_optional_pass_that_fails_is_left_out(monkeypatch, name):
    _, report = outcome(monkeypatch, steps, name, always)
    assert "attention" in {s.op for s in report.sites}
    assert [f.text.startswith("the pass ") for f in report.failures] == [True]


def test_a_failure_is_an_error_when_strict(monkeypatch):
    monkeypatch.setattr(replace, "traced", always)
    with pytest.raises(RewriterError, match="attention: KeyError"):
        rewriter.optimize(gradient(), implementation=FORCED, strict=True).report(
            X, SCALE, KEYS
        )


@pytest.mark.parametrize("bad", [{0}, {6}, {2, 5}, set(range(7))])
def test_the_first_that_fails_is_found(bad):
    def step(some):
        if bad & set(some):
            raise ValueError(min(bad & set(some)))

    item, why = failing(step, range(7))  # pyright: ignore
    assert item == min(bad)
    assert why.args == (item,)
    assert failing(step, []) is None
    assert failing(step, sorted(set(range(7)) - bad)) is None


def test_what_fails_together_costs_the_last():
    def step(some):
        if {1, 4} <= set(some):
            raise ValueError("both")

    assert failing(step, range(7))[0] == 4  # pyright: ignore


def test_a_failure_that_does_not_repeat_leaves_the_program(monkeypatch):
    calls = []

    def once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("inside")
        return old(*args)

    old = replace.traced
    monkeypatch.setattr(replace, "traced", once)
    fast = rewriter.optimize(gradient(), implementation=FORCED)
    with pytest.warns(RewriterWarning, match="left as written: KeyError"):
        assert not fast.report(X, SCALE, KEYS).sites


def test_a_site_that_cannot_be_split_is_left_alone(monkeypatch):
    def located(regions, matches, placement):
        del regions, placement
        if any(m.op.name == "attention" for m in matches):
            raise KeyError("inside")
        return tuple(m.op.name for m in matches)

    def facts(name):
        where = f"model.py:1 ({name})"
        return Facts(SimpleNamespace(op=SimpleNamespace(name=name), where=where))

    monkeypatch.setattr(steps, "located", located)
    names = ["rms_norm", "attention", "embedding"]
    given = Program(
        None, None, None, (), regions=object(), facts=tuple(map(facts, names))
    )
    program = steps.split_over_devices(given)
    why = "splitting it failed, KeyError: 'inside'"
    assert [f.shards for f in program.facts] == ["rms_norm", why, "embedding"]
    assert [f.where for f in program.failures] == ["model.py:1 (attention)"]
