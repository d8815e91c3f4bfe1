"""Maps a function over every body of a program; equal bodies stay one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from rewriter import _jax
from rewriter.program.contents import contents_of

Change = Callable[[Any], Any]
"""Maps a body, closed or not, to another one, or to itself if nothing changes."""

JAXPRS = ClosedJaxpr, Jaxpr


def map_bodies(
    program: Any,
    change: Change,
    first: Change = lambda body: body,
    wanted: Set[str] = frozenset(),
) -> Any:
    """Returns a program with its bodies changed, inner bodies first.

    Args:
        program: The program; it is returned itself if nothing changes.
        change: Changes a body after its inner bodies.
        first: Changes a body before its inner bodies.
        wanted: If not empty, names of primitives: `change` gets only bodies that hold
            one of them.
    """
    return _Bodies(change, first, wanted).changed(program)


def map_equations(
    body: Any,
    primitives: Set[Any],
    chosen: Callable[[Any], bool],
    change: Callable[[Any, Mapping[Any, Any]], Any],
) -> Any:
    """Returns a body with some of its equations changed; itself if none is.

    Args:
        body: The body; bodies inside it stay.
        primitives: The primitives of equations that may change.
        chosen: Says whether such an equation may change.
        change: Changes an equation, given the equation that makes each variable.
    """
    held, old = contents_of(body), body.eqns
    some = [k for k in held.positions(primitives) if chosen(old[k])]
    new = {k: change(old[k], held.makers) for k in some}
    if all(eqn is old[k] for k, eqn in new.items()):
        return body
    eqns = [new.get(k, eqn) for k, eqn in enumerate(old)]
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


class _Bodies:
    def __init__(self, change: Change, first: Change, wanted: Set[str]) -> None:
        self.change, self.first, self.wanted = change, first, wanted
        self.known: dict[int, tuple[Any, Any]] = {}

    def changed(self, body: Any) -> Any:
        known = self.known.get(id(body))
        if known is None:
            first = self.first(body)
            inner = self._with_bodies(first)
            if not self.wanted or not self.wanted.isdisjoint(contents_of(first).names):
                inner = self.change(inner)
            known = self.known[id(body)] = body, inner
        return known[1]

    def _with_bodies(self, body: Any) -> Any:
        old, new = body.eqns, dict[int, Any]()
        for k, others in contents_of(body).holders:
            new[k] = self._with_its_bodies(old[k])
            if others and not self._is_known_call(old[k]):
                new |= {j: self._with_its_bodies(old[j]) for j in others}
        if all(eqn is old[k] for k, eqn in new.items()):
            return body
        eqns = [new.get(k, eqn) for k, eqn in enumerate(old)]
        return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)

    def _with_its_bodies(self, eqn: Any) -> Any:
        if self._is_known_call(eqn) or not _jax.call_kind(eqn):
            return eqn
        changed = {}
        for name, value in eqn.params.items():
            many = isinstance(value, tuple)
            bodies = value if many else (value,)
            if bodies and all(isinstance(b, JAXPRS) for b in bodies):
                new = tuple(map(self.changed, bodies))
                if any(a is not b for a, b in zip(new, bodies, strict=True)):
                    changed[name] = new if many else new[0]
        return eqn.replace(params={**eqn.params, **changed}) if changed else eqn

    def _is_known_call(self, eqn: Any) -> bool:
        """Whether an equation calls a body that was seen before and does not change."""
        body = eqn.params.get("jaxpr")
        known = self.known.get(id(body))
        same = known is not None and known[0] is body and known[1] is body
        return same and eqn.primitive.name in _jax.CALLS
