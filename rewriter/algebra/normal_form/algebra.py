"""The algebra of one analysis: all of its atoms, boolean functions and indices."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.normal_form.boolean import BooleanFunctions
from rewriter.algebra.normal_form.forms import (
    SAME,
    SNAP,
    SNAP_64,
    TRUE,
    Index,
    Monomial,
    Poly,
    is_frozen,
)
from rewriter.algebra.normal_form.fractions import Fractions
from rewriter.algebra.normal_form.functions import Functions
from rewriter.algebra.normal_form.indices import Indices
from rewriter.algebra.normal_form.polynomial import Polynomials
from rewriter.algebra.normal_form.predicates import Predicates
from rewriter.algebra.normal_form.ranges import Ranges
from rewriter.algebra.normal_form.substitution import Substitution
from rewriter.algebra.normal_form.sums import Sums
from rewriter.algebra.normal_form.text import Text


class Algebra(
    Indices,
    BooleanFunctions,
    Polynomials,
    Fractions,
    Functions,
    Sums,
    Ranges,
    Substitution,
    Predicates,
    Text,
):
    """Interned atoms, boolean functions and indices of one analysis."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next_index = itertools.count(1)
        self._spare: dict[int, list[int]] = {}
        self._bound: dict[tuple[int, int, int], int] = {}
        self._level_of: dict[int, int] = {}
        self._atoms: dict[Any, int] = {}
        self.defs: list[tuple[Any, ...]] = []
        self._free: list[frozenset[int]] = []
        self._level: list[int] = []
        self._bools: dict[tuple[tuple[int, ...], int], int] = {((), 1): 0, ((), 0): 1}
        self.bools: list[tuple[tuple[int, ...], int]] = [((), 1), ((), 0)]
        self._unreached: dict[tuple[int, ...], int] = {}
        self._never: dict[tuple[int, int], tuple[tuple[bool, bool], ...]] = {}
        self._numbers: list[float] = []
        self._subst_memo: dict[Any, Any] = {}
        self.nonnegative: set[Any] = set()
        self.leaf_range: dict[Any, tuple[float, float]] = {}
        self.integers: set[Any] = set()
        self.exponentials: set[Any] = set()
        self.own: dict[int, list[tuple[Any, tuple[Index, ...]]]] = {}
        self.snap = SNAP
        self.blurred: set[float] = set()
        self.work = 0
        self._leaves: dict[int, frozenset[int]] = {}
        self._texts: dict[int, str] = {}
        self._digit_args: dict[int, frozenset[Index]] = {}

    # --------------------------------------------------------------- numbers
    def number(self, c: float) -> float:
        """The canonical float close to c: an integer, or an earlier number.

        A number that represents several is in `blurred`: it must not be compared.
        """
        if c in (1.0, -1.0, 0.0) or not math.isfinite(c):
            return c
        nearest = float(round(c))
        if c == nearest:
            return nearest
        if nearest and abs(c - nearest) <= self.snap * abs(c):
            return self._standing_for(nearest, c)
        at = bisect.bisect_left(self._numbers, c)
        for k in (at - 1, at):
            if 0 <= k < len(self._numbers):
                known = self._numbers[k]
                if abs(known - c) <= self.snap * abs(c):
                    return self._standing_for(known, c)
        self._numbers.insert(at, c)
        return c

    def _standing_for(self, known: float, c: float) -> float:
        if abs(known - c) > SAME * abs(c):
            self.blurred.add(known)
        return known

    def set_precision(self, dtype: Any) -> None:
        """Distinguishes numbers as a program in a dtype does."""
        wide = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits > 32
        self.snap = SNAP_64 if wide else SNAP

    # --------------------------------------------------------------- atoms
    def atom(self, *definition: Any) -> int:
        """Interned atom; the definition is its kind and its hashable content."""
        found = self._atoms.get(definition)
        if found is not None:
            return found
        number = self._atoms[definition] = len(self.defs)
        self.defs.append(definition)
        free, level = self._describe(definition)
        self._free.append(free)
        self._level.append(level)
        return number

    def kind(self, atom: int) -> str:
        """Kind of an atom."""
        return self.defs[atom][0]

    def _describe(self, definition: tuple[Any, ...]) -> tuple[frozenset[int], int]:
        kind = definition[0]
        if kind == "leaf":
            found: list[int] = []
            for a in definition[2]:
                if a.__class__ is int:
                    found.append(a)
                elif a is not None:
                    found += self.index_ids(a)
            ids = frozenset(found)
            return ids, self._bound_level(ids)
        if kind == "iota":
            ids = self.index_ids(definition[1])
            return ids, self._bound_level(ids)
        if kind in ("sum", "any"):
            bound, inner, mono = definition[1], definition[2], definition[3]
            ids = self.term_ids(inner, mono)
            level = max(
                [self._level[a] for a, _ in mono]
                + [self._level[a] for a in self.bools[inner][0]]
                + [self._bound_level(bound)]
            )
            return ids - frozenset(bound), level
        if kind == "exp":
            mono = definition[1]
            return (
                self.term_ids(TRUE, mono),
                max((self._level[a] for a, _ in mono), default=0),
            )
        if kind == "ind":
            lits = self.bools[definition[1]][0]
            ids = frozenset().union(*(self._free[a] for a in lits))
            return ids, max((self._level[a] for a in lits), default=0)
        polys = [p for p in definition[1:] if isinstance(p, tuple) and is_frozen(p)]
        ids, level = frozenset(), 0
        for p in polys:
            for (b, mono), _ in p:
                ids |= self.term_ids(b, mono)
                level = max([level, *(self._level[a] for a, _ in mono)])
                level = max([level, *(self._level[a] for a in self.bools[b][0])])
        return ids, level

    def _bound_level(self, ids: Iterable[int]) -> int:
        level = 0
        for i in ids:
            if i < 0 and self._level_of[i] > level:
                level = self._level_of[i]
        return level

    def free(self, atom: int) -> frozenset[int]:
        """Indices free in an atom."""
        return self._free[atom]

    def term_ids(self, b: int, mono: Monomial) -> frozenset[int]:
        """Indices free in a term."""
        free = self._free
        if b <= 1 and len(mono) == 1:
            return free[mono[0][0]]
        out = frozenset().union(*[free[a] for a, _ in mono])
        if b > 1:
            out = out.union(*[free[a] for a in self.bools[b][0]])
        return out

    def ids(self, p: Poly) -> frozenset[int]:
        """Indices free in a polynomial."""
        return frozenset().union(*(self.term_ids(b, m) for b, m in p))
