"""Paged attention: attention whose keys and values are pages gathered by one table.

Formula    k[b, p z + o, k, h] = k_pages[table[b, p], o, k, h], and v alike; then
           attention over them
Looks like attention, with a gather of pages above both of its contractions.
Must hold  keys and values are whole pages of two pools with the same axes. One table
           names both, in its order, and nothing else is done to them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, Pages
from rewriter.algebra.normal_form import TRUE, Algebra, Index, OverBudget
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Group,
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
)
from rewriter.patterns.attention import read
from rewriter.patterns.attention.read import ANCHORS, DOT, STEPS
from rewriter.program.graph import Node

GATHER = frozenset({"gather"})
NAME = "paged_attention"
AXES = ("kpzh", "pkzh", "pzkh")
"""Axes of a pool by the parameter ``heads_axis``."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of attention over pages around an exponential."""
    looking = looking_through(find, NAME, _of_pages)
    if looking is None or not reads_pages(looking, anchor):
        return
    for reading in read.propose(looking, anchor):
        try:
            yield paged(looking, reading)
        except Refused as refusal:
            find.missed(NAME, anchor, refusal)
            looking.found[reading.op, reading.value] = reading
        if find.done(NAME, reading.value):
            looking.found[reading.op, reading.value] = reading


def looking_through(
    find: Finder, name: str, of_pages: Callable[[Finder, Node], bool]
) -> Finder | None:
    """Returns the search that looks through gathers of pages; None if there are none.

    Args:
        find: The search.
        name: The pattern that looks through them.
        of_pages: Whether a gather takes pages.
    """
    if name not in find.cache:
        found = frozenset(
            node.outs[0]
            for node in find.graph.nodes
            if node.prim == "gather" and of_pages(find, node)
        )
        find.cache[name] = (
            dataclasses.replace(
                find, gathers=found, misses={}, found={}, cache={},
                _known_empty={}, _asked={}, _names={},
            )
            if found
            else None
        )  # fmt: skip
    return find.cache[name]


def _of_pages(find: Finder, node: Node) -> bool:
    """Whether a gather takes several pages of an array with heads."""
    return len(node.params["slice_sizes"]) == 4 and takes_pages(find, node)


def takes_pages(find: Finder, node: Node) -> bool:
    """Returns whether a gather takes one entry of an axis, and two axes whole or more.

    Labels that are looked up in logits are no pages: all axes are taken alone.
    """
    taken, sizes = node.params["slice_sizes"], find.graph.shape(node.ins[0])
    cut = [n for n, size in zip(taken, sizes, strict=True) if n != size]
    return cut == [1] and sum(n > 1 for n in taken) >= 2


def reads_pages(find: Finder, anchor: Node) -> bool:
    """Returns whether pages lie above a product whose exponential an anchor takes.

    Args:
        find: A search that looks through gathers.
        anchor: The exponential.
    """
    above = find.regions.above
    return any(
        node.outs[0] in find.gathers
        for product in above(anchor.ins[0], DOT)
        for operand_of in product.ins
        for node in above(operand_of, GATHER)
    )


def paged(find: Finder, reading: Reading) -> Reading:
    """Turns a reading of attention into one over pages.

    Raises:
        Refused: If keys and values are not pages that the same table names.
    """
    alg = find.algebra
    if reading.params.get("unshifted"):
        text = "exponentials without their maximum, which may overflow"
        raise Refused("rows", text, score=0.5)
    if reading.joined:
        raise Refused("pages", "keys are in several arrays", score=0.2)
    keys, values = (_leaf(alg, reading.operands[name]) for name in "kv")
    if keys.name[2:] != values.name[2:] or keys.rows != values.rows:
        text = "keys and values are gathered by different tables"
        raise Refused("table", text, score=0.5)
    if keys.axes != values.axes:
        text = "pages of keys and of values have different axes"
        raise Refused("pages", text, score=0.5)
    if keys.axes not in AXES:
        text = "pages have other axes than heads, positions and features"
        raise Refused("pages", text, score=0.5)
    numbers = alg.of_atom(alg.atom("leaf", keys.name.table, keys.rows))
    own = {
        "k_pages": pool(find, keys.name.array),
        "v_pages": pool(find, values.name.array),
        "table": operand(numbers, reading.out_groups[0], keys.page),
    }
    rest = {n: o for n, o in reading.operands.items() if n not in ("k", "v")}
    params = {
        **reading.params,
        "heads_axis": AXES.index(keys.axes),
        "wraps": keys.name.wraps,
        "fills": keys.name.fills,
        "promises": keys.name.promises,
    }
    return dataclasses.replace(
        reading, op=NAME, operands={**rest, **own}, params=params
    )


@dataclass(frozen=True)
class _Gathered:
    """Gathered keys or values.

    Attributes:
        name: The pool and the table.
        axes: The pool's axes: heads k, pages p, positions z, features h.
        rows: The table's index arguments.
        page: The page index among the indices of keys; none for a single page.
    """

    name: Pages
    axes: str
    rows: tuple[Index, ...]
    page: Group


def _leaf(alg: Algebra, source: Operand) -> _Gathered:
    """Reads keys or values as pages of a pool."""
    (poly, (_, s, heads, width)), *more = source.parts
    ((flag, mono), c), *others = poly.items()
    plain = not more and not others and flag == TRUE and c == 1 and len(mono) == 1
    atom, exponent = mono[0]
    if not plain or exponent != 1 or alg.kind(atom) != "leaf":
        raise Refused("pages", "keys or values are not whole pages", score=0.2)
    _, name, args = alg.defs[atom]
    if not isinstance(name, Pages):
        raise Refused("pages", "keys or values are not gathered pages", score=0.2)
    letters = ""
    for a in args[:3]:
        kind = {(): "k", tuple(heads): "k", tuple(width): "h"}
        kind |= {(i,): "z" for i in s}
        letters += kind.get(tuple(_plain(a)), "?")
    axes = letters[: name.axis] + "p" + letters[name.axis :]
    page = tuple(i for i in s if all(a != i for a in args[:3]))
    return _Gathered(name, axes, args[3:], page)


def _plain(a: Index) -> list[int]:
    """The indices of an argument, most significant first; -1 for other arguments."""
    try:
        return flat_indices(a)
    except OverBudget:
        return [-1]


def pool(find: Finder, name: int) -> Operand:
    """Returns all pages of an array, as they lie in memory.

    Raises:
        Refused: If they are only part of an array, which a kernel would have to copy.
    """
    at = _whole(find, name, 4)
    groups = (() if i is None else (i,) for i in at)
    alg = find.algebra
    return operand(alg.of_atom(alg.atom("leaf", name, at)), *groups)


def pool_without_heads(find: Finder, name: int) -> Operand:
    """Returns the same of an array whose axis of heads is absent, or has size 1.

    Raises:
        Refused: As `pool`.
    """
    shape, alg = find.graph.shape(name), find.algebra
    at = _whole(find, name, 3 + (len(shape) == 4 and 1 in shape[1:3]))
    kept = [i for k, i in enumerate(at) if shape[k] > 1 or k not in (1, 2)]
    groups = (() if i is None else (i,) for i in kept)
    return operand(alg.of_atom(alg.atom("leaf", name, at)), *groups)


def _whole(find: Finder, name: int, rank: int) -> tuple[Index, ...]:
    alg, shape = find.algebra, find.graph.shape(name)
    node = find.graph.node_of(name)
    cut = node is not None and node.prim in LAYOUT_PRIMITIVES
    if cut or len(shape) != rank or name in find.steps:
        text = "the pages are a slice of an array, which a kernel would copy first"
        raise Refused("pages", text, score=0.5)
    return tuple(alg.new_index(n) for n in shape)


PATTERN = ReaderPattern(
    NAME, ANCHORS, propose, STEPS, frozenset({"gather"}), looks_above=True
)
