"""Whole training steps: their own gradients, an optimizer, several batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rewriter
from rewriter.tools import demo
from tests import slow
from tests.examples import train
from tests.gradients.test_gradients import (
    CONTEXTS,
    FORCED,
    LAYERS,
    OPS,
    PARAMS,
    X,
    block,
    equal,
    scanned,
    unrolled,
)

pytestmark = pytest.mark.once


def test_training_gives_the_same_losses() -> None:
    loss, (weights, _) = demo.build(demo.SMALL)
    data = [ids % demo.SMALL.vocabulary for ids in train.batches(6, 1, 65)]
    result = train.compare(loss, weights, data)
    assert result["loss"]["last"] < result["loss"]["first"]
    assert result["largest_difference"] < 1e-4
    assert result["sites"]["attention"] == demo.SMALL.blocks


def accumulated(loss: Callable) -> Callable:
    """Gradients added up over micro-batches in a loop."""

    def step(params, x):
        zeros = jax.tree.map(jnp.zeros_like, params)

        def one(total, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        return jax.lax.scan(one, zeros, jnp.stack([x, x * 0.5]))

    return step


def with_auxiliary(loss: Callable) -> Callable:
    def both(params, x):
        value = loss(params, x)
        return value, {"half": value / 2}

    return jax.value_and_grad(both, has_aux=True)


def with_scaled_loss(loss: Callable) -> Callable:
    """Loss scaling, as with float16."""

    def step(params, x):
        value, grads = jax.value_and_grad(lambda p: loss(p, x) * 1024.0)(params)
        grads = jax.tree.map(lambda g: g / 1024.0, grads)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in grads[0].values()]))
        kept = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        return value / 1024.0, kept

    return step


def with_optimizer(loss: Callable) -> Callable:
    # with the default eps, gradients near zero give updates that rounding decides
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-3))

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return step


def with_frozen_weights(loss: Callable) -> Callable:
    def step(params, x):
        frozen = ("q", "k", "gate")
        free = [{n: w for n, w in p.items() if n not in frozen} for p in params]
        held = [{n: w for n, w in p.items() if n in frozen} for p in params]
        join = lambda free: [{**a, **b} for a, b in zip(free, held, strict=True)]
        return jax.grad(lambda free: loss(join(free), x))(free)

    return step


def by_vjp(loss: Callable) -> Callable:
    def step(params, x):
        value, back = jax.vjp(loss, params, x)
        return value, back(jnp.float32(2.0))

    return step


def by_linearize(loss: Callable) -> Callable:
    def step(params, x):
        value, tangents = jax.linearize(loss, params, x)
        back = jax.linear_transpose(tangents, params, x)
        return value, back(jnp.float32(2.0))

    return step


STEPS = (
    accumulated, with_auxiliary, with_scaled_loss, with_optimizer, with_frozen_weights,
    by_vjp, by_linearize,
)  # fmt: skip


@pytest.mark.parametrize("name", slow.first(1, ["scan_of_remat", "unrolled"]))
@pytest.mark.parametrize("step", STEPS, ids=lambda s: s.__name__)
def test_steps_around_the_gradients(step: Callable, name: str) -> None:
    loss, count = CONTEXTS[name]
    code = step(loss)
    report = rewriter.explain(code)(PARAMS, X)
    assert not report.failures
    counts = report.counts(repeats=False, backward=True)
    assert {op: counts[op] for op in OPS} == dict.fromkeys(OPS, count)
    fast = rewriter.optimize(code, implementation=FORCED, strict=True)
    assert "exp" not in {e.primitive.name for e in fast.jaxpr(PARAMS, X).eqns}
    equal(fast(PARAMS, X), jax.jit(code)(PARAMS, X))


POLICIES = jax.checkpoint_policies
SAVING = {
    "nothing": POLICIES.nothing_saveable,
    "everything": POLICIES.everything_saveable,
    "dots": POLICIES.dots_saveable,
    "dots_without_batch": POLICIES.dots_with_no_batch_dims_saveable,
    "names": POLICIES.save_only_these_names("hidden"),
    "offloaded_names": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def named(p, x):
    return block(p, jax.ad_checkpoint.checkpoint_name(x, "hidden"))


@pytest.mark.parametrize("around", slow.first(1, [scanned, unrolled]))
@pytest.mark.parametrize("policy", SAVING)
def test_policies_of_checkpoints(policy: str, around: Callable) -> None:
    layer = jax.checkpoint(named, policy=SAVING[policy])
    step = jax.value_and_grad(around(layer))
    count = LAYERS if around is unrolled else 1
    report = rewriter.explain(step)(PARAMS, X)
    assert not report.failures
    counts = report.counts(repeats=False, backward=True)
    assert {op: counts[op] for op in OPS} == dict.fromkeys(OPS, count)
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    equal(fast(PARAMS, X), jax.jit(step)(PARAMS, X))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chosen for a CPU")
@pytest.mark.parametrize(("policy", "kernel"), [("nothing", "memory_bounded"),
                                                ("dots", "xla")])  # fmt: skip
def test_saved_products_are_not_made_twice(policy: str, kernel: str) -> None:
    """A checkpoint that saves products makes the unit's result from them again."""

    def layer(w, x):
        return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    shapes = {"gate": (512, 2048), "up": (512, 2048), "down": (2048, 512)}
    w = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    checkpointed = jax.checkpoint(layer, policy=SAVING[policy])
    step = jax.grad(lambda w, x: (checkpointed(w, jnp.sin(x)) ** 2).sum())
    sites = rewriter.explain(step)(w, x).sites
    assert {s.kernel for s in sites} == {kernel}
    assert any(s.backward for s in sites)
    assert policy == "nothing" or "saves its products" in str(sites[0].not_chosen)


def test_half_precision_with_float32_weights() -> None:
    """Weights in float32, layers in bfloat16: cotangents are cast on their way."""
    half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    def layer(p, x):
        return block(half(p), x.astype(jnp.bfloat16)).astype(jnp.float32)

    step = jax.value_and_grad(unrolled(layer))
    counts = rewriter.explain(step)(PARAMS, X).counts(repeats=False, backward=True)
    assert counts["attention"] == counts["gated_linear_unit"] == LAYERS
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    equal(fast(PARAMS, X), step(PARAMS, X), tolerance=0.06)


def test_second_derivatives_of_a_rewritten_step() -> None:
    step = jax.grad(unrolled(block))
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)

    def curvature(gradient):
        loss = lambda p: sum((g**2).sum() for g in jax.tree.leaves(gradient(p, X)))
        return jax.grad(loss)(PARAMS)

    equal(curvature(fast), curvature(step), tolerance=1e-4)


def test_second_derivatives_in_the_program() -> None:
    """A Hessian-vector product: nothing is lost where gradients are not found."""

    def step(params, x):
        loss = lambda x: unrolled(block)(params, x)
        return jax.jvp(jax.grad(loss), (x,), (jnp.cos(x),))

    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    equal(fast(PARAMS, X), step(PARAMS, X), tolerance=1e-4)


def test_optimizers_are_not_taken_for_norms() -> None:
    """Adam divides by a root of a mean of squares over time, not over an axis."""
    step = with_optimizer(unrolled(block))
    report = rewriter.explain(step)(PARAMS, X)
    assert not [m for m in report.misses if "norm" in m.op and "adam" in m.where]
    assert np.all([s.backward for s in report.sites])
