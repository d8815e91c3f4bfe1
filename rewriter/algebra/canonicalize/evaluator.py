"""Evaluates graph values as normal forms, from the result towards the leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rewriter.algebra.canonicalize.computed_positions import counted
from rewriter.algebra.canonicalize.congruence import congruent_atom
from rewriter.algebra.canonicalize.constant_values import Constants
from rewriter.algebra.canonicalize.constants import FOLD
from rewriter.algebra.canonicalize.dtypes import (
    is_coarse,
    is_lossless,
    kind_of,
    may_wrap,
    takes_integers,
)
from rewriter.algebra.canonicalize.exact_values import with_wraps
from rewriter.algebra.canonicalize.expansion import Expansion
from rewriter.algebra.canonicalize.intervals import held_by, interval, within
from rewriter.algebra.canonicalize.layout import Layout
from rewriter.algebra.canonicalize.loop_bodies import Loops
from rewriter.algebra.canonicalize.loops import LoopForms
from rewriter.algebra.canonicalize.modular import exact_sum
from rewriter.algebra.canonicalize.numbers import (
    cast_choice,
    from_the_end,
    in_each_case,
)
from rewriter.algebra.canonicalize.opaque import may_differ, rounds
from rewriter.algebra.canonicalize.primitives import (
    FULL,
    LAYOUT,
    MOVING,
    NeedSplit,
)
from rewriter.algebra.canonicalize.select import choose
from rewriter.algebra.normal_form import (
    FALSE,
    TRUE,
    Algebra,
    Index,
    OverBudget,
    Poly,
    TooMuchWork,
)
from rewriter.program.constant_tables import affine_constant, pattern_of
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Graph, Node


class Evaluator(Expansion, Layout, LoopForms, Constants):
    """Normal forms of graph values relative to leaves.

    Args:
        graph: The matching view.
        algebra: Where atoms are interned.
        names: Leaf values and their names.
        inside: Results of contractions and scans that are expanded, not leaves.
        usable: Whether a value is available where the replacement will stand. An
            equation with an unavailable operand is a leaf. None: all are available.
        soft_fills: Keep additive constants above -1e5 as a bias, not as a mask.
        full_sides: (result of a contraction, operand position) pairs whose operand
            is expanded beyond layout.
        expand_all: Expand every contraction (used for references).
        in_pieces: Whether a concatenation is split into pieces; None: always.
        whole_sides: Whether a float value is expanded; None: every one.
        filled_rows: Assume that sums of exponentials are positive, also masked ones.
            The caller must then handle rows without keys.
        holding: Atoms that are true for all index names, such as that a row has a key.
        core: Whether a value depends on what the op computes. All others are side
            values, see `exact_values`; None: none is.
        at_hand: Whether a value can be a leaf, since it is defined where the
            replacement will stand; None: always.
        assumed: Facts that need no proof, see `assumptions`.
        by_rows: Whether a gather of whole rows is a function of operands, and no leaf.
        masks: Whether a large number that is added may be a mask's.
        by_wraps: Whether a side value that is a position plus another integer is
            analysed by whether it wraps around; else it is a leaf if it may.
    """

    def __init__(
        self,
        graph: Graph,
        algebra: Algebra,
        *,
        names: Mapping[int, Any] | None = None,
        inside: frozenset[int] = frozenset(),
        usable: Callable[[int], bool] | None = None,
        expand_all: bool = False,
        soft_fills: bool = False,
        full_sides: frozenset[tuple[int, int]] = frozenset(),
        in_pieces: Callable[[int], bool] | None = None,
        whole_sides: Callable[[int], bool] | None = None,
        filled_rows: bool = False,
        holding: frozenset[int] = frozenset(),
        core: Callable[[int], bool] | None = None,
        at_hand: Callable[[int], bool] | None = None,
        assumed: frozenset[str] = frozenset(),
        by_rows: bool = False,
        by_wraps: bool = True,
        picked_fills: bool = False,
        masks: bool = True,
    ):
        self.g, self.alg = graph, algebra
        self.names = dict(names or {})
        self.given_names = frozenset(self.names)
        self.inside, self.usable, self.expand_all = inside, usable, expand_all
        self.soft_fills, self.full_sides = soft_fills, full_sides
        self.in_pieces, self.whole_sides = in_pieces, whole_sides
        self.filled_rows, self.holding = filled_rows, holding
        self.core, self.at_hand, self.assumed = core, at_hand, assumed
        self.by_rows, self.by_wraps, self.masks = by_rows, by_wraps, masks
        self.picked_fills = picked_fills
        self.memo: dict[Any, Any] = {}
        self.expands: dict[int, bool] = {}
        self.fills: set[float] = set()
        self.notes: set[str] = set()
        self.unproved: dict[str, str] = {}
        self.assumes = True
        self.given: dict[int, Callable[[tuple[Index, ...]], Any]] = {}
        self.leaf_values: set[int] = set()
        self.visits = 0
        self.private = False
        self.ideal = False
        self.congruent = False
        self.softened: set[int] = set()
        self.outer: frozenset[int] = frozenset()
        self.loops = Loops()

    # ------------------------------------------------------------- entry
    def indices(self, value: int) -> tuple[Index, ...]:
        """New indices, one per axis of a value."""
        return tuple(self.alg.new_index(n) for n in self.g.shape(value))

    def poly(self, value: int, args: tuple[Index, ...], mode: str = FULL) -> Poly:
        """The form of a value at index arguments; booleans count as 0 and 1."""
        if self.g.dtype(value) == bool:
            return self.alg.of_bool(self.flag(value, args, mode))
        key = (value, args, mode)
        if key not in self.memo:
            self._count()
            try:
                self.memo[key] = self._poly(value, args, mode)
            except NeedSplit:
                if self._whole(value):
                    raise
                self.memo[key] = self.alg.of_atom(self.leaf(value, args))
            except TooMuchWork:
                raise
            except OverBudget:  # no rule: the value stays opaque
                self.memo[key] = self.alg.of_atom(self.leaf(value, args))
        return self.memo[key]

    def flag(self, value: int, args: tuple[Index, ...], mode: str = FULL) -> int:
        """The boolean function of a boolean value at index arguments."""
        key = (value, args, mode)
        if key not in self.memo:
            self._count()
            try:
                self.memo[key] = self._flag(value, args, mode)
            except NeedSplit:
                if self._whole(value):
                    raise
                self.memo[key] = self.alg.literal(self.leaf(value, args))
            except TooMuchWork:
                raise
            except OverBudget:
                self.memo[key] = self.alg.literal(self.leaf(value, args))
            if mode == FULL and not self.private:
                self._note_own(value, args, self.memo[key])
        return self.memo[key]

    def _note_own(self, value: int, args: tuple[Index, ...], flag: int) -> None:
        """Remembers the program's own boolean for a boolean function."""
        if flag in (TRUE, FALSE) or (self.at_hand and not self.at_hand(value)):
            return
        known = self.alg.own.setdefault(flag, [])
        if len(known) < OWN_NAMES and (value, args) not in known:
            known.append((value, args))

    def is_side(self, value: int) -> bool:
        """Whether a value feeds an op and does not depend on what the op computes."""
        return self.core is not None and not self.core(value)

    def assume(self, name: str, text: str) -> None:
        """Notes an assumption, and whether the user allows it.

        Raises:
            OverBudget: If it is not allowed, within `proving`.
        """
        if name in self.assumed:
            self.notes.add(text)
        elif not self.assumes:
            raise OverBudget(text)
        else:
            self.unproved.setdefault(name, text)

    def _whole(self, value: int) -> bool:
        """Whether readers must handle an index over several pieces of a value."""
        node = self.g.node_of(value)
        joins = node is not None and node.prim in ("concatenate", "pad", "stack")
        return not joins or self.in_pieces is None or self.in_pieces(value)

    def _count(self) -> None:
        self.visits += 1
        if self.visits > 3000:
            raise TooMuchWork("the region is too large")

    # ------------------------------------------------------------- leaves
    def leaf(self, value: int, args: tuple[Index, ...]) -> int:
        """The atom of an opaque value."""
        if value not in self.names:
            known = congruent_atom(self, value, args) if self.congruent else None
            if known is not None:
                return known
            self.names[value] = ("own", value) if self.private else self.known_as(value)
        self.leaf_values.add(value)
        name = self.names[value]
        if not self.private and name not in self.alg.leaf_range:
            self.alg.leaf_range[name] = interval(self.g, value)
            node = self.g.node_of(value)
            if kind_of(self.g.dtype(value)) == "i":
                self.alg.integers.add(name)
            if node is not None and node.prim in ("exp", "exp2"):
                self.alg.exponentials.add(name)
        return self.alg.atom("leaf", name, (*args, *self.varies(value)))

    # ------------------------------------------------------------- numbers
    def _poly(self, value: int, args: tuple[Index, ...], mode: str) -> Poly:
        if value in self.given:
            return self.given[value](args)
        const = self._constant(value)
        if const is not None:
            return const
        if value not in self.names and (mode == LAYOUT or not self.g.shape(value)):
            number = self.number(value)
            if number is not None:
                return self._number_poly(number, self.g.dtype(value))
        if value in self.loops.steps or value in self.loops.carries:
            known = self.before_step(value, args, mode)
            return self.alg.of_atom(self.leaf(value, args)) if known is None else known
        if mode == FULL and (found := counted(self.g, value)) is not None:
            return self._affine(found, args)
        self.name_recomputed(value)
        node = self.expandable(value, mode)
        if node is None:
            if value in self.g.constants and mode == FULL:
                known = self._of_array("affine", value, affine_constant)
                if known is not None:
                    return self._affine(known, args)
                chosen = self._two_values(value, args)
                if chosen is not None:
                    return chosen
            return self.alg.of_atom(self.leaf(value, args))
        prim = node.prim
        moved = self.moved(node, value, args)
        if moved is not None:
            source, at = moved
            return {} if source is None else self.poly(source, at, mode)
        if prim in LOOPS:
            return self.scanned(node, value, args, mode)
        if prim == "cond":
            return self.chosen(node, value, args)
        return self._by_rule(node, value, args, mode)

    def _by_rule(self, node: Node, value: int, args, mode: str) -> Poly:
        """The form by the rule of a primitive; a leaf where the result may differ."""
        rule = RULES.get(node.prim)
        if node.prim in ("convert_element_type", "stop_gradient"):
            form = self._cast(node, value, args, mode)
        elif rule is None:
            return self.alg.of_atom(self.leaf(value, args))
        else:
            known = self._computed(node, value, args, mode)
            if known is not None:
                return known
            form = rule(self, node, args, mode)
        sums = mode == FULL and node.prim in ("add", "sub") and not self.ideal
        if sums and self.is_side(value):
            whole = exact_sum(self, value, args)
            if whole is not None:
                return whole
        if sums and self.by_wraps and self.is_side(value):
            wrapped = with_wraps(self.alg, form, self.g.dtype(value))
            if wrapped is not None:
                return wrapped
        if may_differ(self, node, value, form, mode) or (
            mode == FULL and rounds(self, node, value, args, form)
        ):
            return self.alg.of_atom(self.leaf(value, args))
        return form

    def _computed(self, node: Node, value: int, args, mode: str) -> Poly | None:
        """A side value that is one of a few numbers, each computed in its dtype.

        Also a position from the end, `where(i < 0, i + n, i)`, which never wraps.
        """
        if mode != FULL:
            return None
        position = from_the_end(self.g, node, self.number)
        if position is not None:
            place, size = position
            p = self.poly(place, self.aligned(place, args))
            inside = self.alg.compare("ge", p, True)
            return choose(self.alg, inside, p, self.alg.add(p, self.alg.const(size)))
        if (
            not self.is_side(value)
            or node.prim not in FOLD
            or kind_of(self.g.dtype(value)) not in "if"
        ):
            return None
        forms = self.operands(node, args, mode)
        return in_each_case(self.alg, self.g, node, forms)

    def operands(self, node: Node, args: tuple[Index, ...], mode: str) -> list[Poly]:
        """Forms of the operands of an elementwise equation."""
        return [self.poly(i, self.aligned(i, args), mode) for i in node.ins]

    def aligned(self, value: int, args: tuple[Index, ...]) -> tuple[Index, ...]:
        """Arguments of an operand that may be a scalar or have axes of size one."""
        shape = self.g.shape(value)
        if len(shape) != len(args):
            return ()
        if 1 not in shape:
            return args
        return tuple(None if n == 1 else a for a, n in zip(args, shape, strict=True))

    def _cast(self, node: Node, value: int, args, mode: str) -> Poly:
        source = node.ins[0]
        if node.prim == "stop_gradient":
            if self.constant_like(source):
                return self.poly(source, args, mode)
            return self.alg.of_atom(self.leaf(value, args))
        old, new = self.g.dtype(source), self.g.dtype(value)
        if old == bool:
            return self.alg.of_bool(self.flag(source, args, mode))
        if self.is_side(value):
            chosen = cast_choice(self.alg, self.poly(source, args, mode), old, new)
            if chosen is not None:
                return chosen
        kinds = (kind_of(old), kind_of(new))
        if kinds == ("f", "i"):
            p = self.poly(source, args, mode)
            c = self.alg.as_constant(p)
            if c is not None and math.isfinite(c):
                return self.alg.const(float(int(c)))
            if takes_integers(self.alg, p):
                return p
            return self.alg.of_atom(self.alg.atom("fn", "trunc", self.alg.freeze(p)))
        if kinds == ("i", "i") and may_wrap(old, new):
            p = self.poly(source, args, mode)
            known = self.alg.bounds(p), interval(self.g, source)
            if not any(within(bounds, held_by(new)) for bounds in known):
                return self.alg.of_atom(self.leaf(value, args))
            return p
        if kinds == ("f", "f") and not is_lossless(old, new):
            if is_coarse(new):
                return self.alg.of_atom(self.leaf(value, args))
            p = self.poly(source, args, mode)
            if self._was_narrow(source, new):
                return p
            if self._is_operand(p, value):
                return self.alg.of_atom(self.leaf(value, args))
            self.notes.add(f"rounding to {np.dtype(new).name} moved")
            return p
        return self.poly(source, args, mode)

    def _was_narrow(self, value: int, dtype: Any) -> bool:
        """Whether a value was widened from numbers that a dtype has, all of them."""
        while (node := self.g.node_of(value)) is not None:
            if node.prim != "convert_element_type":
                return False
            old = self.g.dtype(node.ins[0])
            if not is_lossless(old, self.g.dtype(value)):
                return False
            if is_lossless(old, dtype):
                return True
            value = node.ins[0]
        return False

    def _is_operand(self, p: Poly, value: int) -> bool:
        """Whether a form is a leaf of the region, of which a value is a rounded copy.

        One that is made in a step of a loop does not count, and neither does one that
        is repeated before: each site rounds such numbers as it reads them.
        """
        if self.expand_all or self.varies(value) or len(p) != 1:
            return False
        if self._is_repeated(value):
            return False
        (((flag, mono), c),) = p.items()
        leaf = flag == TRUE and c == 1 and len(mono) == 1 and mono[0][1] == 1
        return leaf and self.alg.kind(mono[0][0]) == "leaf"

    def _is_repeated(self, value: int) -> bool:
        """Whether layout alone makes a value of an array of fewer numbers."""
        size = math.prod(self.g.shape(value))
        while (node := self.g.node_of(value)) is not None:
            if node.prim not in MOVING | {"gather", "convert_element_type"}:
                return False
            value = node.ins[0]
            below = math.prod(self.g.shape(value))
            known = isinstance(below, int) and isinstance(size, int)
            if below < size if known else below != size:  # sizes may be symbols
                return True
        return False

    # ------------------------------------------------------------- booleans
    def _flag(self, value: int, args: tuple[Index, ...], mode: str) -> int:
        if value in self.given:
            return self.given[value](args)
        if value in self.g.constants:
            pattern = self._of_array("pattern", value, pattern_of)
            if pattern is not None:
                return self._patterned(pattern, args)
            return self.alg.literal(self.leaf(value, args))
        if value in self.loops.steps:
            whole, step = self.loops.steps[value]
            return self.flag(whole, (step, *args), mode)
        node = self.expandable(value, mode)
        if node is None:
            return self.alg.literal(self.leaf(value, args))
        moved = self.moved(node, value, args)
        if moved is not None:
            return self.flag(moved[0], moved[1], mode)
        pattern = self.g.known("folded", value, lambda: self._folded(node))
        if pattern is not None:
            return self._patterned(pattern, args)
        rule = FLAGS.get(node.prim)
        if rule is None:
            return self.alg.literal(self.leaf(value, args))
        return rule(self, node, args, mode)


OWN_NAMES = 4
"""The most values of the program remembered for one boolean function."""

RULES: dict[str, Callable[[Evaluator, Node, tuple[Index, ...], str], Poly]] = {}
FLAGS: dict[str, Callable[[Evaluator, Node, tuple[Index, ...], str], int]] = {}


def rule(*names: str, table: dict = RULES):
    """Registers the rule of some primitives, for numbers or for booleans."""

    def register(f):
        for name in names:
            table[name] = f
        return f

    return register
