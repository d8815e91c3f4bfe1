"""Gradients that exist only as terms of a sum with the cotangent that goes past."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.gradients.addends import read_as_a_sum, returned, terms
from rewriter.program.graph import Graph
from tests import slow
from tests.find.test_sliced_operands import in_float64
from tests.gradients.test_gradients import FORCED, agree, scanned, unrolled
from tests.support.arrays import normal

pytestmark = pytest.mark.once

D, F, T, LAYERS = 16, 32, 8, 3


def weights(seed: int) -> dict[str, jax.Array]:
    shapes = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    return {
        name: normal(*shape, seed=9 * seed + i, size=0.1)
        for i, (name, shape) in enumerate(shapes.items())
    }


PARAMS = [weights(i) for i in range(LAYERS)]
X = normal(2, T, D, seed=99)


def unit(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def beside(p, x):
    return x + unit(p, x)


def rms(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def centred(x):
    c = x - x.mean(-1, keepdims=True)
    return c / jnp.sqrt((c * c).mean(-1, keepdims=True) + 1e-5)


def normed(p, x):
    return x + unit(p, rms(x))


def layer_normed(p, x):
    return x + unit(p, centred(x))


UNIT, RMS, LAYER = "gated_linear_unit", "rms_norm", "layer_norm"
PROGRAMS = {
    "unrolled": (unrolled(beside), {UNIT: LAYERS}),
    "jit": (unrolled(jax.jit(beside)), {UNIT: LAYERS}),
    "remat": (unrolled(jax.checkpoint(beside)), {UNIT: LAYERS}),
    "scan": (scanned(beside), {UNIT: 1}),
    "scan_of_remat": (scanned(jax.checkpoint(beside)), {UNIT: 1}),
    "rms_norm": (unrolled(normed), {UNIT: LAYERS, RMS: LAYERS}),
    "scan_of_rms_norm": (scanned(normed), {UNIT: 1, RMS: 1}),
    "layer_norm": (unrolled(layer_normed), {UNIT: LAYERS, LAYER: LAYERS}),
    "scan_of_layer_norm": (scanned(layer_normed), {UNIT: 1, LAYER: 1}),
}


def same_in_float64(fast: Callable, step: Callable, *args) -> None:
    agree(fast, step, *args)
    with jax.enable_x64(True):
        wide = in_float64(args)
        agree(fast, step, *wide, tolerance=1e-12)


@pytest.mark.parametrize("argnums", slow.first(1, [(0, 1), 0]), ids=str)
@pytest.mark.parametrize(
    "name",
    slow.unless(
        lambda name: name not in ("remat", "scan_of_rms_norm", "scan_of_layer_norm"),
        PROGRAMS,
    ),
)
def test_the_gradient_beside_a_skip_connection(name: str, argnums) -> None:
    loss, expected = PROGRAMS[name]
    step = jax.grad(loss, argnums=argnums)
    report = rewriter.explain(step)(PARAMS, X)
    assert not report.failures
    counts = report.counts(repeats=False, backward=True)
    first = argnums == 0 and "scan" not in name  # its norm's input has no gradient
    for op, count in expected.items():
        assert counts[op] == count - (first and op != UNIT)
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    text = str(fast.jaxpr(PARAMS, X))
    assert "logistic" not in text  # all of the unit's gradients are the op's
    same_in_float64(fast, step, PARAMS, X)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="chosen for a CPU")
@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=["weights", "input_too"])
@pytest.mark.parametrize("around", [unrolled, scanned])
@pytest.mark.parametrize("layer", [beside, jax.checkpoint(beside), unit])
def test_no_unit_is_left_for_what_reads_its_products(layer, around, argnums) -> None:
    shapes = {"gate": (512, 2048), "up": (512, 2048), "down": (2048, 512)}
    p = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    report = rewriter.explain(jax.grad(around(layer), argnums=argnums))([p] * 3, x)
    assert {s.kernel for s in report.sites} == {"memory_bounded"}


def scaled(norm: Callable) -> Callable:
    return lambda x, s: norm(x) * s


def skipped(norm: Callable) -> Callable:
    """What goes past the norm is the norm's own cotangent."""

    def fn(x, s):
        return jax.lax.scan(lambda c, _: (c + norm(c) * s, None), x, None, length=3)[0]

    return fn


@pytest.mark.parametrize("loss", [jnp.sum, lambda y: jnp.sin(y).sum()])
@pytest.mark.parametrize(
    "around", [scaled, skipped, lambda f: jax.checkpoint(scaled(f))]
)
@pytest.mark.parametrize(("norm", "op"), [(rms, RMS), (centred, LAYER)])
def test_norms_under_any_cotangent(norm, op: str, around, loss) -> None:
    """The same number everywhere, given to a checkpoint, added to the gradient."""
    step = jax.grad(lambda x, s: loss(around(norm)(x, s)), argnums=(0, 1))
    scale = normal(D, seed=5)
    counts = rewriter.explain(step)(X, scale).counts(repeats=False, backward=True)
    assert counts[op] == 1
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert "rsqrt" not in str(fast.jaxpr(X, scale))
    same_in_float64(fast, step, X, scale)


@pytest.mark.parametrize("frozen", [[0], [2], [0, 2], [1, 2]])
def test_some_layers_are_frozen(frozen: list[int]) -> None:
    """What is known of one layer's gradients does not hide those of another."""

    def loss(free, x):
        free = iter(free)
        for i in range(LAYERS):
            x = beside(PARAMS[i] if i in frozen else next(free), x)
        return (x**2).mean()

    step = jax.grad(loss, argnums=(0, 1))
    free = [p for i, p in enumerate(PARAMS) if i not in frozen]
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    text = str(fast.jaxpr(free, X))
    assert "logistic" not in text
    assert text.count("rewriter_site_backward[") == LAYERS
    agree(fast, step, free, X)


def test_half_precision() -> None:
    """Terms are rounded one by one; here they are rounded once, together."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))

    def layer(p, x):
        wide = x.astype(jnp.float32)
        return x + unit(p, rms(wide).astype(x.dtype))

    step = jax.grad(unrolled(layer), argnums=(0, 1))
    counts = rewriter.explain(step)(*half).counts(backward=True)
    assert counts[RMS] == counts[UNIT] == LAYERS
    as_exact_in_half_precision(step, half)


def test_each_reader_casts_the_norm() -> None:
    """The cotangents of the casts are added up before the result's dtype."""

    def layer(p, x):
        wide = x.astype(jnp.float32)
        h = p["scale"] * rms(wide).astype(x.dtype)
        gate, up = (h.astype(x.dtype) @ p[n].astype(x.dtype) for n in ("gate", "up"))
        return x + (jax.nn.silu(gate) * up) @ p["down"].astype(x.dtype)

    params = [{**p, "scale": normal(D, seed=i)} for i, p in enumerate(PARAMS)]
    args = params, X.astype(jnp.bfloat16)
    step = jax.grad(unrolled(layer), argnums=(0, 1))
    counts = rewriter.explain(step)(*args).counts(backward=True)
    assert counts[RMS] == counts[UNIT] == LAYERS
    as_exact_in_half_precision(step, args)


def as_exact_in_half_precision(step: Callable, half) -> None:
    """No gradient is further from the one in float64 than twice the program's."""
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    assert "rsqrt" not in str(fast.jaxpr(*half))
    with jax.enable_x64(True):
        exact = step(*in_float64(half))
        mine, theirs = (jax.tree.leaves(f(*half)) for f in (fast, step))
        for a, b, c in zip(mine, theirs, jax.tree.leaves(exact), strict=True):
            c = np.asarray(c)
            new, old = (np.linalg.norm(np.asarray(v, np.float64) - c) for v in (a, b))
            assert new <= 2 * old + 1e-3 * np.linalg.norm(c)


# ------------------------------------------------------------------ look-alikes
def parts(p, x, ct):
    """The unit's result, and what its two branches give to the input's gradient."""
    gate, up = x @ p["gate"], x @ p["up"]
    y, back = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    d_gate, d_up = back(jnp.sin(ct))
    return y, d_gate @ p["gate"].T, d_up @ p["up"].T


CT = normal(2, T, F, seed=7)
PAST = normal(2, T, D, seed=8)
SUMS = {
    "once": (lambda past, a, b: [(past + a) + b], True),
    "other_order": (lambda past, a, b: [b + (a + past)], True),
    "partial_sum_read": (lambda past, a, b: [(past + a) + b, jnp.cos(past + a)], False),
    "partial_sum_returned": (lambda past, a, b: [past + a, (past + a) + b], False),
    "term_read": (lambda past, a, b: [(past + a) + b, jnp.cos(b)], False),
    "term_twice": (lambda past, a, b: [((past + a) + b) + a], False),
    "doubled": (lambda past, a, b: [(past + a) + (past + a) + b], False),
    "difference": (lambda past, a, b: [(past + a) - b], False),
    "through_a_function": (lambda past, a, b: [jnp.tanh(past + a) + b], False),
}


@pytest.mark.parametrize("name", SUMS)
def test_terms_that_are_read_as_a_sum_only(name: str) -> None:
    join, found = SUMS[name]

    def fn(p, x, ct, past):
        y, a, b = parts(p, x, ct)
        return [y, *join(past, a, b)]

    report = rewriter.explain(fn)(PARAMS[0], X, CT, PAST)
    assert report.counts(backward=True)[UNIT] == found
    fast = rewriter.optimize(fn, implementation=FORCED, strict=True)
    same_in_float64(fast, fn, PARAMS[0], X, CT, PAST)


def test_terms_that_a_loop_stacks() -> None:
    def fn(p, x, ct, past):
        def step(carry, _):
            y, a, b = parts(p, x + carry, ct)
            return (carry + a) + b, (y, b)

        return jax.lax.scan(step, past, None, length=2)

    assert rewriter.explain(fn)(PARAMS[0], X, CT, PAST).counts(backward=True)[UNIT] == 0
    fast = rewriter.optimize(fn, implementation=FORCED, strict=True)
    same_in_float64(fast, fn, PARAMS[0], X, CT, PAST)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda a, b, c: (a + b) + c, True),
        (lambda a, b, c: (a + c) + b, True),
        (lambda a, b, c: (a + c).astype(jnp.bfloat16) + b.astype(jnp.bfloat16), True),
        (lambda a, b, c: (a + c) * 2 + b, False),
        (lambda a, b, c: (a + c, b), False),
    ],
)
def test_read_as_a_sum(fn: Callable, expected: bool) -> None:
    def code(a, b, c):
        return fn(jnp.sin(a), jnp.sin(b), c)

    graph = Graph(jax.make_jaxpr(code)(*jnp.ones((3, 4))))
    sines = [n.outs[0] for n in graph.nodes if n.prim == "sin"]
    assert read_as_a_sum(graph, sines, returned(graph)) == expected


def test_terms() -> None:
    graph = Graph(jax.make_jaxpr(lambda a, b, c: (a + b) + c)(*jnp.ones((3, 4))))
    a, b, c = (graph.top.env[v] for v in graph.top.jaxpr.invars)
    inner, total = (n.outs[0] for n in graph.nodes)
    assert sorted(terms(graph, total, {inner, total})) == [a, b, c]
    assert sorted(terms(graph, total, {total})) == sorted([inner, c])
