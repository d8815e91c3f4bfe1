"""Finds equations of rows: all that lead to rows in 8 bits, back to what is no row.

A region has one shape ``[..., d]`` of rows. Its equations compute each number of a row
from those at its place, or join the numbers of a row, or repeat what they gave.
Everything else that it reads is an input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rewriter import _jax
from rewriter.ops.row_program import (
    COLUMN,
    FULL,
    ONE,
    ROW,
    SUMS,
    Input,
    Number,
    Place,
    Result,
    RowProgram,
    Step,
)
from rewriter.program.equations import Equations
from rewriter.site import site

FLOATS = ("float32", "bfloat16", "float16")
STORED = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes of rows in 8 bits."""

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest number of each float of 8 bits."""

ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "clamp", "convert_element_type", "div", "eq", "floor",
    "ge", "gt", "integer_pow", "le", "lt", "max", "min", "mul", "ne", "neg", "round",
    "rsqrt", "select_n", "sqrt", "square", "sub",
})  # fmt: skip
"""Primitives whose results are exact, or rounded once, on every device."""

PARAMS = {"integer_pow": ("y",), "round": ("rounding_method",)}
MOVED = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
MOST = 200
"""The most steps of a region."""


@dataclass(frozen=True)
class Region:
    """Equations of rows in a body.

    Attributes:
        program: What they compute.
        lead: The shape of the array without its last axis.
        d: The size of that axis.
        inputs: The variables of what it reads, in the program's order.
        outputs: The variables of its results, in the program's order.
        positions: The positions of the equations that it replaces.
    """

    program: RowProgram
    lead: tuple[int, ...]
    d: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    positions: tuple[int, ...]

    @property
    def m(self) -> int:
        """The number of rows."""
        return math.prod(self.lead)


def seeds(eqns: Sequence[Any]) -> list[int]:
    """Returns the positions of equations that store rows in 8 bits."""
    return [i for i, eqn in enumerate(eqns) if _stores(eqn)]


def _stores(eqn: Any) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    (out,) = eqn.outvars
    if (
        _name(out.aval.dtype) not in STORED
        or _name(eqn.invars[0].aval.dtype) not in FLOATS
    ):
        return False
    shape = out.aval.shape
    return len(shape) > 1 and all(isinstance(n, int) for n in shape)


@functools.cache
def _name(dtype: Any) -> str:
    """The name of a dtype; numpy takes long to make it."""
    return str(dtype)


def region(body: Equations, seed: int) -> Region | None:
    """Returns the equations of rows that lead to an equation, if they join numbers.

    Args:
        body: The body.
        seed: The position of an equation of `seeds`.
    """
    (out,) = body.eqns[seed].outvars
    builder = _Builder(body, tuple(out.aval.shape[:-1]), out.aval.shape[-1])
    builder.value(out)
    if not isinstance(builder.known.get(out), _Value) or out in builder.leaves:
        return None
    return builder.finished(out)


class _No(Exception):
    """An equation is no equation of rows."""


@dataclass(frozen=True)
class _Value:
    place: Place
    kind: str


class _Builder:
    """Builds a program of rows, backwards from a value.

    Attributes:
        known: Values by variable, or None where a shape is no row's.
        steps: The steps, needed or not.
        leaves: The inputs' variables, by their index.
        moved: Variables of equations that only repeat, reshape or cast what is given.
        calls: How many calls the equation at hand is in: those are taken whole.
        names: By the inputs of those calls, what they are in the body.
    """

    def __init__(self, body: Equations, lead: tuple[int, ...], d: int):
        self.body, self.lead, self.d = body, lead, d
        self.known: dict[Any, _Value | None] = {}
        self.steps: list[Step] = []
        self.leaves: dict[Any, int] = {}
        self.kinds: list[tuple[str, str]] = []
        self.moved: set[Any] = set()
        self.calls = 0
        self.names: dict[Any, Any] = {}

    # ------------------------------------------------------------------- values
    def value(self, atom: Any) -> _Value | None:
        """Returns the value of a variable, by its equation or as an input."""
        if _jax.is_literal(atom):
            return _number(atom.val, atom.aval)
        if atom in self.known:
            return self.known[atom]
        eqn = self.body.maker(atom)
        self.known[atom] = None
        made = None
        if eqn is not None and len(self.steps) < MOST and not eqn.effects:
            try:
                made = self.of_equation(eqn, self.value)
            except _No:
                made = None
        self.known[atom] = self.leaf(atom) if made is None else made
        return self.known[atom]

    def leaf(self, var: Any, kind: str = "") -> _Value | None:
        """An input; None if its shape alone does not say of which kind it is."""
        var = self.outside(var)
        if _jax.is_literal(var):
            return None
        kind = kind or self.kind_of(tuple(var.aval.shape))
        if not kind or str(var.aval.dtype) not in FLOATS:
            return None
        if var not in self.leaves:
            self.leaves[var] = len(self.kinds)
            self.kinds.append((kind, str(var.aval.dtype)))
        return _Value(Input(self.leaves[var]), self.kinds[self.leaves[var]][0])

    def outside(self, atom: Any) -> Any:
        """What an input of a call is in the body."""
        return atom if _jax.is_literal(atom) else self.names.get(atom, atom)

    def kind_of(self, shape: tuple[Any, ...]) -> str:
        """The kind of an array of a shape, as an operand beside rows."""
        n = len(self.lead)
        if shape == (*self.lead, self.d):
            return FULL
        if shape == (*self.lead, 1):
            return ROW
        if shape == (*(1,) * n, self.d):
            return COLUMN
        return ONE if len(shape) in (0, n + 1) and math.prod(shape) == 1 else ""

    # ---------------------------------------------------------------- equations
    def of_equation(self, eqn: Any, read: Any) -> _Value:
        """Returns the only result of an equation, and writes its steps."""
        name = eqn.primitive.name
        if len(eqn.outvars) != 1:
            raise _No
        (out,) = eqn.outvars
        closed = _written(eqn)
        if closed is not None:
            return self.of_call(eqn, closed, read)
        if name in MOVED:
            return self.of_moved(eqn, out, read)
        if name in SUMS:
            return self.of_sum(eqn, out, read)
        if name not in ELEMENTWISE:
            raise _No
        return self.of_elementwise(eqn, out, read)

    def of_call(self, eqn: Any, closed: Any, read: Any) -> _Value:
        """The result of a call, whose equations all are of rows."""
        inner = getattr(closed, "jaxpr", closed)
        env = dict(zip(inner.invars, eqn.invars, strict=True))
        made: dict[Any, _Value] = {}

        def inside(atom: Any) -> _Value | None:
            if _jax.is_literal(atom):
                return _number(atom.val, atom.aval)
            return made[atom] if atom in made else read(env[atom])

        if inner.constvars:
            raise _No
        before, self.calls = self.names, self.calls + 1
        self.names = before | {i: self.outside(o) for i, o in env.items()}
        try:
            for one in inner.eqns:
                made[one.outvars[0]] = self.of_equation(one, inside)
        finally:
            self.names, self.calls = before, self.calls - 1
        found = inside(inner.outvars[0])
        if found is None:
            raise _No
        return found

    def of_moved(self, eqn: Any, out: Any, read: Any) -> _Value:
        """A value that is repeated or reshaped: it stays the same."""
        source, shape = eqn.invars[0], tuple(out.aval.shape)
        old, n = tuple(source.aval.shape), len(self.lead)
        kind = self.kind_of(shape)
        target = kind or (ROW if shape == self.lead else "")
        dims = eqn.params.get("broadcast_dimensions")
        if dims is None:
            dims = self.as_dims(old, shape)
        places = {
            (self.lead, tuple(range(n))): ROW,
            ((*self.lead, 1), tuple(range(n + 1))): ROW,
            ((self.d,), (n,)): COLUMN,
            ((*(1,) * n, self.d), tuple(range(n + 1))): COLUMN,
            ((*self.lead, self.d), tuple(range(n + 1))): FULL,
        }
        own = ONE if math.prod(old) == 1 else places.get((old, tuple(dims or ())), "")
        if not own or not target or (own, target) not in SPREAD:
            raise _No
        found = read(source)
        if found is None:
            found = self.leaf(source, own)
        if found is None or (found.kind, own) not in SPREAD:
            raise _No
        self.moved.add(out)
        return found

    def as_dims(self, old: tuple[Any, ...], new: tuple[Any, ...]) -> Any:
        """The axes at which a reshape puts those of its operand."""
        trimmed = [*self.lead], [*self.lead, 1]
        if list(old) in trimmed and list(new) in trimmed:
            return tuple(range(len(old)))
        columns = [self.d], [*(1,) * len(self.lead), self.d]
        if list(old) in columns and list(new) in columns:
            return tuple(range(len(self.lead) + 1 - len(old), len(self.lead) + 1))
        return None if old != new else tuple(range(len(old)))

    def of_sum(self, eqn: Any, out: Any, read: Any) -> _Value:
        """The joined numbers of each row, in float32 or exactly."""
        (source,) = eqn.invars
        dtype, name = str(out.aval.dtype), eqn.primitive.name
        last = tuple(eqn.params["axes"]) == (len(self.lead),)
        exact = dtype == "float32" or name != "reduce_sum"
        if not (last and exact and dtype in FLOATS):
            raise _No
        if tuple(source.aval.shape) != (*self.lead, self.d):
            raise _No
        found = read(source)
        if found is None or found.kind != FULL:
            raise _No
        return self.add(Step(name, (found.place,), ROW, dtype))

    def of_elementwise(self, eqn: Any, out: Any, read: Any) -> _Value:
        shape = tuple(out.aval.shape)
        of_rows = self.kind_of(shape) or shape == self.lead
        if not (of_rows or (self.calls and shape == (self.d,))):
            raise _No
        found = [self.beside(v, shape, read) for v in eqn.invars]
        dtype, name = str(out.aval.dtype), eqn.primitive.name
        if all(isinstance(x.place, Number) for x in found):
            return _folded(eqn, [x.place for x in found])
        kinds = {x.kind for x in found}
        kind = FULL if FULL in kinds or {ROW, COLUMN} <= kinds else ""
        kind = kind or next(k for k in (ROW, COLUMN, ONE) if k in kinds)
        if kind in (COLUMN, ONE) and not self.calls:
            raise _No  # it is little, and stays outside
        if dtype not in (*FLOATS, "bool") and not (kind == FULL and _stores(eqn)):
            raise _No
        if any(str(v.aval.dtype) in STORED for v in eqn.invars):
            raise _No
        if name == "round" and int(eqn.params["rounding_method"]) != 1:
            raise _No
        params = tuple(int(eqn.params[p]) for p in PARAMS.get(name, ()))
        if name == "convert_element_type" and isinstance(found[0].place, Input):
            self.moved.add(out)
        places = tuple(x.place for x in found)
        if name == "select_n" and isinstance(places[0], Number):
            chosen = found[1 + bool(places[0].value)]
            return chosen
        return self.add(Step(name, places, kind, dtype, params))

    def beside(self, atom: Any, shape: tuple[int, ...], read: Any) -> _Value:
        """An operand of an elementwise equation whose result has a shape."""
        found = read(atom)
        if found is None and tuple(atom.aval.shape) == shape != ():
            found = self.leaf(atom, ROW if shape == self.lead else COLUMN)
        if found is None:
            raise _No
        return found

    def add(self, step: Step) -> _Value:
        """Writes a step."""
        self.steps.append(step)
        return _Value(Result(len(self.steps) - 1), step.kind)

    # ------------------------------------------------------------------ the end
    def finished(self, seed: Any) -> Region | None:
        """The region, with all of its values that others read as results."""
        inside = self.inside(seed)
        while True:
            read = [v for v in inside if self.read_elsewhere(v, inside)]
            again = {v for v in read if v in self.moved}
            if not again:
                break
            inside -= again  # they stay, and read the region's results
        outs = [v for v in read if v not in self.moved]
        known: Mapping[Any, Any] = self.known
        if any(self.unwanted(known[v]) for v in outs):
            return None
        outs.sort(key=self.body.made_at)
        program, order = self.pruned([known[v].place for v in outs])
        names = {i: v for v, i in self.leaves.items()}
        positions = tuple(sorted({self.body.made_at(v) for v in inside}))
        inputs = tuple(names[i] for i in order)
        return Region(program, self.lead, self.d, inputs, tuple(outs), positions)

    def unwanted(self, value: _Value) -> bool:
        """Whether a value is none that a kernel returns."""
        if not isinstance(value.place, Result):
            return True
        step = self.steps[value.place.index]
        if step.kind != FULL or step.dtype not in STORED:
            return step.dtype not in FLOATS
        return step.dtype in LARGEST and not self.is_limited(
            step.ins[0], LARGEST[step.dtype]
        )

    def is_limited(self, place: Place, largest: float) -> bool:
        """Whether the program limits a value by numbers, or it is NaN.

        Beyond the largest float of 8 bits devices convert to that, to inf or to NaN.
        """
        if not isinstance(place, Result):
            return False
        step = self.steps[place.index]
        if step.name == "convert_element_type":
            return self.is_limited(step.ins[0], largest)
        low, high = _limits(step, self.steps)
        return -largest <= low and high <= largest

    def inside(self, seed: Any) -> set[Any]:
        """The variables of the body whose equations lead to the seed."""
        found: set[Any] = set()
        queue = [seed]
        while queue:
            var = queue.pop()
            if _jax.is_literal(var) or var in found or var in self.leaves:
                continue
            if self.known.get(var) is None or self.body.made_at(var) < 0:
                continue
            found.add(var)
            queue += self.body.maker(var).invars
        return found

    def read_elsewhere(self, var: Any, inside: set[Any]) -> bool:
        """Whether anything beside the region's equations reads a variable."""
        for k in self.body.readers(var):
            if k == self.body.end or self.body.eqns[k].outvars[0] not in inside:
                return True
        return False

    def pruned(self, outs: Sequence[Place]) -> tuple[RowProgram, list[int]]:
        """The program of some results, and the inputs that it reads, in order."""
        needed: set[int] = set()
        used: set[int] = set()
        queue = list(outs)
        while queue:
            place = queue.pop()
            if isinstance(place, Input):
                used.add(place.index)
            elif isinstance(place, Result) and place.index not in needed:
                needed.add(place.index)
                queue += self.steps[place.index].ins
        order, inputs = sorted(needed), sorted(used)

        def moved(place: Place) -> Place:
            if isinstance(place, Input):
                return Input(inputs.index(place.index))
            if isinstance(place, Result):
                return Result(order.index(place.index))
            return place

        steps = tuple(
            Step(s.name, tuple(map(moved, s.ins)), s.kind, s.dtype, s.params)
            for s in (self.steps[i] for i in order)
        )
        kinds = tuple(self.kinds[i] for i in inputs)
        return RowProgram(kinds, steps, tuple(map(moved, outs))), inputs


SPREAD = frozenset({
    (ONE, ONE), (ONE, ROW), (ONE, COLUMN), (ONE, FULL), (ROW, ROW), (ROW, FULL),
    (COLUMN, COLUMN), (COLUMN, FULL), (FULL, FULL),
})  # fmt: skip
"""Kinds of values, and those that they may be repeated as."""


def _limits(step: Step, steps: Sequence[Step]) -> tuple[float, float]:
    """The numbers between which a step's results are; infinite where it limits none."""
    if step.name == "clamp":
        low, _, high = step.ins
        if isinstance(low, Number) and isinstance(high, Number):
            return float(low.value), float(high.value)
    if step.name not in ("max", "min"):
        return -math.inf, math.inf
    numbers = [float(x.value) for x in step.ins if isinstance(x, Number)]
    others = [x for x in step.ins if isinstance(x, Result)]
    inner = _limits(steps[others[0].index], steps) if others else (-math.inf, math.inf)
    if len(numbers) != 1 or math.isnan(numbers[0]):
        return -math.inf, math.inf
    join = max if step.name == "max" else min
    return join(numbers[0], inner[0]), join(numbers[0], inner[1])


def _written(eqn: Any) -> Any:
    """The equations that a call or a site stands for, or None."""
    if _jax.call_kind(eqn) == "call":
        return _jax.call_body(eqn)
    if eqn.primitive is not site.site_p or eqn.params["residuals"]:
        return None
    if eqn.params["batch"]:
        return None
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    return jax.make_jaxpr(eqn.params["use"].reference)(*structs)


def _number(value: Any, aval: Any) -> _Value | None:
    if np.ndim(value):
        return None
    number = np.asarray(value)[()]
    known = bool(number) if aval.dtype == bool else float(number)
    return _Value(Number(known, str(aval.dtype)), ONE)


def _folded(eqn: Any, numbers: Sequence[Any]) -> _Value:
    """The number that an equation of numbers gives."""
    given = [np.asarray(x.value, x.dtype) for x in numbers]
    with jax.ensure_compile_time_eval():
        made = np.asarray(eqn.primitive.bind(*given, **eqn.params))
    found = _number(made, eqn.outvars[0].aval)
    if found is None:
        raise _No
    return found
