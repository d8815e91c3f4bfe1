"""Names the conditions of a mask: equal ones have one name, whatever their indices."""

from __future__ import annotations

import re
from typing import Any

from rewriter.algebra.normal_form import Algebra

DIGITS = re.compile(r"\(([ts])(?://|%)\d+\)|\(([ts])\*\d+\+\2\)")


def literal_name(alg: Algebra, atom: int, outer: frozenset[int]) -> tuple[str, bool]:
    """(text with roles for indices, polarity); complements share the text.

    Indices of the result and bound ones are distinguished; their names are dropped.
    """
    d = alg.defs[atom]
    if d[0] not in ("ge", "eq"):
        return _text(alg, atom, outer), True
    p = alg.thaw(d[1])
    mine = _poly_text(alg, p, outer)
    if d[0] == "ge" and d[2]:
        complement = alg.add(alg.scale(p, -1.0), alg.const(-1))
        other = _poly_text(alg, complement, outer)
        return min(mine, other), mine <= other
    if d[0] == "eq":  # which side is the first one depends on the indices' numbers
        mine = min(mine, _poly_text(alg, alg.scale(p, -1.0), outer))
    return f"{d[0]} {mine}", True


def _poly_text(alg: Algebra, p: dict, outer: frozenset[int]) -> str:
    digits: list[tuple[float, int]] = []  # of the key's position: factor and size
    terms = []
    for (_, mono), c in p.items():
        digit = _key_digit(alg, mono, outer)
        if digit:
            digits.append((c, digit))
            continue
        text = "".join(sorted(f"{_text(alg, a, outer)}^{e}" for a, e in mono))
        terms.append(f"{c:.6g}{text}")
    digits.sort(key=lambda d: abs(d[0]))
    while len(digits) > 1 and digits[1][0] == digits[0][0] * digits[0][1]:
        digits[:2] = [(digits[0][0], digits[0][1] * digits[1][1])]
    terms += [f"{c:.6g}s^1" for c, _ in digits]
    return " + ".join(sorted(terms))


def _key_digit(alg: Algebra, mono: Any, outer: frozenset[int]) -> int:
    """The size of a key index if a monomial is nothing else, else 0."""
    if len(mono) != 1 or mono[0][1] != 1 or alg.kind(mono[0][0]) != "iota":
        return 0
    index = alg.defs[mono[0][0]][1]
    if not isinstance(index, int) or index in outer:
        return 0
    size = alg.sizes[index]
    return size if isinstance(size, int) else 0


def _text(alg: Algebra, atom: int, outer: frozenset[int]) -> str:
    def role(found: re.Match[str]) -> str:
        name = found.group()
        return "t" if name[0] == "i" and int(name[1:]) in outer else "s"

    text, parts = re.sub(r"\b[ij]\d+", role, alg.show_atom(atom)), 1
    while parts:  # a position and its digits count as one
        text, parts = re.subn(DIGITS, r"\1\2", text)
    return text
