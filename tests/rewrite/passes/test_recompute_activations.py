"""Activations that the backward pass computes again: fewer are saved, same results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import rewriter
from rewriter import _jax
from rewriter.ops import device
from rewriter.rewrite.passes import recompute_activations
from rewriter.rewrite.passes.recompute_activations import PASS

pytestmark = pytest.mark.once

H100 = device.named("h100")
LAYERS, ROWS, WIDTH, HIDDEN = 3, 1024, 16, 2048  # hidden arrays of 8 MiB


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng(seed).normal(0, shape[-2] ** -0.5, shape)
    return jnp.asarray(numbers, jnp.float32)


WEIGHTS = [
    (drawn(WIDTH, HIDDEN, seed=i), drawn(1, HIDDEN, seed=10 + i)[0],
     drawn(HIDDEN, WIDTH, seed=20 + i))
    for i in range(LAYERS)
]  # fmt: skip
X = drawn(ROWS, WIDTH, seed=30)


def model(activation: Any) -> Any:
    def loss(weights, x):
        for up, bias, down in weights:
            x = x + activation(x @ up + bias) @ down
        return jnp.mean(x**2)

    return loss


def changed(fn: Any, *args: Any, on: Any = H100) -> tuple[Any, Any, tuple[Any, ...]]:
    """The program of a function, that with activations computed again, and which."""
    before = jax.make_jaxpr(fn)(*args)
    after, found = PASS(before, on)
    return before, after, found


def close(before: Any, after: Any, *args: Any) -> None:
    flat = jax.tree.leaves(args)
    one, other = (jax.jit(jaxpr_as_fun(p))(*flat) for p in (before, after))
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


def erf_gelu(x):
    return x * 0.5 * (1 + jax.lax.erf(x / np.sqrt(2).astype("float32")))


def clipped(x):
    return jnp.where(x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20))))


def gated(x):
    return x * jnp.exp(-jax.nn.relu(x))


ACTIVATIONS = {
    "gelu": (jax.nn.gelu, {"tanh"}),
    "exact gelu": (lambda x: jax.nn.gelu(x, approximate=False), {"erfc"}),
    "gelu of erf": (erf_gelu, {"erf"}),
    "silu": (jax.nn.silu, {"logistic"}),
    "quick gelu": (lambda x: x * jax.nn.sigmoid(1.702 * x), {"logistic"}),
    "sigmoid": (lambda x: x * (1 / (1 + jnp.exp(-x))), {"exp"}),
    "mish": (lambda x: x * jnp.tanh(jax.nn.softplus(x)), {"tanh", "exp", "log1p"}),
    "written out": (clipped, {"exp"}),
    "in a jit": (jax.jit(lambda x: x * jnp.tanh(x)), {"tanh"}),
    "cast": (lambda x: jax.nn.gelu(x.astype("float16")).astype("float32"), {"tanh"}),
    "reshaped": (
        lambda x: jax.nn.silu(x.reshape(-1, 8, HIDDEN)).reshape(x.shape),
        {"logistic"},
    ),
    "of a maximum": (gated, {"exp"}),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_computed_again(name):
    activation, functions = ACTIVATIONS[name]
    before, after, found = changed(jax.value_and_grad(model(activation)), WEIGHTS, X)
    assert {f.what for f in found} & functions
    per_layer = {f.what: sum(g.what == f.what for g in found) for f in found}
    assert set(per_layer.values()) <= {LAYERS, 2 * LAYERS}
    assert all("test_recompute_activations.py" in f.where for f in found)
    close(before, after, WEIGHTS, X)


def test_equal_layers_are_cut_once(monkeypatch):
    cuts = []
    real = recompute_activations._minimum_cut
    monkeypatch.setattr(
        recompute_activations, "_minimum_cut", lambda *a: cuts.append(a) or real(*a)
    )
    _, _, found = changed(jax.value_and_grad(model(jax.nn.gelu)), WEIGHTS, X)
    assert len(found) == LAYERS
    assert 1 <= len(cuts) < LAYERS


LEFT = {
    "forward": lambda weights, x: model(jax.nn.gelu)(weights, x),
    "relu": jax.grad(model(jax.nn.relu)),
    "squared relu": jax.grad(model(lambda x: jax.nn.relu(x) ** 2)),
    "small": lambda weights, x: jax.grad(model(jax.nn.gelu))(weights, x[:256]),
    # Its gradient reads what the forward pass returns anyway.
    "tanh": jax.grad(model(jnp.tanh)),
    "exp": jax.grad(model(lambda x: jnp.exp(-x))),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name):
    before, after, found = changed(LEFT[name], WEIGHTS, X)
    assert (found, after is before) == ((), True)


def test_other_platforms_stay():
    fn = jax.grad(model(jax.nn.gelu))
    for kind in ("cpu", "tpu_v5e"):
        before, after, found = changed(fn, WEIGHTS, X, on=device.named(kind))
        assert (found, after is before) == ((), True)


def test_tables_of_positions_stay():
    """Sines that all layers read are no activation: nothing is saved between them."""

    def loss(weights, x):
        angles = jnp.arange(ROWS)[:, None] * jnp.arange(1.0, HIDDEN + 1)
        for up, _, down in weights:
            x = x + ((x @ up) * jnp.sin(angles)) @ down
        return jnp.mean(x**2)

    before, after, found = changed(jax.grad(loss), WEIGHTS, X)
    assert (found, after is before) == ((), True)


def read_late(program: Any) -> int:
    """Bytes of hidden arrays before the loss that are read after it.

    Those of cheap functions count as what they are computed from.
    """
    eqns = program.jaxpr.eqns
    makers = {v: (k, e) for k, e in enumerate(eqns) for v in e.outvars}
    scalars = [k for k, e in enumerate(eqns) if e.primitive.name == "reduce_sum"
               and not e.outvars[0].aval.shape]  # fmt: skip
    todo = [a for e in eqns[scalars[0] :] for a in e.invars]
    of_products = {a for e in eqns if e.primitive.name == "dot_general"
                   for a in e.invars}  # fmt: skip
    seen, large = set(), 0
    while todo:
        atom = todo.pop()
        if _jax.is_literal(atom) or atom in seen or atom not in makers:
            continue
        seen.add(atom)
        k, eqn = makers[atom]
        if k > scalars[0] or atom.aval.shape[-1:] != (HIDDEN,):
            continue
        if atom in of_products or eqn.primitive.name in ("dot_general", "tanh"):
            large += atom.aval.size * atom.aval.dtype.itemsize
        elif eqn.primitive.name != "optimization_barrier":
            todo += eqn.invars
    return large


def test_fewer_bytes_are_read_late():
    before, after, found = changed(jax.grad(model(jax.nn.gelu)), WEIGHTS, X)
    each = 4 * ROWS * HIDDEN
    assert sum(f.bytes for f in found) == LAYERS * each
    assert read_late(before) == 3 * LAYERS * each
    assert read_late(after) == 2 * LAYERS * each


def kinds(program: Any) -> list[str]:
    found = []
    for eqn in getattr(program, "jaxpr", program).eqns:
        found.append(eqn.primitive.name)
        if _jax.call_kind(eqn):
            for body in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                found += kinds(body) if hasattr(body, "eqns") else []
    return found


WITHIN = {
    "loop of batches": lambda w, x: jax.lax.map(
        lambda x: jax.grad(model(jax.nn.gelu))(w, x), jnp.stack([x, 2 * x])
    ),
    "vmap": jax.vmap(jax.grad(model(jax.nn.gelu)), (None, 0)),
    "jit": jax.jit(jax.grad(model(jax.nn.gelu))),
}


@pytest.mark.parametrize("name", WITHIN)
def test_within(name):
    x = jnp.stack([X, 2 * X]) if name == "vmap" else X
    before, after, found = changed(WITHIN[name], WEIGHTS, x)
    assert found
    assert "optimization_barrier" in kinds(after)
    close(before, after, WEIGHTS, x)


def test_checkpointed_layers_stay():
    """Each is computed again as a whole, right before its gradients."""

    def loss(weights, x):
        for up, bias, down in weights:
            layer = lambda x, u, b, d: x + jax.nn.gelu(x @ u + b) @ d
            x = jax.checkpoint(layer)(x, up, bias, down)
        return jnp.sum(x**2)

    before, after, found = changed(jax.grad(loss), WEIGHTS, X)
    assert (found, after is before) == ((), True)


def test_further_derivatives():
    fn = jax.grad(model(jax.nn.silu))
    before, after, found = changed(fn, WEIGHTS, X)
    assert found
    flat = jax.tree.leaves((WEIGHTS, X))
    tangents = [0.1 * x for x in flat]
    one, other = (
        jax.jvp(lambda *a, p=p: jaxpr_as_fun(p)(*a), flat, tangents)[1]
        for p in (before, after)
    )
    for x, y in zip(one, other, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)


def test_in_a_training_step():
    """Where a site is replaced, the pass runs, is reported, and can be switched off."""

    def loss(weights, x):
        for up, bias, down in weights:
            root = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            x = x + jax.nn.gelu((x * root) @ up + bias) @ down
        return jnp.mean(x**2)

    wide = [
        (jnp.zeros((512, HIDDEN)), b, jnp.zeros((HIDDEN, 512))) for _, b, _ in WEIGHTS
    ]
    given = jax.tree.map(lambda x: x.astype("bfloat16"), (wide, jnp.zeros((8192, 512))))
    alone = ("activations",)
    with rewriter.config(target="h100", disable=alone):
        report = rewriter.explain(jax.grad(loss))(*given)
    assert [c.what for c in report.changes] == ["tanh"] * LAYERS
    assert "not saved for gradients, but computed again" in str(report)
    off = ("recompute_activations", *alone)
    with rewriter.config(target="h100", disable=off):
        assert rewriter.explain(jax.grad(loss))(*given).changes == ()
