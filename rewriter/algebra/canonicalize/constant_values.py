"""Values that are known: numbers, constant arrays, and masks of a pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rewriter.algebra.canonicalize.constants import (
    FOLD,
    FOLD_FLAGS,
    cast,
    folded,
    in_dtype,
)
from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.primitives import (
    KNOWN_CONSTANTS,
    LAYOUT_PRIMITIVES,
    TRANSPARENT,
)
from rewriter.algebra.canonicalize.select import choose
from rewriter.algebra.normal_form import (
    EXACT,
    FALSE,
    TRUE,
    Index,
    OverBudget,
    Poly,
)
from rewriter.program.constant_tables import one_number, pattern_of, two_numbers
from rewriter.program.graph import Node

SAME_NUMBER = (
    TRANSPARENT | LAYOUT_PRIMITIVES | {"convert_element_type", "stop_gradient"}
)
"""Primitives that keep an array of one number at every position."""


class Constants:
    """Forms of values that depend on no input.

    A class with it has the graph ``g``, the algebra ``alg``, and the ``notes``.
    """

    def number(self, value: int) -> float | None:
        """The number that a value holds everywhere, folded through scalar chains."""
        found = self.typed_number(value)
        if found is None or kind_of(found.dtype) == "c":
            return None
        if kind_of(found.dtype) == "i" and abs(int(found)) > EXACT:
            return None
        return float(found)

    def typed_number(self, value: int) -> np.generic | None:
        """The number that a value holds at every position, computed in its dtype.

        None if there is no such number, or if the machine's result is unknown.
        """
        return self.g.known("number", value, lambda: self._typed_number(value))

    def _typed_number(self, value: int, depth: int = 8) -> np.generic | None:
        dtype = self.g.dtype(value)
        const = self.g.constants.get(value)
        if const is not None:
            return None if np.shape(const) else in_dtype(const, dtype)
        node = self.g.node_of(value)
        if node is None or depth == 0:
            return None
        if node.prim in SAME_NUMBER and len(node.ins) == 1:
            inner = self._typed_number(node.ins[0], depth - 1)
            return None if inner is None else cast(inner, dtype)
        if node.prim not in FOLD:
            return None
        values = []
        for i in node.ins:  # most are no numbers: the first that is none is enough
            values.append(self._typed_number(i, depth - 1))
            if values[-1] is None:
                return None
        return folded(node.prim, values, node.params, dtype)

    def _constant(self, value: int) -> Poly | None:
        const, dtype = self.g.constants.get(value), self.g.dtype(value)
        if const is None or kind_of(dtype) == "c":
            return None
        if np.shape(const) == ():
            exact = in_dtype(const, dtype)
            if kind_of(dtype) == "i" and abs(int(exact)) > EXACT:
                return None
            return self._number_poly(float(exact), dtype)
        number = self._of_array("one number", value, one_number)
        if number is None:
            return None
        return self._number_poly(number, dtype)

    def _of_array(self, what: str, value: int, find: Callable[..., Any]) -> Any:
        """What a function finds in a constant array, which it looks at once.

        None for complex numbers, of which forms know nothing.
        """
        array = self.g.constants[value]
        if kind_of(self.g.dtype(value)) == "c":
            return None
        return self.g.known(what, value, lambda: find(np.asarray(array)))

    def _number_poly(self, c: float, dtype: Any) -> Poly:
        if not math.isnan(c) and str(dtype) in ("bfloat16", "float16"):
            for known in KNOWN_CONSTANTS:
                for sign in (1.0, -1.0):
                    if float(np.asarray(sign * known, dtype)) == c:
                        self.notes.add(f"literal {c:.6g} stands for {sign * known:.6g}")
                        return self.alg.const(sign * known)
        if math.isnan(c):
            raise OverBudget("a NaN constant")
        return self.alg.const(c)

    def _two_values(self, value: int, args: tuple[Index, ...]) -> Poly | None:
        """A constant array of two numbers, such as a mask with its fill."""
        found = self._of_array("two numbers", value, two_numbers)
        if found is None:
            return None
        lo, hi = (self.alg.const(v) for v in found[:2])
        return choose(self.alg, self._patterned(found[2], args), hi, lo)

    def _affine(self, known: tuple[float, tuple[float, ...]], args) -> Poly:
        c0, slopes = known
        out = self.alg.const(c0)
        for slope, a in zip(slopes, args, strict=True):
            if slope:
                out = self.alg.add(out, self.alg.scale(self.alg.iota(a), slope))
        return out

    def constant_like(self, value: int, depth: int = 12) -> bool:
        """Whether a value depends on no input."""
        if value in self.g.constants:
            return True
        node = self.g.node_of(value)
        if node is None or depth == 0:
            return False
        return all(self.constant_like(i, depth - 1) for i in node.ins)

    def _folded(self, node: Node) -> Any:
        """The pattern of a computed predicate of constant arrays, or None."""
        fold = FOLD_FLAGS.get(node.prim)
        arrays = [self.g.constants.get(i) for i in node.ins]
        if fold is None or any(a is None for a in arrays):
            return None
        shape = self.g.shape(node.outs[0])
        if math.prod(shape) > 1 << 27 or not shape:
            return None
        return pattern_of(np.broadcast_to(fold(*map(np.asarray, arrays)), shape))

    def _patterned(self, pattern: Any, args: tuple[Index, ...]) -> int:
        """The boolean function of a constant mask of some pattern."""
        if isinstance(pattern, bool):
            return TRUE if pattern else FALSE
        rows, cols, lower, upper = pattern
        diff = self.alg.add(
            self.alg.iota(args[cols]) if cols is not None else {},
            self.alg.iota(args[rows]) if rows is not None else {},
            -1.0,
        )
        out = TRUE
        if upper is not None:  # col - row <= upper
            p = self.alg.add(self.alg.const(upper), diff, -1.0)
            out = self.alg.both(out, self.alg.compare("ge", p, True))
        if lower is not None:
            p = self.alg.add(diff, self.alg.const(-lower))
            out = self.alg.both(out, self.alg.compare("ge", p, True))
        return out
