"""Finds where a function of scores reads: products at one place, arrays as they lie."""

from __future__ import annotations

import math

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES
from rewriter.algebra.normal_form import Index, OverBudget
from rewriter.find.finder import RegionEvaluator
from rewriter.find.reading import Refused
from rewriter.ops.score import ELEMENTWISE, NAMED

Args = tuple[Index, ...]


def product_place(
    ev: RegionEvaluator, value: int, args: Args, product: int, core: frozenset[int]
) -> Args:
    """Returns the index arguments at which a value's products are read.

    Args:
        ev: What evaluates the region.
        value: The function's value.
        args: Its index arguments.
        product: The products.
        core: All values that are computed from them.

    Raises:
        Refused: If they are read at several places, or at a place that is computed.
        OverBudget: If a value is made of pieces.
    """
    graph, found = ev.g, set[Args]()
    seen, queue = {(value, args)}, [(value, args)]
    while queue:
        value, args = queue.pop()
        if value == product:
            found.add(args)
            continue
        node = graph.node_of(value)
        assert node is not None
        moved = ev.moved(node, value, args)
        if moved is not None:
            source, at = moved
            read = [] if source is None else [(source, at)]
        elif node.prim in ELEMENTWISE or node.prim in NAMED:
            read = [(i, ev.aligned(i, args)) for i in node.ins]
        elif node.prim == "gather":  # of a table, at an index made of scores
            rows = node.params["dimension_numbers"].offset_dims
            kept = tuple(a for k, a in enumerate(args) if k not in rows)
            last = graph.shape(node.ins[1])[-1]
            read = [
                (node.ins[1], (*kept, ev.alg.affine(None, 1, c))) for c in range(last)
            ]
            if node.ins[0] in core:
                raise Refused("scores", "scores are picked by an index", score=0.6)
        else:
            raise Refused(
                "scores",
                f"scores go through {node.prim}, which is not elementwise",
                score=0.6,
            )
        new = [x for x in read if x[0] in core and x not in seen]
        seen.update(new)
        queue += new
    if len(found) != 1:
        raise Refused("scores", "scores of other queries or keys are read", score=0.6)
    return found.pop()


def in_other_layout(
    ev: RegionEvaluator, value: int, args: Args
) -> tuple[int, Args] | None:
    """Returns the array that a value is in another layout, where it is at hand.

    One array may be broadcast several times, and has one gradient.

    Args:
        ev: What evaluates the region.
        value: The value.
        args: Its index arguments.

    Returns:
        ``(array, arguments)``, or None if there is none that is not larger.
    """
    node = ev.g.node_of(value)
    if node is None or node.prim not in LAYOUT_PRIMITIVES:
        return None
    try:
        source, at = ev.moved(node, value, args) or (None, ())
    except OverBudget:
        return None
    if source is None or not ev.at_hand(source):
        return None
    larger = math.prod(ev.g.shape(source)) > math.prod(ev.g.shape(value))
    return None if larger else (source, at)
