"""Walks around an anchor: the equations of its region, and where it can stand."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rewriter.algebra.canonicalize import is_local
from rewriter.find.body_inputs import BodyInput, body_inputs
from rewriter.program.graph import Graph, Node, Scope
from rewriter.program.walk import equations_above, values_above, values_below

Path = tuple[float, ...]
WALK_LIMIT = 80


@dataclass(eq=False)
class Place:
    """A body in which a replacement can stand, with its transparent calls.

    Attributes:
        scope: The body: the top, or that of a loop, branch, remat or shard_map.
        defined: Value to (place of its first definition, scope, variable).
        around: Of those, the values that the body is given once they are read.
    """

    scope: Scope
    defined: dict[int, tuple[Path, Scope, Any]] = field(default_factory=dict)
    around: dict[int, BodyInput] = field(default_factory=dict)
    _usable: dict[int, bool] = field(default_factory=dict)


def path_of(scope: Scope) -> tuple[Scope, Path]:
    """The body around a body, and the path there to the equation that holds it."""
    path, parent = [float(scope.call)], scope.parent
    while parent.kind == "call" and parent.parent is not None:
        path.append(parent.call)
        parent = parent.parent
    return parent, tuple(path[::-1])


class Regions:
    """Walks over a graph, and which values are available at each place."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._places: dict[int, Place] = {}

    # ------------------------------------------------------------- places
    def place(self, scope: Scope) -> Place:
        """The place a scope belongs to: itself, or the body that calls it."""
        while scope.kind == "call" and scope.parent is not None:
            scope = scope.parent
        found = self._places.get(id(scope))
        if found is None:
            found = self._places[id(scope)] = Place(scope)
            self._collect(found, scope, ())
            self._look_around(found, scope)
        return found

    def _look_around(self, place: Place, scope: Scope) -> None:
        """Notes what the body could be given of the body around."""
        if scope.parent is None:
            return
        outer, (_, call) = self.place(scope.parent), path_of(scope)
        place.around = body_inputs(self.graph, scope, outer.defined, call)
        for value, origin in place.around.items():
            place.defined.setdefault(value, ((-1, float("inf")), scope, origin.var))

    def _collect(self, place: Place, scope: Scope, prefix: Path) -> None:
        for value, (position, var) in scope.first_var.items():
            path = (*prefix, position, float("inf"))
            old = place.defined.get(value)
            if old is None or path < old[0]:
                place.defined[value] = (path, scope, var)
        for position, children in scope.children.items():
            for child in children:
                if child.kind == "call":
                    self._collect(place, child, (*prefix, position))

    def usable(self, place: Place) -> Callable[[int], bool]:
        """Whether a value is available at a place: defined there, or recomputable."""
        return functools.partial(self._is_obtainable, place)

    def _is_obtainable(self, place: Place, value: int) -> bool:
        memo = place._usable
        known = memo.get(value)
        if known is None:
            memo[value] = False
            known = memo[value] = self._ask(place, value)
        return known

    def _ask(self, place: Place, value: int) -> bool:
        if value in place.defined or self.graph.scalar(value) is not None:
            return True
        node = self.graph.node_of(value)
        if node is None or not is_local(node):
            return False
        return all(self._is_obtainable(place, i) for i in node.ins)

    @functools.cached_property
    def returned(self) -> frozenset[int]:
        """Values that the program returns, or a body that is not merely a call."""
        found: set[int] = set()
        queue = [self.graph.top]
        while queue:
            scope = queue.pop()
            if scope.kind != "call":
                found.update(self.graph.read(scope, v) for v in scope.jaxpr.outvars)
            queue += [c for children in scope.children.values() for c in children]
        return frozenset(found)

    # ------------------------------------------------------------- walks
    def above(self, value: int, stop: frozenset[str]) -> list[Node]:
        """The nearest equations of the given primitives above a value."""
        goes_on = lambda node: is_local(node) and not _stops(node, stop)
        above = equations_above(self.graph, [value], goes_on, most=WALK_LIMIT)
        return list({id(n): n for n in above if _stops(n, stop)}.values())

    def dominators(
        self, values: list[int], through: Callable[[Node], bool], limit: int
    ) -> Iterator[tuple[int, frozenset[int]]]:
        """Values from which alone all the given values are computed, nearest first.

        Each comes with the results of the contractions passed on the way. Values are
        numbered in program order, so the walk always expands the latest one known. When
        only one value is left, it is a dominator.
        """
        seen = set(values) - self.graph.constants.keys()
        heap = [-v for v in seen]
        heapq.heapify(heap)
        contractions: set[int] = set()
        while heap and len(seen) < WALK_LIMIT and limit:
            value = -heapq.heappop(heap)
            if not heap:
                limit -= 1
                yield value, frozenset(contractions)
            node = self.graph.node_of(value)
            if node is None or not through(node):
                return
            if node.prim == "dot_general":
                contractions.add(value)
            for i in node.ins:
                if i not in seen and i not in self.graph.constants:
                    seen.add(i)
                    heapq.heappush(heap, -i)

    def below(
        self, value: int, stop: frozenset[str], limit: int = WALK_LIMIT
    ) -> Iterator[tuple[Node, int]]:
        """(equation, operand position) of the nearest such primitives below a value."""
        seen, queue = {value}, [value]
        done = set()
        while queue and len(seen) < limit:
            current = queue.pop(0)
            for node in self.graph.users(current):
                if _stops(node, stop):
                    for k, i in enumerate(node.ins):
                        if i == current and (id(node), k) not in done:
                            done.add((id(node), k))
                            yield node, k
                elif is_local(node):
                    for out in node.outs:
                        if out not in seen:
                            seen.add(out)
                            queue.append(out)

    def chain(
        self, value: int, through: Callable[[Node], bool], limit: int = 12
    ) -> list[int]:
        """Values below a value through some equations, nearest first."""
        return list(values_below(self.graph, [value], through, limit + 1))

    def descends(self, value: int, on: frozenset[int], limit: int = 300) -> bool:
        """Whether a value is computed from any of others, through any equation."""
        above = values_above(self.graph, [value], lambda _: True, most=limit)
        return not on.isdisjoint(above)

    def multiplied(self, value: int, last: int) -> bool:
        """Whether a value is multiplied with itself on a way to a later one.

        So are contractions in an activation such as GELU, and scores never.
        """
        nearby = lambda node: is_local(node) and node.outs[0] <= last
        found = {value, *values_below(self.graph, [value], nearby)}
        for node in equations_above(self.graph, [last], is_local, found):
            count = sum(v in found for v in node.ins)
            if node.prim in ("square", "integer_pow") and count:
                return True
            if node.prim == "mul" and count > 1:
                return True
        return False

    def depends(self, value: int, on: int, limit: int = 400) -> bool:
        """Whether a value is computed from another through local equations."""
        goes_on = lambda node: is_local(node) or node.prim == "dot_general"
        return on in values_above(self.graph, [value], goes_on, most=limit)


def _stops(node: Node, stop: frozenset[str]) -> bool:
    """Whether an equation is one of some primitives; products along no axis are not."""
    return node.prim in stop and not (node.prim == "dot_general" and is_local(node))


def region_values(graph: Graph, value: int, leaves: set[int]) -> set[int]:
    """Returns the values between a result and the leaves of its region."""
    seen, stack = set(), [value]
    while stack and len(seen) < 400:
        value = stack.pop()
        if value in seen or value in leaves or value in graph.constants:
            continue
        seen.add(value)
        node = graph.node_of(value)
        if node is not None:
            stack.extend(node.ins)
    return seen
