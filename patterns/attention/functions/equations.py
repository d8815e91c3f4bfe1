"""Reads a function of scores off a program: its equations, and what they read.

Looks like elementwise equations between the products of queries and keys and the
           softmax, with layout, positions, and numbers of small tables among them.
Must hold  each number of the result is computed from the product at its own place, its
           position, and arrays that do not depend on the products. What differs by both
           query and key is computed from positions, or is an array of the program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.algebra.normal_form import Index, OverBudget
from rewriter.find.inlined_rules import inlined_call
from rewriter.find.reading import Operand, Refused
from rewriter.ops.score import (
    ELEMENTWISE,
    NAMED,
    PRODUCT,
    Ref,
    Score,
    named_step,
    number,
    primitive_step,
)
from rewriter.patterns.attention.functions.builder import Builder, Unread
from rewriter.patterns.attention.functions.place import in_other_layout
from rewriter.patterns.attention.functions.positions import position
from rewriter.patterns.attention.functions.results import score_results
from rewriter.patterns.attention.functions.tables import gathered, one_hot
from rewriter.program.graph import Node

STEPS = 256
"""The most equations of a function."""

LOOKS_THROUGH = ELEMENTWISE | NAMED.keys() | LAYOUT_PRIMITIVES | TRANSPARENT
"""What a function consists of, and the layout of what it reads."""


@dataclass(frozen=True)
class Function:
    """A function of scores, and the operands that it reads.

    Attributes:
        score: The function.
        operands: Arrays and tables, by name.
        dense: Whether one of them has a float for each query and key.
        places: Whether it computes with both a query's and a key's position, or reads
            a table.
        asked: Whether the program computes the gradient of a table.
        results: By the number of an equation, the program's value that it computes:
            of those that depend on scores, and of what those read. Also the products.
    """

    score: Score
    operands: dict[str, Operand]
    dense: bool
    places: bool
    asked: bool
    results: dict[Any, Operand]


@dataclass(eq=False)
class ScoreReader(Builder):
    """Reads the function that gives a value of the program."""

    _positional: dict[int, bool] = field(default_factory=dict)

    def function(self, value: int, args: tuple[Index, ...]) -> Function:
        """Returns the function that a value is.

        Raises:
            Refused: If it is none.
        """
        try:
            out = self.read(value, args)
        except Unread as why:
            raise Refused("scores", str(why), score=0.6) from None
        dtype = str(self.ev.g.dtype(self.product))
        score = Score(tuple(self.steps), out, dtype)
        operands, results = dict(self.operands), score_results(self)
        return Function(score, operands, self.dense, self.places, self.asked, results)

    def read(self, value: int, args: tuple[Index, ...]) -> Ref:
        """Returns where a function finds a value at index arguments.

        Raises:
            Unread: If it cannot be had for each place by itself.
        """
        key = (value, args)
        if key not in self.known:
            self.known[key] = self._read(value, args)
        return self.known[key]

    def _read(self, value: int, args: tuple[Index, ...]) -> Ref:
        graph = self.ev.g
        if value == self.product:
            if args != self.at:
                raise Unread("scores of other queries or keys are read")
            return Ref(PRODUCT)
        if value in graph.constants and graph.scalar(value) is not None:
            return number(graph.scalar(value), graph.dtype(value))
        if value in self.core:
            return self._computed(value, args)
        if self.is_dense(args) or self._is_positional(value):
            before = len(self.steps), dict(self.operands), self.dense
            try:
                return self._computed(value, args)
            except (Unread, OverBudget):
                self.forget(*before)
        source = in_other_layout(self.ev, value, args)
        return self.array(value, args) if source is None else self.read(*source)

    def _is_positional(self, value: int) -> bool:
        """Whether a value is computed from positions and numbers alone."""
        known = self._positional.get(value)
        if known is None:
            self._positional[value] = False  # not asked twice on the way
            graph, node = self.ev.g, self.ev.g.node_of(value)
            if node is None:
                known = graph.scalar(value) is not None
            elif node.prim == "iota":
                known = True
            else:
                known = node.prim in LOOKS_THROUGH and all(
                    map(self._is_positional, node.ins)
                )
            self._positional[value] = known
        return known

    # --------------------------------------------------------------- equations
    def _computed(self, value: int, args: tuple[Index, ...]) -> Ref:
        """Where a function finds what an equation gives."""
        ev, node = self.ev, self.ev.g.node_of(value)
        if node is None or len(self.steps) > STEPS:
            raise Unread("the scores are not computed here")
        try:
            moved = ev.moved(node, value, args)
        except OverBudget as why:
            raise Unread(str(why)) from None
        dtype = ev.g.dtype(value)
        if moved is not None:
            source, at = moved
            return number(0, dtype) if source is None else self.read(source, at)
        if node.prim == "iota":
            return position(self, args[int(node.params["dimension"])], dtype)
        if node.prim == "gather":
            return gathered(self, node, args)
        if node.prim == "dot_general":
            return one_hot(self, node, args)
        if node.prim == "concatenate":
            return self._piece(node, args)
        if node.prim not in ELEMENTWISE and node.prim not in NAMED:
            raise Unread(f"scores go through {node.prim}, which is not elementwise")
        self.places |= self.is_dense(args) and value not in self.core
        call = inlined_call(ev.g, node)
        if call is not None:
            name, given = call
            read = tuple(self.read(i, ev.aligned(i, args)) for i in given)
            return self.add(named_step(name, read, dtype))
        ins = tuple(self.read(i, ev.aligned(i, args)) for i in node.ins)
        return self._equation(node, ins, dtype)

    def _equation(self, node: Node, ins: tuple[Ref, ...], dtype: Any) -> Ref:
        """Adds an elementwise equation."""
        if node.prim in NAMED:
            return self.add(named_step(node.prim, ins, dtype))
        if node.prim == "max" and node.scope.rules[-1:] == ("relu",):
            return self.add(named_step("relu", ins[:1], dtype))
        if node.scope.rules:
            name = node.scope.rules[-1]
            raise Unread(f"scores go through {name}, which has a rule of its own")
        made = primitive_step(node.eqn.primitive, node.params, ins, dtype)
        return self.add(made)

    def _piece(self, node: Node, args: tuple[Index, ...]) -> Ref:
        """One of several arrays that are joined, at a place that is known."""
        axis = int(node.params["dimension"])
        low, high = self.ev.alg.index_range(args[axis])
        if low != high:
            raise Unread("several arrays are joined along the keys or the queries")
        for piece in node.ins:
            size = self.ev.g.shape(piece)[axis]
            if low < size:
                at = self.ev.alg.affine(None, 1, low) if size > 1 else None
                return self.read(piece, (*args[:axis], at, *args[axis + 1 :]))
            low -= size
        raise Unread("no array is at this place")
