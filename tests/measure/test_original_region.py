"""XLA's candidate is what the user wrote: taken out, told apart, run on real inputs."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.config import Config
from rewriter.measure import autotune, cache, inputs, programs
from rewriter.measure.measurement import Measurement, of_spelling
from rewriter.measure.original_region import NotTaken
from rewriter.ops import device
from rewriter.ops.registry import registry
from rewriter.run import rewriting
from rewriter.site.implementation import Implementation
from tests import slow

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REWRITER_CACHE_DIR", str(tmp_path / "cache"))
    cache._process.cache_clear()
    yield
    cache._process.cache_clear()


T = 16
X = jax.ShapeDtypeStruct((2, T, 4, 8), jnp.float32)
PAD = jax.ShapeDtypeStruct((2, T), bool)
I32 = jnp.int32


def plain(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.35)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def by_hand(q, k, v):
    s = jnp.einsum("btnh,bsnh->bnts", q * 0.35, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v)


def heads_first(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    weights = jax.nn.softmax(0.35 * (q @ k.swapaxes(-1, -2)))
    return (weights @ v).transpose(0, 2, 1, 3)


def padded(q, k, v, pad):
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.35
    s = jnp.where(pad[:, None, None, :], -1e9, s)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def two_masks(q, k, v, a, b):
    keep = a[:, None, :, None] & b[:, None, None, :]
    s = jnp.where(keep, jnp.einsum("btnh,bsnh->bnts", q, k), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def gated(x, a, b):
    return jax.nn.gelu(x @ a) * (x @ b)


def normed(x, scale):
    x = x.reshape(-1, 8)
    mean = jnp.mean(jnp.square(x), -1, keepdims=True)
    return x / jnp.sqrt(mean + 1e-6) * scale


def experts(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes)


def s(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PROGRAMS = {
    "plain": (plain, (X, X, X)),
    "by_hand": (by_hand, (X, X, X)),
    "heads_first": (heads_first, (X, X, X)),
    "padded": (padded, (X, X, X, PAD)),
    "gated": (gated, (s(6, 8), s(8, 5), s(8, 5))),
    "normed": (normed, (s(3, 4, 8), s(8))),
    "experts": (experts, (s(32, 4), s(4, 4, 6), s(4, dtype=I32))),
}


def gradients(fn, args):
    floats = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def loss(*x):
        y = fn(*x)
        return jnp.sum(jnp.sin(jnp.arange(y.size).reshape(y.shape)) * y)

    return jax.value_and_grad(loss, floats)


def task_of(fn, args, gradients: bool = False) -> programs.Task:
    closed = jax.make_jaxpr(fn)(*args)
    found = rewriting.tasks(closed, Config(), (), gradients)
    return found[-1]


def on_leaves(task: programs.Task):
    drawn = inputs.inputs(task, device.Device("cpu", "cpu"))
    return inputs.with_leaves(task, drawn)


@pytest.mark.parametrize(
    "passes", slow.first(2, ["forward_and_vjp", "differentiated", "forward"])
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_region_on_its_own_computes_what_the_op_does(name: str, passes: str) -> None:
    fn, args = PROGRAMS[name]
    if passes == "differentiated":
        task = task_of(gradients(fn, args), args)
    else:
        task = task_of(fn, args, passes == "forward_and_vjp")
    assert task.written is not None, task.unwritten
    own, exact = programs.own_equations(task)
    with jax.default_matmul_precision("highest"):
        for given in on_leaves(task):
            got, want = (jax.jit(f)(*given.leaves[0]) for f in (own, exact))
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert float(jnp.abs(b).max()) > 1e-3  # of ones nothing is learnt
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    if task.passes != "forward":
        leaves = dict(task.written.leaves)
        floats = {n for n, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        assert set(got[1]) == floats


def primitives(fn, *args) -> set[str]:
    return {e.primitive.name for e in jax.make_jaxpr(fn)(*args).eqns}


def test_it_is_the_users_equations_and_calls_with_a_rule_stay_whole() -> None:
    rectified = lambda x, a, b: jax.nn.relu(x @ a) * (x @ b)
    task = task_of(rectified, PROGRAMS["gated"][1])
    (given,) = on_leaves(task)
    own, _ = programs.own_equations(task)
    assert "custom_jvp_call" in primitives(own, *given.leaves[0])
    task = task_of(*PROGRAMS["by_hand"])
    (given,) = on_leaves(task)
    own, _ = programs.own_equations(task)
    found = primitives(own, *given.leaves[0])
    assert "custom_jvp_call" not in found
    assert {"exp", "reduce_max", "div", "dot_general"} <= found
    fn, args = PROGRAMS["plain"]
    task = task_of(gradients(fn, args), args)
    own, _ = programs.own_equations(task)
    (given,) = on_leaves(task)
    assert "transpose" in str(jax.make_jaxpr(own)(*given.leaves[0]))
    assert task.written.both is not None  # the program's own gradients


def test_leaves_give_operands_like_the_samples() -> None:
    """A mask that is true where keys are hidden, lengths, and rows of experts."""
    task = task_of(*PROGRAMS["padded"])
    (given,) = on_leaves(task)
    hidden = given.leaves[0][0]["3"]
    np.testing.assert_array_equal(~hidden[:, None, None, :], given.sets[0][0]["mask"])
    leaves, operands = given.leaves[0][0], given.sets[0][0]
    np.testing.assert_allclose(leaves["0"], operands["q"], rtol=1e-6)
    task = task_of(*PROGRAMS["experts"])
    drawn = on_leaves(task)
    assert [d.drawn for d in drawn] == ["uniform", "dirichlet", "one_hot"]
    for d in drawn:
        assert d.leaves[0][0]["2"].tolist() == d.sets[0][0]["group_sizes"].tolist()


def test_where_no_leaves_are_realistic_it_is_said() -> None:
    args = (X, X, X, PAD, PAD)
    with pytest.raises(NotTaken, match=r"read bool\[2,16\], and nothing says"):
        on_leaves(task_of(two_masks, args))
    tuned = rewriter.tune(two_masks, level="quick")(*args)
    assert "xla (as usually written)" in tuned.table()
    assert (
        "the op as usually written, since its own equations read bool[2,16], and "
        "nothing says what that looks like" in tuned.table()
    )
    assert all(m.median_us for _, ms in tuned.entries for m in ms)


def spelling(fn, args) -> str:
    return task_of(fn, args).spelling


def test_spellings_are_told_apart_and_sizes_are_not() -> None:
    three = (plain, by_hand, heads_first)
    digests = {spelling(f, (X, X, X)) for f in three}
    assert len(digests) == 3
    larger = jax.ShapeDtypeStruct((3, 64, 4, 16), jnp.float32)
    assert {spelling(f, (larger,) * 3) for f in three} == digests
    half = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    assert spelling(plain, (half,) * 3) not in digests
    keys = {task_of(f, (X, X, X)).key(device.attached()) for f in three}
    assert len(keys) == 1  # kernels are measured for all of them


def test_another_process_has_the_same_digest() -> None:
    code = (
        "from tests.measure.test_original_region import *\n"
        "print(spelling(plain, (X, X, X)), spelling(gated, PROGRAMS['gated'][1]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        check=True,
        capture_output=True,
        text=True,
    )
    mine = spelling(plain, (X, X, X)), spelling(gated, PROGRAMS["gated"][1])
    assert tuple(run.stdout.split()) == mine


def test_kernels_are_measured_once_and_xla_for_each_spelling() -> None:
    args = (X, X, X)
    first = rewriter.tune(plain, level="quick")(*args)
    second = rewriter.tune(by_hand, level="quick")(*args)
    ((key, a),), ((other, b),) = first.entries, second.entries
    assert key == other
    kernels = lambda found: [m for m in found if m.implementation.forward != "xla"]
    assert kernels(a) == kernels(b)  # the very same times
    ((_, kept),) = cache.entries(device.attached().kind, "attention")
    digests = {m.spelling for m in kept if m.implementation.forward == "xla"}
    assert digests == {spelling(plain, args), spelling(by_hand, args)}
    both = (first | second).table()
    assert all(f"xla (as written: {d})" in both for d in digests)
    assert rewriter.tune(plain, level="quick")(*args) == first


def timed(version: str, us: float) -> Measurement:
    made = Implementation(version.split()[0])
    return Measurement(made, version, jax.__version__, us, runs=20)


def test_a_kernel_has_to_beat_what_the_user_wrote() -> None:
    args = (X, X, X)
    key = task_of(plain, args).key(device.attached())
    slow, fast = (f"xla {spelling(f, args)}" for f in (plain, by_hand))
    kernel = timed("memory_bounded 1", 50.0)
    found = (timed(slow, 100.0), timed(fast, 10.0), kernel)
    tuned = rewriter.Tuned(((key, found),))

    def chosen(fn, tuned=tuned):
        (site,) = rewriter.explain(fn, tuned=tuned, tune="off")(*args).sites
        return site.kernel

    assert chosen(plain) == "memory_bounded"
    assert chosen(by_hand) == "xla"
    assert chosen(heads_first) == "xla"  # not measured: against the fastest spelling
    usual = rewriter.Tuned(((key, (*found, timed("xla", 90.0))),))
    assert chosen(heads_first, usual) == "memory_bounded"
    assert chosen(by_hand, usual) == "xla"
    near = dataclasses.replace(
        key, shapes=tuple((n, (3, *shape[1:])) for n, shape in key.shapes)
    )
    assert chosen(plain, rewriter.Tuned(((near, found),))) == "memory_bounded"
    assert chosen(by_hand, rewriter.Tuned(((near, found),))) == "xla"


def test_which_of_xlas_times_stands_for_a_spelling() -> None:
    kernel, usual = timed("memory_bounded 1", 50.0), timed("xla", 80.0)
    a, b = timed("xla a", 100.0), timed("xla b", 10.0)
    assert of_spelling([kernel, a, b, usual], "a") == (kernel, a)
    assert of_spelling([kernel, a, b, usual], "c") == (kernel, usual)
    assert of_spelling([kernel, a, b], "c") == (kernel, b)
    assert of_spelling([kernel, a], "c") == (kernel, a)


def test_named_shapes_have_the_usual_spelling() -> None:
    x = dict.fromkeys(("q", "k", "v"), X)
    op = registry().op("attention")
    spec = task_of(plain, (X, X, X)).spec
    task = programs.Task(op, spec, registry().kernels("attention"), "forward")
    assert spec.operands == tuple(x)
    ((_, found),) = autotune.measure([task], "quick").entries
    assert {m.version for m in found} == {"xla", "memory_bounded 1"}


def test_regions_that_compute_something_else_are_not_run() -> None:
    """Should a region be taken out wrongly, the op as usually written is measured."""
    task = task_of(plain, (X, X, X))
    broken = dataclasses.replace(
        task.written, forward=lambda leaves: 2 * task.written.forward(leaves)
    )
    wrong = dataclasses.replace(task, written=broken)
    ((_, found),) = autotune.measure([wrong], "quick").entries
    (xla,) = (m for m in found if m.implementation.forward == "xla")
    assert xla.median_us is not None
    assert "usually written, since its own equations differ by 1e+00" in xla.note
    assert all(m.median_us is not None for m in found)
