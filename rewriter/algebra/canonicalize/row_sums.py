"""Rows that ids name, added to a table or taken from it: opaque functions of both.

A scatter-add of whole rows is ``table[..., v, d] + Σ_m [ids[m] = v] rows[..., m, d]``.
It has one form for all orders of its axes, and for ids with any number of axes. So has
a gather of whole rows, where an evaluator is asked to read it as one. What an id does
that names no row is part of the form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rewriter.algebra.canonicalize.evaluator import Evaluator, rule
from rewriter.algebra.canonicalize.gathered_entries import set_entries
from rewriter.algebra.canonicalize.layout import reshape_args
from rewriter.algebra.canonicalize.primitives import FULL, OPAQUE_LEVEL
from rewriter.algebra.canonicalize.row_axes import (
    RowAxes,
    RowOrder,
    row_axes,
    row_order,
)
from rewriter.algebra.normal_form import Algebra, Index, OverBudget, Poly
from rewriter.algebra.normal_form.forms import TooMuchWork
from rewriter.program.graph import Node


@rule("scatter-add")
def added(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    """The form of entries, or of whole rows, added to those that ids name."""
    try:
        return set_entries(ev, node, args, mode)
    except TooMuchWork:
        raise
    except OverBudget:
        return _rows_added(ev, node, args, mode)


def _rows_added(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    axes, order = _axes(ev, node)
    alg, (table, ids, rows) = ev.alg, node.ins
    bound = _Bound(ev, node, axes, order)
    name = (
        *_name(ev, node, axes, order),
        alg.freeze(ev.poly(ids, bound.of_ids, _inside(ev, node, order, mode))),
        alg.freeze(ev.poly(rows, bound.of_rows, ev.operand_mode(node, 2, mode))),
    )
    batch = [args[d] for d, _, _ in axes.batch]
    column = _flat(alg, args, ev.g.shape(table), (d for d, _ in axes.window))
    total = alg.of_atom(alg.atom("leaf", name, (*batch, args[axes.table], column)))
    if ev.number(table) == 0:
        return total
    return alg.add(ev.poly(table, args, ev.operand_mode(node, 0, mode)), total)


def rows_taken(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    """The form of whole rows that ids name in a table.

    Raises:
        OverBudget: If the gather takes something else.
    """
    axes, order = _axes(ev, node)
    alg, (table, ids) = ev.alg, node.ins
    bound = _Bound(ev, node, axes, order)
    name = (
        *_name(ev, node, axes, order),
        alg.freeze(ev.poly(ids, bound.of_ids, _inside(ev, node, order, mode))),
        alg.freeze(ev.poly(table, bound.of_table, ev.operand_mode(node, 0, mode))),
    )
    shape = ev.g.shape(node.outs[0])
    batch = [args[u] for _, _, u in axes.batch]
    row = _flat(alg, args, shape, (u for _, u in order.rows))
    column = _flat(alg, args, shape, (u for _, u in axes.window))
    return alg.of_atom(alg.atom("leaf", name, (*batch, row, column)))


def _axes(ev: Evaluator, node: Node) -> tuple[RowAxes, RowOrder]:
    axes = row_axes(node)
    if axes is None or any(ev.varies(i) for i in node.ins):
        raise OverBudget("what is taken or added is not whole rows, by one id each")
    return axes, row_order(ev, node, axes)


def _name(
    ev: Evaluator, node: Node, axes: RowAxes, order: RowOrder
) -> tuple[object, ...]:
    """What tells such functions apart, beside their operands."""
    outside = "" if order.counted else axes.outside  # counted ids are all inside
    return "call", node.prim, outside, ev.g.shape(node.ins[0])[axes.table]


def _inside(ev: Evaluator, node: Node, order: RowOrder, mode: str) -> str:
    """How far ids are expanded: wholly if they count up."""
    return FULL if order.counted else ev.operand_mode(node, 1, mode)


class _Bound:
    """The arguments of the operands: canonical bound indices, the same for all."""

    def __init__(self, ev: Evaluator, node: Node, axes: RowAxes, order: RowOrder):
        alg, (table, ids) = ev.alg, node.ins[:2]
        shape, whole = ev.g.shape(ids), ev.g.shape(table)
        rows = node.outs[0] if node.prim == "gather" else node.ins[2]
        of_ids: list[Index] = [None] * len(shape)
        of_rows: list[Index] = [None] * len(ev.g.shape(rows))
        of_table: list[Index] = [None] * len(whole)
        row = _digits(alg, 0, [shape[k] for k, _ in order.rows])
        column = _digits(alg, 1, [whole[d] for d, _ in axes.window])
        of_table[axes.table] = _bound(alg, 2, whole[axes.table])
        for slot, (d, k, u) in enumerate(axes.batch, 3):
            of_table[d] = of_ids[k] = of_rows[u] = _bound(alg, slot, shape[k])
        for (k, u), digit in zip(order.rows, row, strict=True):
            of_ids[k] = of_rows[u] = digit
        for (d, u), digit in zip(axes.window, column, strict=True):
            of_table[d] = of_rows[u] = digit
        of_ids[-1] = alg.affine(None, 1, axes.column)
        self.of_ids, self.of_table = tuple(of_ids), tuple(of_table)
        self.of_rows = tuple(of_rows)


def _flat(
    alg: Algebra, args: Sequence[Index], shape: Sequence[int], axes: Iterable[int]
) -> Index:
    """The position along several axes as one index."""
    place: Index = None
    for k in axes:
        place = alg.cat(place, args[k], shape[k])
    return place


def _digits(alg: Algebra, slot: int, sizes: Sequence[int]) -> tuple[Index, ...]:
    """The positions along several axes, as digits of one bound index over all."""
    whole = math.prod(sizes)
    return reshape_args(alg, (_bound(alg, slot, whole),), (whole,), tuple(sizes))


def _bound(alg: Algebra, slot: int, size: int) -> Index:
    return None if size == 1 else alg.bound_index(OPAQUE_LEVEL, slot, size)
