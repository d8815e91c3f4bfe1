"""Traces an op's reference once for given operand shapes.

Sites of one program often have equal operand shapes, and so do sites of the next
program. The equations of a cached trace are handed on as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax, errors
from rewriter.ops.op import Op

Operands = Mapping[str, jax.Array]


def referenced(op: Op, operands: Operands, params: Mapping[str, Any]) -> jax.Array:
    """Calls an op's reference, by a cached trace for operands of these shapes."""
    program = reference_program(op, operands, params)
    if program is None:
        return op.reference(**operands, **params)
    return _jax.inlined(program, list(operands.values()))[0]


def reference_program(
    op: Op, operands: Operands, params: Mapping[str, Any]
) -> ClosedJaxpr | None:
    """The cached trace of an op's reference; None if it cannot be kept.

    Args:
        op: The op.
        operands: Arrays, or what they are like. Inputs are in their order.
        params: The op's parameters.
    """
    try:
        return _reference_of(*_key(op, operands, params))
    except (TypeError, _HoldsArrays):
        return None


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
    """The cache key of a trace; the last part is what JAX has set around it."""
    shapes = tuple((k, v.shape, v.dtype) for k, v in operands.items())
    every = tuple(sorted({**op.defaults, **params}.items()))
    return op, shapes, every, settings()


def settings() -> tuple[bool, Hashable]:
    """What decides the types in a trace: the default number types, and the mesh.

    Inside of `jax.shard_map` every type has the mesh around, with its kinds of axes.
    """
    return jax.config.jax_enable_x64, jax.sharding.get_abstract_mesh()


@functools.lru_cache(maxsize=256)
def _reference_of(op: Op, shapes: Any, params: Any, around: Any) -> ClosedJaxpr:
    del around  # as of `settings`
    code, structs = _code(op, shapes, params), _structs(shapes)
    if op.flat:
        traced = _jax.trace_without_calls(code, structs)
    else:  # one call
        traced = _jax.trace_flat(jax.jit(code), structs)
    bodies = map(_jax.call_body, traced.eqns)
    if traced.consts or any(map(_jax.consts_of, filter(None, bodies))):
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
