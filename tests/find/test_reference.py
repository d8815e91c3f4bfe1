"""References from their traces: the same results and the same gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.find.reference import referenced
from rewriter.ops.op import Op, Operand
from rewriter.ops.registry import registry

DRAW = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype(np.float32)


def dtype_of(name: str) -> type:
    return np.int32 if name == "labels" else np.float32


def traced(op_name, params, **shapes):
    """The reference of an op as one program, and operands."""
    op = registry().op(op_name)
    operands = {n: drawn(*s).astype(dtype_of(n)) for n, s in shapes.items()}

    def code(*arrays):
        return referenced(op, dict(zip(operands, arrays, strict=True)), params)

    arrays = list(operands.values())
    return _jax.trace_flat(code, arrays), arrays


ATTENTION = {"q": (2, 6, 4, 4), "k": (2, 6, 2, 4), "v": (2, 6, 2, 4)}
PROGRAMS = {
    "causal": ("attention", {"window": (None, 0), "scale": 0.5}, ATTENTION),
    "soft cap": ("attention", {"softcap": 2.0}, ATTENTION),
    "empty": ("attention", {"shift": -3, "window": (None, 0), "empty_rows": "zero"},
              ATTENTION),
    "passing": ("attention", {"shift": -3, "window": (None, 0),
                "empty_rows": "mean_passing"}, ATTENTION),
    "overflow": ("attention", {"unshifted": "float32"}, ATTENTION),
    "layer norm": ("layer_norm", {"eps": 1e-6},
                   {"x": (3, 4, 8), "scale": (8,), "bias": (8,)}),
    "gelu": ("gated_linear_unit", {"activation": "gelu_tanh"},
             {"x": (3, 8), "w_gate": (8, 4), "w_up": (8, 4)}),
    "relu": ("gated_linear_unit", {"activation": "relu", "clip_up": (-1.0, 1.0)},
             {"x": (3, 8), "w_gate": (8, 4), "w_up": (8, 4)}),
    "loss": ("cross_entropy", {"label_smoothing": 0.1, "outside": "zero"},
             {"logits": (5, 8), "labels": (5,)}),
    "product and loss": ("linear_cross_entropy", {"soft_cap": 5.0, "outside": "clip"},
                         {"x": (5, 4), "w": (4, 8), "labels": (5,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_from_a_trace_are_those_of_jax(name: str) -> None:
    op, params, shapes = PROGRAMS[name]
    closed, arrays = traced(op, params, **shapes)
    code = lambda *x: jaxpr_as_fun(closed)(*x)[0]
    moving = [k for k, x in enumerate(arrays) if x.dtype == np.float32]
    made = _jax.gradients_of(code, arrays, moving)
    (result,) = closed.out_avals
    cotangent = drawn(*result.shape)

    @jax.jit
    def both(*arrays):
        _, back = jax.vjp(code, *arrays)
        return jaxpr_as_fun(made)(*arrays, cotangent), back(cotangent)

    found, wanted = both(*arrays)
    for got, want in zip(found, [wanted[k] for k in moving], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_of_some_inputs() -> None:
    code = lambda x, n, y: jax.lax.stop_gradient(x) * n + y
    structs = [np.ones(3, np.float32), np.ones(3, np.int32), np.ones(3, np.float32)]
    for moving, want in (((0,), [0]), ((2,), [5]), ((0, 2), [0, 5]), ((2, 0), [5, 0])):
        found = _jax.gradients_of(code, structs, moving)
        got = jaxpr_as_fun(found)(*structs, np.full(3, 5, np.float32))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, np.full(3, b))


def test_gradients_of_loops_are_left_to_jax() -> None:
    code = lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0]
    assert _jax.gradients_of(code, [np.ones(3, np.float32)], (0,)) is None


def test_a_reference_that_holds_an_array_is_not_kept() -> None:
    def scaled_by(factor):
        return Op("scaled", (Operand("x", "d", True),), "d", lambda x: x * factor)

    def result(factor):
        return referenced(scaled_by(factor), {"x": jnp.ones(3)}, {})

    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(result)(jnp.arange(3.0)), [0, 1, 2])
        np.testing.assert_array_equal(jax.jit(result)(jnp.full(3, 5.0)), [5, 5, 5])


@pytest.mark.parametrize("name", PROGRAMS)
def test_flat_traces_are_those_of_the_reference(name: str) -> None:
    op, params, shapes = PROGRAMS[name]
    op = registry().op(op)
    nested = dataclasses.replace(op, flat=False)
    given = {k: jax.ShapeDtypeStruct(s, dtype_of(k)) for k, s in shapes.items()}

    def text(op):
        code = lambda *x: referenced(op, dict(zip(given, x, strict=True)), params)
        return _jax.trace_flat(code, given.values())

    flat, called = text(op), text(nested)
    assert [e.primitive.name for e in called.eqns] == ["jit"]
    assert str(flat) == str(_jax.without_calls(called))


def test_a_reference_with_a_loop_keeps_it() -> None:
    def reference(*, x):
        return jax.lax.fori_loop(0, 5, lambda i, c: c * x, x)

    op = Op("power", (Operand("x", "d", True),), "d", reference)
    code = lambda x: referenced(op, {"x": x}, {})
    traced = _jax.trace_flat(code, [np.ones(3, np.float32)])
    assert "scan" in str(traced)
    assert str(traced).count("mul") == 1


def test_traces_of_our_own_are_those_of_jax() -> None:
    table = np.arange(6.0, dtype=np.float32)

    def code(x, y):
        return [jnp.where(x > 0, y, 1), (x @ y.T) * table[0], jnp.sin(table), 2.0]

    structs = [jax.ShapeDtypeStruct((4, 8), jnp.float32)] * 2
    got, want = _jax.trace_flat(code, structs), jax.make_jaxpr(code)(*structs)
    assert str(got) == str(want)
    x = jnp.ones((4, 8))
    for a, b in zip(jaxpr_as_fun(got)(x, x), code(x, x), strict=True):
        np.testing.assert_array_equal(a, b)
