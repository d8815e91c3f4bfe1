"""Rows added to those rows of a table that ids name: the gradient of a lookup.

Formula    out[..., v, d] = table[..., v, d] + Σ_m [ids[m] = v] rows[..., m, d]
Looks like a scatter-add of whole rows, by one id each, mostly to a table of zeros.
Must hold  the rows may collide: the program does not say that ids differ. Ids that
           count up, as positions do, are proved to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize import LAYOUT, row_axes, row_order
from rewriter.algebra.normal_form import Index, OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Reading, Refused, flat_indices, operand, split_digits
from rewriter.program.graph import Node

NAME = "embedding"
ANCHORS = frozenset({"scatter-add"})


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a scatter-add of whole rows."""
    value = anchor.outs[0]
    axes = row_axes(anchor)
    if axes is None or not axes.window or find.done(NAME, value):
        return
    if anchor.params["unique_indices"]:
        return  # no two rows collide
    if not jnp.issubdtype(find.graph.dtype(value), jnp.floating):
        return
    try:
        yield read(find, anchor)
    except OverBudget as error:
        find.missed(NAME, anchor, Refused("budget", str(error), score=0.5))


def read(find: Finder, node: Node) -> Reading:
    """The reading of a scatter-add of whole rows.

    Raises:
        OverBudget: If an axis is no product of indices.
    """
    g, value, axes = find.graph, node.outs[0], row_axes(node)
    ev = find.evaluator(value, inside=frozenset({value}))
    order = row_order(ev, node, axes)
    args = ev.indices(value)
    form = ev.poly(value, args)
    table, ids, updates = node.ins
    of_rows, at = _source(find, ev, updates)
    groups = [
        *(flat_indices(at[u]) for _, _, u in axes.batch),
        _flat(at, (u for _, u in order.rows)),
        _flat(at, (u for _, u in axes.window)),
    ]
    operands = {"rows": operand(of_rows, *groups, dtype=g.dtype(updates))}
    params: dict[str, Any] = {"size": g.shape(value)[axes.table]}
    if order.counted is not None:
        params["start"], params["period"] = order.counted.start, order.counted.period
    else:
        if axes.clips:
            params["outside"] = "clip"
        of_ids, at = _source(find, ev, ids)
        groups = [flat_indices(at[k]) for _, k, _ in axes.batch]
        groups.append(_flat(at, (k for k, _ in order.rows)))
        operands["ids"] = operand(of_ids, *groups, dtype=g.dtype(ids))
    if ev.number(table) != 0:
        of_table, at = _source(find, ev, table)
        groups = [flat_indices(at[d]) for d, _, _ in axes.batch]
        groups.append(flat_indices(at[axes.table]))
        groups.append(_flat(at, (d for d, _ in axes.window)))
        operands["table"] = operand(of_table, *groups, dtype=g.dtype(table))
    out = [flat_indices(args[d]) for d, _, _ in axes.batch]
    out.append(flat_indices(args[axes.table]))
    out.append(_flat(args, (d for d, _ in axes.window)))
    return Reading(
        NAME, find.algebra, ev.place, value, args, form,
        tuple(map(tuple, out)), operands, params, notes=tuple(sorted(ev.notes)),
    )  # fmt: skip


def _source(
    find: Finder, ev: RegionEvaluator, value: int
) -> tuple[Poly, tuple[Index, ...]]:
    """The form of an operand below its layout, and its arguments."""
    at = ev.indices(value)
    return split_digits(find.algebra, ev.poly(value, at, LAYOUT), at)


def _flat(at: Sequence[Index], axes: Iterable[int]) -> list[int]:
    return [i for k in axes for i in flat_indices(at[k])]


PATTERN = ReaderPattern(NAME, ANCHORS, propose, needs=ANCHORS)
