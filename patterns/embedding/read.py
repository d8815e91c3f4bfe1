"""Rows of a table that ids name: taken from it, or added to it.

Formula    out[..., m, d] = table[..., ids[m], d], a lookup; and its gradient,
           out[..., v, d] = table[..., v, d] + Σ_m [ids[m] = v] rows[..., m, d]
Looks like a gather, or a scatter-add, of whole rows, by one id each. Rows are mostly
           added to a table of zeros.
Must hold  rows that are added may collide: the program does not say that ids differ.
           Ids that count up, as positions do, are proved to do so. A lookup is read
           for the sake of the gradient that JAX may make of it: where rows have 16
           bits, and the program holds no gradient of a lookup. Stacks of tables, and
           rows of heads, must be arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize import (
    LAYOUT,
    LAYOUT_PRIMITIVES,
    TRANSPARENT,
    is_lossless,
    row_axes,
    row_order,
)
from rewriter.algebra.normal_form import Index, OverBudget
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Operand,
    Reading,
    flat_indices,
    operand,
    split_digits,
    unproved,
)
from rewriter.patterns.embedding.distances import keys_of_distances
from rewriter.program.graph import Graph, Node

SUMS, LOOKUP = "embedding", "embedding_lookup"
USUAL = {SUMS: "drop", LOOKUP: "nan"}
"""What becomes of ids that name no row, unless said otherwise."""

_KEEPING = frozenset(
    {"convert_element_type", "dynamic_slice", "slice"} | LAYOUT_PRIMITIVES | TRANSPARENT
)
"""Equations whose results are part of their first operand."""

ADDS, TAKES = frozenset({"scatter-add"}), frozenset({"gather"})


def propose_sums(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a scatter-add of whole rows that may collide."""
    if _is_of_rows(find, anchor) and not anchor.params["unique_indices"]:
        yield from _proposed(find, anchor, SUMS)


def propose_lookup(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a gather of whole rows, in a program without gradients of it.

    Rows have one axis, or one of heads besides. What is gathered of more, such as
    pages of keys or the caches of beams, is no embedding.
    """
    if not _is_of_rows(find, anchor) or len(row_axes(anchor).window) > 2:
        return
    axes = row_axes(anchor)
    plain = len(axes.window) == 1 and not axes.batch
    narrow = find.graph.dtype(anchor.outs[0]).itemsize == 2
    if not narrow or not (plain or _is_given(find.graph, anchor.ins[0])):
        return
    if not _is_differentiated(find, anchor):
        yield from _proposed(find, anchor, LOOKUP)


def _is_of_rows(find: Finder, node: Node) -> bool:
    axes = row_axes(node)
    floating = jnp.issubdtype(find.graph.dtype(node.outs[0]), jnp.floating)
    return axes is not None and bool(axes.window) and floating


def _is_given(graph: Graph, value: int) -> bool:
    """Whether a value is an argument, or part of one, in another layout or dtype.

    Weights are. XLA gathers from values that a program computes in the layout in which
    they lie, and our rows would have to be laid out first.
    """
    node = graph.node_of(value)
    while node is not None and node.prim in _KEEPING:
        node = graph.node_of(node.ins[0])
    return node is None


def _is_differentiated(find: Finder, lookup: Node) -> bool:
    """Whether rows are added to a table like that of a lookup."""
    shape = find.graph.shape(lookup.ins[0])
    nodes = (n for n in find.graph.nodes if n.prim in ADDS)
    return any(find.graph.shape(n.outs[0]) == shape for n in nodes)


def _proposed(find: Finder, anchor: Node, op: str) -> Iterator[Reading]:
    if find.done(op, anchor.outs[0]):
        return
    try:
        yield read(find, anchor, op)
    except OverBudget as error:
        find.missed(op, anchor, unproved(error, 0.5))


def read(find: Finder, node: Node, op: str) -> Reading:
    """The reading of whole rows that are taken, or added.

    Raises:
        OverBudget: If an axis is no product of indices.
    """
    g, value, axes = find.graph, node.outs[0], row_axes(node)
    options = {"by_rows": True} if op == LOOKUP else {}
    # What was laid out anew is not laid out twice. Rows may be the result of another
    # op's gradient, and what they were transposed from is then within that.
    own = node.ins[0] if op == LOOKUP else _before_casts(g, node.ins[2])
    names = {own: own}
    ev = find.evaluator(value, names=names, inside=frozenset({value}), **options)
    order = row_order(ev, node, axes)
    args = ev.indices(value)
    form = ev.poly(value, args)
    of_table = (
        *((d,) for d, _, _ in axes.batch), (axes.table,), [d for d, _ in axes.window]
    )  # fmt: skip
    of_ids = (*((k,) for _, k, _ in axes.batch), [k for k, _ in order.rows])
    of_rows = (
        *((u,) for _, _, u in axes.batch),
        [u for _, u in order.rows],
        [u for _, u in axes.window],
    )
    operands: dict[str, Operand] = {}
    params: dict[str, Any] = {}
    if op == SUMS:
        operands["rows"] = _operand(find, ev, node.ins[2], of_rows)
        params["size"] = g.shape(value)[axes.table]
    if order.counted is not None:
        params["start"], params["period"] = order.counted.start, order.counted.period
        if op == LOOKUP:
            params["count"] = _count(g.shape(node.ins[1]), of_ids[-1])
    else:
        if axes.outside != USUAL[op]:
            params["outside"] = axes.outside
        around = find.evaluator_around(value)
        keys = keys_of_distances(around, node, order.rows, axes.column)
        if op == SUMS and keys:
            params["across"] = keys
        operands["ids"] = _operand(find, ev, node.ins[1], of_ids, axes.column)
    if op == LOOKUP or ev.number(node.ins[0]) != 0:
        operands["table"] = _operand(find, ev, node.ins[0], of_table)
    out = of_table if op == SUMS else of_rows
    return Reading(
        op, find.algebra, ev.place, value, args, form,
        tuple(tuple(_flat(args, group)) for group in out), operands, params,
        check_options=options, notes=tuple(sorted(ev.notes)),
    )  # fmt: skip


def _before_casts(graph: Graph, value: int) -> int:
    """What a value was before casts that keep every number."""
    node = graph.node_of(value)
    while node is not None and node.prim == "convert_element_type":
        if not is_lossless(graph.dtype(node.ins[0]), graph.dtype(value)):
            break
        value = node.ins[0]
        node = graph.node_of(value)
    return value


def _operand(
    find: Finder,
    ev: RegionEvaluator,
    value: int,
    axes: Iterable[Sequence[int]],
    column: int | None = None,
) -> Operand:
    """An operand of which each axis is made of some of a value's.

    Of ids it is a column of the last axis.
    """
    at = ev.indices(value)
    if column is not None:
        at = (*at[:-1], find.algebra.affine(None, 1, column))
    form, at = split_digits(find.algebra, ev.poly(value, at, LAYOUT), at)
    groups = [_flat(at, group) for group in axes]
    return operand(form, *groups, dtype=find.graph.dtype(value))


def _flat(at: Sequence[Index], axes: Iterable[int]) -> list[int]:
    return [i for k in axes for i in flat_indices(at[k])]


def _count(shape: Sequence[int], axes: Iterable[int]) -> int:
    count = 1
    for k in axes:
        count *= shape[k]
    return count


PATTERN = ReaderPattern(SUMS, ADDS, propose_sums)
LOOKUPS = ReaderPattern(LOOKUP, TAKES, propose_lookup)
