"""The window of keys outside of which a function of scores gives 0.

A causal sigmoid attention has ``where(j <= i, sigmoid(x), 0)`` as weights, or
``sigmoid(where(j <= i, x, -inf))``. Both are 0 for keys behind the query. Kernels skip
blocks of such keys. What a function's equations are outside of a window is followed
from its positions on: comparisons of them, choices, and what is computed of the fill.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rewriter.ops.score import COLUMN, ROW

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rewriter.ops.score import Ref, Score, Step

Span = tuple[float, float]
"""The least and the greatest distance of a key behind its query."""

NOWHERE, ANYWHERE = (math.inf, -math.inf), (-math.inf, math.inf)

SWALLOWS = 1e30
"""A number of this size is itself whatever score is added."""


@dataclass(frozen=True)
class _Line:
    """A whole number: ``row · query + column · key + constant``."""

    row: int
    column: int
    constant: int


@dataclass(frozen=True)
class _Size:
    """The size of a whole number."""

    of: _Line


@dataclass(frozen=True)
class _Test:
    """A boolean: the distances at which it may be true, and may be false."""

    true: Span
    false: Span


@dataclass(frozen=True)
class _Outside:
    """The value of a number outside of a span."""

    value: Any
    span: Span


def reach(score: Score, t: int, s: int) -> tuple[int | None, int | None]:
    """Returns the ``(left, right)`` reach of a function; None is without limit.

    Args:
        score: The function.
        t: Number of queries.
        s: Number of keys.
    """
    if not (isinstance(t, int) and isinstance(s, int)):
        return None, None
    known: list[Any] = []

    def read(ref: Ref) -> Any:
        match ref.kind:
            case "step":
                return known[ref.name]
            case "number":
                return _number(ref.value)
        return {ROW: _Line(1, 0, 0), COLUMN: _Line(0, 1, 0)}.get(ref.kind)

    for step in score.steps:
        made = _exact(_after(step, [read(x) for x in step.ins]), step.dtype, t, s)
        known.append(_as_test(made) if step.dtype == "bool" else made)
    low, high = ANYWHERE
    for out in _facts(read(score.out)):
        if out.value == 0 and out.span != NOWHERE:
            low, high = _both((low, high), out.span)
    return (
        None if math.isinf(low) else -int(low),
        None if math.isinf(high) else int(high),
    )


def narrowed(
    window: tuple[int | None, int | None], other: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    """Returns the window that is inside of two."""
    ends = (
        [x for x in pair if x is not None] for pair in zip(window, other, strict=True)
    )
    left, right = (min(x, default=None) for x in ends)
    return left, right


def _number(value: Any) -> Any:
    if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.integer):
        return _Line(0, 0, int(value))
    return (_Outside(value, NOWHERE),)


def _exact(x: Any, dtype: str, t: int, s: int) -> Any:
    """What is known of a number, without whole numbers that its dtype may not hold.

    Integers wrap around at the ends of their dtype, and floats round large ones.
    """
    if not isinstance(x, (_Line, _Size)) or dtype == "bool":
        return x
    line = x.of if isinstance(x, _Size) else x
    ends = [
        line.row * i + line.column * j + line.constant
        for i in (0, max(t - 1, 0))
        for j in (0, max(s - 1, 0))
    ]
    if isinstance(x, _Size):
        ends += [-end for end in ends]
    least, most = _whole_numbers(dtype)
    return x if least <= min(ends) and max(ends) <= most else None


def _whole_numbers(dtype: str) -> Span:
    """The least and the greatest of the whole numbers that a dtype holds exactly."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    most = 2 ** (jnp.finfo(dtype).nmant + 1)
    return -most, most


def _after(step: Step, ins: list[Any]) -> Any:
    """What is known of an equation's result, from what is known of its inputs."""
    name = step.name.removeprefix("position_")
    if name == "abs" and isinstance(ins[0], _Line):
        return _Size(ins[0])
    if all(isinstance(x, _Line) for x in ins) and (of := _LINES.get(name)):
        return of(*ins)
    if len(ins) == 2 and isinstance(ins[0], _Size) and isinstance(ins[1], _Line):
        return _within(name, ins[0].of, ins[1])
    if len(ins) == 2 and isinstance(ins[1], _Size) and isinstance(ins[0], _Line):
        return _within(_TURNED.get(name, ""), ins[1].of, ins[0])
    if all(isinstance(x, _Test) for x in ins) and name in ("and", "or", "not"):
        return _combined(name, ins)
    if name == "select_n" and len(ins) == 3 and isinstance(ins[0], _Test):
        return _chosen(*ins)
    if name == "convert_element_type" and isinstance(ins[0], (_Line, _Test)):
        return ins[0]
    every = itertools.product(*(_facts(x) or (None,) for x in ins))
    made = (_computed(step, list(each)) for each in itertools.islice(every, 8))
    return tuple(x for x in made if x is not None)


def _as_test(facts: Any) -> Any:
    """Booleans that are known outside of spans, as a test."""
    if not isinstance(facts, tuple):
        return facts
    true = false = ANYWHERE
    for x in facts:
        true = true if x.value else _both(true, x.span)
        false = _both(false, x.span) if x.value else false
    return _Test(true, false)


def _facts(x: Any) -> tuple[_Outside, ...]:
    """What is known of a number outside of spans."""
    if isinstance(x, _Line) and x.row == x.column == 0:
        return (_Outside(x.constant, NOWHERE),)
    if isinstance(x, _Test):
        return (_Outside(0, x.true), _Outside(1, x.false))
    return x if isinstance(x, tuple) else ()


def _computed(step: Step, ins: list[_Outside | None]) -> _Outside | None:
    """What an elementwise equation gives outside of the spans of its inputs."""
    apart = [x for x in ins if x is not None]
    if step.name == "mul" and len(apart) == 1 and apart[0].value == 0:
        return apart[0]
    swallows = len(apart) == 1 and float(apart[0].value) <= -SWALLOWS
    if step.name in ("add", "sub") and swallows and ins[0] is apart[0]:
        return apart[0]
    if step.name == "add" and swallows:
        return apart[0]
    if len(apart) < len(ins) or step.name.startswith(("position", "lookup")):
        return None
    span = NOWHERE
    for x in apart:
        span = _hull(span, x.span)
    return _Outside(_value(step, apart), span)


def _value(step: Step, ins: list[_Outside]) -> Any:
    """The number that an equation gives for numbers."""
    dtypes = [np.asarray(x.value).dtype for x in ins if not _is_plain(x.value)]
    dtype = dtypes[0] if dtypes else step.dtype
    with jax.ensure_compile_time_eval():
        values = (x.value for x in ins)
        typed = (np.asarray(x, dtype) if _is_plain(x) else x for x in values)
        made = step.run(*typed)
    return np.asarray(made)[()]


def _is_plain(value: Any) -> bool:
    """Whether a number has no dtype: one that is made of positions."""
    return isinstance(value, (bool, int))


def _chosen(test: _Test, no: Any, yes: Any) -> tuple[_Outside, ...]:
    """What a choice gives where its condition is known."""
    return tuple(
        _Outside(known.value, _hull(known.span, span))
        for other, span in ((no, test.true), (yes, test.false))
        for known in _facts(other)
        if span != ANYWHERE
    )


def _combined(name: str, ins: list[_Test]) -> _Test:
    if name == "not":
        return _Test(ins[0].false, ins[0].true)
    a, b = ins
    if name == "and":
        return _Test(_both(a.true, b.true), _hull(a.false, b.false))
    return _Test(_hull(a.true, b.true), _both(a.false, b.false))


def _hull(a: Span, b: Span) -> Span:
    return min(a[0], b[0]), max(a[1], b[1])


def _both(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def _plus(a: _Line, b: _Line, sign: int = 1) -> _Line:
    pairs = ((a.row, b.row), (a.column, b.column), (a.constant, b.constant))
    return _Line(*(x + sign * y for x, y in pairs))


def _minus(a: _Line, b: _Line) -> _Line:
    return _plus(a, b, -1)


def _times(a: _Line, b: _Line) -> _Line | None:
    for x, y in ((a, b), (b, a)):
        if x.row == x.column == 0:
            c = x.constant
            return _Line(c * y.row, c * y.column, c * y.constant)
    return None


def _from(a: _Line, b: _Line, least: int = 0) -> _Test | None:
    """Whether ``a - b >= least``, as a test of distances."""
    line = _minus(a, b)
    edge = least - line.constant
    if (line.row, line.column) == (-1, 1):
        return _Test((edge, math.inf), (-math.inf, edge - 1))
    if (line.row, line.column) == (1, -1):
        return _Test((-math.inf, -edge), (1 - edge, math.inf))
    return None


def _equal(a: _Line, b: _Line) -> _Test | None:
    line = _minus(a, b)
    if sorted((line.row, line.column)) != [-1, 1]:
        return None
    at = -line.constant * line.column
    return _Test((at, at), ANYWHERE)


def _within(name: str, line: _Line, edge: _Line) -> _Test | None:
    """Whether the size of a line is ``name`` a number: ``"lt"`` for below."""
    if edge.row or edge.column or name not in ("lt", "le", "gt", "ge"):
        return None
    most = edge.constant - (name in ("lt", "ge"))
    ends = (_from(_Line(0, 0, most), line), _from(line, _Line(0, 0, -most)))
    if None in ends:
        return None
    inside = _combined("and", list(ends))
    return inside if name in ("lt", "le") else _negated(inside)


def _negated(test: _Test | None) -> _Test | None:
    return None if test is None else _Test(test.false, test.true)


_LINES: Mapping[str, Any] = {
    "add": _plus,
    "sub": _minus,
    "multiply": _times,
    "mul": _times,
    "neg": lambda a: _minus(_Line(0, 0, 0), a),
    "ge": _from,
    "gt": lambda a, b: _from(a, b, 1),
    "le": lambda a, b: _from(b, a),
    "lt": lambda a, b: _from(b, a, 1),
    "eq": _equal,
    "ne": lambda a, b: _negated(_equal(a, b)),
}
"""What is known of equations of whole numbers."""

_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
"""Comparisons with both sides exchanged."""
