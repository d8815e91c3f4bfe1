"""Decides which values an evaluator expands, and which stay leaves of its forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rewriter.algebra.canonicalize.complex_numbers import has_complex_numbers
from rewriter.algebra.canonicalize.dtypes import (
    is_lossless,
    is_stored,
    kind_of,
)
from rewriter.algebra.canonicalize.layout import is_slice
from rewriter.algebra.canonicalize.primitives import (
    EXTREMES,
    FULL,
    LAYOUT,
    LAYOUT_PRIMITIVES,
    LOCAL,
    MOVING,
    STRUCTURAL,
    TRANSPARENT,
    adds_zero,
    is_local,
)
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Graph, Node
from rewriter.program.stacked_slices import sliced

MODERATE = 2.0**-20, 2.0**20
"""Between them, a factor moves from an operand of a contraction to its result."""


class Expansion:
    """The part of an `Evaluator` that decides how far it follows a program."""

    g: Graph
    inside: frozenset[int]
    usable: Callable[[int], bool] | None
    whole_sides: Callable[[int], bool] | None
    full_sides: frozenset[tuple[int, int]]
    expand_all: bool

    def expandable(self, value: int, mode: str) -> Node | None:
        """The equation of a value that is expanded; None if the value is a leaf."""
        if value in self.names and value not in self.g.constants:
            return None
        node = self.g.node_of(value)
        if node is None or has_complex_numbers(self.g, node, value):
            return None
        cuts = node.prim == "scan" and sliced(self.g, value, MOVING) is not None
        if not cuts:
            if self._counts_steps(node, value, mode):
                return node
            if not self._is_followed(node, value, mode):
                return None
            if not self._may_expand_side(value, mode):
                return None
        return node if self.has_operands(node) else None

    def operand_mode(self, node: Node, k: int, mode: str) -> str:
        """How far an operand of a contraction is expanded."""
        if self.expand_all or is_local(node):
            return mode
        return FULL if (node.outs[0], k) in self.full_sides else LAYOUT

    def has_operands(self, node: Node) -> bool:
        """Whether what an equation reads is available where the replacement stands."""
        return not self.usable or all(self._is_available(i) for i in node.ins)

    def _is_followed(self, node: Node, value: int, mode: str) -> bool:
        """Whether an equation is one of those that are expanded in a mode."""
        prim = node.prim
        required = self.expand_all or value in self.inside
        if prim == "gather" and is_slice(node):
            return bool(self.varies(node.ins[1]))
        if prim == "gather":
            return required or (mode == FULL and self.g.dtype(value) == bool)
        if mode == LAYOUT:
            if prim in LAYOUT_PRIMITIVES or prim in TRANSPARENT:
                return True
            return prim in SCALING and self._only_scales(node)
        if prim in STRUCTURAL or prim in ("scatter", "scatter-add"):
            return required
        if prim in LOOPS:
            return value in self.inside
        if prim in ("cond", "dynamic_update_slice"):
            return mode == FULL and value in self.inside
        if prim == "dot_general":
            return required or is_local(node)
        return prim in LOCAL - EXTREMES

    def _counts_steps(self, node: Node, value: int, mode: str) -> bool:
        """Whether a loop outside of the region gives integers, such as positions."""
        if node.prim not in LOOPS or mode != FULL or value in self.inside:
            return False
        return kind_of(self.g.dtype(value)) == "i"

    def _may_expand_side(self, value: int, mode: str) -> bool:
        """Whether a float value may be expanded, and not only its layout."""
        if mode != FULL or self.whole_sides is None:
            return True
        return (
            kind_of(self.g.dtype(value)) != "f"
            or self.whole_sides(value)
            or self.number(value) is not None
        )

    def _is_available(self, value: int) -> bool:
        """Whether a value is available, or expands into available values."""
        if self.usable(value) or self.varies(value):
            return True
        if value not in self.expands:
            node = self.g.node_of(value)
            self.expands[value] = (
                node is not None
                and (value in self.inside or is_local(node))
                and all(self._is_available(i) for i in node.ins)
            )
        return self.expands[value]

    def _only_scales(self, node: Node) -> bool:
        """A lossless cast, a multiplication by a constant number, or zero added."""
        if node.prim == "convert_element_type":
            return is_lossless(self.g.dtype(node.ins[0]), self.g.dtype(node.outs[0]))
        if kind_of(self.g.dtype(node.outs[0])) != "f":
            return False
        if node.prim == "neg":
            return True
        if node.prim in ("add", "sub"):
            return adds_zero(node, self.number)
        one, other = (self.number(i) for i in node.ins)
        side = 0 if other is not None or node.prim == "div" else 1
        known = (other, one)[side]
        if not self.expand_all and self._rounds_stored(node, side):
            return False
        # A factor far from one may take the product out of the dtype's range.
        return known is not None and MODERATE[0] <= abs(known) <= MODERATE[1]

    def _rounds_stored(self, node: Node, side: int) -> bool:
        """Whether a product in 16 bits is of stored numbers of few bits.

        Its rounding says which numbers the matrix has.
        """
        if np.dtype(self.g.dtype(node.outs[0])).itemsize > 2:
            return False
        value = node.ins[side]
        while not is_stored(self.g.dtype(value)):
            below = self.g.node_of(value)
            if below is None or below.prim not in MOVING | {"convert_element_type"}:
                return False
            value = below.ins[0]
        return True


SCALING = frozenset({"convert_element_type", "mul", "div", "neg", "add", "sub"})
"""Primitives whose result may be an operand times a number."""
