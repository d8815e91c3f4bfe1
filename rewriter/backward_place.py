"""Where a match's gradients are computed, seen from its forward.

A replaced forward keeps residuals that its gradients read. They can be read in the
same body, behind the forward; in the backward loop of a loop, which gets them step
by step; and in a checkpoint's recomputation. Calls in between are dissolved, unless
they hold values of a trace around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewriter import _jax
from rewriter.gradients import Backward
from rewriter.graph import Graph, Scope


def residuals_place(
    backward: Backward,
    graph: Graph,
    places: Sequence[tuple[Scope, int]],
    leaves: Sequence[int],
) -> tuple[tuple[Scope, int], int] | None:
    """Of the places of a forward, the one whose residuals the gradients can read.

    That is one in the body that computes the gradients too; or one from which a
    `route` leads to them. None: they are computed elsewhere.

    Args:
        backward: The gradients.
        graph: The program.
        places: Bodies, and where they compute the forward's result.
        leaves: What the forward is computed from.

    Returns:
        The place, and the equation in its body behind which the forward is computed.
        That is another one where the program has the result behind the gradients.
    """
    for scope, position in places:
        home, path = home_of(scope)
        if not (lies_at(backward, graph, home) and _free(scope, home)):
            continue
        found = [first_defined(graph, v, home) for v in backward.results]
        first, where, at = min(found, key=lambda f: f[0])  # type: ignore
        if (*path, position) < first:
            return (scope, position), position
        while where is not scope and where.kind == "call":
            where, at = where.parent, where.call - 1  # in front of the call
        if where is scope and at >= 0 and _known_at(scope, at, leaves):
            return (scope, position), at
    for scope, position in places:
        bodies = route(backward, graph, scope)
        if bodies and _before(scope, position, bodies[0]):
            return (scope, position), position
    return None


def runs_again(scope: Scope) -> bool:
    """Whether a body, or one around it, is a checkpoint's recomputation."""
    while scope.parent is not None:
        if scope.kind == "remat":
            eqn = scope.parent.jaxpr.eqns[scope.call]
            if _jax.is_recomputation(eqn):
                return True
        scope = scope.parent
    return False


def _known_at(scope: Scope, position: int, values: Sequence[int]) -> bool:
    """Whether a body has all values where an equation is computed."""
    found = [scope.first_var.get(v) for v in values]
    return all(f is not None and f[0] <= position for f in found)


def route(backward: Backward, graph: Graph, scope: Scope) -> tuple[Scope, ...]:
    """The bodies through which residuals get to the gradients, outermost first.

    From a loop they get into its backward loop, step by step; from a shard_map into
    that of its gradients, on each device; from any body into a checkpoint's
    recomputation in it. The last one computes the gradients; empty if there is no way.
    """
    home, _ = home_of(scope)
    body, _ = home_of(graph.node_of(next(iter(backward.grads.values()))).scope)
    if home is body or not lies_at(backward, graph, body) or not _free(scope, home):
        return ()
    bodies: list[Scope] = []
    while body.parent is not None and not body.jaxpr.constvars:
        outer, _ = home_of(body.parent)
        if not _free(body.parent, outer):
            return ()
        bodies.append(body)
        if body.kind != "remat":
            if not (_is_backward_loop(body, home) or _is_split_alike(body, home)):
                return ()
            around, _ = home_of(home.parent)
            if not _free(home.parent, around):
                return ()
            home = around
        if outer is home:
            return tuple(bodies[::-1])
        body = outer
    return ()


def left_by(first: Scope, bodies: Sequence[Scope]) -> list[Scope]:
    """The bodies that residuals leave on a `route`, innermost first."""
    out = [first] if any(b.kind != "remat" for b in bodies) else []
    while len(out) < sum(b.kind != "remat" for b in bodies):
        out.append(home_of(out[-1].parent)[0])
    return out


def _is_backward_loop(body: Scope, home: Scope) -> bool:
    """Whether a loop can read, step by step, what another one stacks."""
    if not body.kind == home.kind == "scan" or body.length != home.length:
        return False
    return not home.jaxpr.constvars


def _is_split_alike(body: Scope, home: Scope) -> bool:
    """Whether a shard_map can read, on each device, what another one has there."""
    if not body.kind == home.kind == "shard_map":
        return False
    one, other = (_jax.parts_of(s.parent.jaxpr.eqns[s.call]) for s in (home, body))
    return one[2] == other[2]


def _before(scope: Scope, position: int, body: Scope) -> bool:
    """Whether an equation comes before a body, if one home holds both."""
    home, path = home_of(scope)
    outer, way = home_of(body.parent)
    return outer is not home or (*path, position) < (*way, body.call)


def lies_at(backward: Backward, graph: Graph, home: Scope) -> bool:
    """Whether gradients are computed in a body, in calls that can be dissolved."""
    found = [first_defined(graph, v, home) for v in backward.results]
    found.append(first_had(graph, backward.cotangent, home))
    return all(f is not None and _free(f[1], home) for f in found)


def _free(scope: Scope, home: Scope) -> bool:
    """Whether no call between two bodies holds values of a trace around."""
    while scope is not home:
        if _jax.holds_tracers(scope.jaxpr):
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
    """(path, scope, position) of the first equation for a value in a body.

    What a body is given comes before all its equations, at position -1.
    """
    node = graph.node_of(value)
    given = home.first_var.get(value)
    if given is not None and given[0] < 0:
        return (-1,), home, -1
    if node is None:
        return None
    places = [(node.scope, node.position), *((s, p) for s, p, _ in node.copies)]
    found = []
    for scope, position in places:
        body, path = home_of(scope)
        if body is home:
            found.append(((*path, position), scope, position))
    return min(found, key=lambda f: f[0], default=None)


def first_had(
    graph: Graph, value: int, home: Scope
) -> tuple[tuple[float, ...], Scope, int] | None:
    """As `first_defined`; also of a value that a checkpoint in a body returns.

    What a call returns is had in the call before.
    """
    node, found = graph.node_of(value), first_defined(graph, value, home)
    if node is None or found is not None:
        return found
    having = []
    for scope in (node.scope, *(s for s, _, _ in node.copies)):
        while scope is not None:
            body, path = home_of(scope)
            had = scope.first_var.get(value)
            if body is home and had is not None:
                having.append(((*path, had[0], math.inf), scope, had[0]))
            scope = scope.parent
    return min(having, key=lambda f: f[0], default=None)
