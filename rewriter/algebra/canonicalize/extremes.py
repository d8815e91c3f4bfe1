"""Comparisons with the largest or the least of integers, as comparisons of entries.

    max x >= y   →   x >= y for some entry
    min x >= y   →   x >= y for all entries

Blocks of keys may be skipped whose segments lie apart from those of the queries: the
largest of one block is less than the least of the other. No two of their segments are
equal then, and the mask of the block says so entry by entry.
"""

from __future__ import annotations

from typing import Any

from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.primitives import EXTREMES, TRANSPARENT, NeedSplit
from rewriter.algebra.normal_form import TRUE, Monomial, Poly


def by_entries(ev: Any, flag: int) -> int:
    """A condition that compares entries where it compared the largest or least.

    Args:
        ev: What makes the forms.
        flag: The condition, a boolean function.
    """
    literals = [_literal(ev, a) for a in ev.alg.bools[flag][0]]
    return ev.alg.of_literals(flag, literals)


def _literal(ev: Any, atom: int) -> int:
    alg, definition = ev.alg, ev.alg.defs[atom]
    if definition[0] == "any":
        indices, inner, _ = alg.open_sum(atom)
        return alg.any_over(by_entries(ev, inner), indices)
    if definition[0] != "ge" or not definition[2]:
        return alg.literal(atom)
    return _compared(ev, alg.thaw(definition[1]))


def _compared(ev: Any, p: Poly) -> int:
    """Whether an integer form is at least 0. An entry is read for each extreme."""
    alg = ev.alg
    some: list[int] = []
    every: list[int] = []
    for (flag, mono), c in list(p.items()):
        found = _entry(ev, mono) if flag == TRUE else None
        if found is None:
            continue
        largest, entry, indices = found
        p = alg.add(alg.add(p, {(flag, mono): -c}), entry, c)
        (some if largest == (c > 0) else every).extend(indices)
    anywhere = alg.any_over(alg.compare("ge", p, True), some)
    return alg.negate(alg.any_over(alg.negate(anywhere), every))


def _entry(ev: Any, mono: Monomial) -> tuple[bool, Poly, list[int]] | None:
    """(whether a term is the largest, an entry, its indices); None for other terms."""
    if len(mono) != 1 or mono[0][1] != 1 or ev.alg.kind(mono[0][0]) != "leaf":
        return None
    _, value, args = ev.alg.defs[mono[0][0]]
    node = ev.g.node_of(value) if isinstance(value, int) else None
    while node is not None and node.prim in TRANSPARENT:
        node = ev.g.node_of(node.ins[0])
    if node is None or node.prim not in EXTREMES or 0 in ev.g.shape(node.ins[0]):
        return None
    if kind_of(ev.g.dtype(node.ins[0])) != "i":
        return None
    rank, steps = len(ev.g.shape(value)), ev.varies(value)
    if len(args) != rank + len(steps):
        return None
    at, reduced = ev.before_reduction(node, args[:rank])
    try:
        entry = ev.poly(node.ins[0], at)
    except NeedSplit:
        return None
    own = {i: ev.alg.new_index(ev.alg.sizes[i]) for i in reduced}
    entry = ev.alg.subst(entry, own | dict(zip(steps, args[rank:], strict=True)))
    return node.prim == "reduce_max", entry, [*own.values()]
