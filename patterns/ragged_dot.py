"""Ragged dot: rows in groups, a matrix per group; one primitive, three forms.

Formula    out[m, n] = Σ_k lhs[m, k] rhs[group(m), k, n], or its two gradients
Looks like JAX's own primitive; only its dimension numbers vary.
Must hold  there are no batch axes and no group offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rewriter.finder import Finder
from rewriter.graph import Node
from rewriter.match import ReaderPattern
from rewriter.reading import Reading, Refused, operand

NAME = "ragged_dot"
ANCHORS = frozenset({"ragged_dot_general", "ragged_dot"})


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of one ragged dot."""
    value = anchor.outs[0]
    if find.done(NAME, value):
        return
    try:
        yield read(find, anchor)
    except Refused as refusal:
        find.missed(NAME, anchor, refusal)


def read(find: Finder, node: Node) -> Reading:
    """The reading of a ragged dot.

    Raises:
        Refused: If it has axes that the op does not have.
    """
    g, alg, value = find.graph, find.algebra, node.outs[0]
    if len(node.ins) != 3 or node.params.get("group_offset") is not None:
        raise Refused("offset", "a group offset", score=0.9)
    mode = _mode(node)
    ev = find.evaluator(value, inside=frozenset({value}))
    args = ev.indices(value)
    form = ev.poly(value, args)
    operands = {}
    names = ("lhs", "rhs", "group_sizes")
    for name, source in zip(names, node.ins, strict=True):
        at = ev.indices(source)
        poly = alg.of_atom(ev.leaf(source, at))
        operands[name] = operand(poly, *((() if i is None else (i,)) for i in at))
    params: dict[str, Any] = {"out_dtype": str(g.dtype(value))}
    if mode != "forward":
        params["mode"] = mode
    precision = node.params.get("precision")
    if precision is not None:
        params["precision"] = _precision(precision)
    groups = tuple(() if i is None else (i,) for i in args)
    return Reading(NAME, alg, ev.place, value, args, form, groups, operands, params)


def _mode(node: Node) -> str:
    numbers = node.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions)
    groups = tuple(numbers.rhs_group_dimensions)
    key = (tuple(lc), tuple(rc), tuple(lb), tuple(rb), ragged, groups)
    forms = {
        ((1,), (1,), (), (), (0,), (0,)): "forward",
        ((1,), (2,), (), (), (0,), (0,)): "transposed",
        ((0,), (0,), (), (), (0,), ()): "contracting",
    }
    if key not in forms:
        raise Refused(
            "dimensions",
            "a ragged dot with batch axes or another axis order",
            difference=str(numbers),
            score=0.9,
        )
    return forms[key]


def _precision(precision: Any) -> str:
    first = precision[0] if isinstance(precision, tuple) else precision
    return getattr(first, "name", str(first)).lower()


PATTERN = ReaderPattern(NAME, ANCHORS, propose)
