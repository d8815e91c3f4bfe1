"""Reads numbers that a function of scores takes from a table, at computed indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize import interval, kind_of, within
from rewriter.algebra.normal_form import Index
from rewriter.ops.score import BESIDE, Ref, lookup_step
from rewriter.patterns.attention.functions.builder import Builder, Unread
from rewriter.program.graph import Node


def gathered(reader: Builder, node: Node, args: tuple[Index, ...]) -> Ref:
    """A number of a table, at an index that is computed for each place."""
    ev, alg = reader.ev, reader.ev.alg
    numbers = node.params["dimension_numbers"]
    table, indices = node.ins
    reader.asked |= any(n.prim == "scatter-add" for n in ev.g.users(indices))
    shape, sizes = ev.g.shape(table), node.params["slice_sizes"]
    rows = tuple(a for k, a in enumerate(args) if k not in numbers.offset_dims)
    window = iter(args[k] for k in numbers.offset_dims)
    batch, gone = numbers.operand_batching_dims, numbers.collapsed_slice_dims
    at: list[Index] = [
        None if d in (*batch, *gone) else next(window) for d in range(len(shape))
    ]
    for d, k in zip(batch, numbers.start_indices_batching_dims, strict=True):
        at[d] = rows[k]
    picked: list[tuple[int, Ref]] = []
    for column, d in enumerate(numbers.start_index_map):
        if sizes[d] != 1:
            raise Unread("several numbers of a table are read at once")
        which = alg.affine(None, 1, column)
        index = reader.read(indices, (*rows, which))
        picked.append((d, index))
    if any(sizes[d] != shape[d] for d in range(len(shape)) if d not in
           (*batch, *numbers.start_index_map)):  # fmt: skip
        raise Unread("a part of a table is read")
    fills = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
    fill = node.params["fill_value"] if fills else None
    dtype = ev.g.dtype(node.outs[0])
    if fills and fill is None:
        if kind_of(dtype) != "f":
            raise Unread("a table of integers is read outside of it")
        fill = float("nan")
    if node.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS:
        sizes = [shape[d] for d, _ in picked]
        if not within(interval(ev.g, indices), (0, min(sizes) - 1)):
            fill = BESIDE
    return _lookup(reader, table, at, picked, dtype, fill)


def _lookup(
    reader: Builder,
    table: int,
    at: list[Index],
    picked: Sequence[tuple[int, Ref]],
    dtype: Any,
    fill: Any,
) -> Ref:
    """A number of a table at some indices; outside of it the fill, or the nearest.

    Args:
        reader: What reads the function.
        table: The table.
        at: Its other arguments.
        picked: Its axes that are read by index, and the indices.
        dtype: The table's dtype.
        fill: What is outside; None for the nearest number, `BESIDE` for the
            nearest without a gradient.
    """
    alg, shape = reader.ev.alg, reader.ev.g.shape(table)
    places: list[int] = []
    whole: Ref | None = None
    inside: Ref | None = None
    for d, index in sorted(picked, key=lambda pair: pair[0]):
        index = reader.as_int32(index)
        place = alg.new_index(shape[d])
        at[d] = place
        places.append(place)
        if fill is not None:
            good = reader.count("inside", index, shape[d])
            inside = good if inside is None else reader.count("and", inside, good)
        near = reader.count("clip", index, shape[d] - 1)
        if whole is not None:
            near = reader.count("add", reader.count("multiply", whole, shape[d]), near)
        whole = near
    assert whole is not None
    if inside is not None:
        which = "or_beside" if fill == BESIDE else "or_none"
        whole = reader.count(which, inside, whole)
    ref = reader.table(table, tuple(at), tuple(places))
    return reader.add(lookup_step(ref, whole, dtype, fill))


def one_hot(reader: Builder, node: Node, args: tuple[Index, ...]) -> Ref:
    """A number of a table, by a product with a row that is 1 at its index."""
    ev, alg = reader.ev, reader.ev.alg
    (left, right), (batch_l, batch_r) = node.params["dimension_numbers"]
    if len(left) != 1:
        raise Unread("scores go through a product that is not elementwise")
    place = alg.new_index(ev.g.shape(node.ins[0])[left[0]])
    lead = args[: len(batch_l)]
    sides, k = [], len(batch_l)
    for value, summed, batch in zip(
        node.ins, (left[0], right[0]), (batch_l, batch_r), strict=True
    ):
        at: list[Index] = []
        for d in range(len(ev.g.shape(value))):
            if d == summed:
                at.append(place)
            elif d in batch:
                at.append(lead[list(batch).index(d)])
            else:
                at.append(args[k])
                k += 1
        sides.append((value, at, summed))
    for (hot, at, _), (table, there, axis) in (sides, sides[::-1]):
        index = _index_of(reader, hot, tuple(at), place)
        if index is not None:
            products = [n for n in ev.g.users(hot) if n.prim == "dot_general"]
            reader.asked |= len(products) > 1
            dtype = ev.g.dtype(node.outs[0])
            found = _lookup(reader, table, there, [(axis, index)], dtype, 0)
            if ev.g.dtype(table) == dtype:
                return found
            raise Unread("a table is widened by a product")
    raise Unread("scores go through a product that is not elementwise")


def _index_of(
    reader: Builder, hot: int, at: tuple[Index, ...], place: int
) -> Ref | None:
    """The index at which a row of zeros is 1; None if it is no such row."""
    ev = reader.ev
    for _ in range(8):
        node = ev.g.node_of(hot)
        if node is None:
            return None
        moved = ev.moved(node, hot, at)
        if moved is not None and moved[0] is not None:
            hot, at = moved
        elif node.prim == "convert_element_type":
            hot, at = node.ins[0], ev.aligned(node.ins[0], at)
        elif node.prim == "eq":
            pairs = [(i, ev.aligned(i, at)) for i in node.ins]
            for (one, a), (other, b) in (pairs, pairs[::-1]):
                apart = place in reader.ids(b) and place not in reader.ids(a)
                if apart and ev.poly(other, b) == ev.alg.iota(place):
                    return reader.read(one, a)
            return None
        else:
            return None
    return None
