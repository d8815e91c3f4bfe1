"""Forms as text, for reports."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rewriter.algebra.normal_form.forms import TRUE, Index, Poly, is_frozen

LONGEST = 1000
"""Characters of the text of an atom; atoms share atoms, and text does not."""


class Text:
    """Readable forms."""

    def show(self, p: Poly, names: Callable[[Any], str] = str) -> str:
        """Readable text of a polynomial, for messages."""
        if not p:
            return "0"
        terms = []
        for (flag, mono), c in itertools.islice(p.items(), 6):
            factors = [
                self.show_atom(a, names) + ("" if e == 1 else f"^{_short(e)}")
                for a, e in mono
            ]
            if flag != TRUE:
                factors.append(self.show_bool(flag, names))
            if c != 1 or not factors:
                factors.insert(0, f"{c:.5g}")
            terms.append("*".join(factors))
        return " + ".join(terms) + (" + ..." if len(p) > 6 else "")

    def show_bool(self, b: int, names: Callable[[Any], str] = str) -> str:
        """Readable text of a boolean function."""
        support, table = self.bools[b]
        if len(support) == 1:
            text = self.show_atom(support[0], names)
            return f"[{text}]" if table == 0b10 else f"[not {text}]"
        return "[mask of " + ", ".join(self.show_atom(a, names) for a in support) + "]"

    def show_atom(self, atom: int, names: Callable[[Any], str] = str) -> str:
        """Readable text of an atom, with its end left out if it is long."""
        if names is not str:
            return self._text(atom, names)
        text = self._texts.get(atom)
        if text is None:
            text = self._text(atom, names)
            if len(text) > LONGEST:
                text = text[:LONGEST] + "..."
            self._texts[atom] = text
        return text

    def _text(self, atom: int, names: Callable[[Any], str]) -> str:
        d = self.defs[atom]
        if d[0] == "leaf":
            inside = ",".join(_show_index(a) for a in d[2] if a is not None)
            return f"{names(d[1])}[{inside}]"
        if d[0] == "iota":
            return _show_index(d[1])
        if d[0] == "sum":
            body = self.show({(d[2], d[3]): 1.0}, names)
            return "sum_" + ",".join(map(_show_index, d[1])) + f"({body})"
        if d[0] == "exp":
            return f"exp({self.show({(TRUE, d[1]): 1.0}, names)})"
        if d[0] == "ge":
            return self.show(self.thaw(d[1]), names) + " >= 0"
        if d[0] == "eq":
            return self.show(self.thaw(d[1]), names) + " == 0"
        if d[0] == "any":
            return f"any({self.show_bool(d[2], names)})"
        if d[0] == "ind":
            return self.show_bool(d[1], names)
        parts = [
            self.show(self.thaw(x), names)
            for x in d[1:]
            if isinstance(x, tuple) and is_frozen(x)
        ]
        name = "" if d[0] == "pow" else d[1] if d[0] == "fn" else d[0]
        return f"{name}({', '.join(parts)})"


def _short(e: Any) -> str:
    return str(e) if isinstance(e, (int, Fraction)) else f"{e:.4g}"


def _show_index(a: Index) -> str:
    if a is None:
        return "0"
    if isinstance(a, int):
        return f"i{a}" if a > 0 else f"j{-a}"
    if a[0] == "k":
        return str(a[1])
    if a[0] == "cat":
        return f"({_show_index(a[1])}*{a[3]}+{_show_index(a[2])})"
    if a[0] == "aff":
        return f"({a[2]}*{_show_index(a[1])}+{a[3]})"
    return f"({_show_index(a[1])}{'//' if a[0] == 'div' else '%'}{a[2]})"
