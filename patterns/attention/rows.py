"""Rows without keys, and fills that do not dominate."""

from __future__ import annotations

import math

from rewriter.algebra.normal_form import TRUE
from rewriter.find.reading import Refused
from rewriter.patterns.attention.empty_rows import empty_row

MODERATE = 1e3  # smaller fills leave masked keys a weight that scores can reach


class Rows:
    """What a row gives that sees no key, and when that cannot be told."""

    def _empty_rows(self) -> None:
        some = self.parts.keep if self.over.some is None else self.over.some
        kept = self.alg.both(some, self.parts.row_mask)
        if kept == TRUE or self._never_empty():
            return
        behaviour = (
            "zero"
            if self.parts.zero_rows
            else empty_row(
                self.ev,
                kept,
                self.scores,
                self.products,
                self.value,
                self._dropped(),
            )
        )
        if self.parts.sink:  # zero, as far as is known
            if behaviour in ("zero", "unknown"):
                return
            raise Refused(
                "rows",
                f"with an extra term a row without keys is {behaviour}",
                score=0.8,
            )
        if behaviour == "unknown" and self._may_change():
            behaviour = "zero"
            self.ev.notes.add("rows without keys give something else than before")
        if behaviour == "unknown":
            if self.ev.soft_fills:
                raise Refused(
                    "rows",
                    "a row without keys gives something this op does not",
                    score=0.8,
                )
            raise Refused(
                "rows", "what a row without keys gives is not known", score=0.8
            )
        self.params["empty_rows"] = behaviour

    def _dropped(self) -> tuple[frozenset[int], float]:
        """Arrays and a number that the weights are multiplied by."""
        alg, parts = self.alg, self.parts
        atoms = set().union(*(alg.leaves(a) for a, _ in parts.rest))
        atoms |= alg.poly_leaves(alg.of_bool(parts.drop_flag))
        return frozenset(self.values_of(atoms)), parts.factor

    def _may_change(self) -> bool:
        """Whether rows without keys may change, and nothing exact is left to try."""
        return self.find.fast and self.ev.whole_sides is not None

    def _each_sees_itself(self) -> bool:
        alg, sizes = self.alg, self.alg.sizes
        if [sizes[i] for i in self.t] != [sizes[i] for i in self.s]:
            return False
        kept = alg.both(self.parts.keep, self.parts.row_mask)
        return alg.subst_bool(kept, dict(zip(self.s, self.t, strict=True))) == TRUE

    def _fills(self) -> None:
        """Refuses fills that do not dominate: scores may be as large, or the bias.

        Where all keys of a row are masked by one or the other, the program weighs
        them by which; no hard mask does.
        """
        kept = self.alg.both(self.parts.keep, self.parts.row_mask)
        fills = [abs(f) for f in self.ev.fills if math.isfinite(f)]
        if fills and min(fills) < MODERATE:
            raise Refused(
                "rows", f"a mask of {-min(fills):g} is only a bias", score=0.7
            )
        if kept == TRUE or not self.bias or not fills:
            return
        loudest = max(abs(c) for c in self.bias.values())
        for value in self.values_of(self.alg.poly_leaves(self.bias)):
            loudest = max(loudest, self.find.loudest(value))
        if min(fills) < 100 * loudest >= 1e6 and self._may_change():
            self.ev.notes.add("rows without keys give something else than before")
        elif min(fills) < 100 * loudest >= 1e6:
            raise Refused(
                "rows",
                "a mask and a bias add numbers of like size: which keys a row "
                "without keys weighs depends on both",
                score=0.8,
            )

    def _never_empty(self) -> bool:
        """Whether every query sees itself or the first key."""
        only = {"q", "k", "v", "bias", "alibi", "dropout", "scale_factor", "sinks"}
        sizes = self.alg.sizes
        t = math.prod(sizes[i] for i in self.t)
        s = math.prod(sizes[i] for i in self.s)
        left, right = self.params.get("window", (None, None))
        shift = self.params.get("shift", 0)
        masks = set(self.operands) - only
        if masks == {"q_segments", "kv_segments"}:
            mine, theirs = self.segments
            swap = {self.s[0]: self.t[0]} if self.t and len(self.s) == 1 else {}
            same = t == s and swap and self.alg.subst(theirs, swap) == mine
            lo = -left if left is not None else 0
            if same and lo + shift <= 0 <= shift + (right or 0):  # each sees itself
                return True
        if self._each_sees_itself():
            return True
        if left is None and "offset" in masks and self._offset_is_positive():
            masks -= {"offset"}  # a later query sees the first key all the more
        if masks - {"prefix"} or (left or 0) + (right or 0) < 0:
            return False
        first_sees = right is None or shift + right >= 0
        last_sees = left is None or t + shift <= s + left
        return first_sees and last_sees

    def _offset_is_positive(self) -> bool:
        """Whether what the queries' positions begin at is not below zero."""
        least = 0.0
        for (flag, mono), c in self.alg.thaw(self.offset).items():
            leaf = self.alg.defs[mono[0][0]] if len(mono) == 1 else ("",)
            if flag != TRUE or leaf[0] != "leaf" or leaf[2] or mono[0][1] != 1 or c < 0:
                return False
            known, _ = self.alg.leaf_range.get(leaf[1], (-math.inf, 0))
            least = min(least, max(known, self.find.least(leaf[1])))
        return least >= 0
