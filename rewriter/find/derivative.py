"""The derivative of a value by another one of the program, at some numbers.

JAX differentiates the equations between both, once and twice. So the derivative is the
program's own, also where a function has none: at the kink of a ``max``, and at NaN. The
equations of the derivative are then run on the numbers. Layout passes them on. Other
operands are arrays that are not known: each counts as what changes nothing, 0 in a sum
and 1 in a product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter import _jax
from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.program.numeric import NUMERIC
from rewriter.program.subprogram import NotTaken, Region


class NotKnown(Exception):
    """Says why a derivative cannot be computed."""


class _Unknown:
    """An array of unknown numbers, which changes nothing."""


UNKNOWN = _Unknown()
Number = np.ndarray | _Unknown
"""Numbers of a value, one for each point; one for all; or unknown."""

SAME = LAYOUT_PRIMITIVES | {"stop_gradient"}
"""Primitives that rearrange their first operand."""

WITHOUT_CHANGE = frozenset({"add", "add_any", "sub", "mul", "div", "and", "or"})
"""Primitives in which an unknown operand changes nothing."""


@dataclass(frozen=True)
class Derivatives:
    """Derivatives of a function of one number, for each point.

    Attributes:
        slope: The derivative, [p].
        again: The derivative of the value that is computed beside `slope`, [p]. A
            derivative rule of the program's own may compute it in another way.
        bend: The derivative of `slope`, [p].
    """

    slope: np.ndarray
    again: np.ndarray
    bend: np.ndarray


def derivatives_at(
    region: Region, points: np.ndarray, number: Callable[[int], float | None]
) -> Derivatives:
    """Returns derivatives of a region's result by its first input, for each point.

    Args:
        region: The equations; its first input is the value to differentiate by.
        points: Numbers of that value, in its dtype, [p].
        number: Returns the number that an input holds at every position, or None.

    Raises:
        NotKnown: If a derivative depends on other operands, or an equation cannot be
            run on numbers.
    """
    (value,) = region.outputs
    given = _inputs(region, points, number)
    ones = np.ones_like(points, region.graph.dtype(value))
    return Derivatives(*_found(_traced(region, _twice), [*given, ones], points))


def values_at(
    region: Region, points: np.ndarray, number: Callable[[int], float | None]
) -> np.ndarray:
    """Returns a region's result for numbers of its first input, [p].

    Arguments and errors are those of `derivatives_at`.
    """
    closed = _traced(region, lambda run: lambda *given: [run(*given[:-1])[0]])
    given = _inputs(region, points, number)
    (values,) = _found(closed, [*given, np.zeros_like(points)], points)
    return values


def _traced(region: Region, change: Callable[..., Callable[..., Any]]) -> Any:
    """A function of the region's inputs, and of an array like its result."""
    graph, (value,) = region.graph, region.outputs
    try:
        run = region.function()
        avals = [graph.avals[v] for v in (*region.inputs, value)]
        return _jax.trace_flat(change(run), avals)
    except NotTaken as why:
        raise NotKnown(f"its equations {why}") from why
    except Exception as problem:  # equations that depend on the bodies around them
        text = str(problem).splitlines()
        raise NotKnown(f"it has no derivative on its own: {text[:1]}") from problem


def _inputs(
    region: Region, points: np.ndarray, number: Callable[[int], float | None]
) -> list[Number]:
    given: list[Number] = [points]
    for other in region.inputs[1:]:
        known = number(other)
        dtype = region.graph.dtype(other)
        given.append(UNKNOWN if known is None else np.asarray(known, dtype))
    return given


def derivatives_of(function: Callable[[Any], Any], points: np.ndarray) -> Derivatives:
    """Returns derivatives of a function of numbers, for each point.

    Args:
        function: A function of one array.
        points: Numbers, [p].
    """
    like = jax.ShapeDtypeStruct((), points.dtype)
    closed = _jax.trace_flat(_twice(lambda x: [function(x)]), [like, like])
    return Derivatives(*_found(closed, [points, np.ones_like(points)], points))


def _twice(function: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    """Operands and a cotangent to the derivatives by the first operand."""

    def code(first: Any, *given: Any) -> list[Any]:
        *others, cotangent = given

        def once(x: Any) -> tuple[Any, Any]:
            value, back = jax.vjp(lambda x: function(x, *others)[0], x)
            return value, back(cotangent)[0]

        moved = jnp.ones_like(first)
        (_, slope), (again, bend) = jax.jvp(once, (first,), (moved,))
        return [slope, again, bend]

    return code


def _found(
    closed: Any, given: Sequence[Number], points: np.ndarray
) -> list[np.ndarray]:
    with np.errstate(all="ignore"):
        outs = _run(closed, given)
    if any(isinstance(out, _Unknown) for out in outs):
        raise NotKnown("its derivative depends on other operands")
    return [np.broadcast_to(out, points.shape) for out in outs]


# ----------------------------------------------------------------------- equations
def _run(jaxpr: Any, given: Sequence[Number]) -> list[Number]:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Number] = {
        v: _constant(c)
        for v, c in zip(inner.constvars, _jax.consts_of(jaxpr), strict=True)
    }
    env.update(zip(inner.invars, given, strict=True))

    def read(atom: Any) -> Number:
        return _constant(atom.val) if _jax.is_literal(atom) else env[atom]

    for eqn in inner.eqns:
        outs = _step(eqn, [read(a) for a in eqn.invars])
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = _typed(out, var.aval.dtype)
    return [_typed(read(a), a.aval.dtype) for a in inner.outvars]


def _constant(value: Any) -> Number:
    if _jax.is_opaque(value) or np.size(value) != 1:
        return UNKNOWN
    return np.asarray(value).reshape(())


def _typed(x: Number, dtype: Any) -> Number:
    return x if isinstance(x, _Unknown) else np.asarray(x).astype(dtype)


def _step(eqn: Any, ins: list[Number]) -> list[Number]:
    name = eqn.primitive.name
    kind = _jax.call_kind(eqn)
    if kind in ("call", "remat", "custom"):
        whole = _jax.named_rule(eqn)
        return [_applied(whole, {}, ins)] if whole else _run(_jax.call_body(eqn), ins)
    if name in TRANSPARENT:
        return ins
    if name in SAME:
        return [ins[0]] * len(eqn.outvars)
    if name == "convert_element_type":
        return [ins[0]]
    if all(isinstance(x, _Unknown) or not x.ndim for x in ins) and (
        name not in NUMERIC and name != "select_n"
    ):
        return [UNKNOWN] * len(eqn.outvars)
    if name == "select_n":
        return [_chosen(*ins)]
    if name not in NUMERIC and _is_elementwise(eqn):
        return [_bound(eqn, ins)]
    return [_applied(name, eqn.params, ins)]


def _is_elementwise(eqn: Any) -> bool:
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)}
    return len(shapes) == len(eqn.outvars) == 1 and not _jax.call_kind(eqn)


def _bound(eqn: Any, ins: Sequence[Number]) -> Number:
    """One equation without a rule here, which JAX runs on the numbers."""
    if any(isinstance(x, _Unknown) for x in ins):
        raise NotKnown(f"{eqn.primitive.name} of arrays that are not known")
    types = [v.aval.dtype for v in eqn.invars]
    arrays = [
        jnp.asarray(x, dtype)
        for x, dtype in zip(np.broadcast_arrays(*ins), types, strict=True)
    ]
    try:
        with jax.ensure_compile_time_eval():
            return np.asarray(eqn.primitive.bind(*arrays, **eqn.params))
    except Exception as problem:  # one whose parameters hold shapes
        raise NotKnown(f"{eqn.primitive.name} of numbers: {problem}") from problem


def _applied(name: str, params: Any, ins: Sequence[Number]) -> Number:
    """One equation on numbers; those of 16 bits are computed in 32."""
    known = [x for x in ins if not isinstance(x, _Unknown)]
    moving = [x for x in known if x.ndim]
    if len(known) < len(ins):
        if not moving:
            return UNKNOWN
        if name not in WITHOUT_CHANGE or (name == "div" and ins[0] is UNKNOWN):
            raise NotKnown(f"{name} of it and an array that is not known")
        (x,) = moving
        return -x if name == "sub" and ins[0] is UNKNOWN else x
    function = NUMERIC.get(name)
    if function is None:
        raise NotKnown(f"{name} of numbers has no rule")
    return np.asarray(function(*map(_wide, known), params))


def _chosen(which: Number, *cases: Number) -> Number:
    """A choice; if the condition is not known, the case that is not a constant."""
    if not isinstance(which, _Unknown):
        taken = {int(k) for k in np.ravel(which)}
        if len(taken) == 1:
            return cases[taken.pop()]
        if any(isinstance(x, _Unknown) for x in cases):
            raise NotKnown("a choice between it and an array that is not known")
        return functools.reduce(
            lambda x, k: np.where(which == k, cases[k], x), sorted(taken), cases[0]
        )
    moving = [x for x in cases if not isinstance(x, _Unknown) and x.ndim]
    if not moving:
        return UNKNOWN
    first, *rest = moving
    if any(not np.array_equal(first, x, equal_nan=True) for x in rest):
        raise NotKnown("a choice that is not known")
    return first


def _wide(x: np.ndarray) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4:
        return x.astype(np.float32)
    return x
