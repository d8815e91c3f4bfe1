"""Tells where the program computes a match's gradients, relative to its forward.

A replaced forward saves residuals that its gradients read. The gradients may be in the
same body, after the forward. They may be in the backward loop of a loop, which reads
the residuals step by step. A checkpoint saves what its policy says, and no residuals:
there the forward is computed again. Calls in between are inlined, unless values of an
outer trace stand inside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rewriter import _jax
from rewriter.find.match import Match
from rewriter.find.region import Regions
from rewriter.gradients.backward import Backward
from rewriter.gradients.insertion_point import obstacle, places, read_instead
from rewriter.program.graph import Graph, Scope


def residuals_place(
    backward: Backward, regions: Regions, match: Match
) -> tuple[tuple[Scope, int], int] | None:
    """The place of a forward whose residuals the gradients can read.

    Often it is in the body that computes the gradients. A checkpoint that recomputes
    the forward does so before its gradients, perhaps only because of the replacement.
    It saves what its policy saves; residuals are passed to it only in place of larger
    saved values of the region. Residuals for other bodies come from a place with a
    `route`. The result is None if the gradients can read no residuals.

    Args:
        backward: The gradients.
        regions: The walks over the program's graph.
        match: The replaced forward.

    Returns:
        The place, and the equation of its body after which the forward is computed. The
        forward moves up where the program's own result comes after the gradients.
    """
    graph, leaves = regions.graph, [v for _, v in match.leaves]
    free = [(s, p) for s, p in places(match) if not obstacle(match, s, regions)]
    found = _before_gradients(backward, graph, free, leaves)
    if found is not None:
        return found
    body, _ = home_of(_scope_of_gradients(backward, graph))
    gives_up = body.runs_again and _gives_up(backward, graph, match, body)
    if body.runs_again and not gives_up:
        return _in_recomputation(backward, regions, match, body)
    for scope, position in free:
        bodies = route(backward, graph, scope)
        if bodies and _before(scope, position, bodies[0]):
            return (scope, position), position
    return _in_recomputation(backward, regions, match, body) if gives_up else None


def has_no_room(backward: Backward, regions: Regions, match: Match) -> bool:
    """Whether a checkpoint's gradients have no place because it saves too few bytes.

    Args:
        backward: Gradients without a `residuals_place`.
        regions: The walks over the program's graph.
        match: The replaced forward.
    """
    graph = regions.graph
    body, _ = home_of(_scope_of_gradients(backward, graph))
    return body.runs_again and not _gives_up(backward, graph, match, body)


def _in_recomputation(
    backward: Backward, regions: Regions, match: Match, body: Scope
) -> tuple[tuple[Scope, int], int] | None:
    """The place of a forward that a checkpoint computes again, for its gradients."""
    anew = _made_anew(backward, regions, match, body)
    return anew or _in_recomputed_body(backward, regions, match, body)


def _before_gradients(
    backward: Backward,
    graph: Graph,
    places: Sequence[tuple[Scope, int]],
    leaves: Sequence[int],
) -> tuple[tuple[Scope, int], int] | None:
    """The place in the body that computes the gradients, before them."""
    for scope, position in places:
        home, path = home_of(scope)
        if not (lies_at(backward, graph, home) and _free(scope, home)):
            continue
        found = [first_defined(graph, v, home) for v in backward.results]
        first, where, at = min(found, key=lambda f: f[0])  # type: ignore
        if (*path, position) < first:
            return (scope, position), position
        while where is not scope and where.kind == "call":
            where, at = where.parent, where.call - 1  # before the call
        if where is scope and at >= 0 and _known_at(scope, at, leaves):
            return (scope, position), at
    return None


def _made_anew(
    backward: Backward, regions: Regions, match: Match, body: Scope
) -> tuple[tuple[Scope, int], int] | None:
    """The place of the first gradient in a body, if all leaves are available there."""
    graph, instead = regions.graph, read_instead(regions, match, body)
    known = regions.place(body).defined
    leaves = [
        instead[v].value if v in instead else v
        for _, v in match.leaves
        if v in known or v not in backward.unread
    ]
    if not lies_at(backward, graph, body):
        return None
    found = [first_defined(graph, v, body) for v in backward.results]
    path, scope, position = min(found, key=lambda f: f[0])  # type: ignore
    if position < 0 or any(v not in known or known[v][0] > path for v in leaves):
        return None
    if not all(_free(known[v][1], body) for v in leaves):
        return None
    return (scope, position), position


def _in_recomputed_body(
    backward: Backward, regions: Regions, match: Match, body: Scope
) -> tuple[tuple[Scope, int], int] | None:
    """The place in a loop or a branch of the same recomputation, which has all leaves.

    It passes residuals to the body of the gradients, which lacks a leaf such as the
    position of a block of queries, or the scale of a norm.
    """
    if body.kind not in ("scan", "cond") or body.parent is None:
        return None
    for scope in _bodies_in(home_of(body.parent)[0]):
        defined = regions.place(scope).defined
        had = [defined.get(v) for _, v in match.leaves]
        if scope is body or any(f is None or f[1] is not scope for f in had):
            continue
        at = max(0, *(int(path[0]) for path, _, _ in had))
        bodies = route(backward, regions.graph, scope)
        clear = not obstacle(match, scope, regions)
        if clear and bodies and _before(scope, at, bodies[0]):
            return (scope, at), at
    return None


def _bodies_in(home: Scope) -> Iterator[Scope]:
    """The bodies in a body, also those in its calls; the first body of each loop."""
    for children in home.children.values():
        if children[0].kind == "call":
            yield from _bodies_in(children[0])
        else:
            yield from children if children[0].kind == "cond" else children[:1]


ROOM = 2
"""Assumed size of residuals other than operands, as a multiple of the result's: the
result and a few numbers per row, or its intermediate values."""


def _gives_up(backward: Backward, graph: Graph, match: Match, body: Scope) -> bool:
    """Whether a checkpoint saved more bytes of a region than its residuals have.

    Saved values of the region that are no longer needed make room for residuals. The
    program's own arguments do not count, and the result counts once.
    """
    inside = match.inner | backward.inner
    leaves = {v for _, v in match.leaves}
    inputs = {value for value, (position, _) in body.first_var.items() if position < 0}

    def is_spare(value: int) -> bool:
        return all(inside.issuperset(node.outs) for node in graph.users(value))

    spare = [v for v in inputs & inside - leaves - {match.value} if is_spare(v)]
    need = (ROOM - (match.value in inputs)) * _bytes(graph, match.value)
    need += sum(_bytes(graph, v) for v in leaves - inputs if not _is_argument(body, v))
    return _jax.never_larger(need, sum(_bytes(graph, v) for v in spare))


def _is_argument(body: Scope, value: int) -> bool:
    """Whether a value is an argument of the program, which stays in memory anyway."""
    while body.parent is not None:
        body = body.parent
    return body.first_var.get(value, (0,))[0] < 0


def _bytes(graph: Graph, value: int) -> int:
    """The bytes of a value; symbolic with symbolic axes."""
    return math.prod(graph.shape(value)) * graph.dtype(value).itemsize


def _known_at(scope: Scope, position: int, values: Sequence[int]) -> bool:
    """Whether all values are available in a body at an equation."""
    found = [scope.first_var.get(v) for v in values]
    return all(f is not None and f[0] <= position for f in found)


def route(backward: Backward, graph: Graph, scope: Scope) -> tuple[Scope, ...]:
    """The bodies that residuals pass on the way to the gradients, outermost first.

    A loop passes them to its backward loop, step by step. A shard_map passes them to
    that of its gradients, on each device. A branch passes them to the same branch of a
    later cond of the same choice. Any body passes them to a checkpoint's recomputation
    in it. The last body computes the gradients. Empty without a route.
    """
    home, _ = home_of(scope)
    body, _ = home_of(_scope_of_gradients(backward, graph))
    if home is body or not lies_at(backward, graph, body) or not _free(scope, home):
        return ()
    bodies: list[Scope] = []
    while body.parent is not None and not body.jaxpr.constvars:
        outer, _ = home_of(body.parent)
        if not _free(body.parent, outer):
            return ()
        bodies.append(body)
        if body.kind != "remat":
            if not (
                _is_backward_loop(body, home)
                or _is_split_alike(body, home)
                or _is_chosen_alike(graph, body, home)
            ):
                return ()
            around, _ = home_of(home.parent)
            if not _free(home.parent, around):
                return ()
            home = around
        if outer is home:
            return tuple(bodies[::-1])
        body = outer
    return ()


def _scope_of_gradients(backward: Backward, graph: Graph) -> Scope:
    return graph.node_of(next(iter(backward.grads.values()))).scope  # type: ignore


def left_by(first: Scope, bodies: Sequence[Scope]) -> list[Scope]:
    """The bodies that residuals leave on a `route`, innermost first."""
    out = [first] if any(b.kind != "remat" for b in bodies) else []
    while len(out) < sum(b.kind != "remat" for b in bodies):
        out.append(home_of(out[-1].parent)[0])
    return out


def _is_backward_loop(body: Scope, home: Scope) -> bool:
    """Whether a loop can read another loop's stacks step by step."""
    if not body.kind == home.kind == "scan" or body.length != home.length:
        return False
    return not home.jaxpr.constvars


def _is_split_alike(body: Scope, home: Scope) -> bool:
    """Whether a shard_map can read another one's values on each device."""
    if not body.kind == home.kind == "shard_map":
        return False
    one, other = (_jax.parts_of(s.parent.jaxpr.eqns[s.call]) for s in (home, body))
    return one[2] == other[2]


def _is_chosen_alike(graph: Graph, body: Scope, home: Scope) -> bool:
    """Whether a branch runs exactly if another one has run."""
    if not body.kind == home.kind == "cond" or body.branch != home.branch:
        return False
    one, other = (
        graph.one_number(graph.read(s.parent, s.parent.jaxpr.eqns[s.call].invars[0]))
        for s in (home, body)
    )
    return one == other


def _before(scope: Scope, position: int, body: Scope) -> bool:
    """Whether an equation comes before a body with the same home."""
    home, path = home_of(scope)
    outer, way = home_of(body.parent)
    return outer is not home or (*path, position) < (*way, body.call)


def lies_at(backward: Backward, graph: Graph, home: Scope) -> bool:
    """Whether gradients are computed in a body, inside calls that can be inlined."""
    found = [first_defined(graph, v, home) for v in backward.results]
    found.append(first_available(graph, backward.cotangent, home))
    return all(f is not None and _free(f[1], home) for f in found)


def _free(scope: Scope, home: Scope) -> bool:
    """Whether no call between two bodies closes over tracers."""
    while scope is not home:
        if _jax.holds_tracers(scope.jaxpr):
            return False
        scope = scope.parent
    return True


def home_of(scope: Scope) -> tuple[Scope, tuple[float, ...]]:
    """The body that a scope belongs to, and the calls from the body to the scope."""
    path: list[float] = []
    while scope.kind == "call" and scope.parent is not None:
        path.append(scope.call)
        scope = scope.parent
    return scope, tuple(path[::-1])


def first_defined(
    graph: Graph, value: int, home: Scope
) -> tuple[tuple[float, ...], Scope, int] | None:
    """(path, scope, position) of the first equation for a value in a body.

    Inputs of a body come before all its equations, at position -1.
    """
    node = graph.node_of(value)
    defined = home.first_var.get(value)
    if defined is not None and defined[0] < 0:
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


def first_available(
    graph: Graph, value: int, home: Scope
) -> tuple[tuple[float, ...], Scope, int] | None:
    """Like `first_defined`, also for a value that a checkpoint in a body returns.

    A call's result is first available inside the call.
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
