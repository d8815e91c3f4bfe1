"""Candidates for the cotangent of a match's result, and values computed from them."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

from rewriter.algebra.canonicalize import (
    LAYOUT_PRIMITIVES,
    TRANSPARENT,
    is_local,
    is_lossless,
    is_pick,
    values_named,
)
from rewriter.find.match import Match
from rewriter.gradients.through_loops import through
from rewriter.program.graph import Graph, Node
from rewriter.program.walk import values_below
from rewriter.support.dtypes import number_kind

REACH = 240
"""The most values below a cotangent to examine."""
SHARED = 40
"""Values with more readers are masks or tables that all layers share."""
CONE = 400
"""The most values in a gradient's computation."""
NOTHING: frozenset[int] = frozenset()
MEETS = frozenset({
    "dot_general", "mul", "div", "select_n", "ragged_dot_general", "ragged_dot",
    "reduce_sum",
})  # fmt: skip
CONTRACTIONS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})
ADDS = frozenset({"add", "add_any", "sub", "concatenate", "pad", "stack", "reduce_sum"})
EITHER = frozenset({"mul"}) | CONTRACTIONS
PRODUCTS = LAYOUT_PRIMITIVES | TRANSPARENT | {
    "mul", "div", "neg", "integer_pow", "square", "convert_element_type",
}  # fmt: skip
FACTORS = TRANSPARENT | {
    "broadcast_in_dim", "reshape", "mul", "div", "neg", "select_n",
}  # fmt: skip
STEPS = 24
"""The most values above a candidate that are examined."""
LINEAR = LAYOUT_PRIMITIVES | TRANSPARENT | {"convert_element_type", "mul", "div", "neg"}


def cotangents(graph: Graph, match: Match, *, ruled: bool = False) -> list[int]:
    """Values that are multiplied with a region's values, and could be its cotangent.

    Values with the result's dtype come first. Among them, those come first that are not
    computed from another one and the region: a product of the cotangent and a value of
    the region is not the cotangent. Then come those that meet more than one value of
    the region, since a value that all layers share meets every layer's cotangent.

    Args:
        graph: The program.
        match: The match.
        ruled: Whether gradients may be those of a user's own rule. Then values count
            too that are computed from the region's values alone, as factors of a rule.
    """
    dtype = graph.dtype(match.value)
    met: dict[int, set[int]] = {}
    region = match.inner | {v for _, v in match.leaves}
    if ruled:
        region = _with_factors(graph, region)
    for value, where in _meeting(graph, match, region):
        met.setdefault(value, set()).add(where)
    later = {v for v in met if _is_product(graph, v, met.keys(), region)}
    order = lambda v: (graph.dtype(v) != dtype, v in later, len(met[v]) < 2)
    return sorted(met, key=order)


def _is_product(graph: Graph, value: int, others: Set[int], region: Set[int]) -> bool:
    """Whether a value is a product of other candidates, the region and numbers.

    A choice is none: that of rows which are no NaN keeps the others' cotangent zero.
    """
    seen, queue, met = {value}, [(value, False)], False
    while queue and len(seen) <= STEPS:
        at, beyond = queue.pop()
        node = graph.node_of(at)
        if node is None or node.prim not in PRODUCTS:
            if not beyond:
                return False
            continue
        for i in node.ins:
            met = met or i in region
            if i not in seen and i not in region and i not in graph.constants:
                seen.add(i)
                queue.append((i, beyond or i in others))
    return met and not queue and not others.isdisjoint(seen - {value})


def factors_of(graph: Graph, match: Match, cotangent: int) -> tuple[Set[int]] | None:
    """The values that a loss's cotangent is a product of, at most a few.

    They are () for a number, such as that of a mean. Two means of one program have two
    cotangents, each of which is a multiple of the other: a proof for any cotangent
    cannot know that.
    """
    if not reduces(graph, match):
        return None
    found: set[int] = set()
    queue, seen = [cotangent], 0
    while queue:
        value = queue.pop()
        node, seen = graph.node_of(value), seen + 1
        if seen > STEPS:
            return None
        if node is not None and node.prim in FACTORS:
            queue += node.ins
        elif value not in graph.constants:
            found.add(value)
    return None if cotangent in found else (frozenset(found),)


def _meeting(
    graph: Graph, match: Match, region: frozenset[int]
) -> Iterator[tuple[int, int]]:
    """Pairs of a value and the region's value that it meets, latest first.

    Products with a number, such as the root of a width, are skipped: layers share it.
    """
    shape, dtype = graph.shape(match.value), graph.dtype(match.value)
    added = reduces(graph, match)
    for value in sorted(region, reverse=True):
        users = graph.users(value)
        if not users or len(users) > SHARED or graph.shape(value) == ():
            continue
        for node in users:
            if node.prim not in MEETS or not region.isdisjoint(node.outs):
                continue
            for i in node.ins:
                if i in region or i in graph.constants:
                    continue
                for x in _under_layout(graph, i, added):
                    if x in region or graph.shape(x) != shape:
                        continue
                    # Casts of one result add up their cotangents before its dtype.
                    if graph.dtype(x) == dtype or _is_wider(graph.dtype(x), dtype):
                        yield x, value


def _with_factors(graph: Graph, region: frozenset[int]) -> frozenset[int]:
    """Values of a region, and those that are computed from these and numbers alone."""
    found, queue = set(region), collections.deque(sorted(region))
    while queue and len(found) < len(region) + CONE:
        for node in graph.users(queue.popleft()):
            if not is_local(node) or not found.isdisjoint(node.outs):
                continue
            if all(i in found or i in graph.constants for i in node.ins):
                found.update(node.outs)
                queue.extend(node.outs)
    return frozenset(found)


def _under_layout(graph: Graph, value: int, added: bool) -> Iterator[int]:
    """A value, and what it is a multiple of, or the sum of with zeros.

    Args:
        graph: The program.
        value: The value.
        added: Whether to look into sums of cotangents too.
    """
    summed = False
    for _ in range(12):
        if not summed:
            yield value
        node = graph.node_of(value)
        if node is None:
            return
        if node.prim == "reduce_sum":
            summed, value = True, node.ins[0]
        elif is_pick(node) and node.prim != "gather":
            summed, value = False, node.ins[2]  # of a row with one other number
        elif node.prim == "add_any" and added:
            for i in node.ins:
                yield from _under_layout(graph, i, False)
            return
        elif node.prim not in LINEAR:
            return
        else:
            moving = [i for i in node.ins if i not in graph.constants]
            if not moving:
                return
            value = moving[-1] if node.prim == "mul" else moving[0]


def reduces(graph: Graph, match: Match) -> bool:
    """Whether a result is smaller than every array that it is made of, as a loss is.

    Its cotangent may meet the region in a sum with multiples of itself. What the result
    is multiplied by does not count, nor do operands with a number for each row.
    """
    alg, times = match.reading.algebra, match.reading.times or {}
    leaves = alg.poly_leaves(times).union(
        *(
            given.leaves(alg)
            for name, given in match.reading.operands.items()
            if match.op.dims.get(name) == match.op.out == "..."
        )
    )
    factors = {n for a in leaves for n in values_named(alg.defs[a][1])}
    floats = (
        v for n, v in match.leaves if is_float(graph.dtype(v)) and n not in factors
    )
    shapes = [graph.shape(v) for v in (match.value, *floats)]
    if any(not isinstance(n, int) for shape in shapes for n in shape):
        return False
    own, *others = map(math.prod, shapes)
    return bool(others) and own < min(others)


def below(graph: Graph, value: int) -> list[int]:
    """Values that are computed from a value, in program order."""
    return sorted([value, *values_below(graph, [value], lambda _: True, REACH)])


def linear(graph: Graph, reached: Sequence[int], stops: frozenset[int]) -> set[int]:
    """Those of the values below a cotangent that are linear in it, as gradients are.

    Args:
        graph: The program.
        reached: The cotangent, and values that are computed from it, in program order.
        stops: Where to stop; the cotangent is one of them.
    """
    found = {v for v in reached[:1] if v in stops}
    other: set[int] = set()  # what depends on the cotangent in other ways
    for value in reached[1:]:
        made = graph.producer.get(value)
        if made is None or value in stops:
            continue
        node = made[0]
        positions = [k for k, v in enumerate(node.ins) if v in found]
        if not other.isdisjoint(node.ins) or (
            positions and not _is_linear(node, positions)
        ):
            other.add(value)
        elif positions:
            found.add(value)
    return found


def _is_linear(node: Node, positions: Sequence[int]) -> bool:
    """Whether a result is linear in some of its operands."""
    if node.prim in ADDS:
        return True
    if is_pick(node):
        return positions == [0] or (positions == [2] and node.prim != "gather")
    if node.prim == "scan":
        return True  # if it is not, no form of its results is a gradient
    if node.prim in LINEAR or node.prim in CONTRACTIONS:
        return positions == [0] or (len(positions) == 1 and node.prim in EITHER)
    return node.prim == "select_n" and 0 not in positions


class Cones:
    """Values between a value and some stops, each found once.

    Args:
        graph: The program.
        stops: Where to stop.
        foreign: Values on which a value may not depend.
    """

    def __init__(
        self, graph: Graph, stops: frozenset[int], foreign: Set[int] = NOTHING
    ):
        self.graph, self.stops = graph, stops
        self._reads: dict[int, tuple[frozenset[int], tuple[int, ...]]] = {}
        self._known: dict[int, frozenset[int] | None] = {
            **dict.fromkeys(foreign), **dict.fromkeys(stops, NOTHING)
        }  # fmt: skip

    def of(self, value: int) -> frozenset[int] | None:
        """The values, this one too; None if it depends on anything but the stops.

        Constants that are not foreign do not count.
        """
        known, constants = self._known, self.graph.constants
        stack = [value]
        while stack:
            current = stack[-1]
            if current in known:
                stack.pop()
            elif current in constants:
                known[current] = NOTHING
            else:
                self._step(current, stack)
        return known[value]

    def _step(self, value: int, stack: list[int]) -> None:
        """Finds the cone of a value, or puts an operand on the stack whose is needed.

        One operand that depends on anything else is enough.
        """
        known, maker = self._known, self.graph.producer.get(value)
        if maker is None or not may_expand(maker[0]):
            known[value] = None
            return
        inside, operands = [value], maker[0].ins
        if maker[0].prim == "scan":
            if value not in self._reads:
                self._reads[value] = through(self.graph, maker[0], value, self.stops)
            within, operands = self._reads[value]
            inside += within
        for operand in operands:
            if operand not in known:
                stack.append(operand)
                return
            above = known[operand]
            if above is None:
                known[value] = None
                return
            inside += above
        found = frozenset(inside)
        known[value] = found if len(found) <= CONE else None


def cone(graph: Graph, value: int, stops: frozenset[int]) -> frozenset[int] | None:
    """Values between a value and the stops; None if it depends on anything else."""
    return Cones(graph, stops).of(value)


def may_expand(node: Node) -> bool:
    """Whether a gradient's form may look through an equation."""
    return is_local(node) or node.prim in CONTRACTIONS | {"scan"} or is_pick(node)


def cancelled_reads(graph: Graph, match: Match) -> frozenset[int]:
    """Values that a region reads, but whose effect cancels in its reading.

    A number added to all scores of a row cancels in the weights. But gradients read
    exponentials of scores with that number.
    """
    leaves = frozenset(v for _, v in match.leaves)
    inside, edge = set(leaves), set()
    for value in sorted(match.inner):
        ins = graph.node_of(value).ins if value in graph.producer else ()
        if not inside.isdisjoint(ins):
            inside.add(value)
            edge.update(ins)
    cones = Cones(graph, leaves)
    return frozenset(v for v in edge - inside if cones.of(v) is None)


def _is_wider(dtype: Any, other: Any) -> bool:
    """Whether one float dtype holds every value of another one."""
    return is_float(dtype) and is_float(other) and is_lossless(other, dtype)


def is_float(dtype: Any) -> bool:
    """Whether values of a dtype have gradients."""
    return number_kind(dtype) == "float"
