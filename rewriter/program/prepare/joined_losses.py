"""Joins sums over rows that are added up to one number: a loss of several terms.

    s = reduce_sum a;  t = reduce_sum b          r = a + 0.01 b
    u = s / 24;  v = 0.01 (t / 24)         →     s = reduce_sum r
    l = u + v                                    l = s / 24

Each term of such a loss is the mean of an array over the same rows. If these arrays are
made of the same logits, the loss of each row is their sum, which no value of the
program is. Sums whose numbers are read elsewhere too stay as they are. Of two terms one
may be multiplied by a number q of the program and the other by ``1 - q``, as of two
labels of each row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import Equations, live
from rewriter.program.loops import inserted
from rewriter.program.prepare import shares_of_cotangents

log = logging.getLogger("rewriter.joined_losses")

ADDS = ("add", "add_any", "sub")
LINEAR = (*ADDS, "mul", "div", "neg", "reduce_sum")
CHAIN = 64
"""The most equations, one above the other, of a sum of numbers."""

DEEP = 6
"""The most equations, one above the other, by which factors are compared."""

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
        share: A factor of its own, which the others of its group do not have; or None.
    """

    atom: Any
    number: float = 1.0
    factors: tuple[tuple[Any, int], ...] = ()
    summed: bool = False
    share: Any = None


@dataclass(frozen=True)
class Where:
    """Arrays of rows whose other rows are zero.

    Attributes:
        condition: Which rows, for all arrays.
        kept: Whether they are those where it is true.
        atoms: The arrays with all rows.
    """

    condition: Any
    kept: bool
    atoms: tuple[Any, ...]


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
        if eqn.primitive.name not in ADDS or not _is_number(eqn.outvars[0]):
            continue
        if _is_whole(known, eqn.outvars[0]):
            groups = _groups(known, _terms(known, eqn.outvars[0], known.end + 1))
            if any(len(g) > 1 for g in groups):
                try:
                    new |= {position: _written(known, eqn, groups)}
                    new |= _cotangents(known, groups)
                except Exception as why:  # JAX has no rule for their placement
                    log.debug("sums stay apart: %s", why)
    if not new:
        return body
    eqns = [e for k, old in enumerate(body.eqns) for e in new.get(k, (old,))]
    outs = getattr(body, "jaxpr", body).outvars
    return _jax.with_equations(body, live(eqns, outs)[0], outs)


def _cotangents(
    known: Equations, groups: Sequence[Sequence[Term]]
) -> dict[int, list[Any]]:
    """New equations of cotangents of terms with shares, by position."""
    found: dict[int, list[Any]] = {}
    for group in groups:
        shares = [t.share for t in group if t.share is not None]
        if shares:
            found |= shares_of_cotangents.split(known, shares, group[0].atom.aval.shape)
    return found


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
    return known.eqns[readers[0]].primitive.name not in ADDS


def _terms(known: Equations, atom: Any, readers: int, depth: int = CHAIN) -> list[Term]:
    """The terms of a number; itself if it is read elsewhere, too.

    Args:
        known: The equations.
        atom: The number.
        readers: The most readers it may have to be taken apart.
        depth: The most equations, one above the other, that are looked through.
    """
    eqn = None if _jax.is_literal(atom) else known.maker(atom)
    alone = eqn is not None and len(known.readers(atom)) <= readers
    if not alone or not depth or eqn.primitive.name not in LINEAR:
        return [Term(atom)]
    if any(a.aval.dtype != atom.aval.dtype for a in eqn.invars):
        return [Term(atom)]
    name, ins = eqn.primitive.name, eqn.invars
    if name == "reduce_sum":
        return [Term(ins[0], summed=True)] if _is_sum(eqn) else [Term(atom)]
    parts = [_terms(known, a, 1, depth - 1) for a in ins]
    if name in ADDS:
        if name == "sub":
            parts[1] = [replace(t, number=-t.number) for t in parts[1]]
        return [t for part in parts for t in part]
    if name == "neg":
        return [replace(t, number=-t.number) for t in parts[0]]
    if not any(t.summed for t in parts[0]) and name == "mul":
        parts, ins = parts[::-1], ins[::-1]
    found = [_times(t, ins[1], -1 if name == "div" else 1) for t in parts[0]]
    usable = all(math.isfinite(t.number) for t in found)
    return found if usable and any(t.summed for t in found) else [Term(atom)]


def _times(term: Term, factor: Any, power: int) -> Term:
    """A term times a power of a number of the program."""
    if _jax.is_literal(factor):
        number = float(factor.val)
        if power < 0 and number == 0:
            return replace(term, number=math.nan)
        return replace(term, number=term.number * number**power)
    return replace(term, factors=(*term.factors, (factor, power)))


def _groups(known: Equations, terms: Sequence[Term]) -> list[list[Term]]:
    """The terms, those together that are joined; the largest of a group first."""
    groups: list[list[Term]] = []
    logits: dict[int, set[Any]] = {}
    for term in sorted(terms, key=lambda t: abs(t.number), reverse=True):
        joined = term.summed and term.number != 0
        if joined:
            logits[id(term)] = _larger(known, term.atom)
        for group in groups if joined else ():
            first = group[0]
            own = logits.get(id(first), set())
            if own.isdisjoint(logits[id(term)]):
                continue
            if _kind(known, first) == _kind(known, term):
                group.append(term)
                break
            pair = _shares(known, first, term) if len(group) == 1 else None
            if pair is not None:
                logits[id(pair[0])] = logits[id(first)]
                group[:] = pair
                break
        else:
            groups.append([term])
    return groups


def _kind(known: Equations, term: Term) -> Any:
    """Equal for terms that may be joined: of as many rows, and with equal factors."""
    aval = term.atom.aval
    powers = sorted((_text(known, f), power) for f, power in term.factors)
    return powers, [n for n in aval.shape if n != 1], aval.dtype


def _shares(known: Equations, one: Term, other: Term) -> tuple[Term, Term] | None:
    """Two terms with factors q and ``1 - q`` of their own, if they have; or None."""
    for q, power in one.factors:
        for p, same in other.factors:
            pair = _is_rest(known, q, p) or _is_rest(known, p, q)
            if not pair or power != 1 or same != 1:
                continue
            made = _with_share(one, q), _with_share(other, p)
            if _kind(known, made[0]) == _kind(known, made[1]):
                return made
    return None


def _with_share(term: Term, share: Any) -> Term:
    """A term with one of its factors as its share."""
    others = tuple(f for f in term.factors if f[0] is not share)
    return replace(term, share=share, factors=others)


def _is_rest(known: Equations, whole: Any, rest: Any) -> bool:
    """Whether a number is what another one leaves of 1."""
    eqn = None if _jax.is_literal(rest) else known.maker(rest)
    if eqn is None or eqn.primitive.name != "sub" or eqn.invars[1] is not whole:
        return False
    return _jax.is_literal(eqn.invars[0]) and float(eqn.invars[0].val) == 1


def _text(known: Equations, atom: Any, depth: int = DEEP) -> str:
    """What a value is, in text: equal for values that equal equations compute."""
    if _jax.is_literal(atom):
        return str(atom.val)
    eqn = known.maker(atom)
    if eqn is None or depth == 0 or eqn.effects:
        return str(id(atom))
    ins = [_text(known, a, depth - 1) for a in eqn.invars]
    at = [v is atom for v in eqn.outvars].index(True)
    return f"{eqn.primitive}[{at} {sorted(eqn.params.items())}]({', '.join(ins)})"


def _larger(known: Equations, rows: Any) -> set[Any]:
    """Arrays of floats above rows, with more axes: logits, and not what makes them."""
    long = lambda v: sum(n != 1 for n in v.aval.shape)
    found, seen, queue = set(), {rows}, [rows]
    while queue and len(seen) < ABOVE:
        value = queue.pop()
        if long(value) > long(rows) and jnp.issubdtype(value.aval.dtype, jnp.floating):
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


def _written(known: Equations, eqn: Any, groups: Sequence[Sequence[Term]]) -> list[Any]:
    """The equations of a number that is the sum of some groups of terms."""
    out, wheres = eqn.outvars[0], [_where(known, g) for g in groups]
    groups = [
        g
        if w is None
        else [replace(t, atom=a) for t, a in zip(g, w.atoms, strict=True)]
        for g, w in zip(groups, wheres, strict=True)
    ]
    atoms = [t.atom for g in groups for t in g]
    atoms += [t.share for g in groups for t in g if t.share is not None]
    atoms += [f for g in groups for f, _ in g[0].factors]
    atoms += [w.condition for w in wheres if w is not None]
    named = list({id(a): a for a in atoms if not _jax.is_literal(a)}.values())

    def code(*arrays: jax.Array) -> jax.Array:
        at = dict(zip(map(id, named), arrays, strict=True))
        read = lambda a: a.val if _jax.is_literal(a) else at[id(a)]
        pairs = zip(groups, wheres, strict=True)
        total = sum(_value(g, w, read) for g, w in pairs)
        total = jnp.asarray(total, out.aval.dtype)
        return _jax.weakly_typed(total) if out.aval.weak_type else total

    fragment = _jax.trace_placed(code, [a.aval for a in named])
    made, _ = inserted(fragment, named, eqn.source_info)
    return [*made[:-1], made[-1].replace(outvars=[out])]


def _where(known: Equations, group: Sequence[Term]) -> Where | None:
    """The condition under which all arrays of a group are zero, if there is one."""
    if len(group) < 2:
        return None
    found = [_selected(known, t.atom) for t in group]
    if None in found:
        return None
    condition, kept, _ = found[0]
    if any(c is not condition or k != kept for c, k, _ in found):
        return None
    return Where(condition, kept, tuple(a for *_, a in found))


Given = Mapping[Any, Any]
"""What the inputs of a call's body are given."""


def _selected(
    known: Equations,
    atom: Any,
    given: Given = {},  # noqa: B006
) -> tuple[Any, bool, Any] | None:
    """(condition, whether rows are kept where it is true, them) of a choice of rows."""
    eqn = known.maker(atom)
    if eqn is None:
        return None
    if _jax.call_kind(eqn) == "call":
        (body,) = jaxprs_in_params(eqn.params)
        inner, at = Equations(body), [v is atom for v in eqn.outvars].index(True)
        inside = dict(zip(body.invars, eqn.invars, strict=True))
        found = _selected(inner, inner.outs[at], inside)
        if found is None or found[0] not in inside or found[2] not in inside:
            return None
        return inside[found[0]], found[1], inside[found[2]]
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    condition, *cases = eqn.invars
    zeros = [_is_zero(known, c, given) for c in cases]
    alike = all(a.aval.shape == atom.aval.shape for a in eqn.invars)
    if sum(zeros) != 1 or not alike:
        return None
    return condition, zeros[0], cases[zeros[0]]


def _is_zero(known: Equations, atom: Any, given: Given) -> bool:
    """Whether a value is zero everywhere."""
    atom = atom if _jax.is_literal(atom) else given.get(atom, atom)
    if _jax.is_literal(atom):
        return not atom.aval.shape and float(atom.val) == 0
    eqn = known.maker(atom)
    copies = ("broadcast_in_dim", "convert_element_type")
    copied = eqn is not None and eqn.primitive.name in copies
    return copied and _is_zero(known, eqn.invars[0], given)


def _value(group: Sequence[Term], where: Where | None, read: Any) -> Any:
    """The sum of a group of terms."""
    first, *others = group
    of = lambda t: read(t.atom) if t.share is None else read(t.share) * read(t.atom)
    total = of(first)
    for term in others:
        rows, shape = of(term), first.atom.aval.shape
        rows = rows if rows.shape == shape else jnp.reshape(rows, shape)
        total = total + term.number / first.number * rows
    if where is not None:
        cases = [jnp.zeros_like(total), total]
        keep = read(where.condition)
        keep = keep if keep.shape == total.shape else jnp.reshape(keep, total.shape)
        total = lax.select_n(keep, *(cases if where.kept else cases[::-1]))
    if first.summed:
        total = jnp.sum(total)
    if first.number != 1:
        total = first.number * total
    for factor, power in first.factors:
        total = total * read(factor) if power > 0 else total / read(factor)
    return total
