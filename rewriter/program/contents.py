"""What a body holds: its primitives and where they are, found once for all passes."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

from rewriter import _jax


class Contents:
    """The primitives of a body, and the makers of its values.

    Attributes:
        eqns: The body's equations.
        primitives: Their primitives, in the order in which they first occur.
    """

    def __init__(self, eqns: Sequence[Any]) -> None:
        self.eqns = eqns
        self.primitives = dict.fromkeys([eqn.primitive for eqn in eqns])
        self._dtypes_read: dict[frozenset[Any], frozenset[Any]] = {}

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names of the primitives."""
        return frozenset(p.name for p in self.primitives)

    @functools.cached_property
    def makers(self) -> Mapping[Any, Any]:
        """By variable, the equation that makes it."""
        outs = [eqn.outvars for eqn in self.eqns]
        each = map(itertools.repeat, self.eqns, map(len, outs))
        chain = itertools.chain.from_iterable
        return dict(zip(chain(outs), chain(each), strict=True))

    @functools.cached_property
    def _positions(self) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {p: [] for p in self.primitives}
        for k, eqn in enumerate(self.eqns):
            found[eqn.primitive].append(k)
        return found

    @functools.cached_property
    def holders(self) -> Sequence[tuple[int, Sequence[int]]]:
        """Where equations with bodies are, each with later calls of the same body."""
        outer = {p for p in self.primitives if p.name in _jax.BODIES}
        found: list[tuple[int, list[int]]] = []
        calls: dict[int, list[int]] = {}  # by the identity of a body
        for k in self.positions(outer):
            eqn = self.eqns[k]
            body = eqn.params.get("jaxpr")
            if body is None or eqn.primitive.name not in _jax.CALLS:
                found.append((k, []))
            elif id(body) in calls:
                calls[id(body)].append(k)
            else:
                found.append((k, calls.setdefault(id(body), [])))
        return found

    def dtypes_read(self, primitives: Set[Any]) -> frozenset[Any]:
        """Returns the dtypes of what equations of some primitives read.

        Args:
            primitives: Those of this body.
        """
        key = frozenset(primitives)
        known = self._dtypes_read.get(key)
        if known is None:
            atoms = [v for k in self.positions(key) for v in self.eqns[k].invars]
            known = frozenset([getattr(v.aval, "dtype", None) for v in atoms])
            self._dtypes_read[key] = known
        return known

    def positions(self, primitives: Set[Any]) -> list[int]:
        """Returns where equations of some primitives are, in order."""
        held = [p for p in self.primitives if p in primitives]
        if len(held) < 2:
            return list(self._positions[held[0]]) if held else []
        return sorted(k for p in held for k in self._positions[p])

    def named(self, names: Set[str]) -> list[Any]:
        """Returns the equations of the primitives with some names, in order."""
        held = {p for p in self.primitives if p.name in names}
        return [self.eqns[k] for k in self.positions(held)]


_KNOWN: weakref.WeakKeyDictionary[Any, Contents] = weakref.WeakKeyDictionary()


def contents_of(body: Any) -> Contents:
    """Returns what a body holds; bodies are never changed in place.

    Args:
        body: A jaxpr, closed or not.
    """
    body = getattr(body, "jaxpr", body)
    known = _KNOWN.get(body)
    if known is None:
        known = _KNOWN[body] = Contents(body.eqns)
    return known
