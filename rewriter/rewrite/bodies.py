"""Decides how each body must change, before replacements are written into it.

A body with a replacement is written anew, and so are those around it. A call is inlined
where a replacement reads values on its other side. A body that cannot be inlined is
given them. Residuals go from the bodies of a forward to those of its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriter import _jax
from rewriter.find.body_inputs import BodyInput
from rewriter.find.region import Regions
from rewriter.gradients.backward import Backward
from rewriter.gradients.backward_place import (
    first_available,
    first_defined,
    home_of,
    left_by,
    lies_at,
    route,
)
from rewriter.gradients.insertion_point import Instead, read_instead
from rewriter.program.graph import Scope
from rewriter.rewrite.splice import Splice

EXTENDED = frozenset({"remat", "scan", "shard_map"})
"""Bodies whose equations are written anew where they are given more."""


class Bodies:
    """The bodies of a program, and what must become of them; by the id of a body.

    Attributes:
        at: Splices by their positions in a body.
        rewritten: Bodies that are written anew.
        inlined: Bodies that are inlined.
        given: Values of the body around that a body is given.
        saved_in: Splices whose residuals leave a body.
        read_in: Splices whose residuals enter a body.
        level: By body and splice, how many bodies residuals have left before they enter
            this one.
        backward_at: By position in a body, the splices whose gradients are computed
            there, each with the body of every gradient's result.
        gradients_home: By the id of a splice, the body of its gradients.
        instead: By the id of a splice, what it reads in place of its leaves.
    """

    def __init__(self, regions: Regions, splices: Sequence[Splice]):
        self.regions, self.graph = regions, regions.graph
        self.at: dict[int, dict[int, list[Splice]]] = {}
        self.rewritten: set[int] = set()
        self.inlined: set[int] = set()
        self.given: dict[int, list[int]] = {}
        self.saved_in: dict[int, list[Splice]] = {}
        self.read_in: dict[int, list[Splice]] = {}
        self.level: dict[tuple[int, int], int] = {}
        self.backward_at: dict[int, dict[int, list[Any]]] = {}
        self.gradients_home: dict[int, Scope] = {}
        self.instead = {id(s): read_instead(regions, s.match, s.scope) for s in splices}
        for splice in splices:
            here = self.at.setdefault(id(splice.scope), {})
            here.setdefault(splice.position, []).append(splice)
            scope: Scope | None = splice.scope
            while scope is not None:
                self.rewritten.add(id(scope))
                scope = scope.parent
            self._reach_leaves(splice)
            if splice.backward is not None:
                self._plan_backward(splice, splice.backward)

    def _plan_backward(self, splice: Splice, backward: Backward) -> None:
        """Decides where gradients are computed: at the program's first one."""
        first, _ = home_of(splice.scope)
        home = first
        if not lies_at(backward, self.graph, first):
            bodies = route(backward, self.graph, splice.scope)
            self._plan_carried(splice, first, bodies)
            home = bodies[-1]
        self.gradients_home[id(splice)] = home
        found = {v: first_defined(self.graph, v, home) for v in backward.results}
        _, scope, position = min(found.values(), key=lambda f: f[0])  # type: ignore
        start = splice.scope if home is first else home
        scopes = {id(start): start}
        defined = first_available(self.graph, backward.cotangent, home)
        for _, at, _ in (*found.values(), defined):  # type: ignore[misc]
            scopes[id(at)] = at
        if len(scopes) > 1:  # the results cross calls
            self._inline_up_to(home, *scopes.values())
        for inner in scopes.values():
            while inner is not None:
                self.rewritten.add(id(inner))
                inner = inner.parent
        here = self.backward_at.setdefault(id(scope), {})
        where = {v: f[1] for v, f in found.items()}  # type: ignore[index]
        here.setdefault(position, []).append((splice, where))

    def _plan_carried(
        self, splice: Splice, first: Scope, bodies: tuple[Scope, ...]
    ) -> None:
        """Passes residuals from body to body: a loop stacks them for its backward loop.

        A shard_map stacks them for another one, along the first axis.
        """
        self._inline_up_to(first, splice.scope)
        for body in bodies:
            self.read_in.setdefault(id(body), []).append(splice)
            self._inline_up_to(home_of(body.parent)[0], body.parent)
        for body in left_by(first, bodies):
            self.saved_in.setdefault(id(body), []).append(splice)
            self._inline_up_to(home_of(body.parent)[0], body.parent)
        for k, body in enumerate(bodies):  # the number of bodies that they have left
            left = sum(inner.kind != "remat" for inner in bodies[k + 1 :])
            self.level[id(body), id(splice)] = left

    def _reach_leaves(self, splice: Splice) -> None:
        """Marks the calls that must be inlined for a splice to see its leaves."""
        place = self.regions.place(splice.scope)
        for _, leaf in splice.match.leaves:
            value = self.read_for(splice, leaf).value
            if self.is_spare(splice, value):
                continue
            if value not in splice.scope.first_var:
                _, home, _ = place.defined[value]
                self._inline_up_to(place.scope, splice.scope, home)
                if value in place.around:
                    self._give(value, place.scope)

    def _give(self, value: int, body: Scope) -> None:
        """Plans that a body is given a value of the body around."""
        given = self.given.setdefault(id(body), [])
        if value in given:
            return
        given.append(value)
        for branch in body.parent.children[body.call]:
            self.given[id(branch)] = given
            self.rewritten.add(id(branch))
        place = self.regions.place(body.parent)
        outside = self.regions.place(body).around[value].outside
        _, home, _ = place.defined[outside]
        self._inline_up_to(place.scope, body.parent, home)
        if outside in place.around:
            self._give(outside, place.scope)

    def _inline_up_to(self, home: Scope, *scopes: Scope) -> None:
        """Marks the calls between bodies and the one they belong to."""
        for scope in scopes:
            while scope is not home:
                self.inlined.add(id(scope))
                scope = scope.parent

    def is_any_inlined(self, scope: Scope) -> bool:
        """Whether some call in a body is inlined."""
        return any(
            id(child) in self.inlined
            for children in scope.children.values()
            for child in children
        )

    def changes_signature(self, child: Scope) -> bool:
        """Whether a body gains inputs or results: values, or residuals."""
        residuals = id(child) in self.saved_in or id(child) in self.read_in
        return residuals or (id(child) in self.given and child.kind in EXTENDED)

    def read_for(self, splice: Splice, leaf: int) -> Instead:
        """The atom that a splice reads for a leaf."""
        return self.instead[id(splice)].get(leaf, Instead(leaf))

    def is_spare(self, splice: Splice, value: int) -> bool:
        """Whether a leaf is not there, and nothing reads what depends on it."""
        if splice.backward is None or value not in splice.backward.unread:
            return False
        defined = self.regions.place(splice.scope).defined
        return value not in splice.scope.first_var and value not in defined

    def all_given(self, body: Scope) -> list[BodyInput]:
        """The values that a body is given; a branch those of all branches."""
        those = self.given.get(id(body), ())
        branches = body.parent.children[body.call] if those else ()
        known = [self.regions.place(b).around for b in branches]
        return [next(k[v] for k in known if v in k) for v in those]

    def variables_of(self, body: Scope) -> list[Any]:
        """What carries them in it."""
        around, avals = self.regions.place(body).around, self.graph.avals
        those = self.given.get(id(body), ())
        return [around[v].var if v in around else _jax.new_var(avals[v]) for v in those]
