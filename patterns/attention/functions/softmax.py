"""Attention with any function of its scores, as the program computes it.

Formula    out[b,t,n,e] = Σ_s p v[b,s,k,e], with p the softmax over s of
           f(Σ_h q[b,t,n,h] k[b,s,k,h], t, s, arrays)
Looks like attention, with other equations between the first contraction and the
           exponential than attention knows.
Must hold  these equations compute each number from the contraction at its own place,
           from positions and from arrays. What is above them is a softmax of their
           result: that is proved. They themselves are taken over as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from rewriter.algebra.canonicalize import (
    LAYOUT_PRIMITIVES,
    LOCAL,
    TRANSPARENT,
    is_local,
    is_lossless,
)
from rewriter.algebra.normal_form import Algebra, OverBudget
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Reading,
    Refused,
    unproved,
)
from rewriter.find.sieve import Step
from rewriter.ops.score import ELEMENTWISE, NAMED
from rewriter.patterns.attention.assembly import NAME as GENERAL
from rewriter.patterns.attention.functions.candidate import NAME
from rewriter.patterns.attention.functions.softmax_region import SoftmaxRegion
from rewriter.patterns.attention.functions.weights import STEPS as WEIGHED
from rewriter.patterns.attention.functions.weights import propose_weighed
from rewriter.patterns.attention.read import ANCHORS, DOT, later_forms
from rewriter.program.graph import Node
from rewriter.program.walk import equations_above

FILLS = 1e3
"""Numbers from here on, below zero, hide a score where a choice takes them."""

NEARLY = frozenset({"assumption", "gradient", "rows"})
"""Why a region is not attention: it would be with what the reason advises, or a sum
over keys, whose gradient is 0, would be lost in rounding."""

SUMS = frozenset({"reduce_sum", "dot_general"})
"""What may add up weights."""

MAXIMA = frozenset({"reduce_max", "argmax"})
"""What takes the largest number of a row."""

ATTEMPTS = 4
"""Products that are read in vain in one program; reading one is slow."""

SUMMED = 3
"""The most contractions that scores are a sum of, as those of contents and places."""

NEAR = 60
"""The most values above what is added to scores that are looked at."""

WALK = 400
"""The most values between products and a softmax."""

BETWEEN = LOCAL | ELEMENTWISE | NAMED.keys()
"""What may lie between products and the softmax."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the softmax around an exponential, or of another weighed sum."""
    if anchor.prim in DOT:
        yield from propose_weighed(find, anchor)
        return
    products = _products(find, anchor.ins[0])
    if not products or find.known_empty(NAME, anchor):
        return
    _, refusal = find.misses.get((GENERAL, anchor.outs[0]), (anchor, None))
    if refusal is not None and refusal.code in NEARLY:
        return
    if not any(True for _ in find.regions.below(anchor.outs[0], SUMS, NEAR)):
        return  # nothing divides by a sum of weights
    below = [
        (pv, side)
        for pv, side in find.regions.below(anchor.outs[0], DOT)
        if pv.params["dimension_numbers"][0][0]
        and pv not in products
        and find.number(pv.ins[1 - side]) is None
        and _are_weights(find, pv.ins[side], anchor, products)
    ]
    known = [
        (pv, side)
        for pv, side in below
        if any(find.done(GENERAL, v) for v in later_forms(find, pv))
    ]
    below.sort(key=lambda found: found[0].outs[0])  # the program's order
    for pv, side in known or below:
        failed = find.cache.get(NAME, 0)
        if failed >= ATTEMPTS:
            return
        find.cache[NAME] = failed + 1
        before = len(find.found)
        whole = refusal is not None and refusal.code == "empty_rows"
        yield from _around(find, anchor, products, pv, side, whole)
        if len(find.found) > before:
            find.cache[NAME] = failed
            return


def _products(find: Finder, value: int) -> list[Node]:
    """Contractions of which an exponent is computed, nearest first.

    None if there are many, as where layers add to one stream.
    """
    found: list[Node] = []
    for node in equations_above(find.graph, [value], BETWEEN, most=WALK):
        if node.prim == "dot_general" and not is_local(node):
            empty = any(0 in find.graph.shape(i) for i in node.ins)
            if node not in found and not empty:
                found.append(node)
                if len(found) > SUMMED:
                    return []
    return found


def _are_weights(find: Finder, value: int, anchor: Node, products: list[Node]) -> bool:
    """Whether a value depends on products through exponentials alone, this one too.

    An exponential in the function is behind another one, and a gradient is a multiple
    of the function's derivative.
    """
    found, passed = False, BETWEEN - MAXIMA - ANCHORS
    for node in equations_above(find.graph, [value], passed, most=WALK):
        if node in products:
            return False
        found = found or node is anchor
    return found


def _around(
    find: Finder, anchor: Node, products: list[Node], pv: Node, side: int, whole: bool
) -> Iterator[Reading]:
    """Readings of one product of weights and values, by each product of scores.

    With `whole` masks are part of the function, which then says what each row gives.
    """
    miss: Refused | None = None
    for product in products:
        candidates = _candidates(find, anchor, product)
        if whole:
            candidates = _unmasked(find, anchor, product)
        for scored in candidates:
            for value in later_forms(find, pv):
                known = find.found.get((GENERAL, value))
                larger = _size_of_a_sum(find, known) if known else 0
                if known and not (
                    _has_bias_of_pairs(known)
                    and (larger or _adds_of_places(find, scored, product))
                ):
                    return
                for how in ("full", "soft"):
                    region = SoftmaxRegion(
                        find, value, scored, product, (pv, side), candidates[-1], how
                    )
                    try:
                        yield region.reading(known is not None, larger)
                    except Refused as refusal:
                        if miss is None or refusal.score > miss.score:
                            miss = refusal.with_traceback(None)
                    except (OverBudget, RecursionError) as error:
                        miss = miss or unproved(error, 0.3)
                    if find.done(NAME, value):
                        return
    reported = (GENERAL, anchor.outs[0]) in find.misses  # one reason for a place
    if miss is not None and miss.score > 0.5 and not reported:
        find.missed(NAME, anchor, miss)


def _has_bias_of_pairs(reading: Reading) -> bool:
    """Whether attention is read with a bias that differs by both query and key.

    Without one, attention has an operand for all that is added, as slopes of ALiBi.
    """
    bias = reading.operands.get("bias")
    if bias is None:
        return False
    ((form, groups),) = bias.parts
    ids = reading.algebra.ids(form)
    return all(ids.intersection(axis) for axis in groups[2:])


def _size_of_a_sum(find: Finder, reading: Reading) -> int:
    """The size of a bias that is a sum of smaller arrays; 0 if it is none.

    In triangle attention one differs by row and key, and one by head, query and key.
    A function of scores reads each of them as it is.
    """
    bias, alg = reading.operands.get("bias"), reading.algebra
    if bias is None:
        return 0
    ((form, _),) = bias.parts
    whole = _count(alg, alg.ids(form))
    terms = [_count(alg, alg.term_ids(flag, mono)) for flag, mono in form]
    if len(form) > 1 and max(terms) < whole:
        return whole
    leaves = (alg.defs[a][1] for a in alg.poly_leaves(form))
    if any(_is_outer_sum(find, v) for v in leaves if isinstance(v, int)):
        return whole
    return 0


def _count(alg: Algebra, ids: Iterable[int]) -> int:
    return math.prod(alg.sizes[i] for i in ids)


def _is_outer_sum(find: Finder, value: int) -> bool:
    """Whether a value is a sum of arrays that are each smaller."""
    graph = find.graph
    node = graph.node_of(value)
    while node is not None and node.prim in LAYOUT_PRIMITIVES | TRANSPARENT:
        value = node.ins[0]
        node = graph.node_of(value)
    if node is None or node.prim not in ("add", "sub"):
        return False
    size = math.prod(graph.shape(value))
    return all(_size_below_layout(find, i) < size for i in node.ins)


def _size_below_layout(find: Finder, value: int) -> int:
    """The least number of numbers that a value holds in another layout."""
    graph, size = find.graph, math.prod(find.graph.shape(value))
    while (node := graph.node_of(value)) and node.prim in LAYOUT_PRIMITIVES:
        value = node.ins[0]
        size = min(size, math.prod(graph.shape(value)))
    return size


def _adds_of_places(find: Finder, scored: int, product: Node) -> bool:
    """Whether numbers are added to scores that are computed of positions, or picked.

    Attention takes them as an array with a number for each query and key.
    """
    core = find.below(frozenset(product.outs), scored)
    inside = equations_above(find.graph, [scored], lambda n: n is not product, core)
    return any(
        node.prim in ("add", "sub") and i not in core and _is_of_places(find, i)
        for node in inside
        for i in node.ins
    )


def _is_of_places(find: Finder, value: int) -> bool:
    """Whether a value with two axes is made of positions or of a table's numbers."""
    graph = find.graph
    if sum(n != 1 for n in graph.shape(value)) < 2:
        return False
    above = equations_above(graph, [value], lambda _: True, most=NEAR)
    return any(node.prim in ("iota", "gather") for node in above)


def _candidates(find: Finder, anchor: Node, product: Node) -> list[int]:
    """Values that may be the function's result: without what hides it, then with.

    Empty if nothing is computed of the products but what attention knows.
    """
    graph = find.graph
    core = find.below(frozenset(product.outs), anchor.outs[0])
    value = anchor.ins[0]
    if value not in core:
        return []
    value = _unshifted(find, value, core)
    whole = value
    while True:
        inner = _unhidden(find, value, core)
        if inner is None:
            break
        value = inner
    if graph.node_of(value) is product:
        return []
    return list(dict.fromkeys((value, whole)))


def _unmasked(find: Finder, anchor: Node, product: Node) -> list[int]:
    """The function's result with masks in it; empty if there is no function."""
    core = find.below(frozenset(product.outs), anchor.outs[0])
    value = anchor.ins[0]
    found = _unshifted(find, value, core) if value in core else product.outs[0]
    return [] if find.graph.node_of(found) is product else [found]


def _unshifted(find: Finder, value: int, core: frozenset[int]) -> int:
    """The value of which an exponent takes the largest of its row."""
    while True:
        node = find.graph.node_of(value)
        if node is None or node.ins[0] not in core:
            return value
        if node.prim == "sub" and find.graph.shape(node.ins[0]) == find.graph.shape(
            value
        ):
            shift = node.ins[1]
            if shift in core and _is_maximum(find, shift):
                return node.ins[0]
            return value
        if node.prim not in TRANSPARENT | LAYOUT_PRIMITIVES and not _is_widening(
            find, node
        ):
            return value
        value = node.ins[0]


def _is_maximum(find: Finder, value: int) -> bool:
    """Whether a value is made of a maximum of a row, near above it."""
    above = equations_above(find.graph, [value], lambda _: True, most=24)
    return any(node.prim in MAXIMA for node in above)


def _is_widening(find: Finder, node: Node) -> bool:
    graph = find.graph
    return node.prim == "convert_element_type" and is_lossless(
        graph.dtype(node.ins[0]), graph.dtype(node.outs[0])
    )


def _unhidden(find: Finder, value: int, core: frozenset[int]) -> int | None:
    """What a choice by a mask hides, or the same value in another layout, or None."""
    node = find.graph.node_of(value)
    if node is None:
        return None
    if node.prim in TRANSPARENT | LAYOUT_PRIMITIVES or _is_widening(find, node):
        return node.ins[0] if node.ins[0] in core else None
    if node.prim == "concatenate":  # with scores of sinks
        pieces = [i for i in node.ins if i in core]
        return pieces[0] if len(pieces) == 1 else None
    if node.prim != "select_n" or len(node.ins) != 3 or node.ins[0] in core:
        return None
    inside = [i for i in node.ins[1:] if i in core]
    fills = [find.number(i) for i in node.ins[1:] if i not in core]
    if len(inside) != 1 or None in fills or fills[0] > -FILLS:
        return None
    return inside[0]


STEPS = (Step(DOT, BETWEEN), Step(ANCHORS), Step(DOT))

PATTERN = ReaderPattern(NAME, ANCHORS | DOT, propose, STEPS, other_steps=WEIGHED)
