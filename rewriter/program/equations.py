"""The equations of one body: who makes and who reads each value, and edits to them."""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rewriter import _jax


class Equations:
    """The equations of a body by position; results are read after the last one.

    Args:
        jaxpr: The body.

    Attributes:
        eqns: The equations; None where one was replaced by others.
        outs: What the body returns.
    """

    def __init__(self, jaxpr: Any):
        self.eqns: list[Any] = list(jaxpr.eqns)
        self.outs: list[Any] = list(getattr(jaxpr, "jaxpr", jaxpr).outvars)
        self._made = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self._replaced: dict[int, tuple[Any, Any]] = {}

    @functools.cached_property
    def _read(self) -> dict[Any, list[int]]:
        """By value, the positions where it is read; some passes never ask."""
        readers: dict[Any, list[int]] = defaultdict(list)
        variable = _jax.Var
        atoms_read = (eqn.invars for eqn in self.eqns)
        for i, atoms in enumerate((*atoms_read, self.outs)):  # in order
            for atom in atoms:
                if atom.__class__ is variable:
                    readers[atom].append(i)
        return readers

    @property
    def end(self) -> int:
        """The position at which the body's results are read."""
        return len(self.eqns)

    def made_at(self, atom: Any) -> int:
        """Returns the position where a value is made; -1 for an input."""
        return -1 if _jax.is_literal(atom) else self._made.get(atom, -1)

    def maker(self, atom: Any) -> Any:
        """Returns the equation that makes a value; None for an input."""
        where = self.made_at(atom)
        return self.eqns[where] if where >= 0 else None

    def readers(self, value: Any) -> Sequence[int]:
        """Returns the positions where a value is read, in order, once for each read."""
        return self._read.get(value, ())

    def replace(self, positions: Iterable[int], place: int, new: Any) -> None:
        """Replaces some equations by a new one, at the position of one of them."""
        for k in positions:
            for atom in self.eqns[k].invars:
                if not _jax.is_literal(atom):
                    self._read[atom].remove(k)
            self.eqns[k] = None
        self.eqns[place] = new
        self._made.update(dict.fromkeys(new.outvars, place))
        self._reads(place, new.invars)

    def redirect_readers(self, position: int, old: Any, new: Any) -> None:
        """Makes equations after a position read a new value instead of an old one."""
        self._replaced[position] = old, new

    def finished(self) -> tuple[list[Any], list[Any]]:
        """Returns the new equations, and the body's results."""
        env: dict[Any, Any] = {}
        equations = []
        for i, eqn in enumerate(self.eqns):
            if eqn is not None:
                equations.append(_jax.reading(eqn, env) if env else eqn)
            if i in self._replaced:
                old, new = self._replaced[i]
                env[old] = new
        if not env:
            return equations, self.outs
        return equations, [
            a if _jax.is_literal(a) else env.get(a, a) for a in self.outs
        ]

    def _reads(self, position: int, atoms: Sequence[Any]) -> None:
        for atom in atoms:
            if not _jax.is_literal(atom):
                bisect.insort(self._read.setdefault(atom, []), position)


def followed(
    body: Equations,
    value: Any,
    wanted: Callable[[Any], bool],
    passed: Callable[..., bool],
) -> tuple[list[int], Any]:
    """Follows a value through its only readers to a wanted equation.

    Args:
        body: The equations.
        value: The value.
        wanted: Whether an equation ends the search.
        passed: Whether the search continues through an equation.

    Returns:
        The positions of those equations, the last of which is wanted, and the value
        that it reads. No positions if something else reads the value.
    """
    through: list[int] = []
    while True:
        readers = body.readers(value)
        if len(readers) != 1 or readers[0] == body.end:
            return [], value
        through.append(readers[0])
        reader = body.eqns[readers[0]]
        if wanted(reader):
            return through, value
        if not passed(reader):
            return [], value
        value = reader.outvars[0]


def live(eqns: Sequence[Any], outs: Sequence[Any]) -> tuple[list[Any], set[Any]]:
    """The equations whose results are read, or that have effects, in order.

    Also returns the variables that none of the equations makes.
    """
    read = {a for a in outs if not _jax.is_literal(a)}
    kept, variable = [], _jax.Var
    for eqn in reversed(eqns):
        if not read.isdisjoint(eqn.outvars) or eqn.effects:
            kept.append(eqn)
            read.difference_update(eqn.outvars)
            for atom in eqn.invars:
                if atom.__class__ is variable:
                    read.add(atom)
    return kept[::-1], read
