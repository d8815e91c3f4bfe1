"""Builds a function of scores: its equations, each once, and what they read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from rewriter.algebra.canonicalize import kind_of
from rewriter.algebra.normal_form import Index
from rewriter.find.finder import RegionEvaluator
from rewriter.find.reading import Operand, Refused
from rewriter.ops.score import Ref, Step, cast_step, number, position_step
from rewriter.patterns.attention.axes import Axes

ARRAYS, TABLES = 8, 4
"""How many arrays and tables the op takes."""


class Unread(Exception):
    """A value that is no part of a function; it may still be an array of its own."""


@dataclass(eq=False)
class Builder(ABC):
    """A function of scores under construction: the equations and operands read so far.

    Attributes:
        ev: What evaluates the region.
        axes: The op's axes.
        product: The products of queries and keys.
        at: Their index arguments.
        core: All values that are computed from them.
        known: Where the function finds what was read: pairs of a value and its index
            arguments. A value in another layout comes after its source.
        steps: The equations, each after those that it reads.
        operands: Arrays and tables, by name.
        dense: Whether an array has a float for each query and key.
        places: Whether positions of both a query and a key are computed with, or a
            table is read.
        asked: Whether the program computes the gradient of a table.
    """

    ev: RegionEvaluator
    axes: Axes
    product: int
    at: tuple[Index, ...]
    core: frozenset[int]
    steps: list[Step] = field(default_factory=list)
    operands: dict[str, Operand] = field(default_factory=dict)
    dense: bool = False
    places: bool = False
    asked: bool = False
    known: dict[Any, Ref] = field(default_factory=dict)
    _steps: dict[str, Ref] = field(default_factory=dict)

    @abstractmethod
    def read(self, value: int, args: tuple[Index, ...]) -> Ref:
        """Returns where a function finds a value at index arguments.

        Raises:
            Unread: If it cannot be had for each place by itself.
        """

    # --------------------------------------------------------------- equations
    def add(self, step: Step) -> Ref:
        """Adds an equation, unless it is there, and returns its result."""
        text = str(step)
        if text not in self._steps:
            self.steps.append(step)
            self._steps[text] = Ref("step", len(self.steps) - 1)
        return self._steps[text]

    def count(self, name: str, *ins: Ref | int) -> Ref:
        """Adds an equation of whole numbers: of positions, or of places in a table."""
        refs = (number(x, "int32") if isinstance(x, int) else x for x in ins)
        return self.add(position_step(name, *refs))

    def as_int32(self, ref: Ref) -> Ref:
        """Returns a result as int32, converted if it is of another dtype."""
        dtype = self.steps[ref.name].dtype if ref.kind == "step" else ""
        return ref if dtype == "int32" else self.add(cast_step(ref, "int32"))

    def forget(self, count: int, operands: dict[str, Operand], dense: bool) -> None:
        """Takes back what was read in vain."""
        del self.steps[count:]
        self.operands, self.dense = operands, dense
        kept = {k: r for k, r in self.known.items() if self._is_there(r)}
        self.known = kept
        self._steps = {k: r for k, r in self._steps.items() if self._is_there(r)}

    def _is_there(self, ref: Ref) -> bool:
        if ref.kind == "step":
            return ref.name < len(self.steps)
        return ref.kind != "array" or ref.name in self.operands

    def ids(self, args: tuple[Index, ...]) -> frozenset[int]:
        """The indices that index arguments are made of."""
        return frozenset().union(*map(self.ev.alg.index_ids, args))

    def is_dense(self, args: tuple[Index, ...]) -> bool:
        """Whether a value has a number for each query and key."""
        ids = self.ids(args)
        return bool(ids & {*self.axes.t}) and bool(ids & {*self.axes.s})

    # ---------------------------------------------------------------- operands
    def array(self, value: int, args: tuple[Index, ...]) -> Ref:
        """An array of the program, which is an operand."""
        ev, alg = self.ev, self.ev.alg
        if not ev.at_hand(value):
            raise Unread("an array that the scores read is not at hand")
        form = alg.of_atom(ev.leaf(value, args))
        self.dense |= self.is_dense(args) and kind_of(ev.g.dtype(value)) == "f"
        return self.operand((value, args), form, self.ids(args), ev.g.dtype(value))

    def operand(self, key: Any, form: Any, ids: frozenset[int], dtype: Any) -> Ref:
        """An operand that broadcasts against the scores."""
        if ids - {i for axis in self.axes.of_scores for i in axis}:
            raise Unread("an array that the scores read has an axis of its own")
        name = f"score_{sum(n.startswith('score') for n in self.operands)}"
        if name == f"score_{ARRAYS}":
            raise Refused("arrays", f"the scores read more than {ARRAYS} arrays")
        cast = None if key[0] != "iota" else str(dtype)
        parts = ((form, self.axes.of_scores),)
        self.operands[name] = Operand(parts, False, None, cast)
        self.known[key] = Ref("array", name)
        return self.known[key]

    def table(
        self, value: int, args: tuple[Index, ...], places: tuple[int, ...]
    ) -> Ref:
        """A table: an array with axes that are read by index."""
        ev, alg = self.ev, self.ev.alg
        if not ev.at_hand(value) or value in self.core:
            raise Unread("scores are picked by an index")
        if self.ids(args) - {*self.axes.b, *self.axes.n, *places}:
            raise Unread("a table differs by query or key")
        name = f"table_{sum(n.startswith('table') for n in self.operands)}"
        if name == f"table_{TABLES}":
            raise Refused("arrays", f"the scores read more than {TABLES} tables")
        form = alg.of_atom(ev.leaf(value, args))
        groups = (self.axes.b, self.axes.n, places)
        self.operands[name] = Operand(((form, groups),), False)
        self.places = True
        return Ref("array", name)
