"""Attention whose weights are a function of each score, and no softmax.

Formula    out[b,t,n,e] = Σ_s w v[b,s,k,e], or that divided by a function of Σ_s w
           w = f(Σ_h q[b,t,n,h] k[b,s,k,h], t, s, arrays)
Looks like elementwise equations between two contractions, as of sigmoid attention or of
           ReLU attention. The sum of a query's weights may divide them.
Must hold  as for a function before a softmax. Both contractions have an axis of the
           batch or of heads in common: without one they are layers of a network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, is_local
from rewriter.algebra.normal_form import OverBudget
from rewriter.find.finder import Finder
from rewriter.find.reading import Reading, Refused, unproved
from rewriter.find.sieve import BATCHED, Step
from rewriter.ops.score import ELEMENTWISE, NAMED
from rewriter.patterns.attention.assembly import NAME as GENERAL
from rewriter.patterns.attention.functions.candidate import NAME
from rewriter.patterns.attention.functions.weights_region import Divisor, WeighedRegion
from rewriter.patterns.attention.precision import rounded
from rewriter.patterns.attention.read import ANCHORS, later_forms
from rewriter.program.counted_loops import LOOPS
from rewriter.program.graph import Node
from rewriter.program.lines import is_of_gradient
from rewriter.program.walk import equations_above

BETWEEN = LAYOUT_PRIMITIVES | TRANSPARENT | ELEMENTWISE | NAMED.keys() | {"gather"}
"""What may lie between products and weights."""

FUNCTIONS = (ELEMENTWISE | NAMED.keys()) - TRANSPARENT
"""What makes weights of scores."""

KEPT = LAYOUT_PRIMITIVES | TRANSPARENT | {
    "convert_element_type", "copy", "div", "mul", "select_n",
}  # fmt: skip
"""What leaves an exponential the weight that it is."""

SORTED = frozenset({"sort", "top_k", "cumsum"})
"""What sparsemax and entmax compute of a row of scores."""

OF_ROWS = SORTED | {"cumprod", "cumlogsumexp", "reduce_sum", "reduce_prod"}
"""What else may be computed of a row, which makes no function of each score."""

STEPS = (
    Step(frozenset({BATCHED}), BETWEEN | {"reduce_sum"}),
    Step(FUNCTIONS, BETWEEN | {"reduce_sum"}),
    Step(frozenset({BATCHED})),
)
"""The path through such an attention."""

OF_SOFTMAX = frozenset({"reduce_max", "argmax"})
"""What says, beside an exponential, that weights are those of a softmax."""

WALK = 400
"""The most values between products and weights."""


def propose_weighed(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of a contraction as one of weights with values."""
    summed, batch = anchor.params["dimension_numbers"]
    if not summed[0] or not batch[0] or is_of_gradient(anchor):
        return
    for side in (0, 1):
        for product in _products(find, anchor.ins[side]):
            if any(find.done(GENERAL, v) for v in later_forms(find, product)):
                continue  # what an attention gives: these are the next one's queries
            between = _between(find, product, anchor.ins[side])
            if between is None or _has_exponentials(find, anchor.ins[side], between):
                continue
            if find.known_empty(NAME, anchor):
                return
            try:
                for region in _regions(find, product, anchor, side, between):
                    yield region.reading()
                    if find.done(NAME, region.value):
                        return
            except Refused as refusal:
                find.missed(NAME, anchor, refusal.with_traceback(None))
            except (OverBudget, RecursionError) as error:
                find.missed(NAME, anchor, unproved(error, 0.3))


def _products(find: Finder, value: int) -> list[Node]:
    """Contractions with axes in common of which alone weights are computed.

    None if there are several, as in a gradient.
    """
    found: list[Node] = []
    for node in equations_above(find.graph, [value], BETWEEN | OF_ROWS, most=WALK):
        if node.prim == "dot_general" and not is_local(node):
            (summed, _), (batch, _) = node.params["dimension_numbers"]
            if summed and batch and node not in found:
                found.append(node)
    return found if len(found) == 1 else []


def _between(find: Finder, product: Node, weights: int) -> list[Node] | None:
    """The equations by which weights are made of products, without the products.

    None if they are none of a function of each score.
    """
    core = find.below(frozenset(product.outs), weights)
    inside = equations_above(find.graph, [weights], lambda n: n is not product, core)
    found = list(itertools.islice((n for n in inside if n is not product), WALK + 1))
    if len(found) > WALK:
        return None
    prims = {node.prim for node in found}
    if prims.isdisjoint(FUNCTIONS) or (prims & ANCHORS and prims & OF_SOFTMAX):
        return None
    return found


def _has_exponentials(find: Finder, weights: int, between: list[Node]) -> bool:
    """Whether weights are exponentials, or multiples of them: those of a softmax."""
    inside = {v for node in between for v in node.outs}
    above = equations_above(find.graph, [weights], KEPT, inside)
    return any(node.prim in ANCHORS for node in above)


def _regions(
    find: Finder, product: Node, pv: Node, side: int, between: list[Node]
) -> Iterator[WeighedRegion]:
    """The candidates of one contraction of weights with values.

    Raises:
        Refused: If weights depend on other scores of their query, or are a result.
    """
    weights, graph = pv.ins[side], find.graph
    others = [n for n in between if n.prim not in BETWEEN]
    sums = [n for n in others if n.prim == "reduce_sum"]
    if len(sums) < len(others) or len(sums) > 1:
        raise _unlike(others)
    kept = (v for n in (product, *between) for v in n.outs)
    if not set(graph.results).isdisjoint(kept):
        text = "the weights or the scores are a result too, so they are kept anyway"
        raise Refused("returned", text, score=0.5)
    if sums:
        divisor = _divisor(find, sums[0], between)
        if divisor is None:
            raise _unlike(others)
        scored = find.uncast(sums[0].ins[0])
        yield WeighedRegion(
            find, rounded(find, pv.outs[0]), scored, product, (pv, side), divisor
        )
        return
    for value, divisor in _divided_later(find, product, pv):
        scored = find.uncast(divisor.total.ins[0])
        yield WeighedRegion(find, value, scored, product, (pv, side), divisor)
    value = rounded(find, pv.outs[0])
    yield WeighedRegion(find, value, weights, product, (pv, side), None)


def _unlike(others: list[Node]) -> Refused:
    """Why weights are no function of each score alone."""
    prims = {n.prim for n in others}
    if prims & SORTED:
        text = "the scores of a query are sorted, as for sparsemax and entmax or for "
        text += "the largest ones, and there is no running form of that"
        return Refused("sorted", text, score=0.6)
    if prims & LOOPS:
        text = "the weights are made in a loop over all scores of a query, as entmax "
        text += "searches its threshold, and there is no running form of that"
        return Refused("loop", text, score=0.6)
    names = " and ".join(sorted(prims))
    text = f"each weight depends on other scores of its query, through {names}"
    return Refused("scores", text, score=0.4)


def _divisor(find: Finder, total: Node, between: list[Node]) -> Divisor | None:
    """What weights are divided by, from a sum of them among what makes them."""
    graph = find.graph
    below = find.below(frozenset(total.outs), max(v for n in between for v in n.outs))
    full = math.prod(graph.shape(total.ins[0]))
    row = {v for v in below if math.prod(graph.shape(v)) < full}
    for node in sorted(between, key=lambda n: n.outs[0]):
        if node.prim not in ("div", "mul"):
            continue
        after = [i in below for i in node.ins]
        if after in ([False, True], [True, False]):
            k = after.index(True)
            shape = find.graph.shape(node.outs[0])
            if find.graph.shape(node.ins[1 - k]) != shape or node.outs[0] in row:
                continue
            if node.prim == "div" and k == 0:
                return None
            return Divisor(total, _row(find, node.ins[k]), node.prim == "mul")
    return None


def _divided_later(
    find: Finder, product: Node, pv: Node
) -> Iterator[tuple[int, Divisor]]:
    """Results that are divided behind the sum of values, and what by."""
    scores = frozenset(product.outs)
    for value in later_forms(find, pv)[1:]:
        node = find.graph.node_of(value)
        while node is not None and node.prim not in ("div", "mul"):
            node = find.graph.node_of(node.ins[0]) if node.ins else None
        if node is None:
            continue
        for k in (0, 1):
            if node.prim == "div" and k == 0:
                continue
            total = _total(find, node.ins[k], scores)
            if total is not None:
                row = _row(find, node.ins[k])
                yield value, Divisor(total, row, node.prim == "mul")


def _total(find: Finder, value: int, scores: frozenset[int]) -> Node | None:
    """A sum of what is computed of scores, near above a value."""
    for node in equations_above(find.graph, [value], BETWEEN, most=24):
        if node.prim == "reduce_sum" and node.ins[0] in find.below(scores, node.ins[0]):
            return node
    return None


def _row(find: Finder, value: int) -> int:
    """A number of each row, before it is broadcast along the row."""
    while True:
        node = find.graph.node_of(value)
        if node is None or node.prim not in LAYOUT_PRIMITIVES or len(node.ins) != 1:
            return value
        value = node.ins[0]
