"""Matrices that are stored in few bits: numbers, and scales that widen them.

An op that multiplies matrices may have a stored form, which is derived here. It is a
special form of the op: matrices are numbers of few bits, and scales another operand::

    numbers  [g, k, n]         scales [g, n]        one for each column
                                      [g, k/z, n]   one for z numbers that are summed

    matrix[g, k, n] = numbers[g, k, n] · scales[g, n]

A form by steps also has zero points, and its matrices are rounded as the program rounds
them; see `rewriter.ops.widening`::

    numbers  [k, n]            scales, zero points  [z, n], [1, n], [z, 1] or [1, 1]

An op declares what it takes by `Operand.stored`. Everything else of the form follows
from the op: its reference, its work, how it is split over devices, its samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.ops.cost import FOUR_BITS, Dtypes, Shapes
from rewriter.ops.form import Form, special_form
from rewriter.ops.kernel import Spec
from rewriter.ops.op import Op, Operand, Sharding, Stored
from rewriter.ops.widening import by_steps

EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of 8 bits whose numbers floats of 16 bits hold exactly."""

FEW_BITS = (*EIGHT_BITS, "uint8", *FOUR_BITS)
"""Dtypes of at most 8 bits whose numbers bfloat16 and float16 hold exactly."""

GROUPS = "z"
"""The letter of groups along the summed axis, in forms by steps."""

LEVELS = 40
"""A deviation of sampled numbers, in integers: a third of the range of int8."""


def scale_of(name: str) -> str:
    """Returns the name of the scales of an operand."""
    return f"{name}_scale"


def zero_of(name: str) -> str:
    """Returns the name of the zero points of an operand."""
    return f"{name}_zero"


def stored_in(op: Op) -> dict[str, Stored]:
    """Returns how each operand of an op may be stored, by name."""
    return {o.name: o.stored for o in op.operands if o.stored is not None}


def stored_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of an op whose matrices are stored.

    Args:
        op: The op. Matrices are widened to the dtype of its first operand.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    drawn = functools.partial(_drawn, op)
    form = Form(
        operands=(*map(_of_numbers, op.operands), *_scales(op)),
        compute=functools.partial(_computed, op),
        sizes=functools.partial(_sizes, added_by(op)),
        sharding=functools.partial(_sharding, op),
        sample=drawn,
        distributions=op.distributions
        and functools.partial(_distributions, drawn, op.distributions),
    )
    return special_form(op, name, about, form)


# ---------------------------------------------------------------------- widening
def widened(numbers: jax.Array, scales: Any, axis: int, dtype: Any) -> jax.Array:
    """Returns matrices: numbers times scales, in float32, rounded once.

    Args:
        numbers: The stored array.
        scales: Without the axis, or with one for each group of numbers along it; None
            for ones.
        axis: The axis of the numbers that the op sums over.
        dtype: The dtype of the matrices.

    Example:
        >>> numbers = jnp.array([[1, 2], [3, 4]], "int8")
        >>> widened(numbers, jnp.array([1.0, 0.5]), 0, "float32").tolist()
        [[1.0, 1.0], [3.0, 2.0]]
        >>> widened(numbers, jnp.array([[1.0, 0.5]]), 0, "float32").tolist()
        [[1.0, 1.0], [3.0, 2.0]]
    """
    if scales is None:
        return numbers.astype(dtype)
    wide = jnp.promote_types(scales.dtype, jnp.float32)
    scales = scales.astype(wide)
    if scales.ndim < numbers.ndim:
        scales = jnp.expand_dims(scales, axis)
    elif scales.shape[axis] not in (1, numbers.shape[axis]):
        times = numbers.shape[axis] // scales.shape[axis]
        scales = jnp.repeat(scales, times, axis)
    return (numbers.astype(wide) * scales).astype(dtype)


def widened_operands(op: Op, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns operands and parameters of an op, from those of its stored form."""
    stored, made = stored_in(op), dict(given)
    for name in stored:
        scales = made.pop(scale_of(name), None)
        zeros = made.pop(zero_of(name), None)
        if made.get(name) is not None:
            axis = _axes(op, name, given).index(stored[name].summed)
            numbers, dtype = made[name], given[op.names[0]].dtype
            if stored[name].by_steps:
                steps = given.get(WIDEN)
                steps = usual_steps(scales, zeros, dtype) if steps is None else steps
                made[name] = by_steps(numbers, steps, scales, zeros, axis)
            else:
                made[name] = widened(numbers, scales, axis, dtype)
    made.pop(WIDEN, None)
    return made


WIDEN = "widen"
"""The parameter of forms by steps: the steps, or None for the usual ones."""


def usual_steps(scales: Any, zeros: Any, dtype: Any) -> str:
    """Returns the steps that round once: in float32, then to a dtype.

    Args:
        scales: The scales, or whether there are some; None for none.
        zeros: The same for zero points.
        dtype: The dtype of the matrix.
    """
    zero = "" if zeros is None or zeros is False else "-zero "
    scale = "" if scales is None or scales is False else "*scale "
    return f"float32 {zero}{scale}{jnp.dtype(dtype).name}"


def _computed(op: Op, function: Callable[..., Any], **given: Any) -> jax.Array:
    """A form's result, by a function of the op's own operands and parameters."""
    return function(**widened_operands(op, given))


def widened_spec(op: Op, spec: Spec) -> Spec:
    """Returns a use of an op, from one of its stored form."""
    stored = stored_in(op)
    scales = added_by(op)
    dtype = spec.dtype(op.names[0])
    return dataclasses.replace(
        spec,
        op=op.name,
        params=tuple((n, x) for n, x in spec.params if n != WIDEN),
        shapes=tuple((n, s) for n, s in spec.shapes if n not in scales),
        dtypes=tuple(
            (n, dtype if n in stored else d) for n, d in spec.dtypes if n not in scales
        ),
    )


def added_by(op: Op) -> set[str]:
    """Returns the operands that the stored form of an op has beside the op's."""
    stored = stored_in(op)
    return {*map(scale_of, stored), *map(zero_of, stored)}


def _axes(op: Op, name: str, params: Mapping[str, Any]) -> list[str]:
    """The letters of an operand's axes in a use with these parameters."""
    rule = op.spread({**op.defaults, **params})
    return ((rule and rule.dims) or op.dims)[name].split()


# ------------------------------------------------------------ what a form declares
def _of_numbers(operand: Operand) -> Operand:
    if operand.stored is None:
        return operand
    *some, last = operand.stored.dtypes
    doc = f"{operand.doc} Stored as {', '.join(some)} or {last}."
    return dataclasses.replace(operand, doc=doc)


def _scales(op: Op) -> tuple[Operand, ...]:
    """The operands of scales, one for each column; by steps also of zero points."""
    found: list[Operand] = []
    for name, stored in stored_in(op).items():
        axes = _axes_of_scales(op.operand(name).axes.split(), stored)
        if stored.by_steps:
            where = f"of {name}, of each group of rows and each column"
            found += [
                Operand(scale_of(name), axes, doc=f"A factor {where}; 1 if absent."),
                Operand(zero_of(name), axes, doc=f"An addend {where}; 0 if absent."),
            ]
        else:
            text = f"A factor for each column of {name}; 1 if absent."
            found.append(Operand(scale_of(name), axes, doc=text))
    return tuple(found)


def _axes_of_scales(axes: list[str], stored: Stored) -> str:
    """The axes of scales of an array with some axes."""
    rest = [x for x in axes if x != stored.summed]
    if stored.by_steps:
        rest = [f"{x}|1" for x in (GROUPS, *rest)]
    return " ".join(rest)


def _sharding(op: Op, params: Mapping[str, Any]) -> Sharding | None:
    """How a use is split: scales like their columns, the same for parts of a sum."""
    rule = op.spread(params)
    if rule is None:
        return None
    dims = dict(rule.dims or op.dims)
    follows = dict(rule.follows)
    for name, stored in stored_in(op).items():
        axes = _axes_of_scales(_axes(op, name, params), stored)
        dims[scale_of(name)] = axes
        if stored.by_steps:
            dims[zero_of(name)] = axes
            follows[GROUPS] = stored.summed
    return dataclasses.replace(rule, dims=dims, follows=follows)


def _sizes(
    scales: set[str], shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any]
) -> tuple[Shapes, Dtypes]:
    """Those of the stored numbers, whose bytes are read; scales do not count."""
    del params
    return {n: s for n, s in shapes.items() if n not in scales}, dtypes


# ---------------------------------------------------------------------- samples
def levels_of(dtype: Any) -> float:
    """Returns a deviation of sampled numbers of a dtype: a third of its range."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return 1.0
    bits = int(jnp.iinfo(dtype).bits)
    return float(LEVELS) * 2.0 ** (bits - 8)


def numbers_of(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns normal numbers as they are stored: a third of the range of integers."""
    if jnp.issubdtype(dtype, jnp.integer):
        least, most = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        middle = (least + most + 1) // 2
        levels = jnp.round(levels_of(dtype) * x.astype(jnp.float32)) + middle
        return jnp.clip(levels, max(least, -most), most).astype(dtype)
    return x.astype(dtype)


def _distributions(
    drawn: Callable[..., Any],
    of_op: Callable[..., Mapping[str, Any]],
    operands: Mapping[str, Any],
) -> dict[str, Any]:
    """The op's ways to draw operands, by name."""
    return {n: functools.partial(drawn, draw) for n, draw in of_op(operands).items()}


def _drawn(
    op: Op,
    draw: Callable[..., Any],
    key: jax.Array,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
) -> dict[str, jax.Array]:
    """Operands as for the op: matrices of its size, once they are widened."""
    stored, scales = stored_in(op), added_by(op)
    wide = {
        n: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if n in stored else x
        for n, x in operands.items()
        if n not in scales
    }
    made = dict(draw(key, wide, params))
    for i, name in enumerate(n for n in stored if n in operands):
        own, size = operands[name].dtype, jnp.std(made[name].astype(jnp.float32))
        made[name] = numbers_of(made[name] / size, own)
        if (zero := zero_of(name)) in operands:
            made[zero] = jnp.ones(operands[zero].shape, operands[zero].dtype)
        if (scale := scale_of(name)) in operands:
            x, one = operands[scale], jax.random.fold_in(key, i)
            levels = levels_of(own)
            each = jax.random.uniform(one, x.shape, minval=0.5, maxval=1.5)
            made[scale] = (each * size / levels).astype(x.dtype)
    return made
