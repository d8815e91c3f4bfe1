"""Choices for TPUs that are not there: estimated by their compiler."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from rewriter.errors import ConfigError
from rewriter.hardware import ahead_of_time
from rewriter.measure import static_cost
from rewriter.measure.autotune import LEVELS
from rewriter.measure.decision import fastest
from rewriter.measure.key import key_of
from rewriter.measure.measurement import BUNDLES, SIMULATED, Measurement
from rewriter.measure.programs import Task, function
from rewriter.measure.sources import shipped
from rewriter.measure.tuned import Tuned
from rewriter.ops.device import named
from rewriter.ops.kernel import Spec, spec_of
from rewriter.ops.registry import registry
from rewriter.site.implementation import Implementation, settings
from tests.support import on_tpu
from tests.support.kernels.tpu import needs_compiler

pytestmark = pytest.mark.once

X = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
W = jax.ShapeDtypeStruct((512, 512), jnp.float32)
TARGETS = ("tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_7x")
"""Generations that estimates of these gradients are shipped for."""
BLOCK = {rows: settings(on_tpu.Block(rows)) for rows in (8, 16, 32, 128, 512, 2048)}


def timed(
    name: str, us: float | None, method: str, rows: int = 128, problem: str = ""
) -> Measurement:
    """An estimate or measurement of a kernel, or of XLA."""
    if name == "xla":
        made, version = Implementation(), "xla"
    else:
        made, version = Implementation(name, config=BLOCK[rows]), f"{name} 1"
    here = jax.__version__
    return Measurement(made, version, here, us, method=method, problem=problem)


def chosen(*measurements: Measurement) -> tuple[str, str, str]:
    """The kernel, its config and the origin that a report shows for a v5e."""
    spec = Spec("gated", (("x", X.shape), ("w", W.shape)),
                (("x", "float32"), ("w", "float32")), ())  # fmt: skip
    key = key_of(spec, "forward", "TPU v5 lite")
    fast = rewriter.optimize(
        on_tpu.program, patterns=[on_tpu.gated], target="tpu_v5e",
        tuned=Tuned(((key, measurements),)),
    )  # fmt: skip
    (site,) = fast.report(X, W).sites
    return site.kernel, site.config, site.origin


@needs_compiler
def test_configs_are_ranked_and_the_best_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LEVELS, "full", 2)
    run = rewriter.tune(on_tpu.program, patterns=[on_tpu.gated], target="TPU v5e")
    tuned = run(X, W)
    ((key, found),) = tuned.entries
    assert key.device == "TPU v5 lite"
    by = {(m.implementation.name, m.implementation.config): m for m in found}
    xla = by["xla", None]
    assert xla.method == SIMULATED
    assert 5 < xla.median_us < 500  # 1.1 GFLOP of a chip that does 197 TFLOP/s
    assert xla.driver.startswith("libtpu 0.0.")
    small, usual = (by["in_blocks", BLOCK[rows]] for rows in (8, 128))
    assert {m.method for m in (small, usual)} == {SIMULATED}
    assert small.median_us > 2 * usual.median_us
    moved_us = 1e6 * 4 * (2 * 2048 * 512 + 512 * 512) / named("tpu_v5e").bandwidth
    assert all(m.median_us >= moved_us for m in found)  # of kernels too
    other = by["prefetching", BLOCK[128]]
    assert other.method == BUNDLES
    assert "simulated" in tuned.table()
    assert "✓ chosen" not in tuned.table()  # bundles say nothing against others
    assert "times as long as the best of its configs" in tuned.table()
    monkeypatch.setattr("rewriter.measure.static_cost.estimated", None)  # it is kept
    assert run(X, W) == tuned


def norm_with_gradients() -> Task:
    op = registry().op("rms_norm")
    rows = jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16)
    spec = spec_of(op, {"x": rows, "scale": rows.update(shape=(4096,))}, {"eps": 1e-6})
    return Task(op, spec, registry().kernels("rms_norm"), "forward_and_vjp")


@needs_compiler
@pytest.mark.parametrize("target", ["tpu_v5e", "tpu_v6e"])
def test_what_xla_moves_between_its_fusions(target: str) -> None:
    """Rows for the root; both for the sums; both and the results. Few fit into VMEM."""
    task = norm_with_gradients()
    program = ahead_of_time.compiled(
        named(target), function(task, Implementation()), task.structs, task.structs["x"]
    )
    array = 2 * 16384 * 4096
    assert 7 <= static_cost.streamed(program.as_text()) / array < 7.1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ["tpu_v5e", "tpu_v6e"])
def test_bytes_choose_where_they_take_longest(target: str) -> None:
    task, on = norm_with_gradients(), named(target)
    until, say = time.monotonic() + 60, lambda done, of: None
    wanted = Implementation(), Implementation("mosaic_tpu")
    xla, ours = static_cost.estimated(task, on, wanted, until, say)
    array = 1e6 * 2 * 16384 * 4096 / on.bandwidth
    assert xla.median_us >= 7 * array
    assert 5 * array <= ours.median_us < 5.1 * array


@needs_compiler
def test_what_the_compiler_refuses_is_a_reason() -> None:
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 2048), (2048, 512)))
    spec = spec_of(on_tpu.gated.op, {"x": x, "w": w}, {})
    task = Task(on_tpu.gated.op, spec, tuple(on_tpu.gated.kernels), "forward")
    wanted = (Implementation(), Implementation("in_blocks", config=BLOCK[2048]))
    until, say = time.monotonic() + 60, lambda done, of: None
    xla, large = static_cost.estimated(task, named("tpu_v4"), wanted, until, say)
    assert xla.problem == static_cost.ALONE  # it is not even compiled
    assert large.problem.startswith("does not compile: ")
    assert "memory" in large.problem  # of 16 MiB it needs 32
    (xla,) = static_cost.estimated(task, named("tpu_v4"), wanted[:1], until, say)
    assert xla.problem == "no estimate: no simulator for TPU v4"


@pytest.mark.parametrize("said", ["does not compile: memory", "no estimate: slow"])
def test_bundles_rank_what_the_simulator_does_not_take(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"name": "k", "steps": 3, "prefetched": False}
    compiled = {"calls": [call], "bundles": {"k": 1500}, "moved": 1, "temp": 0}
    compiled |= {"loops": 0}
    answers = {"bundles": compiled, "cycles": said}
    monkeypatch.setattr(static_cost, "_child", lambda mode, *_: answers[mode])
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 512), (512, 512)))
    spec = spec_of(on_tpu.gated.op, {"x": x, "w": w}, {})
    task = Task(on_tpu.gated.op, spec, tuple(on_tpu.gated.kernels), "forward")
    made = Implementation("in_blocks", config=BLOCK[128])
    args = task, named("tpu_v5e"), [made], time.monotonic() + 60, lambda done, of: None
    (found,) = static_cost.estimated(*args)
    assert (found.method, found.median_us) == (BUNDLES, 3.0)  # 1.5 GHz
    compiled["calls"] = [{**call, "steps": 0}]
    (found,) = static_cost.estimated(*args)
    assert found.problem == "no estimate: the grid of k depends on values"
    compiled["calls"] = [call, {**call, "name": "forward"}]
    (found,) = static_cost.estimated(*args)
    assert found.problem == "no estimate: XLA computes what forward would, uncounted"
    compiled["calls"] = []
    (found,) = static_cost.estimated(*args)
    assert found.problem.startswith("no estimate")  # the program itself compiled


@pytest.mark.parametrize(
    ("simulated", "order"),
    [
        ({8, 16}, ["8", "xla", "16", "32"]),  # as soon as there is what it opposes
        ({16}, ["8", "16", "32", "xla"]),
        ((), ["8", "16", "32"]),
    ],
)
def test_no_kernel_is_estimated_unopposed(
    simulated: Collection[int], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 512), (512, 512)))
    spec = spec_of(on_tpu.gated.op, {"x": x, "w": w}, {})
    task = Task(on_tpu.gated.op, spec, tuple(on_tpu.gated.kernels), "forward")
    done: list[str] = []

    def estimate(task: Task, on: Any, made: Implementation) -> Measurement:
        rows = dict(made.config)["rows"] if made.config else 0
        done.append(str(rows or "xla"))
        method = SIMULATED if rows in simulated else BUNDLES
        return Measurement(made, "", "", 1.0, method=method)

    monkeypatch.setattr(static_cost, "_estimated", estimate)
    monkeypatch.setattr(
        static_cost, "side_by_side", lambda jobs, *_: [job() for job in jobs]
    )
    wanted = [Implementation()] + [
        Implementation("in_blocks", config=BLOCK[rows]) for rows in (8, 16, 32)
    ]
    until, say = time.monotonic() + 60, lambda done, of: None
    found = static_cost.estimated(task, named("tpu_v5e"), wanted, until, say)
    assert done == order
    assert [m.implementation for m in found] == wanted
    assert found[0].problem == ("" if simulated else static_cost.ALONE)


def test_simulated_times_choose_where_nothing_was_measured() -> None:
    guess = [timed("xla", 100.0, SIMULATED), timed("in_blocks", 50.0, SIMULATED, 512)]
    assert chosen(*guess) == ("in_blocks", "rows=512", "simulated")
    real = [timed("xla", 10.0, "profiler"), timed("in_blocks", 20.0, "profiler")]
    assert chosen(*guess, *real) == ("xla", "", "tuned")


def test_simulated_times_must_be_better_by_a_fifth() -> None:
    xla = timed("xla", 100.0, SIMULATED)
    near = timed("in_blocks", 90.0, SIMULATED)
    assert chosen(xla, near)[0] == "xla"
    assert fastest([xla, near]).best is xla
    measured = [dataclasses.replace(m, method="profiler") for m in (xla, near)]
    assert chosen(*measured)[0] == "in_blocks"


def test_bundles_choose_a_config_and_not_the_kernel() -> None:
    guess = [
        timed("xla", 1.0, SIMULATED),
        timed("in_blocks", 90.0, BUNDLES, 128),
        timed("in_blocks", 60.0, BUNDLES, 512),
        timed("prefetching", 5.0, BUNDLES, 8),
    ]
    assert chosen(*guess) == ("in_blocks", "rows=512", "simulated")
    assert fastest(guess) is None
    real = [timed("xla", 70.0, "profiler"), timed("in_blocks", 90.0, "profiler")]
    assert fastest([*guess, *real]).best is real[0]


def test_a_device_that_is_neither_here_nor_compiled_for() -> None:
    with pytest.raises(ConfigError, match=r"NVIDIA H200.*is not attached") as caught:
        rewriter.tune(on_tpu.program, patterns=[on_tpu.gated], target="h200")(X, W)
    assert "pip install" in str(caught.value)
    with pytest.raises(ConfigError, match="end_to_end=True for 'TPU v5 lite'"):
        rewriter.tune(jnp.sin, end_to_end=True, target="tpu_v5e")(jnp.ones(3))
    assert named("TPU v5e").kind == "TPU v5 lite"


# ----------------------------------------------------------------------- shipped
def grouped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of several query heads to a key head."""
    b, t, n, h = q.shape
    q = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32) * h**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def gradients(*args: jax.Array) -> tuple[jax.Array, ...]:
    loss = lambda *args: grouped(*args).astype(jnp.float32).sum()
    return jax.grad(loss, (0, 1, 2))(*args)


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_estimates_choose_the_blocks(target: str) -> None:
    """Those of the fewest instruction bundles; elsewhere, those of the rule."""
    array = lambda t, n: jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16)
    given = array(4096, 16), array(4096, 4), array(4096, 4)
    (site,) = rewriter.explain(gradients, target=target)(*given).sites
    assert (site.kernel, site.origin, site.backward) == (
        "mosaic_tpu",
        "simulated",
        True,
    )
    counted = [
        measured
        for key, measured in shipped("attention").entries
        if (key.device, key.passes) == (named(target).kind, "forward_and_vjp")
        and dict(key.shapes)["k"] == given[1].shape
    ]
    ((first, *others),) = [sorted(ms, key=lambda m: m.median_us) for ms in counted]
    assert others
    assert first.method == BUNDLES
    text = str(first.implementation.text)
    assert site.config.partition("; ")[0] in text
    assert site.config.partition("; ")[2] in text
    (site,) = rewriter.explain(gradients, target=target, tune="off")(*given).sites
    assert site.origin == "heuristic"
    short = array(1024, 4), array(1024, 1), array(1024, 1)
    (site,) = rewriter.explain(gradients, target=target)(*short).sites
    assert site.origin == "heuristic"


def test_shipped_bundles_say_nothing_against_the_program() -> None:
    """A kernel is chosen by estimates of both, its blocks by the bundles."""
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    given = like(8192, 4096), like(8, 4096, 14336), sizes
    back = jax.grad(
        lambda *args: jax.lax.ragged_dot(*args).astype(jnp.float32).sum(), (0, 1)
    )
    for run, kernel in ((jax.lax.ragged_dot, "xla"), (back, "mosaic_tpu")):
        (site,) = rewriter.explain(run, target="tpu_v6e")(*given).sites
        assert site.kernel == kernel
        if kernel != "xla":
            assert site.origin == "simulated"
            (ruled,) = rewriter.explain(run, target="tpu_v6e", tune="off")(*given).sites
            assert ruled.origin != "simulated"
            assert ruled.kernel == kernel
            assert ruled.config != site.config


@pytest.mark.parametrize("target", ["tpu_v5e", "tpu_v5p", "tpu_v6e"])
def test_shipped_cycles_choose_norms_where_gradients_are_taken(target: str) -> None:
    """XLA moves 7 arrays there, the kernels 5; alone, a norm is XLA's."""
    x, scale = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 8192), (8192,)))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def both(x: jax.Array, scale: jax.Array, cotangent: jax.Array) -> tuple:
        out, pull = jax.vjp(norm, x, scale)
        return out, pull(cotangent)

    (site,) = rewriter.explain(both, target=target)(x, scale, x).sites
    assert (site.kernel, site.origin) == ("mosaic_tpu", "simulated")
    assert dict(site.not_chosen)["xla"].startswith("1.40 times as long")
    (site,) = rewriter.explain(norm, target=target)(x, scale).sites
    assert site.kernel == "xla"
