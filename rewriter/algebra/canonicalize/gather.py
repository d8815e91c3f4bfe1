"""Gathers of whole pages by a table of page numbers: each is a leaf of its own.

``pages[table]`` has many spellings: indexing, `jax.numpy.take`, a vmapped
`lax.dynamic_index_in_dim`, a table with other axes. All of them give one leaf. The leaf
is named after the array, the axis of pages and the table, and has the axes of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.lax import GatherScatterMode

from rewriter.algebra.canonicalize.evaluator import Evaluator, rule
from rewriter.algebra.canonicalize.gathered_entries import is_pick, picked
from rewriter.algebra.canonicalize.primitives import LAYOUT
from rewriter.algebra.canonicalize.repeated_rows import repeated_rows
from rewriter.algebra.canonicalize.row_sums import rows_taken
from rewriter.algebra.canonicalize.select import choose
from rewriter.algebra.normal_form import TRUE, Index, OverBudget, Poly
from rewriter.program.graph import Node


class Pages(NamedTuple):
    """The name of a leaf that is pages of an array, gathered by a table.

    The leaf's arguments are those of the array without the axis of pages, then those
    of the table.

    Attributes:
        array: The leaf that holds the pages.
        axis: Its axis of pages.
        table: The leaf that holds page numbers.
        wraps: Whether a negative number counts from the end.
        fills: Whether a number beyond the last page gives NaN; else the nearest page.
        promises: Whether the program promises that there is no such number: the nearest
            page then has no gradient.
    """

    array: Any
    axis: int
    table: Any
    wraps: bool
    fills: bool
    promises: bool


def values_named(leaf: Any) -> tuple[Any, ...]:
    """Returns the names of the values that a leaf depends on."""
    return (leaf.array, leaf.table) if isinstance(leaf, Pages) else (leaf,)


@rule("gather")
def gathered(ev: Evaluator, node: Node, args: tuple[Index, ...], mode: str) -> Poly:
    """The leaf of a gather of pages, or the entries of rows; others stay opaque.

    With `Evaluator.by_rows`, a gather of whole rows is a function of its operands.
    """
    if ev.by_rows and not is_pick(node):
        return rows_taken(ev, node, args, mode)
    if is_pick(node):
        return picked(ev, node, args, mode)
    if repeated_rows(ev.g, node) is not None and node.outs[0] in ev.inside:
        source, at = ev.moved(node, node.outs[0], args)
        return ev.poly(source, at, mode)
    found = _pages(ev, node, args)
    return ev.alg.of_atom(ev.leaf(node.outs[0], args) if found is None else found)


def _pages(ev: Evaluator, node: Node, args: tuple[Index, ...]) -> int | None:
    numbers, array = node.params["dimension_numbers"], node.ins[0]
    axis = _axis(ev, node)
    if axis is None or numbers.operand_batching_dims:
        return None
    if any(ev.varies(i) for i in node.ins):
        return None  # another step of a loop has other pages
    alg, pages = ev.alg, ev.g.shape(array)[axis]
    rows = [a for k, a in enumerate(args) if k not in numbers.offset_dims]
    offsets = iter(args[k] for k in numbers.offset_dims)
    page = alg.new_index(pages)
    at = [
        None if d in numbers.collapsed_slice_dims else next(offsets)
        for d in range(len(ev.g.shape(array)))
    ]
    at[axis] = page
    source = _leaf(ev, ev.poly(array, tuple(at), LAYOUT))
    which = alg.affine(None, 1, tuple(numbers.start_index_map).index(axis))
    wanted = ev.poly(node.ins[1], (*rows, which))
    leaves = alg.poly_leaves(wanted)
    if source is None or len(leaves) != 1:
        return None
    (table,) = leaves
    wraps = _wraps(ev, wanted, table, pages)
    _, name, indices = alg.defs[source]
    if wraps is None or indices.count(page) != 1:
        return None
    if sum(page in alg.index_ids(a) for a in indices) != 1:
        return None
    fills = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
    promises = node.params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS
    where = indices.index(page)
    _, numbered, rows = alg.defs[table]
    found = Pages(name, where, numbered, wraps, fills, promises)
    ev.leaf_values.add(found)
    return alg.atom("leaf", found, (*indices[:where], *indices[where + 1 :], *rows))


def _axis(ev: Evaluator, node: Node) -> int | None:
    """The axis of pages; the gather takes all other axes whole."""
    sizes, taken = ev.g.shape(node.ins[0]), node.params["slice_sizes"]
    axes = [d for d, (n, m) in enumerate(zip(sizes, taken, strict=True)) if m != n]
    mapped = tuple(node.params["dimension_numbers"].start_index_map)
    if len(axes) != 1 or taken[axes[0]] != 1 or axes[0] not in mapped:
        return None
    fills = node.params["mode"] == GatherScatterMode.FILL_OR_DROP
    return None if fills and len(mapped) > 1 else axes[0]


def _leaf(ev: Evaluator, p: Poly) -> int | None:
    """The leaf that a form consists of, or None."""
    if len(p) != 1:
        return None
    ((flag, mono), c) = next(iter(p.items()))
    if flag != TRUE or c != 1 or len(mono) != 1 or mono[0][1] != 1:
        return None
    return mono[0][0] if ev.alg.kind(mono[0][0]) == "leaf" else None


def _wraps(ev: Evaluator, wanted: Poly, table: int, pages: int) -> bool | None:
    """Whether page numbers count from the end if negative, or are a table's own."""
    alg, plain = ev.alg, ev.alg.of_atom(table)
    if wanted == plain:
        return False
    at_end = alg.add(plain, alg.const(pages))
    flag = alg.compare("ge", plain, True)
    try:
        wrapped = choose(alg, flag, plain, at_end)
    except OverBudget:
        return None
    return True if not alg.add(wanted, wrapped, -1.0) else None
