"""Traces code of our own, with the types of usual results known at once.

JAX finds the type of each result anew for each shape, with its place on a mesh, which
takes as long as the rest of a small trace. Floats, integers and booleans that are on no
mesh have a shape and a dtype alone. What is not sure here is asked of JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dtypes, source_info_util
from jax._src.interpreters.partial_eval import (
    DynamicJaxprTrace,
    TracebackScope,
    const_fold_rules,
    forwarding_rules,
)

FLOATS = frozenset(map(np.dtype, ("float16", "float32", "float64", jnp.bfloat16)))
KNOWN = FLOATS | frozenset(map(np.dtype, ("int32", "bool")))

Type = tuple[tuple[int, ...], Any] | None
"""A shape and a dtype; None if they are not known here."""


class LeanTrace(DynamicJaxprTrace):
    """A trace that asks JAX only for the types that are not in `RULES`."""

    def default_process_primitive(
        self, primitive: Any, tracers: Any, params: Any, source_info: Any = None
    ) -> Any:
        """Adds an equation, and returns its results."""
        aval = None
        folds = primitive in const_fold_rules and any(
            self.get_const(t) is not None for t in tracers
        )
        if (
            source_info is not None
            and not folds
            and jax.sharding.get_abstract_mesh().empty
        ):
            aval = result_type(primitive.name, [t.aval for t in tracers], params)
        if primitive in forwarding_rules and tracers[:1] and aval == tracers[0].aval:
            aval = None  # perhaps no equation is needed
        if aval is None:
            rule = super().default_process_primitive
            return rule(primitive, tracers, params, source_info)
        effects = core.no_effects
        eqn, outs = self.make_eqn(
            tracers, [aval], primitive, params, effects, source_info
        )
        self.frame.add_eqn(eqn)
        return outs.pop()


def result_type(name: str, avals: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Returns the type of an equation's result; None if JAX is to be asked.

    Args:
        name: The primitive.
        avals: The types of its operands.
        params: Its parameters.
    """
    rule = RULES.get(name)
    if rule is None or not all(map(_is_plain, avals)):
        return None
    if params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None
    found = rule(avals, params)
    if found is None:
        return None
    shape, dtype = found
    first = avals[0] if avals else None
    if first is not None and first.shape == shape and first.dtype == dtype:
        return first
    return core.ShapedArray(shape, dtype)


def _is_plain(aval: Any) -> bool:
    """Whether a type is a shape of numbers and a usual dtype, on no mesh."""
    return (
        aval.__class__ is core.ShapedArray
        and not aval.weak_type
        and aval.dtype in KNOWN
        and aval.sharding.mesh.empty
        and all(n.__class__ is int for n in aval.shape)
    )


def _broadcast_together(avals: Sequence[Any]) -> tuple[int, ...] | None:
    """The shape of one operand into which the others are broadcast."""
    shapes = {a.shape for a in avals} - {()}
    if len(shapes) < 2:
        return next(iter(shapes), ())
    largest = max(shapes, key=math.prod)
    for shape in shapes:
        if len(shape) != len(largest):
            return None
        if any(m not in (1, n) for n, m in zip(largest, shape, strict=True)):
            return None
    return largest


def _elementwise(avals: Sequence[Any], params: Any) -> Type:
    dtype, shape = avals[0].dtype, _broadcast_together(avals)
    alike = all(a.dtype == dtype for a in avals)
    return (shape, dtype) if alike and shape is not None and dtype in FLOATS else None


def _arithmetic(avals: Sequence[Any], params: Any) -> Type:
    if {a.dtype for a in avals} != {np.dtype("int32")}:
        return _elementwise(avals, params)
    shape = _broadcast_together(avals)
    return None if shape is None else (shape, avals[0].dtype)


def _comparison(avals: Sequence[Any], params: Any) -> Type:
    found = _arithmetic(avals, params)
    return found and (found[0], np.dtype("bool"))


def _select(avals: Sequence[Any], params: Any) -> Type:
    which, first, *others = avals
    if which.dtype != bool or which.shape not in ((), first.shape):
        return None
    like = first.shape, first.dtype
    return like if all((a.shape, a.dtype) == like for a in others) else None


def _transposed(avals: Sequence[Any], params: Any) -> Type:
    (x,), order = avals, params["permutation"]
    if sorted(order) != list(range(len(x.shape))):
        return None
    return tuple(x.shape[k] for k in order), x.dtype


def _reduced(avals: Sequence[Any], params: Any) -> Type:
    (x,), axes = avals, params["axes"]
    if x.dtype not in FLOATS or not set(axes) <= set(range(len(x.shape))):
        return None
    return tuple(n for k, n in enumerate(x.shape) if k not in axes), x.dtype


def _broadcast(avals: Sequence[Any], params: Any) -> Type:
    x, shape, dims = avals[0], params["shape"], params["broadcast_dimensions"]
    if len(avals) > 1 or len(dims) != len(x.shape) or list(dims) != sorted({*dims}):
        return None
    if not all(k < len(shape) and n in (1, shape[k]) for k, n in zip(dims, x.shape)):  # noqa: B905
        return None
    return _sized(shape, x.dtype)


def _reshaped(avals: Sequence[Any], params: Any) -> Type:
    x, shape = avals[0], params["new_sizes"]
    if len(avals) > 1 or params["dimensions"] is not None:
        return None
    found = _sized(shape, x.dtype)
    return found if found and math.prod(shape) == math.prod(x.shape) else None


def _cast(avals: Sequence[Any], params: Any) -> Type:
    (x,), dtype = avals, params["new_dtype"]
    if params["weak_type"] or dtype not in KNOWN:
        return None
    return x.shape, np.dtype(dtype)


def _positions(avals: Sequence[Any], params: Any) -> Type:
    if avals or params["dtype"] != np.dtype("int32"):
        return None
    shape, axis = params["shape"], params["dimension"]
    return _sized(shape, np.dtype("int32")) if 0 <= axis < len(shape) else None


def _product(avals: Sequence[Any], params: Any) -> Type:
    (x, y), ((lc, rc), (lb, rb)) = avals, params["dimension_numbers"]
    wanted = params["preferred_element_type"] or x.dtype
    known = x.dtype == y.dtype and x.dtype in FLOATS and wanted in FLOATS
    if not known or params["precision"] is not None:
        return None
    for left, right in ((lc, rc), (lb, rb)):
        if [x.shape[k] for k in left] != [y.shape[k] for k in right]:
            return None
    left, right = {*lc, *lb}, {*rc, *rb}
    if len(left) != len(lc) + len(lb) or len(right) != len(rc) + len(rb):
        return None
    shape = [x.shape[k] for k in lb]
    shape += [n for k, n in enumerate(x.shape) if k not in left]
    shape += [n for k, n in enumerate(y.shape) if k not in right]
    return tuple(shape), np.dtype(wanted)


def _sized(shape: Sequence[Any], dtype: Any) -> Type:
    """A type, if its sizes are numbers."""
    known = all(n.__class__ is int and n >= 0 for n in shape)
    return (tuple(shape), dtype) if known else None


RULES: dict[str, Callable[[Sequence[Any], Any], Type]] = {
    **dict.fromkeys(("add", "sub", "mul", "max", "min", "neg"), _arithmetic),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _comparison),
    **dict.fromkeys(
        (
            "div", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf",
            "sqrt", "rsqrt", "square", "sin", "cos", "integer_pow",
        ),
        _elementwise,
    ),
    **dict.fromkeys(("reduce_sum", "reduce_max"), _reduced),
    "select_n": _select,
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "convert_element_type": _cast,
    "iota": _positions,
    "dot_general": _product,
}  # fmt: skip
"""By primitive, the shape and dtype of its result."""


def traced(
    trace: DynamicJaxprTrace,
    info: Any,
    fn: Callable[..., Sequence[Any]],
    avals: Sequence[Any],
) -> tuple[Any, list[Any]]:
    """The jaxpr of a function of arrays, and its constants.

    Args:
        trace: A new trace.
        info: What the trace is of.
        fn: A function with a sequence of results.
        avals: The types of its arguments.
    """
    with (
        core.ensure_no_leaks(trace),
        source_info_util.reset_name_stack(),
        TracebackScope(),
    ):
        here = source_info_util.current()
        ins = [trace.new_arg(a, source_info=here) for a in avals]
        with core.set_current_trace(trace):
            results = map(dtypes.canonicalize_value, fn(*ins))
        outs = [trace.to_jaxpr_tracer(x, source_info=here) for x in results]
        jaxpr, consts = trace.frame.to_jaxpr(trace, outs, info, here)
        del ins, results, outs
    return jaxpr, consts
