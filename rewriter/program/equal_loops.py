"""Finds loops that compute the same last carries, whatever else they stack.

A checkpoint's recomputation runs a loop again, and stacks what its gradients read. So
its equation differs from that of the first run. Its carries are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import jaxprs_in_params

from rewriter import _jax
from rewriter.program.equations import live

Signatures = Callable[[Sequence[Any]], Sequence[int]]


@dataclass(eq=False)
class Loops:
    """The loops that were seen, by what their carries are.

    Attributes:
        signatures: Gives a number for each equation of a body, equal for those with
            equal primitives and parameters; below zero for others.
        numbers: By content, the number of a value of a body.
        carries: By what they are, the last carries of the first such loop.
        seen: Loops that are not in `carries` yet: what they are is told once there is a
            recomputation.
    """

    signatures: Signatures
    numbers: dict[Hashable, int] = field(default_factory=dict)
    carries: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    seen: list[tuple[Any, Sequence[int], tuple[int, ...]]] = field(default_factory=list)

    def first(
        self, eqn: Any, ins: Sequence[int], outs: Sequence[int], again: bool
    ) -> tuple[int, ...]:
        """The last carries of the first loop that has the same ones as a recomputation.

        Args:
            eqn: A scan.
            ins: Its operands, as values of the graph.
            outs: Its last carries, as values of the graph; they are returned if there
                is no earlier such loop.
            again: Whether it is part of a checkpoint's recomputation.
        """
        if not again:
            self.seen.append((eqn, ins, tuple(outs)))
            return tuple(outs)
        while self.seen:
            earlier, its_ins, its_outs = self.seen.pop(0)
            self.carries.setdefault(self._key(earlier, its_ins), its_outs)
        return self.carries.get(self._key(eqn, ins) or object(), tuple(outs))

    def _key(self, eqn: Any, ins: Sequence[int]) -> Hashable:
        """What the last carries of a scan are; None if that is not told."""
        body, n_consts, n_carry, length = _jax.scan_parts(eqn)
        if eqn.effects or not n_carry:
            return None
        inner = getattr(body, "jaxpr", body)
        consts = zip(inner.constvars, _jax.consts_of(body), strict=True)
        known = {v: self._number(("constant", id(c))) for v, c in consts}
        for k, (var, value) in enumerate(zip(inner.invars, ins, strict=True)):
            kind = (k >= n_consts) + (k >= n_consts + n_carry)
            place = k if kind == 1 else -1
            known[var] = self._number(("input", kind, place, value))
        signatures = self.signatures(inner.eqns)
        numbers = dict(zip(map(id, inner.eqns), signatures, strict=True))
        kept, _ = live(inner.eqns, inner.outvars[:n_carry])
        for one in kept:
            what = _what(one, numbers[id(one)])
            if what is None:
                return None
            operands = tuple(self._read(known, a) for a in one.invars)
            for k, var in enumerate(one.outvars):
                known[var] = self._number((what, operands, k))
        outs = tuple(self._read(known, a) for a in inner.outvars[:n_carry])
        return length, bool(eqn.params["reverse"]), outs

    def _read(self, known: dict[Any, int], atom: Any) -> int:
        if not _jax.is_literal(atom):
            return known[atom]
        value = np.asarray(atom.val)
        return self._number(("literal", str(atom.aval), value.tobytes()))

    def _number(self, content: Hashable) -> int:
        return self.numbers.setdefault(content, len(self.numbers))


def _what(eqn: Any, signature: int) -> Hashable:
    """The primitive and parameters of an equation; None if they cannot be compared."""
    if signature >= 0:
        return signature
    bodies = list(jaxprs_in_params(eqn.params))
    inside = [e for b in bodies for e in b.eqns]
    if _jax.call_kind(eqn) != "call" or eqn.effects or any(
        b.constvars or b.effects for b in bodies
    ):  # fmt: skip
        return None
    if any(list(jaxprs_in_params(e.params)) for e in inside):
        return None
    return eqn.primitive.name, tuple(map(str, bodies))
