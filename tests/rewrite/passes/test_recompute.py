"""Values that loops stack for their gradients: fewer, and the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter import _jax
from rewriter.ops import device
from rewriter.rewrite.passes import recompute
from tests import slow
from tests.support import loops_at_random

CPU = device.named("cpu")

pytestmark = pytest.mark.once

LAYERS, ROWS, WIDTH, HIDDEN = 4, 512, 64, 256


def drawn(*shape, seed=0, dtype=jnp.float32):
    size = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    numbers = np.random.default_rng(seed).normal(0, size, shape)
    return jnp.asarray(numbers.astype(dtype))


WEIGHTS = {
    "gate": drawn(LAYERS, WIDTH, HIDDEN, seed=1),
    "up": drawn(LAYERS, WIDTH, HIDDEN, seed=2),
    "down": drawn(LAYERS, HIDDEN, WIDTH, seed=3),
    "scale": jnp.asarray(1 + 0.1 * np.asarray(drawn(LAYERS, WIDTH, seed=4))),
}
X = jnp.asarray(5 * np.asarray(drawn(ROWS, WIDTH, seed=5)))


def block(x, p):
    root = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    h = x * root * p["scale"]
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss(weights, x):
    x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, weights)
    return jnp.mean(x**2)


def loops(program):
    """The scans of a program at any depth, the first first."""
    found = []
    for eqn in getattr(program, "jaxpr", program).eqns:
        if eqn.primitive.name == "scan":
            found.append(eqn)
        elif _jax.call_kind(eqn):
            found += loops(_jax.call_body(eqn))
    return found


def stacked(eqn):
    """The shapes, without the turns, of what a scan stacks."""
    _, _, n_carry, _ = _jax.scan_parts(eqn)
    return sorted(v.aval.shape[1:] for v in eqn.outvars[n_carry:])


def before_and_after(fn, *args):
    """The program of a function, and that with less stacked; what changed."""
    before = jax.make_jaxpr(fn)(*args)
    after, found = recompute.PASS(before, CPU)
    run = jax.extend.core.jaxpr_as_fun
    flat = jax.tree.leaves(args)
    one, other = (jax.jit(run(program))(*flat) for program in (before, after))
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
    return before, after, found


def test_a_gated_layer_stacks_its_products_alone():
    before, after, (found,) = before_and_after(jax.grad(loss), WEIGHTS, X)
    first, second = map(loops, (before, after))
    assert len(first) == len(second) == 2
    wide = (ROWS, HIDDEN)
    assert stacked(first[0]).count(wide) >= 5
    assert stacked(second[0]).count(wide) == 2
    # What the norm reads is kept, and a number for each row; not what it gives.
    assert stacked(first[0]).count((ROWS, WIDTH)) >= 3
    assert stacked(second[0]).count((ROWS, WIDTH)) == 1
    assert found.turns == LAYERS
    assert "test_recompute.py" in found.where
    sizes = [
        4 * LAYERS * sum(map(np.prod, stacked(eqn))) for eqn in (first[0], second[0])
    ]
    assert [found.before, found.after] == sizes
    assert found.again >= 5


def test_memory_is_less():
    run = jax.extend.core.jaxpr_as_fun
    before, after, _ = before_and_after(jax.grad(loss), WEIGHTS, X)
    flat = jax.tree.leaves((WEIGHTS, X))
    one, other = (
        jax.jit(run(p)).lower(*flat).compile().memory_analysis().temp_size_in_bytes
        for p in (before, after)
    )
    assert other < 0.65 * one


def test_gradients_of_a_rewritten_step_against_float64():
    step = jax.value_and_grad(loss)
    fast = rewriter.optimize(step, implementation={"rms_norm": "memory_bounded"})
    report = fast.report(WEIGHTS, X)
    (found,) = report.changes
    assert found.after < 0.6 * found.before
    assert "stacked for gradients, not" in str(report)
    assert report.as_dict()["changes"][0]["after"] == found.after
    value, grads = fast(WEIGHTS, X)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (WEIGHTS, X))
        exact, expected = step(*wide)
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    for name in WEIGHTS:
        exact = np.asarray(expected[name])
        gap = np.linalg.norm(np.asarray(grads[name]) - exact)
        assert gap <= 2e-6 * np.linalg.norm(exact), name


def test_what_is_read_elsewhere_is_stacked_all_the_same():
    def with_states(weights, x):
        def turn(x, p):
            gate = jax.nn.silu(x @ p["gate"])
            return x + (gate * (x @ p["up"])) @ p["down"], gate

        x, gates = jax.lax.scan(turn, x, weights)
        return jnp.mean(x**2), gates

    fn = jax.grad(with_states, has_aux=True)
    before, after, (found,) = before_and_after(fn, WEIGHTS, X)
    counts = [stacked(loops(p)[0]).count((ROWS, HIDDEN)) for p in (before, after)]
    # The gate's product, the other one, and what is returned.
    assert counts[0] > counts[1] == 3
    assert found.after < found.before


def test_backwards_in_order_and_turns_that_are_given():
    def other_way(weights, x, more):
        def turn(x, given):
            p, scale = given
            x = x + jnp.tanh(jnp.exp(scale) * (x @ p["gate"])) @ p["down"]
            return x, None

        x, _ = jax.lax.scan(turn, x, (weights, more), reverse=True)
        return jnp.mean(x**2)

    more = drawn(LAYERS, ROWS, HIDDEN, seed=7) / 9
    fn = jax.grad(other_way, argnums=(0, 1, 2))
    before, after, _ = before_and_after(fn, WEIGHTS, X, more)
    first, second = (
        stacked(loops(p)[0]).count((ROWS, HIDDEN)) for p in (before, after)
    )
    assert first >= 3
    assert second == 1  # the product; the factor is made of what each turn is given


def test_random_masks_are_stacked_as_masks():
    def dropped(weights, x, key):
        def turn(x, given):
            p, key = given
            keep = jax.random.bernoulli(key, 0.9, (ROWS, HIDDEN))
            h = jnp.where(keep, jax.nn.silu(x @ p["gate"]) / 0.9, 0.0)
            return x + h @ p["down"], None

        keys = jax.random.split(key, LAYERS)
        x, _ = jax.lax.scan(turn, x, (weights, keys))
        return jnp.mean(x**2)

    fn = jax.grad(dropped)
    _, after, _ = before_and_after(fn, WEIGHTS, X, jax.random.key(0))
    eqn = loops(after)[0]
    wide = [v.aval.dtype for v in eqn.outvars if v.aval.shape[1:] == (ROWS, HIDDEN)]
    assert sorted(map(str, wide)) == ["bool", "float32"]


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param(lambda x, w: jnp.sin(x @ w), id="the product alone"),
        pytest.param(lambda x, w: jnp.cumsum(x @ w, 0) * x, id="a running sum"),
        pytest.param(lambda x, w: jnp.sort(x @ w, 0) * x, id="sorted"),
    ],
)
def test_what_costs_much_is_not_computed_again(turn):
    weights = drawn(LAYERS, WIDTH, WIDTH, seed=8)

    def fn(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (turn(x, w), None), x, weights)
        return jnp.mean(x**2)

    before, after, _ = before_and_after(jax.grad(fn), weights, X)
    heavy = ("dot_general", "cumsum", "sort")
    first, second = (
        [e.primitive.name for e in _jax.call_body(loops(p)[1]).eqns]
        for p in (before, after)
    )
    assert [first.count(n) for n in heavy] == [second.count(n) for n in heavy]
    assert second.count("dot_general") == 2


def test_small_stacks_and_single_loops_stay_the_same_object():
    cut = {"gate": (16, 16), "up": (16, 16), "down": (16, 16), "scale": (16,)}
    small = {n: WEIGHTS[n][:, *map(slice, shape)] for n, shape in cut.items()}
    program = jax.make_jaxpr(jax.grad(loss))(small, X[:8, :16])
    assert recompute.PASS(program, CPU) == (program, ())
    forward = jax.make_jaxpr(loss)(WEIGHTS, X)
    assert recompute.PASS(forward, CPU)[0] is forward


def test_under_jit_vmap_and_twice_differentiated():
    inner = jax.jit(loss)
    before_and_after(jax.grad(inner), WEIGHTS, X)
    xs = jnp.stack([X, 2 * X])
    many = jax.vmap(jax.grad(loss), (None, 0))
    _, after, found = before_and_after(many, WEIGHTS, xs)
    assert found
    assert stacked(loops(after)[0]).count((2, ROWS, HIDDEN)) == 2

    def slope(weights, x):
        grads = jax.grad(loss)(weights, x)
        return sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))

    before_and_after(jax.grad(slope), WEIGHTS, X)


def test_loops_without_carries_and_numbers_among_what_is_stacked(monkeypatch):
    monkeypatch.setattr("rewriter.rewrite.passes.recompute.LEAST", 1)

    def alone(weights, x):  # no carry, nothing that all turns read
        turn = lambda _, p: (None, jnp.sum(jax.nn.silu(p["gate"] @ p["down"])))
        return jnp.mean(jax.lax.scan(turn, None, weights)[1]) + 0 * jnp.sum(x)

    before_and_after(jax.grad(alone), WEIGHTS, X)

    def numbered(weights, x):
        turn = lambda x, p: (jnp.tanh(x @ p["gate"]) @ p["down"], 1.5)
        x, ones = jax.lax.scan(turn, x, weights)
        return jnp.mean(x**2) * jnp.sum(ones), ones

    before_and_after(jax.grad(numbered, has_aux=True), WEIGHTS, X)


@pytest.mark.parametrize("seed", slow.first(8, range(24)))
def test_random_loops_compute_the_same(seed, monkeypatch):
    monkeypatch.setattr("rewriter.rewrite.passes.recompute.LEAST", 1)
    monkeypatch.setattr("rewriter.rewrite.passes.checkpoint_savings.WORTH", 0.001)
    for name, far, _ in loops_at_random.compared(seed):
        assert far < 1e-3, name


def test_checkpointed_layers_stack_what_they_did():
    def checkpointed(weights, x):
        one = jax.checkpoint(block)
        x, _ = jax.lax.scan(lambda x, p: (one(x, p), None), x, weights)
        return jnp.mean(x**2)

    before, after, found = before_and_after(jax.grad(checkpointed), WEIGHTS, X)
    assert after is before
    assert found == ()
