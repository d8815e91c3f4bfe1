"""Reads a function of scores off a program: its equations, and what they read.

Looks like elementwise equations between the products of queries and keys and the
           softmax, with layout, positions, and numbers of small tables among them.
Must hold  each number of the result is computed from the product at its own place, its
           position, and arrays that do not depend on the products. What differs by both
           query and key is computed from positions, or is an array of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize import (
    LAYOUT_PRIMITIVES,
    TRANSPARENT,
    interval,
    kind_of,
    within,
)
from rewriter.algebra.normal_form import TRUE, Index, OverBudget
from rewriter.find.finder import RegionEvaluator
from rewriter.find.inlined_rules import inlined_call
from rewriter.find.reading import Operand, Refused
from rewriter.ops.score import (
    BESIDE,
    COLUMN,
    ELEMENTWISE,
    NAMED,
    PRODUCT,
    ROW,
    Ref,
    Score,
    Step,
    cast_step,
    lookup_step,
    named_step,
    number,
    position_step,
    primitive_step,
)
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.score_place import in_other_layout
from rewriter.patterns.attention.score_results import score_results
from rewriter.program.graph import Node

ARRAYS, TABLES = 8, 4
"""How many arrays and tables the op takes."""

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


class Unread(Exception):
    """A value that is no part of a function; it may still be an array of its own."""


@dataclass(eq=False)
class ScoreReader:
    """Reads the function that gives a value of the program.

    Attributes:
        ev: What evaluates the region.
        axes: The op's axes.
        product: The products of queries and keys.
        at: Their index arguments.
        core: All values that are computed from them.
        known: Where the function finds what was read: pairs of a value and its index
            arguments. A value in another layout comes after its source.
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

    # ------------------------------------------------------------------ values
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
        if self._is_dense(args) or self._is_positional(value):
            before = len(self.steps), dict(self.operands), self.dense
            try:
                return self._computed(value, args)
            except (Unread, OverBudget):
                self._forget(*before)
        source = in_other_layout(self.ev, value, args)
        return self._array(value, args) if source is None else self.read(*source)

    def _forget(self, count: int, operands: dict[str, Operand], dense: bool) -> None:
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

    def _ids(self, args: tuple[Index, ...]) -> frozenset[int]:
        return frozenset().union(*map(self.ev.alg.index_ids, args))

    def _is_dense(self, args: tuple[Index, ...]) -> bool:
        """Whether a value has a number for each query and key."""
        ids = self._ids(args)
        return bool(ids & {*self.axes.t}) and bool(ids & {*self.axes.s})

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
            return self._position(args[int(node.params["dimension"])], dtype)
        if node.prim == "gather":
            return self._gathered(node, args)
        if node.prim == "dot_general":
            return self._one_hot(node, args)
        if node.prim == "concatenate":
            return self._piece(node, args)
        if node.prim not in ELEMENTWISE and node.prim not in NAMED:
            raise Unread(f"scores go through {node.prim}, which is not elementwise")
        self.places |= self._is_dense(args) and value not in self.core
        call = inlined_call(ev.g, node)
        if call is not None:
            name, given = call
            read = tuple(self.read(i, ev.aligned(i, args)) for i in given)
            return self._add(named_step(name, read, dtype))
        ins = tuple(self.read(i, ev.aligned(i, args)) for i in node.ins)
        return self._equation(node, ins, dtype)

    def _equation(self, node: Node, ins: tuple[Ref, ...], dtype: Any) -> Ref:
        """Adds an elementwise equation."""
        if node.prim in NAMED:
            return self._add(named_step(node.prim, ins, dtype))
        if node.prim == "max" and node.scope.rules[-1:] == ("relu",):
            return self._add(named_step("relu", ins[:1], dtype))
        if node.scope.rules:
            name = node.scope.rules[-1]
            raise Unread(f"scores go through {name}, which has a rule of its own")
        made = primitive_step(node.eqn.primitive, node.params, ins, dtype)
        return self._add(made)

    def _add(self, step: Step) -> Ref:
        """Adds an equation, unless it is there, and returns its result."""
        text = str(step)
        if text not in self._steps:
            self.steps.append(step)
            self._steps[text] = Ref("step", len(self.steps) - 1)
        return self._steps[text]

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

    # --------------------------------------------------------------- positions
    def _position(self, arg: Index, dtype: Any) -> Ref:
        """The number of a query or key, or a digit of it."""
        alg = self.ev.alg
        ids = alg.index_ids(arg)
        if ids - {*self.axes.t, *self.axes.s}:
            form = alg.iota(arg)
            return self._operand(("iota", arg), form, ids, dtype)
        total: Ref | None = None
        for (flag, mono), c in alg.iota(arg).items():
            if flag != TRUE or len(mono) > 1 or c != int(c):
                raise Unread("a position that is no sum of digits")
            term = number(1, "int32") if not mono else self._digit(mono[0][0])
            if c != 1:
                term = self._at("multiply", term, int(c))
            total = term if total is None else self._at("add", total, term)
        total = number(0, "int32") if total is None else total
        if np.dtype(dtype) == np.int32:
            return total
        return self._add(cast_step(total, dtype))

    def _at(self, name: str, *ins: Ref | int) -> Ref:
        """Adds an equation of positions or places."""
        refs = (number(x, "int32") if isinstance(x, int) else x for x in ins)
        return self._add(position_step(name, *refs))

    def _digit(self, atom: int) -> Ref:
        """A digit of a query's or key's number."""
        arg = self.ev.alg.defs[atom][1]
        ways: list[tuple[str, int]] = []
        while isinstance(arg, tuple) and arg[0] in ("div", "mod"):
            ways.append((arg[0], arg[2]))
            arg = arg[1]
        if not isinstance(arg, int):
            raise Unread("a position that is no digit")
        ref = self._number_of(arg)
        for way, n in reversed(ways):
            ref = self._at("quotient" if way == "div" else "remainder", ref, n)
        return ref

    def _number_of(self, index: int) -> Ref:
        """The value of one index of the queries or keys."""
        sizes = self.ev.alg.sizes
        for kind, group in ((ROW, self.axes.t), (COLUMN, self.axes.s)):
            if index in group:
                k, ref = group.index(index), Ref(kind)
                below = math.prod(sizes[i] for i in group[k + 1 :])
                if below != 1:
                    ref = self._at("quotient", ref, below)
                return ref if k == 0 else self._at("remainder", ref, sizes[index])
        raise Unread("a position of another axis")

    # ------------------------------------------------------------------ arrays
    def _array(self, value: int, args: tuple[Index, ...]) -> Ref:
        """An array of the program, which is an operand."""
        ev, alg = self.ev, self.ev.alg
        if not ev.at_hand(value):
            raise Unread("an array that the scores read is not at hand")
        form = alg.of_atom(ev.leaf(value, args))
        self.dense |= self._is_dense(args) and kind_of(ev.g.dtype(value)) == "f"
        return self._operand((value, args), form, self._ids(args), ev.g.dtype(value))

    def _operand(self, key: Any, form: Any, ids: frozenset[int], dtype: Any) -> Ref:
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

    def _table(
        self, value: int, args: tuple[Index, ...], places: tuple[int, ...]
    ) -> Ref:
        """A table: an array with axes that are read by index."""
        ev, alg = self.ev, self.ev.alg
        if not ev.at_hand(value) or value in self.core:
            raise Unread("scores are picked by an index")
        if self._ids(args) - {*self.axes.b, *self.axes.n, *places}:
            raise Unread("a table differs by query or key")
        name = f"table_{sum(n.startswith('table') for n in self.operands)}"
        if name == f"table_{TABLES}":
            raise Refused("arrays", f"the scores read more than {TABLES} tables")
        form = alg.of_atom(ev.leaf(value, args))
        groups = (self.axes.b, self.axes.n, places)
        self.operands[name] = Operand(((form, groups),), False)
        self.places = True
        return Ref("array", name)

    def _gathered(self, node: Node, args: tuple[Index, ...]) -> Ref:
        """A number of a table, at an index that is computed for each place."""
        ev, alg = self.ev, self.ev.alg
        numbers = node.params["dimension_numbers"]
        table, indices = node.ins
        self.asked |= any(n.prim == "scatter-add" for n in ev.g.users(indices))
        shape, sizes = ev.g.shape(table), node.params["slice_sizes"]
        rows = tuple(a for k, a in enumerate(args) if k not in numbers.offset_dims)
        window = iter(args[k] for k in numbers.offset_dims)
        batch, gone = numbers.operand_batching_dims, numbers.collapsed_slice_dims
        at: list[Index] = [
            None if d in (*batch, *gone) else next(window) for d in range(len(shape))
        ]
        for d, k in zip(batch, numbers.start_indices_batching_dims, strict=True):
            at[d] = rows[k]
        picked: list[tuple[int, Ref]] = []
        for column, d in enumerate(numbers.start_index_map):
            if sizes[d] != 1:
                raise Unread("several numbers of a table are read at once")
            which = alg.affine(None, 1, column)
            index = self.read(indices, (*rows, which))
            picked.append((d, index))
        if any(sizes[d] != shape[d] for d in range(len(shape)) if d not in
               (*batch, *numbers.start_index_map)):  # fmt: skip
            raise Unread("a part of a table is read")
        fills = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
        fill = node.params["fill_value"] if fills else None
        dtype = ev.g.dtype(node.outs[0])
        if fills and fill is None:
            if kind_of(dtype) != "f":
                raise Unread("a table of integers is read outside of it")
            fill = float("nan")
        if node.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS:
            sizes = [shape[d] for d, _ in picked]
            if not within(interval(ev.g, indices), (0, min(sizes) - 1)):
                fill = BESIDE
        return self._lookup(table, at, picked, dtype, fill)

    def _lookup(
        self,
        table: int,
        at: list[Index],
        picked: Sequence[tuple[int, Ref]],
        dtype: Any,
        fill: Any,
    ) -> Ref:
        """A number of a table at some indices; outside of it the fill, or the nearest.

        Args:
            table: The table.
            at: Its other arguments.
            picked: Its axes that are read by index, and the indices.
            dtype: The table's dtype.
            fill: What is outside; None for the nearest number, `BESIDE` for the
                nearest without a gradient.
        """
        alg, shape = self.ev.alg, self.ev.g.shape(table)
        places: list[int] = []
        whole: Ref | None = None
        inside: Ref | None = None
        for d, index in sorted(picked, key=lambda pair: pair[0]):
            index = self._as_int32(index)
            place = alg.new_index(shape[d])
            at[d] = place
            places.append(place)
            if fill is not None:
                good = self._at("inside", index, shape[d])
                inside = good if inside is None else self._at("and", inside, good)
            near = self._at("clip", index, shape[d] - 1)
            if whole is not None:
                near = self._at("add", self._at("multiply", whole, shape[d]), near)
            whole = near
        assert whole is not None
        if inside is not None:
            which = "or_beside" if fill == BESIDE else "or_none"
            whole = self._at(which, inside, whole)
        ref = self._table(table, tuple(at), tuple(places))
        return self._add(lookup_step(ref, whole, dtype, fill))

    def _as_int32(self, ref: Ref) -> Ref:
        dtype = self.steps[ref.name].dtype if ref.kind == "step" else ""
        return ref if dtype == "int32" else self._add(cast_step(ref, "int32"))

    def _one_hot(self, node: Node, args: tuple[Index, ...]) -> Ref:
        """A number of a table, by a product with a row that is 1 at its index."""
        ev, alg = self.ev, self.ev.alg
        (left, right), (batch_l, batch_r) = node.params["dimension_numbers"]
        if len(left) != 1:
            raise Unread("scores go through a product that is not elementwise")
        place = alg.new_index(ev.g.shape(node.ins[0])[left[0]])
        lead = args[: len(batch_l)]
        sides, k = [], len(batch_l)
        for value, summed, batch in zip(
            node.ins, (left[0], right[0]), (batch_l, batch_r), strict=True
        ):
            at: list[Index] = []
            for d in range(len(ev.g.shape(value))):
                if d == summed:
                    at.append(place)
                elif d in batch:
                    at.append(lead[list(batch).index(d)])
                else:
                    at.append(args[k])
                    k += 1
            sides.append((value, at, summed))
        for (hot, at, _), (table, there, axis) in (sides, sides[::-1]):
            index = self._index_of(hot, tuple(at), place)
            if index is not None:
                products = [n for n in ev.g.users(hot) if n.prim == "dot_general"]
                self.asked |= len(products) > 1
                dtype = ev.g.dtype(node.outs[0])
                found = self._lookup(table, there, [(axis, index)], dtype, 0)
                if ev.g.dtype(table) == dtype:
                    return found
                raise Unread("a table is widened by a product")
        raise Unread("scores go through a product that is not elementwise")

    def _index_of(self, hot: int, at: tuple[Index, ...], place: int) -> Ref | None:
        """The index at which a row of zeros is 1; None if it is no such row."""
        ev = self.ev
        for _ in range(8):
            node = ev.g.node_of(hot)
            if node is None:
                return None
            moved = ev.moved(node, hot, at)
            if moved is not None and moved[0] is not None:
                hot, at = moved
            elif node.prim == "convert_element_type":
                hot, at = node.ins[0], ev.aligned(node.ins[0], at)
            elif node.prim == "eq":
                pairs = [(i, ev.aligned(i, at)) for i in node.ins]
                for (one, a), (other, b) in (pairs, pairs[::-1]):
                    apart = place in self._ids(b) and place not in self._ids(a)
                    if apart and ev.poly(other, b) == ev.alg.iota(place):
                        return self.read(one, a)
                return None
            else:
                return None
        return None
