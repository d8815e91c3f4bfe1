"""Kernels that crash or hang cost one candidate, not the process."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.measure import cache, isolate
from rewriter.measure.autotune import candidates
from rewriter.measure.programs import Task
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.site.implementation import Implementation
from tests.support import crashing

pytestmark = pytest.mark.once

X, W = jnp.ones((64, 32)) * 0.01, jnp.ones((32, 48)) * 0.1


def test_a_crash_is_the_reason_why_a_candidate_lost(monkeypatch) -> None:
    monkeypatch.setattr(isolate, "RUN_S", 10.0)
    run = rewriter.tune(crashing.program, patterns=[crashing.gated], isolate=True)
    tuned = run(X, W)  # this process is still here
    ((_, found),) = tuned.entries
    problems = {m.implementation.name: m.problem for m in found}
    assert problems["aborts"] == "crashes: the process was ended by SIGABRT"
    assert problems["hangs"] == "hangs: it was ended after 10 s"
    assert "callback" in problems["fails"]
    times = {m.implementation.name for m in found if m.median_us is not None}
    assert times == {"xla", "good", "also_good"}
    assert "✗ crashes: the process was ended by SIGABRT" in tuned.table()
    fast = rewriter.optimize(crashing.program, patterns=[crashing.gated], tuned=tuned)
    np.testing.assert_allclose(fast(X, W), crashing.program(X, W), rtol=1e-6)
    (site,) = fast.report(X, W).sites
    assert "SIGABRT" in dict(site.not_chosen)["aborts"]
    monkeypatch.setattr(isolate, "first_runs", None)  # it is kept: nothing is run again
    assert run(X, W) == tuned


def test_what_no_other_process_finds_is_not_run() -> None:
    @rewriter.pattern(dims="x: m k, w: k n -> m n")
    def local(x, w):
        return jnp.sin(x @ w) * (x @ w)

    @local.kernel()
    def never(x, w):
        raise AssertionError("must not be traced")

    run = rewriter.tune(crashing.program, patterns=[local], isolate=True)
    ((_, found),) = run(X, W).entries
    problems = {m.implementation.name: m.problem for m in found}
    assert problems["xla"] == ""
    assert "at the top level of a module" in problems["never"]
    files = cache.info().files
    assert files == 1  # without isolation it may well run: nothing is kept of it


def test_code_that_was_not_tried_runs_in_a_child_process_only() -> None:
    op = registry().op("rms_norm")
    operands = {"x": jnp.ones((4, 8)), "scale": jnp.ones(8)}
    bounded = next(k for k in registry().kernels(op.name) if k.name == "memory_bounded")
    new = dataclasses.replace(bounded, name="new", tried=False)
    task = Task(op, spec_of(op, operands, {}), (bounded, new), "forward")
    here = device.attached()
    for isolated, names in ((False, set()), (True, {"new"})):
        found = candidates(task, here, "full", isolate=isolated)
        assert {i.forward for i in found} == {"xla", "memory_bounded"} | names


def test_shipped_kernels_are_found() -> None:
    def norm(x, scale):
        mean = jnp.mean(jnp.square(x), -1, keepdims=True)
        return x / jnp.sqrt(mean + 1e-6) * scale

    run = rewriter.tune(norm, level="quick", isolate=True, grad=True)
    tuned = run(jnp.ones((4, 8)), jnp.ones(8))
    found = [m for _, ms in tuned.entries for m in ms]
    assert {m.implementation.name for m in found} == {"xla", "memory_bounded"}
    assert all(m.median_us is not None for m in found)


def test_a_child_that_does_not_start_is_not_the_candidates_fault(monkeypatch) -> None:
    monkeypatch.setattr(isolate.sys, "executable", "/bin/false")
    run = rewriter.tune(crashing.program, patterns=[crashing.gated], isolate=True)
    ((_, found),) = run(X, W).entries
    problems = {m.implementation.name: m.problem for m in found}
    assert problems["good"].startswith("not run: its child process ")
    assert "status 1" in problems["good"]
    assert Implementation("good") in {m.implementation for m in found}
    assert cache.info().files == 1
