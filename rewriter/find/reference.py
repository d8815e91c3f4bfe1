"""Traces an op's reference and its gradients once for given operand shapes.

Sites of one program often have equal operand shapes, and so do sites of the next
program. A cached trace is embedded as one call, so that tracing around it stays cheap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rewriter import _jax, errors
from rewriter.ops.op import Op

Operands = Mapping[str, jax.Array]


def referenced(op: Op, operands: Operands, params: Mapping[str, Any]) -> jax.Array:
    """Calls an op's reference, by a cached trace for operands of these shapes."""
    try:
        program = _reference_of(*_key(op, operands, params))
    except (TypeError, _HoldsArrays):
        return op.reference(**operands, **params)
    return jaxpr_as_fun(program)(*operands.values())[0]


def result_of(
    op: Op, operands: Mapping[str, jax.ShapeDtypeStruct], params: Mapping[str, Any]
) -> Any:
    """The shape and dtype of a reference's result."""
    try:
        (result,) = _reference_of(*_key(op, operands, params)).out_avals
    except (TypeError, _HoldsArrays):
        code = lambda **given: _array(op, op.reference(**given, **params))
        return jax.eval_shape(code, **operands)
    return result


def differentiable(op: Op, operands: Operands, params: Mapping[str, Any]) -> jax.Array:
    """The same, differentiable: gradients use a cached trace of the reference's own."""
    try:
        found = _gradients_of(*_key(op, operands, params))
    except (TypeError, _HoldsArrays):
        return op.reference(**operands, **params)
    gradients = jaxpr_as_fun(found)
    names = tuple(operands)  # of a trace: not for a cache to hold

    def reference(*arrays: jax.Array) -> jax.Array:
        return referenced(op, dict(zip(names, arrays, strict=True)), params)

    def forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return reference(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], cotangent: jax.Array) -> Any:
        of_floats = iter(gradients(*arrays, cotangent))
        return tuple(next(of_floats) if _is_float(x) else None for x in arrays)

    result = jax.custom_vjp(reference)
    result.defvjp(forward, backward)
    return result(*operands.values())


def gradient_function(
    code: Callable[..., jax.Array], arrays: list[jax.Array], moving: list[int]
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """`jax.vjp` of a function by some of its arguments."""

    def of(*chosen: jax.Array) -> jax.Array:
        full = list(arrays)
        for k, x in zip(moving, chosen, strict=True):
            full[k] = x
        return code(*full)

    return jax.vjp(of, *(arrays[k] for k in moving))


class _HoldsArrays(Exception):
    """A reference closes over arrays, perhaps tracers of an outer trace."""


def _key(op: Op, operands: Operands, params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The cache key of a trace; the last part selects the default number types."""
    shapes = tuple((k, v.shape, v.dtype) for k, v in operands.items())
    every = tuple(sorted({**op.defaults, **params}.items()))
    return op, shapes, every, jax.config.jax_enable_x64


@functools.lru_cache(maxsize=256)
def _reference_of(op: Op, shapes: Any, params: Any, wide: bool) -> ClosedJaxpr:
    del wide
    return _closed(_code(op, shapes, params), _structs(shapes))


@functools.lru_cache(maxsize=256)
def _gradients_of(op: Op, shapes: Any, params: Any, wide: bool) -> ClosedJaxpr:
    """A function of operands and a cotangent: the gradients of float operands."""
    (result,) = _reference_of(op, shapes, params, wide).out_avals
    code, structs = _code(op, shapes, params), _structs(shapes)
    moving = [k for k, x in enumerate(structs) if _is_float(x)]

    def gradients(*given: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, cotangent = given
        return gradient_function(code, arrays, moving)[1](cotangent)

    return _closed(gradients, [*structs, result])


def _closed(code: Callable[..., Any], structs: list[Any]) -> ClosedJaxpr:
    traced = _jax.trace_flat(jax.jit(code), structs)
    bodies = map(_jax.call_body, traced.eqns)
    if traced.consts or any(map(_jax.consts_of, bodies)):
        raise _HoldsArrays
    return traced


def _code(op: Op, shapes: Any, params: Any) -> Callable[..., jax.Array]:
    def code(*arrays: jax.Array) -> jax.Array:
        names = (name for name, _, _ in shapes)
        given = dict(zip(names, arrays, strict=True))
        return _array(op, op.reference(**given, **dict(params)))

    return code


def _array(op: Op, out: Any) -> jax.Array:
    if hasattr(out, "shape"):
        return out
    raise errors.PatternError(
        f"the reference of {op.name} returned {type(out).__name__}", wanted="one array"
    )


def _structs(shapes: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(s, d) for _, s, d in shapes]


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
