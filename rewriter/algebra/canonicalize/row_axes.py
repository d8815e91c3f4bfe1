"""Rows of a table that ids name: which axes are which, and which ids count up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize.evaluator import Evaluator
from rewriter.algebra.canonicalize.primitives import FULL
from rewriter.algebra.normal_form import TRUE, Algebra, Index, OverBudget, Poly
from rewriter.algebra.normal_form.forms import TooMuchWork
from rewriter.program.graph import Node


@dataclass(frozen=True)
class RowAxes:
    """Which axes are which where rows are taken from a table, or added to it.

    Attributes:
        table: The axis of the table that ids count along.
        column: Where an id is among the numbers of its place: others are of axes that
            are taken whole.
        batch: (axis of the table, of the ids, of the rows) for each batch axis.
        rows: (axis of the ids, of the rows) for each axis along which rows follow.
        window: (axis of the table, of the rows) for each axis of a row.
        outside: What an id does that names no row. It names the nearest one,
            ``"clip"``. Rows that are added are dropped, ``"drop"``. Rows that are
            taken are ``"nan"`` or ``"zero"``. The program may promise that there are
            no such ids, ``"promise"``: XLA then adds nothing, and takes the nearest.
    """

    table: int
    column: int
    batch: tuple[tuple[int, int, int], ...]
    rows: tuple[tuple[int, int], ...]
    window: tuple[tuple[int, int], ...]
    outside: str


def row_axes(node: Node) -> RowAxes | None:
    """The axes of a gather or scatter-add of whole rows by one id each, or None."""
    if node.prim not in ("gather", "scatter-add"):
        return None
    numbers, outside = node.params["dimension_numbers"], _outside(node)
    table, ids = (tuple(x.aval.shape) for x in node.eqn.invars[:2])
    if node.prim == "gather":
        names = GATHER
        rows = tuple(node.eqn.outvars[0].aval.shape)
    else:
        names = SCATTER
        rows = tuple(node.eqn.invars[2].aval.shape)
    mapped, batch, own, window, inserted = (
        tuple(map(int, getattr(numbers, name))) for name in names
    )
    others = [k for k in range(len(rows)) if k not in window]
    kept = [d for d in range(len(table)) if d not in (*inserted, *batch)]
    if outside is None or not ids or ids[-1] != len(mapped):
        return None
    if len(others) != len(ids) - 1 or len(kept) != len(window):
        return None
    pairs = tuple(zip(kept, window, strict=True))
    taken = {**dict.fromkeys(inserted, 1), **{d: rows[k] for d, k in pairs}}
    some = [d for d in taken if taken[d] != table[d]] or list(mapped[:1])
    if len(some) != 1 or some[0] not in mapped or taken[some[0]] != 1:
        return None
    if len(mapped) > 1 and outside != "clip":
        return None  # whole axes may begin elsewhere, and be outside
    (axis,) = some
    return RowAxes(
        axis,
        mapped.index(axis),
        tuple((d, k, others[k]) for d, k in zip(batch, own, strict=True)),
        tuple((k, others[k]) for k in range(len(ids) - 1) if k not in own),
        tuple((d, k) for d, k in pairs if d != axis),
        outside,
    )


GATHER = (
    "start_index_map", "operand_batching_dims", "start_indices_batching_dims",
    "offset_dims", "collapsed_slice_dims",
)  # fmt: skip
SCATTER = (
    "scatter_dims_to_operand_dims", "operand_batching_dims",
    "scatter_indices_batching_dims", "update_window_dims", "inserted_window_dims",
)  # fmt: skip
"""The same axes in the dimension numbers of both primitives."""


def _outside(node: Node) -> str | None:
    """As `RowAxes.outside`; None for what is neither."""
    mode, modes = node.params["mode"], GatherScatterMode
    if mode == modes.CLIP:
        return "clip"
    if mode not in (modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS):
        return None
    if mode == modes.PROMISE_IN_BOUNDS:
        return "promise"
    if node.prim != "gather":
        return "drop"
    fill = node.params["fill_value"]
    if fill is None or math.isnan(fill):
        return "nan"
    return "zero" if fill == 0 else None


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
    at = (*(alg.new_index(n) for n in sizes[:-1]), alg.affine(None, 1, axes.column))
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
