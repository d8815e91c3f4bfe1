"""Maps a function over every body of a program; equal bodies stay one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from rewriter import _jax

Change = Callable[[Any], Any]
"""Maps a body, closed or not, to another one, or to itself if nothing changes."""


def map_bodies(program: Any, change: Change, first: Change = lambda body: body) -> Any:
    """Returns a program with its bodies changed, inner bodies first.

    Args:
        program: The program; it is returned itself if nothing changes.
        change: Changes a body after its inner bodies.
        first: Changes a body before its inner bodies.
    """
    return _Bodies(change, first).changed(program)


def map_equations(
    body: Any,
    chosen: Callable[[Any], bool],
    change: Callable[[Any, Mapping[Any, Any]], Any],
) -> Any:
    """Returns a body with some of its equations changed; itself if none is.

    Args:
        body: The body; bodies inside it stay.
        chosen: Says whether an equation may change.
        change: Changes an equation, given the equation that makes each variable.
    """
    if not any(map(chosen, body.eqns)):
        return body
    makers = {v: e for e in body.eqns for v in e.outvars}
    eqns = [change(e, makers) if chosen(e) else e for e in body.eqns]
    if all(a is b for a, b in zip(eqns, body.eqns, strict=True)):
        return body
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


class _Bodies:
    def __init__(self, change: Change, first: Change) -> None:
        self.change, self.first = change, first
        self.known: dict[int, tuple[Any, Any]] = {}

    def changed(self, body: Any) -> Any:
        if id(body) not in self.known:
            inner = self._with_bodies(self.first(body))
            self.known[id(body)] = body, self.change(inner)
        return self.known[id(body)][1]

    def _with_bodies(self, body: Any) -> Any:
        eqns, changed = list(body.eqns), False
        for k, eqn in enumerate(eqns):
            if eqn.primitive.name in _jax.BODIES:
                eqns[k] = self._with_its_bodies(eqn)
                changed = changed or eqns[k] is not eqn
        if not changed:
            return body
        return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)

    def _with_its_bodies(self, eqn: Any) -> Any:
        if not _jax.call_kind(eqn):
            return eqn
        changed = {}
        for name, value in eqn.params.items():
            many = isinstance(value, tuple)
            bodies = value if many else (value,)
            if bodies and all(isinstance(b, ClosedJaxpr | Jaxpr) for b in bodies):
                new = tuple(map(self.changed, bodies))
                if any(a is not b for a, b in zip(new, bodies, strict=True)):
                    changed[name] = new if many else new[0]
        return eqn.replace(params={**eqn.params, **changed}) if changed else eqn
