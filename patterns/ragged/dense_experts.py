"""Experts without ragged dots: near misses, with what would make them match.

Looks like a choice among E experts (top_k, argmax), and matrices [E, ...]. Every
           expert is computed for every token and masked, or one-hot contractions
           dispatch tokens, or weights are gathered for each token.
Never      a match: less work would need the tokens in another order, which the
           program does not ask for.
"""

from __future__ import annotations

import math

from rewriter.find.finder import Finder
from rewriter.find.reading import Refused
from rewriter.program.graph import Node
from rewriter.program.lines import is_of_gradient

CHOICES = frozenset({"top_k", "argmax", "approx_top_k"})
RAGGED = frozenset({"ragged_dot_general", "ragged_dot"})
DOT = frozenset({"dot_general"})
ROUTERS = frozenset({"attention"})
"""What the softmax of a router looks like, from afar."""
REACH = 600
SUGGESTION = (
    "sort the tokens by expert and call jax.lax.ragged_dot(tokens[order], weights, "
    "group_sizes): the work is then that of the chosen experts alone"
)


def near_miss(find: Finder, choice: Node) -> Refused | None:
    """A near miss for a choice among experts without ragged dots, or None."""
    scores = find.graph.shape(choice.ins[0])
    if not scores:
        return None
    axis = choice.params.get("axis", choice.params.get("axes", -1))
    experts = scores[axis[0] if isinstance(axis, tuple) else axis]
    values, nodes = _below(find, choice)
    if experts < 2 or any(n.prim in RAGGED for n in nodes):
        return None
    for node in nodes:
        if is_of_gradient(node):
            continue
        text = _spent(find, node, values, experts)
        if text:
            return Refused(
                "dense", text, score=0.6, suggestion=SUGGESTION, explains=ROUTERS
            )
    return None


def _spent(find: Finder, node: Node, chosen: set[int], experts: int) -> str:
    """The wasted work of an equation that reads a choice, in words."""
    fixed = [i for i in node.ins if i not in chosen]
    shapes = [find.graph.shape(i) for i in fixed]
    if node.prim == "gather" and any(_stacked(s, experts) for s in shapes[:1]):
        rows = math.prod(find.graph.shape(node.outs[0])) // max(1, math.prod(shapes[0]))
        if rows >= 1:
            return "the weights of the chosen experts are gathered for every token"
    if node.prim in ("mul", "dot_general", "select_n") and len(fixed) == 1:
        for dot in find.regions.above(fixed[0], DOT):
            if is_of_gradient(dot):
                continue
            if any(_stacked(find.graph.shape(i), experts) for i in dot.ins):
                return f"all {experts} experts are computed for every token"
    if node.prim == "dot_general":
        _, (lb, rb) = node.params["dimension_numbers"]
        batch = (lb, rb)[node.ins.index(fixed[0])] if len(fixed) == 1 else ()
        if any(
            _stacked(s, experts) and s[int(b)] == experts for s in shapes for b in batch
        ):
            return "tokens are dispatched to experts by one-hot contractions"
    return ""


def _stacked(shape: tuple[int, ...], experts: int) -> bool:
    return len(shape) == 3 and experts in shape[:2]


def _below(find: Finder, choice: Node) -> tuple[set[int], list[Node]]:
    values, queue, nodes = set(choice.outs), list(choice.outs), []
    seen = set()
    while queue and len(values) < REACH:
        for node in find.graph.users(queue.pop(0)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            nodes.append(node)
            values.update(node.outs)
            queue += node.outs
    return values, nodes
