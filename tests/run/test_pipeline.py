"""The passes: their order, what can be left out, what is logged, what is checked."""

from __future__ import annotations

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.config import PASSES_TO_DISABLE
from rewriter.run import rewriting, steps
from rewriter.run.pipeline import PASSES
from rewriter.run.program import Pass, Program
from tests.support.programs import FORCED, attention

X = jax.ShapeDtypeStruct((1, 8, 2, 4), jnp.float32)


def loss(q, k, v):
    return jnp.sum(attention(q, k, v) ** 2)


def test_a_configuration_names_the_passes_that_may_be_left_out():
    assert tuple(p.name for p in PASSES if p.optional) == PASSES_TO_DISABLE


def test_every_pass_says_what_it_does():
    assert all(step.run.__doc__ for step in PASSES)


def test_a_disabled_pass_does_not_run():
    fast = rewriter.optimize(jax.grad(loss), implementation=FORCED)
    (site,) = fast.report(X, X, X).sites
    assert site.backward
    with rewriter.config(disable="gradients"):
        report = fast.report(X, X, X)
    assert "gradients" not in report.seconds
    assert not any(site.backward for site in report.sites)
    assert fast.report(X, X, X).sites[0].backward  # as before, outside of it


@pytest.mark.parametrize("name", PASSES_TO_DISABLE)
def test_programs_are_right_without_a_pass(name):
    q, k, v = (jax.random.normal(jax.random.key(i), X.shape) for i in range(3))
    fast = rewriter.optimize(jax.grad(loss), implementation=FORCED, disable=(name,))
    assert name not in fast.report(q, k, v).seconds
    assert jnp.allclose(fast(q, k, v), jax.grad(loss)(q, k, v), atol=1e-5)


def test_others_cannot_be_left_out():
    with pytest.raises(rewriter.ConfigError, match=r"disable='replace'.*recompute"):
        rewriter.optimize(loss, disable=("replace",))


def test_the_log_has_the_time_of_each_pass(caplog):
    with caplog.at_level(logging.DEBUG, "rewriter.passes"):
        rewriter.optimize(loss).report(X, X, X)
    said = [r.getMessage().split(":")[0] for r in caplog.records]
    first = ["sieve", "equal_constants", "differences_of_softmaxes", "graph", "match"]
    assert said[:5] == first
    assert [n for n in said if n not in {p.name for p in PASSES}] == []


def _cast(program: Program) -> Program:
    """Gives a result of another type."""
    made = steps.replace_sites(program)
    halved = jax.make_jaxpr(lambda *xs: loss(*xs).astype(jnp.bfloat16))(X, X, X)
    return dataclasses.replace(made, closed_jaxpr=halved)


def test_a_pass_that_breaks_the_program_is_named(monkeypatch):
    broken = tuple(
        Pass("replace", _cast) if step.name == "replace" else step for step in PASSES
    )
    monkeypatch.setattr(rewriting, "PASSES", broken)
    monkeypatch.setenv("REWRITER_VALIDATE", "1")
    closed = jax.make_jaxpr(loss)(X, X, X)
    with pytest.raises(AssertionError, match="after 'replace' the program gives"):
        rewriting.rewrite(closed, rewriter.Config())
