"""Measuring kernels: good, bad, hung and broken ones, also inside a trace."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.config import Config
from rewriter.hardware import conditions, timing
from rewriter.measure import autotune, cache, inputs, programs, race
from rewriter.measure.measurement import Measurement
from rewriter.ops import device, registry
from rewriter.ops.kernel import Space, Spec, spec_of
from rewriter.ops.op import Op, Operand
from rewriter.run import rewriting
from rewriter.site.implementation import Implementation
from rewriter.support import threads
from rewriter.support.verdict import YES, no

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:.*:rewriter.CacheWarning"),
]


def slow_pattern() -> rewriter.Pattern:
    """A sum of sines written as a long loop, that a kernel can do at once."""

    @rewriter.pattern(dims="x: m k, w: k n -> m n")
    def gated(x, w):
        return jnp.sin(x @ w) * (x @ w)

    return gated


def program(x, w):
    y = x @ w
    return jnp.sin(y) * y


X, W = jnp.ones((64, 32)) * 0.01, jnp.ones((32, 48)) * 0.1


def measured(pattern, **options):
    tuned = rewriter.tune(program, patterns=[pattern], **options)(X, W)
    return {
        m.implementation.text: m for _, found in tuned.entries for m in found
    }  # fmt: skip


def sleepy(seconds: float):
    """A kernel that takes its time at every run."""

    def wait(x: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return x

    def kernel(x, w):
        y = x @ w
        y = jnp.sin(y) * y
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    return kernel


def test_every_kind_of_failure_costs_one_candidate() -> None:
    pattern = slow_pattern()

    @pattern.kernel()
    def good(x, w):
        y = jnp.dot(x, w)
        return y * jnp.sin(y)

    @pattern.kernel()
    def wrong(x, w):
        return 1.001 * program(x, w)

    @pattern.kernel()
    def not_a_number(x, w):
        return program(x, w) / jnp.zeros(())

    @pattern.kernel()
    def does_not_trace(x, w):
        raise NotImplementedError("sm_90 only")

    @pattern.kernel()
    def does_not_run(x, w):
        def fail(y: np.ndarray) -> np.ndarray:
            raise RuntimeError("RESOURCE_EXHAUSTED: 80 GiB")

        y = program(x, w)
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

    @pattern.kernel(supports=lambda spec: no("never", "takes nothing"))
    def refuses(x, w):
        raise AssertionError("must not be traced")

    found = measured(pattern)
    assert set(found) == {
        "xla", "good", "wrong", "not_a_number", "does_not_trace", "does_not_run",
    }  # fmt: skip
    times = {name for name, m in found.items() if m.median_us is not None}
    assert times == {"xla", "good"}
    assert "wrong: error 1e-03 in the result" in found["wrong"].problem
    assert "wrong: error inf in the result" in found["not_a_number"].problem
    assert found["does_not_trace"].problem == (
        "does not compile: NotImplementedError: sm_90 only"
    )
    assert "does not run: out of memory: " in found["does_not_run"].problem
    (site,) = rewriter.explain(program, patterns=[pattern])(X, W).sites
    assert site.origin == "cached"
    assert site.kernel in ("xla", "good")
    assert "wrong: error 1e-03" in dict(site.not_chosen)["wrong"]
    assert dict(site.not_chosen)["refuses"] == "takes nothing"


def test_a_compilation_that_hangs_is_left_behind(monkeypatch) -> None:
    monkeypatch.setattr(race, "HUNG_S", 3.0)
    pattern = slow_pattern()

    @pattern.kernel()
    def hangs(x, w):
        time.sleep(30)
        return program(x, w)

    start = time.monotonic()
    found = measured(pattern)
    assert time.monotonic() - start < 20
    assert found["hangs"].problem == threads.HUNG
    assert found["xla"].median_us is not None


def test_each_kernel_is_measured_however_long_others_compile(monkeypatch) -> None:
    """Else one that was compiled in time would be chosen before all that were not."""
    monkeypatch.setattr(race, "COMPILING", 0.0)
    pattern = slow_pattern()
    space = waiting(Wait(0.01), Wait(0.0, "b"))

    @pattern.kernel(space=space, platform="cpu")
    def tunable(x, w, *, config: Wait | None = None):
        return sleepy((config or Wait()).seconds)(x, w)

    @pattern.kernel()
    def good(x, w):
        y = jnp.dot(x, w)
        return y * jnp.sin(y)

    found = measured(pattern)
    late = {name for name, m in found.items() if m.problem == threads.LATE}
    assert late == {"tunable (seconds=0.01, label=a)", "tunable (seconds=0.0, label=b)"}
    assert all(found[n].median_us for n in found.keys() - late)
    assert found.keys() - late == {"xla", "good", "tunable (seconds=0.02, label=a)"}


def test_the_budget_bounds_the_time(caplog) -> None:
    pattern = slow_pattern()
    pattern.kernel()(sleepy(0.3))

    def many(x, w):
        return [program(x[:n], w) for n in range(1, 40)]

    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "rewriter.tune"):
        tuned = rewriter.tune(many, patterns=[pattern], budget_s=4.0)(X, W)
    assert time.monotonic() - start < 12
    assert 0 < len(tuned) < 39
    assert "sites were not measured within 4 s" in caplog.text


def test_hopeless_candidates_run_a_few_times_only() -> None:
    pattern = slow_pattern()
    pattern.kernel()(sleepy(0.3))

    @pattern.kernel()
    def good(x, w):
        return program(x, w)

    found = measured(pattern)
    assert found["kernel"].runs == 1
    # One of these two may look bad once on a busy machine, the better one cannot.
    assert max(found["xla"].runs, found["good"].runs) >= 3
    assert found["good"].method == timing.method()


@dataclasses.dataclass(frozen=True)
class Wait:
    seconds: float = 0.02
    label: str = "a"


def waiting(*configs: Wait, fits=None) -> Space:
    checks = {} if fits is None else {"fits": fits}
    return Space(Wait, lambda spec, on: Wait(), lambda spec, on: configs, **checks)


def raced(
    flops: float,
    groups: int,
    names: tuple[str, ...] = ("memory_bounded",),
    *more: Implementation,
    passes: str = "forward",
) -> dict[str, Measurement]:
    """Ragged dots of so many groups, as if on a GPU of such a peak."""
    of = registry.registry()
    sizes = {"lhs": (256, 64), "rhs": (groups, 64, 64), "group_sizes": (groups,)}
    types = {n: jnp.int32 if n == "group_sizes" else jnp.float32 for n in sizes}
    operands = {n: jax.ShapeDtypeStruct(s, types[n]) for n, s in sizes.items()}
    spec = spec_of(of.op("ragged_dot"), operands, {})
    task = programs.Task(of.op("ragged_dot"), spec, of.kernels("ragged_dot"), passes)
    until = time.monotonic() + 60
    on = device.Device("some GPU", "cuda", flops=flops, bandwidth=flops)
    run = race.Race(task, on, until, until, lambda done, of: None).run
    wanted = (Implementation(), *map(Implementation, names), *more)
    return {m.implementation.name: m for m in run(wanted)}


def test_xla_is_left_out_where_its_operations_alone_take_longer() -> None:
    """By its own count: with 16 groups it multiplies 16 times as much."""
    slow = raced(flops=1e6, groups=16)
    assert slow["xla"].median_us is None
    assert slow["xla"].problem.startswith("not timed: its operations alone take 3")
    assert "by XLA's own count" in slow["xla"].problem
    assert slow["memory_bounded"].median_us
    # The same where its operations might take less than the best kernel: it is timed.
    assert raced(flops=1e18, groups=16)["xla"].median_us
    # And where it computes no more than it needs.
    assert raced(flops=1e6, groups=1)["xla"].median_us


def test_a_backward_is_left_out_behind_a_forward_by_xla_that_takes_longer() -> None:
    """Else it is compiled with XLA's trials of products, which takes 15 s on a GPU."""
    mixed = Implementation("reference", "memory_bounded")
    found = raced(1e6, 16, ("memory_bounded",), mixed, passes="forward_and_vjp")
    assert found[mixed.name].median_us is None
    assert "its operations alone take" in found[mixed.name].problem
    assert found["memory_bounded"].median_us
    fast = raced(1e18, 16, ("memory_bounded",), mixed, passes="forward_and_vjp")
    assert fast[mixed.name].median_us


def test_what_took_the_time_of_tuning_is_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "rewriter.tune"):
        raced(flops=1e6, groups=1)
    told = [x for x in caplog.messages if " in " in x]
    stages = [x.split(" in ")[0].split(": ")[-1] for x in told]
    assert stages == ["drawn inputs", "drawn and compiled", "checked", "timed"]
    assert any(x.endswith("s: memory_bounded") for x in caplog.messages)


def test_kernels_are_left_out_that_are_estimated_to_be_far_slower(monkeypatch) -> None:
    kernels = registry.registry().kernels("ragged_dot")

    def estimated(**seconds: float) -> dict[str, Measurement]:
        told = lambda spec, on, passes: seconds
        made = tuple(
            dataclasses.replace(k, estimate=told) for k in kernels if k.name in seconds
        )
        monkeypatch.setattr(registry.Registry, "kernels", lambda self, op: made)
        return raced(flops=1e6, groups=16, names=tuple(seconds))

    found = estimated(memory_bounded=0.1, tiled=0.31)
    assert found["tiled"].problem == (
        "not compiled: estimated to take 310 ms, and memory_bounded 100 ms"
    )
    assert found["memory_bounded"].median_us
    # If the best takes as long as what was left out should, that is timed after all.
    found = estimated(memory_bounded=1e-9, tiled=4e-9)
    assert found["memory_bounded"].median_us
    assert found["tiled"].median_us
    assert estimated(memory_bounded=0.1, tiled=0.29)["tiled"].median_us


def test_a_wrong_kernel_is_found_out_by_the_general_form(monkeypatch) -> None:
    """On a GPU, ragged dots are compared with products of whole groups."""
    of = registry.registry()
    kernel = of.kernel("ragged_dot", "memory_bounded")
    wrong = dataclasses.replace(
        kernel,
        forward=lambda **given: jax.tree.map(
            lambda x: 1.5 * x, kernel.forward(**given)
        ),
    )
    monkeypatch.setattr(
        registry.Registry, "kernels", lambda self, op: (wrong,), raising=True
    )
    found = raced(flops=1e6, groups=16)
    assert "wrong: error 5e-01" in found["memory_bounded"].problem


def test_the_best_config_of_a_users_kernel_is_found_and_used() -> None:
    pattern = slow_pattern()
    traced: list[Wait | None] = []

    def fits(config: Wait, spec: Spec, on: device.Device):
        return no("large", "too large") if config.label == "large" else YES

    space = waiting(Wait(0.05), Wait(0.0, "b"), Wait(0.0, "large"), fits=fits)

    @pattern.kernel(space=space, platform="cpu")
    def tunable(x, w, *, config: Wait | None = None):
        traced.append(config)
        return sleepy((config or Wait()).seconds)(x, w)

    found = measured(pattern)
    assert set(found) == {
        "xla", "tunable (seconds=0.02, label=a)", "tunable (seconds=0.05, label=a)",
        "tunable (seconds=0.0, label=b)",
    }  # fmt: skip
    assert "large" not in {c.label for c in traced if c}
    forced = {"gated": "tunable"}
    told = rewriter.explain(program, patterns=[pattern], implementation=forced)(X, W)
    assert told.sites[0].config == "seconds=0.02, label=a"  # its rule of thumb
    key = rewriter.tune(program, patterns=[pattern])(X, W).entries[0][0]
    best = Implementation("tunable", config=(("seconds", 0.0), ("label", "b")))
    slow_xla = tuple(
        dataclasses.replace(m, median_us=1e6)
        for m in found.values()
        if m.implementation.forward == "xla"
    )
    mine = tuple(m for m in found.values() if m.implementation == best)
    tuned = rewriter.Tuned(((key, slow_xla + mine),))
    del traced[:]
    fast = rewriter.optimize(program, patterns=[pattern], tuned=tuned)
    np.testing.assert_allclose(fast(X, W), program(X, W), rtol=1e-6)
    assert set(traced) == {Wait(0.0, "b")}
    (site,) = fast.report(X, W).sites
    assert (site.kernel, site.config) == ("tunable", "seconds=0.0, label=b")


def test_only_what_is_missing_is_measured() -> None:
    pattern, count = slow_pattern(), [0]

    @pattern.kernel()
    def good(x, w):
        count[0] += 1
        return program(x, w)

    first = rewriter.tune(program, patterns=[pattern])(X, W)
    before = count[0]
    assert rewriter.tune(program, patterns=[pattern])(X, W) == first
    assert count[0] == before
    runs = []

    @pattern.kernel()
    def newer(x, w):
        runs.append(1)
        return program(x, w)

    second = rewriter.tune(program, patterns=[pattern])(X, W)
    assert count[0] == before
    assert runs
    ((_, old),), ((_, new),) = first.entries, second.entries
    assert set(old) < set(new)
    assert rewriter.tune(program, patterns=[pattern], again=True)(X, W) != second


def test_a_new_version_of_a_kernel_is_measured_again() -> None:
    pattern = slow_pattern()
    pattern.kernel(version=1)(program)
    first = rewriter.tune(program, patterns=[pattern])(X, W)
    newer = slow_pattern()
    newer.kernel(version=2)(program)
    second = rewriter.tune(program, patterns=[newer])(X, W)
    kernels = [
        {m.version for m in found if m.implementation.forward != "xla"}
        for ((_, found),) in (first.entries, second.entries)
    ]
    assert kernels == [{"program 1"}, {"program 2"}]


def test_forward_and_backward_are_chosen_apart() -> None:
    """The kernel's forward is hopeless, its backward is not."""

    @rewriter.pattern(dims="x: m k, w: k n -> m n")
    def gated(x, w):
        y = x @ w
        return jnp.sin(y) * y

    def backward(*, x, w, out, residuals, cotangent):
        y = x @ w
        d = cotangent * (jnp.cos(y) * y + jnp.sin(y))
        return {"x": d @ w.T, "w": x.T @ d}

    @gated.kernel(backward=backward, saves_out=False)
    def slow_forward(x, w, residuals=False):
        out = sleepy(0.03)(x, w)
        return (out, ()) if residuals else out

    def loss(x, w):
        return jax.value_and_grad(lambda x: program(x, w).sum())(x)

    tuned = rewriter.tune(loss, patterns=[gated])(X, W)
    ((key, found),) = tuned.entries
    assert key.passes == "forward_and_vjp"
    names = {m.implementation.name for m in found}
    assert names == {"xla", "slow_forward", "reference, backward slow_forward"}
    assert all(m.median_us is not None for m in found)
    # Make the mix the winner, whatever this machine says: it must be what runs.
    won = tuple(
        dataclasses.replace(m, median_us=1.0 if "backward" in m.implementation.name
                            else 100.0, sigma_us=0.0)
        for m in found
    )  # fmt: skip
    fast = rewriter.optimize(
        loss, patterns=[gated], tuned=rewriter.Tuned(((key, won),))
    )
    (site,) = fast.report(X, W).sites
    assert site.kernel == "reference, backward slow_forward"
    start = time.perf_counter()
    (value, grad), (want, exact) = fast(X, W), loss(X, W)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grad, exact, rtol=1e-5)
    assert time.perf_counter() > start
    assert "cos" in str(fast.lower(X, W).as_text())


@pytest.mark.parametrize("level", ["quick", "full"])
def test_tuning_inside_of_an_outer_trace(level: str) -> None:
    pattern = slow_pattern()

    @pattern.kernel()
    def good(x, w):
        return program(x, w)

    fast = rewriter.optimize(program, patterns=[pattern], tune=level)

    @jax.jit
    def outer(x, w):
        def body(carry, _):
            return carry + jax.grad(lambda x: fast(x, w).sum())(x).sum(), None

        return jax.lax.scan(body, 0.0, None, 3)[0]

    got = outer(X, W)
    want = 3 * jax.grad(lambda x: program(x, W).sum())(X).sum()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert cache.info().files == 2
    assert "sleep" not in str(jax.make_jaxpr(outer)(X, W))
    (site,) = rewriter.explain(program, patterns=[pattern])(X, W).sites
    assert site.origin == "cached"


def test_cached_never_times(monkeypatch) -> None:
    def never(*args, **kwargs):
        raise AssertionError("timed")

    monkeypatch.setattr(timing, "measure", never)
    pattern = slow_pattern()
    pattern.kernel()(sleepy(0.0))
    for tune in ("off", "cached"):
        fast = rewriter.optimize(program, patterns=[pattern], tune=tune)
        fast(X, W)
        assert fast.report(X, W).sites[0].origin == "heuristic"


def test_clear_cache_picks_up_what_was_measured() -> None:
    pattern = slow_pattern()

    @pattern.kernel()
    def good(x, w):
        return program(x, w)

    fast = rewriter.optimize(program, patterns=[pattern])
    fast(X, W)
    rewriter.tune(program, patterns=[pattern])(X, W)
    assert fast.report(X, W).sites[0].origin == "heuristic"  # what was compiled
    fast.clear_cache()
    fast(X, W)
    assert fast.report(X, W).sites[0].origin == "cached"
    off = rewriter.optimize(program, patterns=[pattern], tune="off")
    assert off.report(X, W).sites[0].origin == "heuristic"


def test_integer_operands_need_a_sample() -> None:
    def rows(*, table, ids):
        return 2 * table[ids]

    def sample(key, operands, params):
        ids = jax.random.randint(key, operands["ids"].shape, 0, 7)
        return {"table": jnp.ones(operands["table"].shape), "ids": ids}

    spec = Spec(
        "rows",
        (("table", (7, 3)), ("ids", (4,))),
        (("table", "float32"), ("ids", "int32")),
        (),
    )
    op = Op("rows", (Operand("table", "n", True), Operand("ids", "m", True)), "m", rows)
    ((_, found),) = autotune.measure([programs.Task(op, spec, (), "forward")]).entries
    assert "operand ids is int32 and the op has no sample=" in found[0].problem
    op = dataclasses.replace(op, sample=sample)
    task = programs.Task(op, spec, (), "forward")
    ((_, found),) = autotune.measure([task], again=True).entries
    assert found[0].median_us is not None


@pytest.mark.parametrize("op", ["attention", "ragged_dot", "gated_linear_unit"])
def test_samples_are_realistic(op: str) -> None:
    from rewriter.ops.registry import registry

    f32, i32 = jnp.dtype("float32"), jnp.dtype("int32")
    specs = {
        "attention": {"q": ((2, 16, 2, 4), f32), "k": ((2, 16, 2, 4), f32),
                      "v": ((2, 16, 2, 4), f32), "kv_lengths": ((2,), i32),
                      "q_segments": ((2, 16), i32), "kv_segments": ((2, 16), i32)},
        "ragged_dot": {"lhs": ((64, 4), f32), "rhs": ((8, 4, 4), f32),
                       "group_sizes": ((8,), i32)},
        "gated_linear_unit": {"x": ((8, 4), f32), "w_gate": ((4, 6), f32),
                              "w_up": ((4, 6), f32)},
    }[op]  # fmt: skip
    the_op = registry().op(op)
    spec = Spec(
        op, tuple((n, s) for n, (s, _) in specs.items()),
        tuple((n, str(d)) for n, (_, d) in specs.items()),
        tuple(sorted(the_op.defaults.items())),
    )  # fmt: skip
    on = device.Device("a GPU", "cuda", cache=1 << 20)
    task = programs.Task(the_op, spec, (), "forward_and_vjp")
    drawn = inputs.inputs(task, on)
    assert {len(d.sets) for d in drawn} == {math.ceil(16 / len(drawn))}
    (given, out), (other, _) = drawn[0].sets[:2]  # small: many, all different
    first = spec.operands[0]
    assert not np.array_equal(given[first], other[first])
    if op == "ragged_dot":
        assert given["group_sizes"].sum() == 64
        assert len(set(given["group_sizes"].tolist())) > 1
    if op == "attention":
        assert 1 <= given["kv_lengths"].min() <= given["kv_lengths"].max() <= 16
        assert set(given["q_segments"].ravel().tolist()) == {0, 1, 2}
    assert abs(float(out.std()) - 1) < 0.5
    here = inputs.inputs(task, device.Device("cpu", "cpu"))
    assert {len(d.sets) for d in here} == {1}


def group_sizes(samples: dict[str, rewriter.Pattern], m: int, g: int):
    structs = {"lhs": jax.ShapeDtypeStruct((m, 4), jnp.float32),
               "rhs": jax.ShapeDtypeStruct((g, 4, 4), jnp.float32),
               "group_sizes": jax.ShapeDtypeStruct((g,), jnp.int32)}  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 20)
    return {
        name: np.stack([sample(k, structs, {})["group_sizes"] for k in keys])
        for name, sample in samples.items()
    }


def test_group_sizes_are_drawn_as_stated() -> None:
    from rewriter.ops.registry import registry

    m, g = 4096, 16
    found = group_sizes(registry().op("ragged_dot").distributions({}), m, g)
    assert list(found) == ["uniform", "dirichlet", "one_hot"]
    assert all((sizes.sum(-1) == m).all() for sizes in found.values())
    largest = {name: sizes.max(-1).mean() / m for name, sizes in found.items()}
    assert 1 / g < largest["uniform"] < 1.4 / g
    assert 0.15 < largest["dirichlet"] < 0.35
    assert largest["one_hot"] == 1.0
    assert len({int(s.argmax()) for s in found["one_hot"]}) > 5  # not always the same


def by_value(x, n):
    """Takes longer the larger its operand is."""

    def wait(n: np.ndarray) -> np.ndarray:
        time.sleep(0.002 * int(n[0]))
        return n

    n = jax.pure_callback(wait, jax.ShapeDtypeStruct(n.shape, n.dtype), n)
    return x + n.astype(x.dtype)


def counted(value: int):
    return lambda key, operands, params: {
        "x": jnp.ones(operands["x"].shape),
        "n": jnp.full(operands["n"].shape, value, "int32"),
    }


def of_values(**options) -> programs.Task:
    op = Op(
        "by_value", (Operand("x", "d", True), Operand("n", "i", True)), "d",
        by_value, **options,
    )  # fmt: skip
    spec = Spec(
        "by_value", (("x", (4,)), ("n", (1,))),
        (("x", "float32"), ("n", "int32")), (),
    )  # fmt: skip
    return programs.Task(op, spec, (), "forward")


def test_clock_and_driver_are_kept(monkeypatch) -> None:
    at = conditions.Conditions(1755, "570.86.15")
    monkeypatch.setattr(conditions, "now", lambda: at)
    tuned = autotune.measure([of_values(sample=counted(1))])
    ((_, (found,)),) = rewriter.Tuned.loads(tuned.dumps()).entries
    assert (found.clock_mhz, found.driver) == (1755, "570.86.15")


def test_the_mean_over_distributions_counts_and_is_shown() -> None:
    both = lambda operands: {"few": counted(1), "many": counted(5)}
    tuned = autotune.measure([of_values(distributions=both)])
    ((_, (found,)),) = tuned.entries
    times = dict(found.by_inputs)
    assert list(times) == ["few", "many"]
    assert times["few"] < times["many"]  # one sleeps five times as long
    mean = (times["few"] + times["many"]) / 2
    assert found.median_us == pytest.approx(mean, abs=0.01)
    assert found.runs == 40
    assert "mean of few " in tuned.table()
    assert ", many " in tuned.table()
    again = rewriter.Tuned.loads(tuned.dumps())
    assert again == tuned


def test_a_users_own_samples_take_the_place_of_the_ops() -> None:
    task = of_values(sample=counted(1))
    first = autotune.measure([task])
    assert first.entries[0][1][0].by_inputs == ()
    mine = dataclasses.replace(task, samples=(("mine", counted(3)),))
    second = autotune.measure([mine])
    ((name, us),) = second.entries[0][1][0].by_inputs
    assert name == "mine"
    assert us > 3 * 2000  # 6 ms of sleep
    assert autotune.measure([mine]) == second  # and is kept
    ((key, cached),) = cache.entries(device.attached().kind, "by_value")
    assert (key, cached) == second.entries[0]


def test_samples_of_a_program() -> None:
    drawn = []

    def even(key, operands, params):
        m, g = operands["lhs"].shape[0], operands["group_sizes"].shape[0]
        drawn.append((m, g))
        made = {n: jnp.ones(operands[n].shape) for n in ("lhs", "rhs")}
        return {**made, "group_sizes": jnp.full((g,), m // g, jnp.int32)}

    def experts(lhs, rhs, sizes):
        return jax.lax.ragged_dot(lhs, rhs, sizes)

    args = jnp.ones((32, 4)), jnp.ones((4, 4, 8)), jnp.full((4,), 8, jnp.int32)
    tuned = rewriter.tune(experts, level="quick", sample={"ragged_dot": even})(*args)
    assert drawn == [(32, 4)]
    assert {n for _, ms in tuned.entries for m in ms for n, _ in m.by_inputs} == {
        "sample"
    }
    usual = rewriter.tune(experts, level="quick")(*args)
    names = [n for n, _ in usual.entries[0][1][0].by_inputs]
    assert names == ["uniform", "dirichlet", "one_hot"]
    with pytest.raises(rewriter.ConfigError, match="Did you mean 'ragged_dot'"):
        rewriter.tune(experts, sample={"raged_dot": even})(*args)


def test_bad_arguments() -> None:
    with pytest.raises(rewriter.ConfigError, match=r"level='fast'. Choose quick, full"):
        rewriter.tune(program, level="fast")
    with pytest.raises(rewriter.ConfigError, match=r"budget_s=0; expected seconds"):
        rewriter.tune(program, budget_s=0)
    with pytest.raises(rewriter.ConfigError, match="unknown option 'budget'"):
        rewriter.tune(program, budget=3)


def test_forcing_passes_apart_and_in_order() -> None:
    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    x = jax.random.normal(jax.random.key(0), (1, 32, 2, 8))

    def kernel(implementation):
        given = {"attention": implementation}
        fast = rewriter.optimize(jax.grad(lambda q: attention(q, x, x).sum()),
                                 implementation=given)  # fmt: skip
        want = jax.grad(lambda q: attention(q, x, x).sum())(x)
        np.testing.assert_allclose(fast(x), want, atol=1e-5)
        (site,) = fast.report(x).sites
        return site.kernel

    assert kernel("memory_bounded") == "memory_bounded"
    assert kernel(["cudnn", "memory_bounded"]) == "memory_bounded"
    assert kernel(["cudnn", "xla"]) == "xla"
    assert kernel({"backward": "memory_bounded"}) == (
        "reference, backward memory_bounded"
    )
    assert kernel({"forward": "memory_bounded", "backward": "reference"}) == (
        "memory_bounded, backward reference"
    )
    with pytest.raises(rewriter.KernelError, match=r"is not available: cudnn: .*'xla'"):
        kernel("cudnn")
    with pytest.raises(rewriter.UnknownKernel, match="Did you mean 'cudnn'"):
        kernel(["cuddn", "xla"])


def two_ops(x, w, scale):
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
    return program(y, w)


def test_what_makes_the_whole_program_slower_is_left_as_written(monkeypatch) -> None:
    pattern = slow_pattern()
    pattern.kernel()(sleepy(0.02))
    x, scale = jnp.ones((8192, 32)), jnp.ones(32)
    args = (x, W, scale)
    options = {"patterns": ["default", pattern], "implementation": {}}
    task = next(
        t
        for t in rewriting.tasks(
            jax.make_jaxpr(two_ops)(*args), Config(), [pattern], False
        )
        if t.op.name == "gated"
    )
    made = (("xla", "xla", 1e6), ("kernel", "kernel 1", 1.0))  # it seems a good choice
    won = tuple(
        Measurement(Implementation(n), v, jax.__version__, us) for n, v, us in made
    )
    tuned = rewriter.Tuned(((task.key(device.attached()), won),))
    seemed = rewriter.explain(two_ops, **options, tuned=tuned)(*args)
    assert {s.op: s.kernel for s in seemed.sites}["gated"] == "kernel"

    monkeypatch.setattr(autotune, "measure", lambda *_: rewriter.Tuned())
    found = rewriter.tune(
        two_ops, **options, tuned=tuned, level="quick", end_to_end=True
    )(*args)
    whole = dict(found.entries)[seemed.key]
    assert {m.implementation.forward for m in whole} >= {"xla", "rewritten"}
    assert "whole program" in found.table()
    for given in ({"tuned": [tuned, found]}, {"tuned": tuned}):  # given, then cached
        report = rewriter.explain(two_ops, **options, **given)(*args)
        (site,) = (s for s in report.sites if s.op == "gated")
        assert site.kernel == "xla"
        assert "end to end, with it" in dict(site.not_chosen)["kernel"]
    deaf = rewriter.explain(two_ops, **options, tuned=tuned, end_to_end=False)(*args)
    assert {s.op: s.kernel for s in deaf.sites}["gated"] == "kernel"
    other = rewriter.explain(two_ops, **options, tuned=tuned)(x[:64], W, scale)
    assert other.key != seemed.key  # another program: nothing is known of it

    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    with pytest.raises(rewriter.ConfigError, match="end_to_end=True with shapes"):
        rewriter.tune(two_ops, end_to_end=True)(*specs)


def test_a_terminal_sees_a_bar_and_one_line(monkeypatch, capsys) -> None:
    module = sys.modules["rewriter.run.tune"]
    pattern = slow_pattern()
    pattern.kernel()(program)
    rewriter.tune(program, patterns=[pattern], level="quick")(X, W)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(module, "_is_on_a_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    run = rewriter.tune(program, patterns=[pattern], level="quick", again=True)
    run(X, W)
    err = capsys.readouterr().err
    assert "tuning gated forward x float32[64,32]" in err
    assert "tuned 1 of 1 sites and passes" in err
    assert 'tuned.save("tuned.json")' in err
