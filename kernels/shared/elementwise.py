"""Elementwise functions as kernels for GPUs compute them: what they may hold, and cost.

A function is a jaxpr of scalars. Kernels apply it to each number of a tile, in
registers. Floats are computed in float32 and rounded to the dtype of each equation, as
XLA does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewriter.support.verdict import YES, Verdict, all_of, no

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "uint32")
DTYPES = (*FLOATS, *INTEGERS, "bool")
"""What registers hold."""

INNER = {
    "pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip
"""Primitives that call another jaxpr, and the parameter that holds it."""

LAYOUT = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy", "copy_p"})
"""Primitives that leave a scalar as it is."""

INSTRUCTIONS = {
    "abs": 1, "add": 1, "add_any": 1, "and": 1, "ceil": 1, "clamp": 2,
    "convert_element_type": 1, "eq": 1, "floor": 1, "ge": 1, "gt": 1, "integer_pow": 2,
    "is_finite": 2, "le": 1, "lt": 1, "max": 1, "min": 1, "mul": 1, "ne": 1, "neg": 1,
    "not": 1, "one_minus_square": 1, "or": 1, "reduce_precision": 2, "rem": 12,
    "round": 1, "select_n": 1, "shift_left": 2, "shift_right_arithmetic": 2,
    "shift_right_logical": 2, "sign": 4, "square": 1, "sub": 1, "xor": 1,
    "cos": 30, "div": 8, "erf": 20, "exp": 5, "exp2": 4, "expm1": 14, "log": 5,
    "log1p": 12, "logistic": 10, "pow": 40, "rsqrt": 4, "sin": 30, "sqrt": 5,
    "tanh": 16,
    "acos": 20, "acosh": 30, "asin": 20, "asinh": 30, "atan": 20, "atan2": 30,
    "atanh": 20, "cbrt": 20, "cosh": 12, "erfc": 30, "sinh": 20, "tan": 40,
}  # fmt: skip
"""What each primitive takes, in instructions of the simplest kind for a number."""

LOOKUP = 8
"""Instructions of reading a number of a table."""


@dataclass(frozen=True)
class Line:
    """One equation.

    Attributes:
        name: Its primitive.
        ins: For each operand the number of a value, or a `Number`.
        dtypes: The dtypes of the operands.
        out: The result's dtype.
        params: The primitive's parameters.
        refused: Why kernels do not compute it, or nothing.
    """

    name: str
    ins: tuple[int | Number, ...]
    dtypes: tuple[str, ...]
    out: str
    params: Mapping[str, Any]
    refused: str = ""

    @property
    def decides(self) -> bool:
        """Whether the result jumps where an operand moves a little."""
        whole = self.floats and self.out not in FLOATS
        return whole or self.name in ("floor", "ceil", "round", "sign")

    @property
    def floats(self) -> bool:
        """Whether operands are floats."""
        return self.dtypes[0] in FLOATS

    @property
    def signed(self) -> bool:
        """Whether operands are signed integers."""
        return self.dtypes[0] == "int32"


@dataclass(frozen=True)
class Number:
    """A number that is known while tracing."""

    value: Any
    dtype: str


@dataclass(frozen=True)
class Program:
    """The equations of a function of scalars that its results need.

    Values are numbered: those that are given, then the results of all lines.

    Attributes:
        given: How many values are given.
        lines: The equations, in order; calls are written out.
        needed: The indices of lines that results depend on.
        decisive: The indices of lines that comparisons and roundings depend on. They
            are computed as XLA does, so that these decide alike.
        outs: The results.
    """

    given: int
    lines: tuple[Line, ...]
    needed: frozenset[int]
    decisive: frozenset[int]
    outs: tuple[int | Number, ...]

    def uniform(self, given: Collection[int]) -> frozenset[int]:
        """Returns the values that are the same for all numbers of a tile.

        Args:
            given: Those among the values that are given.
        """
        same = set(given)
        for at, line in enumerate(self.lines):
            if all(isinstance(x, Number) or x in same for x in line.ins):
                same.add(self.given + at)
        return frozenset(same)

    def ranges(self, given: Sequence[Range]) -> list[Range]:
        """Returns the range of each value that is an integer; None if it is unknown.

        Args:
            given: Those of the values that are given.
        """
        known = list(given)
        for line in self.lines:
            known.append(_range(line, [range_of(x, known) for x in line.ins]))
        return known

    @property
    def contracted(self) -> dict[int, int]:
        """Sums of float32, each with the product that nothing else reads, by index.

        Example:
            >>> import jax
            >>> program(jax.make_jaxpr(lambda x: x * x + 1.0)(1.0)).contracted
            {1: 0}
        """
        readers: dict[int, int] = dict.fromkeys(
            (x for x in self.outs if isinstance(x, int)), 2
        )
        for at in self.needed:
            for x in self.lines[at].ins:
                if isinstance(x, int):
                    readers[x] = readers.get(x, 0) + 1
        found = {}
        for at in sorted(self.needed - self.decisive):
            line = self.lines[at]
            if line.name not in ("add", "add_any") or line.out != "float32":
                continue
            for x in line.ins:
                own = x - self.given if isinstance(x, int) else -1
                alone = own >= 0 and readers[own + self.given] == 1
                if alone and self.lines[own].name == "mul":
                    found[at] = own
                    break
        return found

    def supports(self) -> Verdict:
        """Returns whether kernels compute it."""
        texts = dict.fromkeys(self.lines[i].refused for i in sorted(self.needed))
        return all_of(YES, *(no("function", text) for text in texts if text))

    @property
    def cost(self) -> int:
        """Instructions for each number of a tile; those of numbers alone are left out.

        Example:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> program(jax.make_jaxpr(lambda x: jnp.exp(x) + 1.0)(1.0)).cost
            6
        """
        moving, total = set(range(self.given)), 0
        for i in sorted(self.needed):
            if moving.intersection(x for x in self.lines[i].ins if isinstance(x, int)):
                moving.add(self.given + i)
                total += INSTRUCTIONS.get(self.lines[i].name, 0)
        return total


def program(jaxpr: Any) -> Program:
    """Returns a closed jaxpr of scalars, without calls and without what is unused."""
    count, lines = len(jaxpr.jaxpr.invars), []
    outs = _write(jaxpr, list(range(count)), count, lines)
    needed = _depended(lines, outs, count)
    decided = [x for i in needed if lines[i].decides for x in lines[i].ins]
    return Program(
        count, tuple(lines), needed, _depended(lines, decided, count), tuple(outs)
    )


def _depended(lines: Sequence[Line], outs: Sequence[Any], count: int) -> frozenset[int]:
    """The indices of lines that some values depend on."""
    needed: set[int] = set()
    queue = [x - count for x in outs if isinstance(x, int)]
    while queue:
        at = queue.pop()
        if at >= 0 and at not in needed:
            needed.add(at)
            queue += [x - count for x in lines[at].ins if isinstance(x, int)]
    return frozenset(needed)


Range = tuple[int, int] | None
"""The least and the largest value of an integer."""


def range_of(place: int | Number, known: Sequence[Range]) -> Range:
    """Returns the range of a value or constant, if it is an integer's and known."""
    if isinstance(place, int):
        return known[place]
    whole = place.dtype in INTEGERS
    return (int(place.value), int(place.value)) if whole else None


def _range(line: Line, ins: list[Range]) -> Range:
    """The range of a line's result, if its operands' tell."""
    if line.out != "int32" or line.name not in RANGES:
        return None
    values = ins[1:] if line.name == "select_n" else ins
    ends = [x for x in values if x is not None]
    if len(ends) != len(values):
        return None
    low, high = RANGES[line.name](*ends)
    inside = low >= -(1 << 31) and high < 1 << 31
    return (low, high) if inside else None


def _product(x: tuple[int, int], y: tuple[int, int]) -> tuple[int, int]:
    found = [a * b for a in x for b in y]
    return min(found), max(found)


RANGES: Mapping[str, Callable[..., tuple[int, int]]] = {
    "abs": lambda x: (max(0, x[0], -x[1]), max(-x[0], x[1])),
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "clamp": lambda low, x, high: (low[0], high[1]),
    "convert_element_type": lambda x: x,
    "max": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "min": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
    "mul": _product,
    "neg": lambda x: (-x[1], -x[0]),
    "select_n": lambda *x: (min(a for a, _ in x), max(b for _, b in x)),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
}
"""The range of a result by those of operands."""


def _write(closed: Any, given: list[Any], count: int, lines: list[Line]) -> list[Any]:
    """Writes a jaxpr's equations; returns its results."""
    jaxpr, consts = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    known: dict[Any, Any] = dict(zip(jaxpr.invars, given, strict=True))
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        known[var] = Number(np.asarray(value)[()], str(var.aval.dtype))

    def read(atom: Any) -> Any:
        if hasattr(atom, "val"):
            return Number(np.asarray(atom.val)[()], str(atom.aval.dtype))
        return known[atom]

    for eqn in jaxpr.eqns:
        ins, name = [read(v) for v in eqn.invars], eqn.primitive.name
        if name in INNER:
            made = _write(eqn.params[INNER[name]], ins, count, lines)
        elif name in LAYOUT and eqn.outvars[0].aval.shape == ():
            made = ins[:1]
        else:
            made = []
            for var in eqn.outvars:
                lines.append(_line(eqn, ins, var))
                made.append(count + len(lines) - 1)
        known.update(zip(eqn.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _line(eqn: Any, ins: list[Any], out: Any) -> Line:
    dtypes = tuple(str(v.aval.dtype) for v in eqn.invars)
    return Line(
        eqn.primitive.name, tuple(ins), dtypes, str(out.aval.dtype), eqn.params,
        _refused(eqn, set(dtypes)),
    )  # fmt: skip


def _refused(eqn: Any, kinds: set[str]) -> str:
    """Why an equation is not computed, or nothing."""
    name = eqn.primitive.name
    if name not in INSTRUCTIONS or len(eqn.outvars) != 1:
        return f"it does not compute {name}"
    for aval in (v.aval for v in (*eqn.invars, *eqn.outvars)):
        if aval.shape != () or str(aval.dtype) not in DTYPES:
            text = f"{name} of {aval.dtype}{list(aval.shape)}, not of scalars of "
            return text + ", ".join(DTYPES)
    if name == "rem" and kinds & {*FLOATS}:
        return "it does not compute remainders of floats"
    if name == "select_n" and str(eqn.invars[0].aval.dtype) != "bool":
        return "it selects by a bool"
    if name in ("lt", "le", "gt", "ge") and "bool" in kinds:
        return f"it does not compute {name} of bool"
    if name == "reduce_precision":
        kept = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
        if kept not in ((8, 23), (8, 7)):
            return f"it does not round to {kept} bits"
    return ""
