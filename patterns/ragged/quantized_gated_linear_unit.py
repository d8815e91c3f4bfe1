"""Quantized gated linear unit of experts: one whose matrices are stored in 8 bits.

Formula    that of the unit, with matrices of stored numbers times scales of columns
Looks like the unit, with 8-bit numbers above the matrices of its ragged dots.
Must hold  the conditions of the unit, and of both quantized ragged dots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rewriter.algebra.normal_form import OverBudget
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Reading, Refused
from rewriter.patterns.ragged.dense_experts import RAGGED
from rewriter.patterns.ragged.gated_linear_unit import Unit, read, units
from rewriter.patterns.ragged.quantized_dot import evaluator, matrices, quantized
from rewriter.program.graph import Node

NAME = "quantized_ragged_gated_linear_unit"


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the products below a ragged dot of 8-bit matrices."""
    if quantized(find, anchor) is None:
        return
    for unit in units(find, anchor, NAME):
        try:
            yield of_stored(find, unit)
            return
        except Refused as refusal:
            find.missed(NAME, anchor, refusal)
        except OverBudget as error:
            find.missed(NAME, anchor, Refused("budget", str(error), score=0.2))


def of_stored(find: Finder, unit: Unit) -> Reading:
    """The reading of a unit with stored matrices.

    Raises:
        Refused: If it is no unit, or its matrices are not stored numbers with scales.
        OverBudget: If the form grows too large.
    """
    plain = read(find, unit)
    stored: dict[Node, int] = {}
    for dot in (unit.gate_dot, unit.up_dot):
        numbers = quantized(find, dot)
        if numbers is None:
            raise Refused("dtype", "only one branch has 8-bit matrices", score=0.3)
        stored[dot] = numbers
    x, _, sizes = unit.gate_dot.ins
    ev = evaluator(find, unit.value, stored, x, sizes)
    args = ev.indices(unit.value)
    form = ev.poly(unit.value, args)
    operands = {n: o for n, o in plain.operands.items() if n in ("x", "group_sizes")}
    for name, dot in zip(("w", "w_up"), stored, strict=False):
        found = matrices(find, ev, dot, stored[dot])
        if found.mode != "forward":
            raise Refused("stored", "the matrices are stored transposed", score=0.2)
        operands[name] = found.numbers
        if found.scale is not None:
            operands[f"{name}_scale"] = found.scale
    return dataclasses.replace(
        plain, op=NAME, place=ev.place, args=args, form=form,
        out_groups=tuple(() if i is None else (i,) for i in args),
        operands=operands, notes=tuple(sorted(ev.notes)),
    )  # fmt: skip


PATTERN = ReaderPattern(NAME, RAGGED, propose, needs=frozenset({"mul"}))
