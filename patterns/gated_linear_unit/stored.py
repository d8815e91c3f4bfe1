"""Reads gated linear units whose matrices are stored in few bits.

Formula    as of a gated linear unit, with w[k, f] = (q[k, f] - zero[k/z, f])
           scale[k/z, f] in both branches
Looks like a gated linear unit with arrays of 4 or 8 bits above both matrices, or above
           one that holds both. Scales may also multiply the branches.
Must hold  each matrix is stored numbers after the same steps, as
           `rewriter.patterns.quantized.operands` says. Scales are equal within groups
           along the axis that is summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rewriter.algebra.normal_form import TRUE, Algebra, Index, Poly
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Operand, Reading, Refused
from rewriter.patterns.gated_linear_unit import read
from rewriter.patterns.gated_linear_unit.read import ANCHORS, STEPS, linear
from rewriter.patterns.quantized.operands import (
    StoredOperand,
    may_be_stored,
    readings,
    size_of,
    stored_operand,
)
from rewriter.patterns.quantized.steps import STORED, few_bits
from rewriter.program.graph import Node

NAME = "quantized_gated_linear_unit"
MATRICES = ("w_gate", "w_up")


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of units below an activation whose matrices are of few bits."""
    if not few_bits(find):
        return
    dots = [n for i in anchor.ins for n in linear(find, i)]
    if may_be_stored(find, dots):
        yield from readings(find, anchor, NAME, read.propose, stored)


def stored(find: Finder, reading: Reading) -> Reading:
    """The reading of a unit with stored matrices.

    Raises:
        Refused: If its matrices are something else.
        OverBudget: If a form grows too large.
    """
    times = _of_columns(reading)
    gate = stored_operand(find, reading, "w_gate")
    up = stored_operand(find, reading, "w_up", times)
    if gate is None or up is None:
        raise Refused("dtype", "only one branch has numbers of few bits", score=0.3)
    if gate.widen != up.widen:
        text = f"the branches are widened differently: {gate.widen!r}, {up.widen!r}"
        raise Refused("widen", text, score=0.5)
    floats = str(find.graph.dtype(reading.value))  # they hold all these numbers
    params = {**reading.params, "widen": gate.widen or floats}
    halves = _halves(gate, up)
    if halves is not None:
        order, whole = halves
        params["halves"] = order
        operands = _of_matrix(find, "w_gate", whole)
    else:
        operands = _of_matrix(find, "w_gate", gate) | _of_matrix(find, "w_up", up)
    others = {n: o for n, o in reading.operands.items() if n not in MATRICES}
    return dataclasses.replace(
        reading, op=NAME, operands={**others, **operands}, params=params, proof=reading,
        times=None if times is not None else reading.times,
    )  # fmt: skip


def _of_columns(reading: Reading) -> Poly | None:
    """What the result is multiplied by, if that is a scale of the other branch.

    That branch is linear in its matrix, unless something is added or it is bounded.
    """
    alg, times = reading.algebra, reading.times
    if times is None or {"b_up", "rows_up"} & reading.operands.keys():
        return None
    if {"clip_up", "up_shift"} & reading.params.keys():
        return None
    columns = set(reading.out_groups[-1])
    for (flag, mono), c in times.items() if len(times) == 1 else ():
        one = flag == TRUE and c == 1 and len(mono) == 1 and mono[0][1] == 1
        leaf = one and alg.kind(mono[0][0]) == "leaf"
        if leaf and alg.ids(times) <= columns:
            return times
    return None


def _of_matrix(find: Finder, name: str, found: StoredOperand) -> dict[str, Operand]:
    """The operands of a matrix.

    Raises:
        Refused: If its numbers are a part of an array, or lie transposed.
    """
    alg = found.algebra
    _, leaf, args = alg.defs[found.atom]
    own = [i for a in args for i in _indices(a)]
    if own != [i for group in found.groups for i in group]:
        text = f"{name} lies transposed, or is a part of an array"
        raise Refused(name, text, score=0.5)
    if size_of(alg, own) != size(find, leaf):
        raise Refused(name, f"{name} is a part of an array", score=0.5)
    return found.operands(name, 0)


def size(find: Finder, value: int) -> int:
    """Returns how many numbers a value has."""
    total = 1
    for n in find.graph.shape(value):
        total *= n
    return total


def _indices(a: Index) -> list[int]:
    """The indices of an argument in their order; -1 for one that is something else."""
    if a is None:
        return []
    if isinstance(a, int):
        return [a]
    if a[0] == "cat":
        return _indices(a[1]) + _indices(a[2])
    return [-1]


# ------------------------------------------------------------------- packed branches
def _halves(gate: StoredOperand, up: StoredOperand) -> tuple[str, StoredOperand] | None:
    """(their order, the whole) of branches that are halves of one array."""
    alg = gate.algebra
    (_, name, first), (_, other, second) = (alg.defs[m.atom] for m in (gate, up))
    up = _renamed(up, gate)
    (_, _, second) = alg.defs[up.atom]
    differ = [k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if name != other or len(differ) != 1 or gate.joined.keys() != up.joined.keys():
        return None
    (at,) = differ
    for order, (low, high) in (("gate_up", (gate, up)), ("up_gate", (up, gate))):
        both = _whole(low, high, at)
        if both is not None:
            return order, both
    return None


def _renamed(up: StoredOperand, gate: StoredOperand) -> StoredOperand:
    """One branch by the indices of the other, if their axes have equal digits."""
    alg = up.algebra
    pairs = list(zip(up.groups, gate.groups, strict=True))
    digits = lambda group: [alg.sizes[i] for i in group]
    if any(digits(a) != digits(b) for a, b in pairs):
        return up
    to = {i: j for a, b in pairs for i, j in zip(a, b, strict=True)}
    return dataclasses.replace(
        up,
        groups=gate.groups,
        numbers=alg.subst(up.numbers, to),
        joined={n: (alg.subst(p, to), d) for n, (p, d) in up.joined.items()},
    )


def _whole(low: StoredOperand, high: StoredOperand, at: int) -> StoredOperand | None:
    """The array whose halves along an axis are two others, or None.

    Args:
        low: The first half.
        high: The second half, with the same indices.
        at: The axis of the array.
    """
    alg, (k, f) = low.algebra, low.groups
    (_, name, first), (_, _, second) = alg.defs[low.atom], alg.defs[high.atom]
    half = alg.new_index(2)
    if first[at] is None and second[at] == ("k", 1):  # [k, 2, f]
        new, columns = half, f
    elif isinstance(first[at], int) and f[:1] == (first[at],):  # [k, 2 f]
        size = alg.sizes[first[at]]
        if second[at] != alg.affine(first[at], 1, size):
            return None
        new, columns = alg.cat(half, first[at], size), f
    else:
        return None
    numbers = alg.of_atom(alg.atom("leaf", name, (*first[:at], new, *first[at + 1 :])))
    joined = {}
    for what, (form, dtype) in low.joined.items():
        both = _both(alg, form, high.joined[what][0], half, columns)
        if both is None:
            return None
        joined[what] = both, dtype
    return StoredOperand(alg, (k, (half, *columns)), numbers, joined, low.widen)


def _both(
    alg: Algebra, low: Poly, high: Poly, half: int, columns: tuple[int, ...]
) -> Poly | None:
    """The form whose halves are two others, or None."""
    if low == high:
        return low
    for (flag, mono), c in low.items() if len(low) == 1 else ():
        if len(mono) != 1 or mono[0][1] != 1 or alg.kind(mono[0][0]) != "leaf":
            return None
        _, name, args = alg.defs[mono[0][0]]
        for at, a in enumerate(args):
            size = alg.sizes[a] if isinstance(a, int) else 1
            index = half if a is None else alg.cat(half, a, size)
            if a is not None and a not in columns[:1]:
                continue
            whole = (*args[:at], index, *args[at + 1 :])
            form = {(flag, ((alg.atom("leaf", name, whole), 1),)): c}
            if alg.subst(form, {half: None}) == low and (
                alg.subst(form, {half: ("k", 1)}) == high
            ):
                return form
    return None


PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS, dtypes=STORED, looks_above=True)
