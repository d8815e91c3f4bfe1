"""Joins sums over rows that are added up to one number: a loss of several terms.

    s = reduce_sum a;  t = reduce_sum b          r = a + 0.01 b
    u = s / 24;  v = 0.01 (t / 24)         →     s = reduce_sum r
    l = u + v                                    l = s / 24

Each term of such a loss is the mean of an array over the same rows. If these arrays are
made of the same logits, the loss of each row is their sum, which no value of the
program is. Sums whose numbers are read elsewhere too stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import Equations
from rewriter.program.loops import inserted

ADDS = ("add", "add_any", "sub")
LINEAR = (*ADDS, "mul", "div", "neg", "reduce_sum")
ABOVE = 120
"""The most equations above an array of rows that are examined."""


@dataclass(frozen=True)
class Term:
    """A term of a number that is a sum: ``number · Π factor^power · atom``.

    Attributes:
        atom: A number of the program, or the array of rows whose sum it is.
        number: What it is multiplied by.
        factors: Numbers of the program that it is multiplied by, and their powers.
        summed: Whether the atom is an array of rows.
    """

    atom: Any
    number: float = 1.0
    factors: tuple[tuple[Any, int], ...] = ()
    summed: bool = False

    @property
    def kind(self) -> Any:
        """Equal for terms that are joined; None for a number."""
        if not self.summed:
            return None
        powers = sorted((id(f), power) for f, power in self.factors)
        return tuple(powers), self.atom.aval.shape, self.atom.aval.dtype


def join(program: Any) -> Any:
    """Returns a program whose losses of several terms are sums over rows.

    Args:
        program: The program, closed; it is returned itself without such losses.
    """
    return map_bodies(program, _joined)


def _joined(body: Any) -> Any:
    """A body with its sums joined."""
    if sum(map(_is_sum, body.eqns)) < 2:
        return body
    known, new = Equations(body), {}
    for position, eqn in enumerate(body.eqns):
        if eqn.primitive.name in ADDS and _is_number(eqn.outvars[0]):
            terms = _terms(known, eqn.outvars[0], known.end + 1)
            if terms and _is_whole(known, eqn.outvars[0]):
                groups = _groups(known, terms)
                if any(len(g) > 1 for g in groups):
                    new[position] = _written(eqn, groups)
    if not new:
        return body
    eqns = [e for k, old in enumerate(body.eqns) for e in new.get(k, (old,))]
    return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)


def _is_sum(eqn: Any) -> bool:
    """Whether an equation sums an array of floats to one number."""
    if eqn.primitive.name != "reduce_sum":
        return False
    placed = eqn.params.get("out_sharding") is not None
    return not placed and _is_number(eqn.outvars[0]) and bool(eqn.invars[0].aval.shape)


def _is_number(atom: Any) -> bool:
    """Whether a value is one float."""
    aval = atom.aval
    return aval.shape == () and jnp.issubdtype(aval.dtype, jnp.floating)


def _is_whole(known: Equations, value: Any) -> bool:
    """Whether a sum is no term of a larger one."""
    readers = known.readers(value)
    if len(readers) != 1 or readers[0] == known.end:
        return True
    return known.eqns[readers[0]].primitive.name not in LINEAR


def _terms(known: Equations, atom: Any, readers: int) -> list[Term]:
    """The terms of a number; itself if it is read elsewhere, too.

    Args:
        known: The equations.
        atom: The number.
        readers: The most readers it may have to be taken apart.
    """
    eqn = None if _jax.is_literal(atom) else known.maker(atom)
    alone = eqn is not None and len(known.readers(atom)) <= readers
    if not alone or eqn.primitive.name not in LINEAR:
        return [Term(atom)]
    if any(a.aval.dtype != atom.aval.dtype for a in eqn.invars):
        return [Term(atom)]
    name, ins = eqn.primitive.name, eqn.invars
    if name == "reduce_sum":
        return [Term(ins[0], summed=True)] if _is_sum(eqn) else [Term(atom)]
    parts = [_terms(known, a, 1) for a in ins]
    if name in ADDS:
        if name == "sub":
            parts[1] = [replace(t, number=-t.number) for t in parts[1]]
        return [t for part in parts for t in part]
    if name == "neg":
        return [replace(t, number=-t.number) for t in parts[0]]
    if not any(t.summed for t in parts[0]) and name == "mul":
        parts, ins = parts[::-1], ins[::-1]
    if not any(t.summed for t in parts[0]):
        return [Term(atom)]
    return [_times(t, ins[1], -1 if name == "div" else 1) for t in parts[0]]


def _times(term: Term, factor: Any, power: int) -> Term:
    """A term times a power of a number of the program."""
    if _jax.is_literal(factor):
        number = float(factor.val)
        if power < 0 and number == 0:
            return replace(term, number=math.nan)
        return replace(term, number=term.number * number**power)
    return replace(term, factors=(*term.factors, (factor, power)))


def _groups(known: Equations, terms: Sequence[Term]) -> list[list[Term]]:
    """The terms, those together that are joined."""
    groups: list[list[Term]] = []
    logits: dict[int, set[Any]] = {}
    for term in terms:
        if term.summed:
            logits[id(term)] = _larger(known, term.atom)
        for group in groups if term.summed else ():
            same = group[0].kind == term.kind and math.isfinite(term.number)
            usable = same and group[0].number and math.isfinite(group[0].number)
            if usable and not logits[id(group[0])].isdisjoint(logits[id(term)]):
                group.append(term)
                break
        else:
            groups.append([term])
    return groups


def _larger(known: Equations, rows: Any) -> set[Any]:
    """Floats above an array of rows that have more axes: its logits, not what makes
    them."""
    found, seen, queue = set(), {rows}, [rows]
    while queue and len(seen) < ABOVE:
        value = queue.pop()
        aval = value.aval
        if len(aval.shape) > len(rows.aval.shape) and aval.shape[-1] != 1:
            if jnp.issubdtype(aval.dtype, jnp.floating):
                found.add(value)
        eqn = known.maker(value)
        if eqn is None or _multiplies(eqn):
            continue
        new = [a for a in eqn.invars if not _jax.is_literal(a) and a not in seen]
        seen.update(new)
        queue += new
    return found


def _multiplies(eqn: Any) -> bool:
    """Whether an equation is a product of matrices, or holds one."""
    if eqn.primitive.name == "dot_general":
        return True
    return any(
        _multiplies(e) for body in jaxprs_in_params(eqn.params) for e in body.eqns
    )


def _written(eqn: Any, groups: Sequence[Sequence[Term]]) -> list[Any]:
    """The equations of a number that is the sum of some groups of terms."""
    out = eqn.outvars[0]
    atoms = [t.atom for g in groups for t in g]
    atoms += [f for g in groups for f, _ in g[0].factors]
    named = list({id(a): a for a in atoms if not _jax.is_literal(a)}.values())

    def code(*arrays: jax.Array) -> jax.Array:
        at = dict(zip(map(id, named), arrays, strict=True))
        read = lambda a: a.val if _jax.is_literal(a) else at[id(a)]
        total = sum(_value(g, read) for g in groups)
        total = jnp.asarray(total, out.aval.dtype)
        return _jax.weakly_typed(total) if out.aval.weak_type else total

    fragment = _jax.trace_placed(code, [a.aval for a in named])
    made, (result,) = inserted(fragment, named, eqn.source_info)
    return [*made[:-1], made[-1].replace(outvars=[out])]


def _value(group: Sequence[Term], read: Any) -> Any:
    """The sum of a group of terms."""
    first, *others = group
    total = read(first.atom)
    for term in others:
        total = total + term.number / first.number * read(term.atom)
    if first.summed:
        total = jnp.sum(total)
    if first.number != 1:
        total = first.number * total
    for factor, power in first.factors:
        total = total * read(factor) if power > 0 else total / read(factor)
    return total
