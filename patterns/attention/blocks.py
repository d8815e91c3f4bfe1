"""Attention over blocks of keys: an online softmax in several products or loop steps.

Looks like products of weights and values, which are added or made by the steps of a
           loop. They are then divided by the sum of all weights, as in an online
           softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.algebra.canonicalize import TRANSPARENT
from rewriter.find.finder import Finder
from rewriter.program.counted_loops import LOOPS, counted
from rewriter.program.graph import Node
from rewriter.program.skipped_steps import branch_results

LIMIT = 600
CANDIDATES = 4
ADDED = frozenset({"add", "reduce_sum"})
NORMALISED = frozenset({"div", "mul"})
DOWN = ADDED | NORMALISED | TRANSPARENT | {
    "select_n", "transpose", "reshape", "squeeze", "broadcast_in_dim", "expand_dims",
    "convert_element_type", "slice",
}  # fmt: skip

MOVED = frozenset({"transpose", "reshape", "broadcast_in_dim", "convert_element_type"})


@dataclass(frozen=True)
class Blocks:
    """The contractions and loops that a result is computed from.

    Attributes:
        scores: Contractions of queries with keys.
        products: Contractions of weights with values, and the operand that holds the
            weights.
        scans: Results of loops on the way.
        at_once: Whether one softmax holds the weights of all products.
    """

    scores: tuple[Node, ...]
    products: tuple[tuple[Node, int], ...]
    scans: frozenset[int] = frozenset()
    at_once: bool = False


def results(find: Finder, product: Node) -> list[int]:
    """Values below a product that may be normalised sums of several, likely first."""
    exits = _exits(find)
    seen = {product.outs[0]: frozenset[str]()}
    queue = [product.outs[0]]
    found: list[tuple[bool, int]] = []
    while queue and len(seen) < 120:
        value = queue.pop(0)
        before = seen[value]
        below = []
        for out in exits.get(value, ()):
            below.append((out, before | ADDED))
            if "add" in before and "result" not in before:
                found.append((True, out))
        for node in find.graph.users(value):
            if node.prim not in DOWN:
                continue
            after = before | {node.prim}
            if before & ADDED and node.prim == "div":
                after |= {"result"}
            below.append((node.outs[0], after))
            if before & ADDED and node.prim in NORMALISED:
                found.append((node.prim == "div", node.outs[0]))
            elif node.prim in ADDED and (
                before & NORMALISED or _adds_products(find, node.outs[0])
            ):
                found.append((False, node.outs[0]))
        for out, after in below:
            if out not in seen:
                seen[out] = after
                queue.append(out)
    return [v for _, v in sorted(found, reverse=True)][:CANDIDATES]


def _adds_products(find: Finder, value: int) -> bool:
    """Whether a value is a sum of contractions only."""
    node = find.graph.node_of(value)
    while node is not None and node.prim in MOVED:
        node = find.graph.node_of(node.ins[0])
    if node is None or node.prim != "add":
        return node is not None and node.prim == "dot_general"
    return all(_adds_products(find, i) for i in node.ins)


def exponentials(find: Finder, value: int, found: Blocks) -> set[int]:
    """The results of exponentials that a value is computed from through its weights."""
    starts = [value, *(n.ins[k] for n, k in found.products)]
    return set().union(*(_seen_above(find, v) for v in starts))


def _seen_above(find: Finder, value: int) -> set[int]:
    nodes = {v: find.graph.node_of(v) for v in _above(find, value)[2]}
    return {v for v, n in nodes.items() if n is not None and n.prim in ("exp", "exp2")}


def _exits(find: Finder) -> dict[int, list[int]]:
    """Maps results of scan bodies to the scans' results."""
    if "exits" not in find.cache:
        found: dict[int, list[int]] = {}
        for node in find.loops.values():
            for inner, out in _results(find, node):
                found.setdefault(inner, []).append(out)
        for node in find.graph.nodes:
            if node.prim == "cond" and not LOOPS.isdisjoint(node.scope.path):
                for out in node.outs:
                    for inner in branch_results(find.graph, node, out):
                        found.setdefault(inner, []).append(out)
        find.cache["exits"] = found
    return find.cache["exits"]


def _results(find: Finder, scan: Node) -> list[tuple[int, int]]:
    """Pairs of a scan body's result and the scan's result."""
    (scope,) = scan.scope.children[scan.position]
    inner = [find.graph.read(scope, v) for v in scope.jaxpr.outvars]
    return list(zip(inner, scan.outs, strict=True))


def blocks(find: Finder, value: int) -> Blocks | None:
    """The contractions that a value is computed from, if they are over blocks."""
    dots, scans, _ = _above(find, value)
    here = {id(n) for n in dots}
    weighed = {
        id(n): [
            k
            for k, i in enumerate(n.ins)
            if any(id(m) in here for m in _above(find, i)[0])
        ]
        for n in dots
    }
    products = tuple((n, weighed[id(n)][0]) for n in dots if len(weighed[id(n)]) == 1)
    scores = tuple(n for n in dots if not weighed[id(n)])
    if not scores or len(scores) + len(products) < len(dots) or not products:
        return None
    return Blocks(scores, products, frozenset(scans))


def weighing(
    find: Finder, value: int, weights: int, scores: tuple[Node, ...]
) -> Blocks | None:
    """The contractions that add up to a value, if one softmax holds all weights.

    Args:
        find: The search.
        value: The sum.
        weights: The exponential of all scores.
        scores: The contractions that the scores come from.
    """
    dots, _, _ = _above(find, value)
    sides = [
        [k for k, i in enumerate(n.ins) if find.regions.depends(i, weights)]
        for n in dots
    ]
    if len(dots) < 2 or any(len(k) != 1 for k in sides):
        return None
    products = tuple((n, k) for n, (k,) in zip(dots, sides, strict=True))
    return Blocks(scores, products, at_once=True)


def _above(find: Finder, value: int) -> tuple[list[Node], set[int], set[int]]:
    """(contractions, results of scans, all values) on the way to a value."""
    g = find.graph
    dots: dict[int, Node] = {}
    scans: set[int] = set()
    seen, queue = {value}, [value]
    while queue and len(seen) < LIMIT:
        current = queue.pop()
        node = g.node_of(current)
        if node is None:
            continue
        above: list[int] = []
        if node.prim in LOOPS:
            if counted(node) is None:
                continue
            scans.update(node.outs)
            above = [i for i, out in _results(find, node) if out == current]
        elif node.prim == "cond":  # a step that may be skipped
            above = branch_results(g, node, current)
        elif find.local(node):
            above = list(node.ins)
        elif node.prim == "dot_general":
            dots[id(node)] = node
        for i in above:
            if i not in seen and i not in g.constants:
                seen.add(i)
                queue.append(i)
    return list(dots.values()), scans, seen
