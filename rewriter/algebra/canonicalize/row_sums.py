"""Rows added to the rows of a table that ids name: an opaque function of both.

A scatter-add of whole rows is ``table[..., v, d] + Σ_m [ids[m] = v] rows[..., m, d]``.
It has one form for all orders of its axes, and for ids with any number of axes. What
an id outside of the table does is part of the form: its row is dropped, or added to
the nearest row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize.evaluator import Evaluator, rule
from rewriter.algebra.canonicalize.layout import reshape_args
from rewriter.algebra.canonicalize.picks import set_entries
from rewriter.algebra.canonicalize.primitives import FULL, OPAQUE_LEVEL
from rewriter.algebra.normal_form import TRUE, Algebra, Index, OverBudget, Poly
from rewriter.algebra.normal_form.forms import TooMuchWork
from rewriter.program.graph import Node


@dataclass(frozen=True)
class RowAxes:
    """Which axes are which in a scatter of whole rows.

    Attributes:
        table: The axis of the table that ids count along.
        batch: (axis of the table, of the ids, of the updates) for each batch axis.
        rows: (axis of the ids, of the updates) for each axis of rows.
        window: (axis of the table, of the updates) for each axis of a row.
        clips: Whether an id outside of the table names the nearest row.
    """

    table: int
    batch: tuple[tuple[int, int, int], ...]
    rows: tuple[tuple[int, int], ...]
    window: tuple[tuple[int, int], ...]
    clips: bool


def row_axes(node: Node) -> RowAxes | None:
    """The axes of a scatter-add of whole rows by one id each; None for others."""
    if node.prim != "scatter-add":
        return None
    numbers = node.params["dimension_numbers"]
    table, ids, updates = (tuple(x.aval.shape) for x in node.eqn.invars)
    mapped = tuple(map(int, numbers.scatter_dims_to_operand_dims))
    if len(mapped) != 1 or not ids or ids[-1] != 1:
        return None
    batch = tuple(map(int, numbers.operand_batching_dims))
    own = tuple(map(int, numbers.scatter_indices_batching_dims))
    window = tuple(map(int, numbers.update_window_dims))
    inserted = tuple(map(int, numbers.inserted_window_dims))
    others = [k for k in range(len(updates)) if k not in window]
    kept = [d for d in range(len(table)) if d not in (*inserted, *batch)]
    if len(others) != len(ids) - 1 or len(kept) != len(window):
        return None
    pairs = tuple(zip(kept, window, strict=True))
    whole = [updates[k] == (1 if d in mapped else table[d]) for d, k in pairs]
    if not all(whole) or set(inserted) - set(mapped):
        return None
    return RowAxes(
        mapped[0],
        tuple((d, k, others[k]) for d, k in zip(batch, own, strict=True)),
        tuple((k, others[k]) for k in range(len(ids) - 1) if k not in own),
        tuple((d, k) for d, k in pairs if d not in mapped),
        node.params["mode"] == GatherScatterMode.CLIP,
    )


@dataclass(frozen=True)
class Counted:
    """Ids that count up: row i of the rows has the id ``start + i % period``."""

    start: int
    period: int


@dataclass(frozen=True)
class RowOrder:
    """The order in which axes of rows are flattened, and what is known of the ids.

    Attributes:
        rows: As `RowAxes.rows`; where ids count up, the axes along which they do are
            the last ones.
        counted: How they count up, or None.
    """

    rows: tuple[tuple[int, int], ...]
    counted: Counted | None


def row_order(ev: Evaluator, node: Node, axes: RowAxes) -> RowOrder:
    """The order of a scatter's rows: as they are, but for ids that count up."""
    alg, ids = ev.alg, node.ins[1]
    sizes = ev.g.shape(ids)
    at = tuple(alg.new_index(n) for n in sizes)
    own = {at[k]: k for k, _ in axes.rows if at[k] is not None}
    form = _counting(ev, ids, at)
    if form is None or not alg.ids(form) <= own.keys():
        return RowOrder(axes.rows, None)
    moving = {own[i] for i in alg.ids(form)}
    order = tuple(sorted(axes.rows, key=lambda pair: pair[0] in moving))
    start, rest = alg.split_constant(form)
    linear: Index = None
    for k, _ in order:
        linear = alg.cat(linear, at[k], sizes[k])
    period = _period(alg, rest) or math.prod(sizes[k] for k in moving)
    size = ev.g.shape(node.ins[0])[axes.table]
    counted = alg.iota(alg.mod(linear, period))
    if alg.add(rest, counted, -1.0) or not isinstance(size, int):
        return RowOrder(axes.rows, None)
    if start != int(start) or start < 0 or start + period > size:
        return RowOrder(axes.rows, None)
    return RowOrder(order, Counted(int(start), period))


def _period(alg: Algebra, form: Poly) -> int | None:
    """The period of positions that are one index, again and again."""
    if len(form) != 1:
        return None
    ((_, mono),) = form
    position = alg.defs[mono[0][0]][1]
    again = isinstance(position, tuple) and position[0] == "mod"
    return position[2] if again else None


def _counting(ev: Evaluator, ids: int, at: tuple[Index, ...]) -> Poly | None:
    """The form of ids that are made of positions alone."""
    try:
        form = ev.poly(ids, at, FULL)
    except TooMuchWork:
        raise
    except OverBudget:
        return None
    atoms = (ev.alg.kind(a) == "iota" and e == 1 for _, m in form for a, e in m)
    plain = all(flag == TRUE and len(m) <= 1 for flag, m in form)
    return form if plain and all(atoms) else None


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
    axes, alg = row_axes(node), ev.alg
    if axes is None or any(ev.varies(i) for i in node.ins):
        raise OverBudget("a scatter that is not of whole rows")
    order = row_order(ev, node, axes)
    table, ids, updates = node.ins
    shape = ev.g.shape(ids)
    sizes = [shape[k] for k, _ in order.rows]
    widths = [ev.g.shape(table)[d] for d, _ in axes.window]
    slots = iter(range(2 + len(axes.batch)))
    row = _digits(alg, next(slots), sizes)
    column = _digits(alg, next(slots), widths)
    of_ids: list[Index] = [None] * len(shape)
    of_rows: list[Index] = [None] * len(ev.g.shape(updates))
    for (_, k, u), slot in zip(axes.batch, slots, strict=True):
        of_ids[k] = of_rows[u] = _bound(alg, slot, shape[k])
    for (k, u), digit in zip(order.rows, row, strict=True):
        of_ids[k] = of_rows[u] = digit
    for (_, u), digit in zip(axes.window, column, strict=True):
        of_rows[u] = digit
    inside = [ev.operand_mode(node, k, mode) for k in range(3)]
    whole = FULL if order.counted else inside[1]
    name = (
        "call", node.prim, axes.clips, ev.g.shape(table)[axes.table],
        alg.freeze(ev.poly(ids, tuple(of_ids), whole)),
        alg.freeze(ev.poly(updates, tuple(of_rows), inside[2])),
    )  # fmt: skip
    place: Index = None
    for (d, _), n in zip(axes.window, widths, strict=True):
        place = alg.cat(place, args[d], n)
    batch = (args[d] for d, _, _ in axes.batch)
    total = alg.of_atom(alg.atom("leaf", name, (*batch, args[axes.table], place)))
    if ev.number(table) == 0:
        return total
    return alg.add(ev.poly(table, args, inside[0]), total)


def _digits(alg: Algebra, slot: int, sizes: Sequence[int]) -> tuple[Index, ...]:
    """The positions along several axes, as digits of one bound index over all."""
    whole = math.prod(sizes)
    return reshape_args(alg, (_bound(alg, slot, whole),), (whole,), tuple(sizes))


def _bound(alg: Algebra, slot: int, size: int) -> Index:
    return None if size == 1 else alg.bound_index(OPAQUE_LEVEL, slot, size)
