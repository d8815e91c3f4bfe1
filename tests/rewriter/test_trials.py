"""XLA's trials of products while it compiles: who has them, and who is spared them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter import device, race, trials
from rewriter.kernel import spec_of
from rewriter.programs import Task
from rewriter.registry import registry
from tests.rewriter.test_autotune import W, X, measured, sleepy, slow_pattern


class Lowered:
    """Takes note of how it is compiled."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.options = problem, []

    def compile(self, **options: Any) -> str:
        self.options.append(options)
        if options and self.problem:
            raise RuntimeError(self.problem)
        return "compiled"


def test_only_gpus_have_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = Lowered()
    assert trials.compiled(lowered, False) == "compiled"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert trials.compiled(lowered, True) == "compiled"
    assert lowered.options == [{}, {}]
    assert trials.compiled(lowered, False) == "compiled"
    without = {"compiler_options": {"xla_gpu_autotune_level": 0}}
    assert lowered.options[2:] == [without]
    older = Lowered("No such compile option: 'xla_gpu_autotune_level'")
    assert trials.compiled(older, False) == "compiled"
    assert older.options == [without, {}]
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        trials.compiled(Lowered("RESOURCE_EXHAUSTED"), False)


def test_xla_takes_the_option() -> None:
    """It is no kernel's, but of all of XLA, so that a CPU says whether it exists."""
    lowered = jax.jit(jnp.sin).lower(X)
    assert lowered.compile(compiler_options={trials.OPTION: 0})(X).shape == X.shape


def ragged(m: int, groups: int, passes: str) -> Task:
    op = registry().op("ragged_dot")
    given = {
        "lhs": jax.ShapeDtypeStruct((m, 2048), jnp.bfloat16),
        "rhs": jax.ShapeDtypeStruct((groups, 2048, 1536), jnp.bfloat16),
        "group_sizes": jax.ShapeDtypeStruct((groups,), jnp.int32),
    }
    return Task(op, spec_of(op, given, {}), registry().kernels("ragged_dot"), passes)


def test_who_is_likely_behind() -> None:
    """XLA took 100 times as long as our kernel for 128 groups, twice for one."""
    h200 = device.named("h200")
    for passes in ("forward", "vjp", "forward_and_vjp"):
        assert trials.likely_lost(ragged(32768, 128, passes), h200)
        assert not trials.likely_lost(ragged(32768, 1, passes), h200)
        unmeasured = dataclasses.replace(h200, measured=False)
        assert not trials.likely_lost(ragged(32768, 128, passes), unmeasured)
        assert not trials.likely_lost(
            ragged(32768, 128, passes), device.named("tpu_v5e")
        )


def seen(monkeypatch: pytest.MonkeyPatch, seconds: float) -> tuple[list[bool], Any]:
    """How XLA's program and the reference were compiled; XLA's measurement."""
    pattern = slow_pattern()
    pattern.kernel()(sleepy(seconds))
    asked: list[bool] = []
    compiled = trials.compiled

    def told(lowered: Any, has: bool) -> Any:
        asked.append(has)
        return compiled(lowered, has)

    monkeypatch.setattr(trials, "compiled", told)
    monkeypatch.setattr(race, "likely_lost", lambda task, on: True)
    return asked, measured(pattern)["xla"]


def test_who_is_far_behind_has_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LOST", 0.0)
    asked, xla = seen(monkeypatch, 0.01)
    assert xla.median_us is not None
    assert "without XLA's trials" in xla.note
    assert asked.count(True) == 1  # the kernel


def test_who_is_not_far_behind_is_compiled_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, xla = seen(monkeypatch, 0.1)
    assert xla.median_us is not None
    assert "trials" not in xla.note
    assert asked.count(True) == 2
    assert asked[-1]


def test_without_a_kernel_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = slow_pattern()

    @pattern.kernel()
    def fails(x: Any, w: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(race, "likely_lost", lambda task, on: True)
    xla = measured(pattern)["xla"]
    assert xla.median_us is not None
    assert "trials" not in xla.note


def test_own_equations_keep_their_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled again in full are the user's own equations, not the op's."""
    monkeypatch.setattr(race, "likely_lost", lambda task, on: True)

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        y = (x.T + 1).T @ w
        return jnp.sin(y) * y

    pattern = slow_pattern()
    pattern.kernel()(sleepy(0.05))
    tuned = rewriter.tune(program, patterns=[pattern])(X, W)
    ((_, found),) = tuned.entries
    (xla,) = (m for m in found if m.implementation.text == "xla")
    assert xla.median_us is not None
    assert xla.note == ""
    assert xla.spelling
