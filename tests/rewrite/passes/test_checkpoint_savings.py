"""What checkpoints compute again, kept in memory that is given for that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter import _jax
from rewriter.errors import ConfigError
from rewriter.rewrite.passes.checkpoint_savings import _same, save
from tests.rewrite.passes.test_recompute import loops, stacked

pytestmark = pytest.mark.once

LAYERS, BATCH, ROWS, WIDTH, HEADS = 3, 2, 64, 1024, 8
GIB = 1 << 30


def drawn(*shape, seed, size=1.0):
    numbers = np.random.default_rng(seed).normal(0, size * shape[-2] ** -0.5, shape)
    return jnp.asarray(numbers.astype(np.float32))


WEIGHTS = {
    name: drawn(LAYERS, WIDTH, WIDTH, seed=k)
    for k, name in enumerate(("q", "k", "v", "o", "up"))
}
X = drawn(BATCH, ROWS, WIDTH, seed=9, size=8.0)


def block(x, p):
    """A layer of attention and of a product under silu."""
    heads = (BATCH, ROWS, HEADS, WIDTH // HEADS)
    q, k, v = ((x @ p[n]).reshape(heads) for n in "qkv")
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / heads[-1] ** 0.5
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    x = x + out.reshape(x.shape) @ p["o"]
    return x + jax.nn.silu(x @ p["up"])


def in_a_loop(weights, x):
    one = jax.checkpoint(block)
    x, _ = jax.lax.scan(lambda x, p: (one(x, p), None), x, weights)
    return jnp.mean(x**2)


def one_by_one(weights, x):
    one = jax.checkpoint(block)
    for k in range(LAYERS):
        x = one(x, jax.tree.map(lambda w, k=k: w[k], weights))
    return jnp.mean(x**2)


def checkpoints(program):
    """The checkpoints that run again, at any depth."""
    found = []
    for eqn in getattr(program, "jaxpr", program).eqns:
        if _jax.call_kind(eqn) == "remat" and _jax.is_recomputation(eqn):
            found.append(_jax.call_body(eqn))
        elif _jax.call_kind(eqn):
            found += checkpoints(_jax.call_body(eqn))
    return found


def counted(program, name):
    """How many equations of a name checkpoints hold, all together."""
    names = [e.primitive.name for body in checkpoints(program) for e in body.eqns]
    return names.count(name)


def fast_step(fn, memory):
    options = {"implementation": {"attention": "memory_bounded"}}
    return rewriter.optimize(
        jax.value_and_grad(fn), checkpoint_memory=memory, **options
    )


@pytest.fixture(autouse=True)
def few_operations_are_enough(monkeypatch):
    """So that attention of few keys is worth its memory."""
    monkeypatch.setattr("rewriter.rewrite.passes.checkpoint_savings.WORTH", 20.0)


@pytest.fixture(scope="module")
def exact():
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (WEIGHTS, X))
        return jax.tree.map(np.asarray, jax.value_and_grad(in_a_loop)(*wide))


@pytest.mark.parametrize("fn", [in_a_loop, one_by_one])
def test_products_and_attention_are_not_computed_again(fn, exact):
    before, after = (
        jax.make_jaxpr(fast_step(fn, memory))(WEIGHTS, X) for memory in (0, GIB)
    )
    times = 1 if fn is in_a_loop else LAYERS
    assert counted(before, "rewriter_site") == times
    assert counted(after, "rewriter_site") == 0
    # Five products less a layer: q, k, v, o, up.
    products = [counted(p, "dot_general") for p in (before, after)]
    assert products[0] - products[1] == 5 * times
    value, grads = fast_step(fn, GIB)(WEIGHTS, X)
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    for name, expected in exact[1].items():
        gap = np.linalg.norm(np.asarray(grads[name]) - expected)
        assert gap <= 3e-6 * np.linalg.norm(expected), name


@pytest.mark.parametrize("fn", [in_a_loop, one_by_one])
def test_less_memory_keeps_what_takes_most_operations_for_it(fn, exact):
    every = fast_step(fn, GIB).report(WEIGHTS, X).changes
    product = 4 * BATCH * ROWS * WIDTH * LAYERS
    memory = sum(k.bytes for k in every if k.what == "product") // 2
    some = fast_step(fn, memory).report(WEIGHTS, X).changes
    assert 0 < sum(k.bytes for k in some) <= memory
    assert sum(k.bytes for k in every if k.what == "product") == 5 * product
    ratio = lambda k: k.flops / k.bytes
    left = sorted(map(ratio, every))[: len(every) - len(some)]
    assert min(map(ratio, some)) >= max(left)
    value, grads = fast_step(fn, memory)(WEIGHTS, X)
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    for name, expected in exact[1].items():
        gap = np.linalg.norm(np.asarray(grads[name]) - expected)
        assert gap <= 3e-6 * np.linalg.norm(expected), name


def test_a_loop_stacks_what_is_kept():
    first, second = (
        loops(jax.make_jaxpr(fast_step(in_a_loop, m))(WEIGHTS, X))[0] for m in (0, GIB)
    )
    assert stacked(first) == [(BATCH, ROWS, WIDTH)]
    # Five products, and attention's result and the logarithms of its sums.
    assert len(stacked(second)) >= 8


def test_operations_of_the_compiled_program():
    flops = [
        fast_step(in_a_loop, m).lower(WEIGHTS, X).compile().cost_analysis()["flops"]
        for m in (0, GIB)
    ]
    assert flops[1] < 0.9 * flops[0]


def test_report_says_what_is_kept():
    report = fast_step(in_a_loop, GIB).report(WEIGHTS, X)
    text = str(report)
    assert "kept for gradients in" in text
    assert "TFLOP less" in text
    whats = {row["what"] for row in report.as_dict()["changes"]}
    assert whats == {"product", "attention"}


@pytest.mark.parametrize("fn", [in_a_loop, one_by_one])
def test_report_says_what_could_be_kept(fn):
    nothing, some, every = (
        fast_step(fn, m).report(WEIGHTS, X) for m in (0, 4 << 20, GIB)
    )
    assert set(nothing.offered) == set(every.changes)
    assert every.offered == ()
    assert len(some.changes) + len(some.offered) == len(every.changes)
    memory = f"{sum(k.bytes for k in every.changes) / 2**20:.3g} MiB"
    assert f"checkpoint_memory keeps all of it in {memory}" in str(nothing)
    assert "checkpoint_memory" not in str(every)
    assert len(nothing.as_dict()["offered"]) == len(every.changes)


def test_without_memory_nothing_changes():
    program = jax.make_jaxpr(jax.grad(in_a_loop))(WEIGHTS, X)
    assert save(program, 0) == (program, ())
    assert save(program, 1000)[0] is program  # too little for anything
    plain = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(w["q"][0] @ w["k"][0])))(WEIGHTS)
    assert save(plain, GIB)[0] is plain


def pairs(one, other, *args):
    """How many equations of a function another does again, of the same arguments."""
    first, second = (jax.make_jaxpr(fn)(*args) for fn in (one, other))
    known = dict(zip(second.jaxpr.invars, first.jaxpr.invars, strict=True))
    return len(list(_same(first.jaxpr.eqns, second.jaxpr.eqns, known)))


def test_other_operands_numbers_and_parameters_are_not_the_same():
    w, x = WEIGHTS["q"][0], X[0]
    assert pairs(lambda w, x: x @ w, lambda w, x: x @ w, w, x) == 1
    assert pairs(lambda w, x: x @ w, lambda w, x: (x + 1) @ w, w, x) == 0
    assert pairs(lambda w, x: x @ w, lambda w, x: x @ w.T, w, x) == 0
    high = jax.lax.Precision.HIGHEST
    assert (
        pairs(lambda w, x: x @ w, lambda w, x: jnp.dot(x, w, precision=high), w, x) == 0
    )
    assert pairs(lambda w, x: x * 2.0, lambda w, x: x * 2.5, w, x) == 0
    assert pairs(lambda w, x: x * 2.0, lambda w, x: x * 2.0, w, x) == 1
    # What the first computes twice, and reads the second time.
    twice = lambda w, x: (jnp.sin(w), x @ jnp.sin(w))
    assert pairs(twice, lambda w, x: x @ jnp.sin(w), w, x) == 2
    # Inside of calls, whatever they return.
    silu = jax.jit(lambda x: (jnp.exp(x), jnp.sin(x)))
    less = jax.jit(lambda x: jnp.sin(x))
    assert pairs(lambda w, x: silu(x)[1] @ w, lambda w, x: less(x) @ w, w, x) == 2


def test_random_numbers_of_another_key_are_not_the_same():
    def dropped(weights, x, key):
        def turn(x, given):
            p, key = given
            keep = jax.random.bernoulli(key, 0.9, x.shape)
            return jnp.where(keep, jax.nn.silu(x @ p["up"]), 0.0)

        one = jax.checkpoint(turn)
        keys = jax.random.split(key, LAYERS)
        x, _ = jax.lax.scan(lambda x, g: (one(x, g), None), x, (weights, keys))
        return jnp.mean(x**2)

    args = WEIGHTS, X, jax.random.key(3)
    step = jax.value_and_grad(dropped)
    program = jax.make_jaxpr(step)(*args)
    after, found = save(program, GIB)
    assert [k.what for k in found] == ["product"]
    flat = jax.tree.leaves(args)
    run = jax.extend.core.jaxpr_as_fun
    for x, y in zip(run(program)(*flat), run(after)(*flat), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


def two_by_two(weights, x):
    one = jax.checkpoint(block)
    loop = lambda x, w: jax.lax.scan(lambda x, p: (one(x, p), None), x, w)[0]
    pairs = jax.tree.map(lambda w: jnp.stack([w[:2], w[1:]]), weights)
    both = jax.checkpoint(loop)
    x, _ = jax.lax.scan(lambda x, p: (both(x, p), None), x, pairs)
    return jnp.mean(x**2)


def temporary(fn, **options):
    step = rewriter.optimize(
        jax.value_and_grad(fn),
        implementation={"attention": "memory_bounded"},
        **options,
    )
    analysis = step.lower(WEIGHTS, X).compile().memory_analysis()
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("fn", [in_a_loop, two_by_two])
def test_the_compiled_program_keeps_no_more_than_it_may(fn):
    nothing = temporary(fn)
    assert temporary(fn, checkpoint_memory=0) == nothing
    assert temporary(fn, checkpoint_memory=1000) == nothing
    grown = []
    for memory in (3 << 20, 8 << 20):
        grown.append(temporary(fn, checkpoint_memory=memory) - nothing)
        assert 0 < grown[-1] <= memory + 4096  # some numbers of a loop's own
    assert grown[0] < grown[1]


@pytest.mark.parametrize("value", [-1, "2 GiB", 1.5, True, False, None, np.bool_(1)])
def test_memory_is_a_number_of_bytes(value):
    wanted = r"checkpoint_memory=.*whole number of bytes, 0 or more, such as 2 << 30"
    with pytest.raises(ConfigError, match=wanted) as raised:
        rewriter.optimize(in_a_loop, checkpoint_memory=value)
    assert repr(value) in str(raised.value)


def test_numbers_of_numpy_are_numbers_of_bytes():
    rewriter.optimize(in_a_loop, checkpoint_memory=np.int64(1 << 20))
