"""Where a match's gradients are computed, seen from its forward.

A replaced forward keeps residuals that its gradients read. They can be read in the
same body, behind the forward; and in the backward loop of a loop, which gets them
step by step. Calls in between are dissolved, unless they hold arrays of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.gradients import Backward
from rewriter.graph import Graph, Scope


def gradients_scope(
    backward: Backward, graph: Graph, places: Sequence[tuple[Scope, int]]
) -> Scope | None:
    """Of the bodies with a forward, the one whose residuals the gradients can read.

    That is one that computes the gradients too, behind the forward; or a loop,
    whose backward loop does. None: they are computed elsewhere.
    """
    for scope, position in places:
        home, path = home_of(scope)
        if lies_at(backward, graph, home) and _free(scope, home):
            found = (first_defined(graph, v, home) for v in backward.grads.values())
            if (*path, position) < min(f[0] for f in found):  # type: ignore[index]
                return scope
    for scope, _ in places:
        if carried_to(backward, graph, scope) is not None:
            return scope
    return None


def lies_at(backward: Backward, graph: Graph, home: Scope) -> bool:
    """Whether gradients are computed in a body, in calls that can be dissolved."""
    values = (backward.cotangent, *backward.grads.values())
    found = [first_defined(graph, v, home) for v in values]
    return all(f is not None and _free(f[1], home) for f in found)


def carried_to(backward: Backward, graph: Graph, scope: Scope) -> Scope | None:
    """The backward loop of a loop, if gradients are computed there."""
    home, _ = home_of(scope)
    last, _ = home_of(graph.node_of(next(iter(backward.grads.values()))).scope)
    loops = home.kind == last.kind == "scan" and home.length == last.length
    if not loops or home is last or not lies_at(backward, graph, last):
        return None
    if home.jaxpr.constvars or last.jaxpr.constvars or not _free(scope, home):
        return None
    outer, _ = home_of(home.parent)
    same = outer is home_of(last.parent)[0]
    calls = _free(home.parent, outer) and _free(last.parent, outer) if same else False
    return last if calls else None


def _free(scope: Scope, home: Scope) -> bool:
    """Whether no call between two bodies holds arrays of its own."""
    while scope is not home:
        if scope.jaxpr.constvars:
            return False
        scope = scope.parent
    return True


def home_of(scope: Scope) -> tuple[Scope, tuple[float, ...]]:
    """The body that a scope belongs to, and the calls that lead to it there."""
    path: list[float] = []
    while scope.kind == "call" and scope.parent is not None:
        path.append(scope.call)
        scope = scope.parent
    return scope, tuple(path[::-1])


def first_defined(
    graph: Graph, value: int, home: Scope
) -> tuple[tuple[float, ...], Scope, int] | None:
    """(path, scope, position) of the first equation for a value in a body."""
    node = graph.node_of(value)
    if node is None:
        return None
    places = [(node.scope, node.position), *((s, p) for s, p, _ in node.copies)]
    found = []
    for scope, position in places:
        body, path = home_of(scope)
        if body is home:
            found.append(((*path, position), scope, position))
    return min(found, key=lambda f: f[0], default=None)
