"""Rejects patterns that a program cannot hold, by its primitives and their order.

Every pattern names the steps that its regions consist of, such as a contraction,
an exponential and another contraction. A pattern is possible if some path through the
program takes all steps in order. The path may cross other equations that regions look
through. Most programs without a site are rejected here, before a graph is built. Many
of them are rejected by the names of their primitives alone.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rewriter import _jax
from rewriter.algebra.canonicalize import LOCAL
from rewriter.program.contents import contents_of

BATCHED = "batched dot_general"
"""In steps: a contraction whose operands have more axes in common."""

REPLAYED = _jax.CALLS | _jax.REMAT | _jax.CUSTOM


@dataclass(frozen=True)
class Step:
    """One step of a pattern's path.

    Attributes:
        prims: Primitives that perform the step.
        through: Primitives allowed on the way to the next step; any local one by
            default.
        joins: If not empty: another operand must have taken the first step, and passed
            only these primitives since.
    """

    prims: frozenset[str]
    through: frozenset[str] = LOCAL
    joins: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("prims", "through", "joins"):  # sets have no hash
            object.__setattr__(self, name, frozenset(getattr(self, name)))


def possible(jaxpr: Any, patterns: Sequence[Any], names: Set[str]) -> list[Any]:
    """The patterns that may have a site in a program.

    Args:
        jaxpr: The program.
        patterns: The patterns to choose from.
        names: The names of its `primitives`.
    """
    named = [
        p
        for p in patterns
        if p.needs <= names
        and not (p.either and p.either.isdisjoint(names))
        and not p.anchors.isdisjoint(names)
        and any(all(not x.prims.isdisjoint(names) for x in way) for way in _ways(p))
    ]
    if any(p.dtypes for p in named):
        have = dtypes(jaxpr)
        named = [p for p in named if not (p.dtypes and p.dtypes.isdisjoint(have))]
    sieve = _Sieve(named)
    sieve.body(jaxpr, [NOTHING] * len(jaxpr.invars))
    return [p for p in named if not p.steps or p.name in sieve.found]


def primitives(jaxpr: Any) -> set[str]:
    """The names of a program's primitives, at any depth."""
    found: set[str] = set()
    for body in _each_body(jaxpr):
        held = contents_of(body)
        found |= held.names
        look = BATCHED not in found and "dot_general" in held.names
        if look and any(map(_is_batched, held.eqns)):
            found.add(BATCHED)
    return found


def _is_batched(eqn: Any) -> bool:
    """Whether an equation is a contraction whose operands have more axes in common."""
    return eqn.primitive.name == "dot_general" and bool(
        eqn.params["dimension_numbers"][1][0]
    )


def dtypes(jaxpr: Any) -> set[Any]:
    """The dtypes of a program's inputs and constants, and those that it casts to."""
    found = {getattr(v.aval, "dtype", None) for v in jaxpr.invars}
    for body in _each_body(jaxpr):
        body = getattr(body, "jaxpr", body)  # closed, with constants of its own
        found |= {getattr(v.aval, "dtype", None) for v in body.constvars}
        cast = (eqn.params for eqn in body.eqns if eqn.primitive.name in CASTS)
        found |= {params["new_dtype"] for params in cast}
    return found


CASTS = frozenset({"convert_element_type", "bitcast_convert_type"})


def _each_body(jaxpr: Any) -> Iterator[Any]:
    """A program, and each body in it once."""
    seen: set[int] = set()
    bodies = [jaxpr]
    while bodies:
        body = bodies.pop()
        if id(body.eqns) in seen:
            continue
        seen.add(id(body.eqns))
        yield body
        held = contents_of(body)
        for k, _ in held.holders:
            bodies += _bodies(held.eqns[k])


@dataclass(frozen=True)
class _Move:
    """A transition between two steps, as bits, and the pattern that it completes."""

    before: int
    after: int
    joins: int
    complete: str


@dataclass(frozen=True, slots=True)
class _Rule:
    """A primitive's effect: paths begun and kept, moves, and whether it has bodies."""

    begun: int
    kept: int
    moves: tuple[_Move, ...]
    inner: bool


Taken = tuple[int, frozenset[int]]
"""The steps taken on the way to a value, and where its tracked paths began."""

NOTHING: Taken = (0, frozenset())
PIECES = frozenset({"split", "slice", "dynamic_slice", "unstack"})
MANY = 8


Way = tuple[str, tuple[Step, ...]]
"""A pattern's name, and the steps of one path through its sites."""


class _Paths:
    """The paths of some patterns as bits, and what primitives do to them."""

    def __init__(self, ways: Iterable[Way]):
        self.rules: dict[str, _Rule] = {}
        self.starts: dict[str, int] = {}
        self.moves: dict[str, list[_Move]] = {}
        self.kept: dict[str, int] = {}
        self.tracked = 0
        bit = 1
        for name, steps in ways:
            bit = self._add(name, steps, bit)

    def _add(self, name: str, steps: Sequence[Step], bit: int) -> int:
        first, before = bit, 0
        for k, step in enumerate(steps):
            last = k == len(steps) - 1
            joins = 0
            if step.joins:  # each first step begins a path of its own
                joins, bit = bit, bit << 1
                _mark(self.starts, steps[0].prims, joins)
                _mark(self.kept, step.joins, joins)
            if k == 0:
                _mark(self.starts, step.prims, bit)
            else:
                after, done = (0, name) if last else (bit, "")
                for prim in step.prims:
                    move = _Move(before, after, joins, done)
                    self.moves.setdefault(prim, []).append(move)
            if not last:
                _mark(self.kept, step.through, bit)
            before, bit = bit, bit << 1
        if any(step.joins for step in steps):
            self.tracked |= bit - first
        return bit

    def rule(self, name: str) -> _Rule:
        """The effect of a primitive on paths; each primitive is analysed once.

        A rounding that keeps all bits is a copy; checkpoints emit such roundings.
        """
        as_if = ["copy" if name == "reduce_precision" else name]
        if name == BATCHED:
            as_if.append("dot_general")
        begun = kept = 0
        moves: list[_Move] = []
        for prim in as_if:
            begun |= self.starts.get(prim, 0)
            kept |= self.kept.get(prim, 0)
            moves += self.moves.get(prim, ())
        self.rules[name] = _Rule(begun, kept, tuple(moves), name in _jax.BODIES)
        return self.rules[name]


@functools.lru_cache(maxsize=64)
def _paths(ways: tuple[Way, ...]) -> _Paths:
    """The paths of some patterns; many programs may hold the same ones."""
    return _Paths(ways)


class _Sieve:
    """The steps taken on the way to each value, as bits.

    Paths that are joined by another operand begin at different equations, or at
    different pieces of one result: an activation times its own input is no gate.
    """

    def __init__(self, patterns: Sequence[Any]):
        self.paths = _paths(tuple((p.name, way) for p in patterns for way in _ways(p)))
        self.found: set[str] = set()
        self.open = {p.name for p in patterns if p.steps}
        self.memo: dict[Any, tuple[int, list[Taken]]] = {}
        self.origins = itertools.count()

    def body(self, jaxpr: Any, taken: Sequence[Taken]) -> list[Taken]:
        """The steps taken to a body's results, from those taken to its arguments."""
        key = (id(jaxpr.eqns), *taken)
        if key in self.memo:
            return self._second_call(*self.memo[key])
        first = next(self.origins)
        env = {v: t for v, t in zip(jaxpr.invars, taken, strict=True) if t[0]}
        self._equations(jaxpr.eqns, env)
        outs = [_read(env, v) for v in jaxpr.outvars]
        self.memo[key] = first, outs
        return outs

    def _second_call(self, first: int, outs: Sequence[Taken]) -> list[Taken]:
        """The results of another call of a body: its own paths begin anew."""
        fresh: dict[int, int] = collections.defaultdict(lambda: next(self.origins))
        return [
            (bits, frozenset(o if o < first else fresh[o] for o in origins))
            for bits, origins in outs
        ]

    def _equations(self, eqns: Sequence[Any], env: dict[Any, Taken]) -> None:
        variable, rules, get = _jax.Var, self.paths.rules, env.get
        for eqn in eqns:
            if not self.open:
                return  # all patterns are possible already
            name = eqn.primitive.name
            if _is_batched(eqn):
                name = BATCHED
            rule = rules.get(name) or self.paths.rule(name)
            taken = [t for a in eqn.invars if a.__class__ is variable and (t := get(a))]
            if rule.inner:
                self._inner(eqn, env)
            elif taken or rule.begun:
                self._step(eqn, env, rule, taken)

    def _step(
        self, eqn: Any, env: dict[Any, Taken], rule: _Rule, taken: Sequence[Taken]
    ) -> None:
        bits = _bits(taken)
        begun, out = rule.begun, bits & rule.kept | rule.begun
        if begun and not is_contraction(eqn):
            begun, out = 0, bits  # an outer product is local
        if bits and rule.moves:
            out |= self._moved(bits, taken, rule.moves)
        if not out:
            return
        if not out & self.paths.tracked:
            after = out, NOTHING[1]
        elif begun or eqn.primitive.name in PIECES:
            for var in eqn.outvars:
                env[var] = out, frozenset({next(self.origins)})
            return
        else:
            after = out, _origins(taken)
        for var in eqn.outvars:
            env[var] = after

    def _moved(self, bits: int, taken: Sequence[Taken], moves: Sequence[_Move]) -> int:
        out = 0
        for move in moves:
            if not bits & move.before or move.complete in self.found:
                continue
            if move.joins and not _joined(taken, move):
                continue
            out |= move.after
            if move.complete:
                self.found.add(move.complete)
                self.open.discard(move.complete)
        return out

    def _inner(self, eqn: Any, env: dict[Any, Taken]) -> None:
        replayed = eqn.primitive.name in REPLAYED
        args = [_read(env, a) for a in eqn.invars]
        for body in _bodies(eqn):
            states = args
            if not replayed or len(args) != len(body.invars):
                origins = frozenset().union(*(o for _, o in args))
                states = [(_bits(args), origins)] * len(body.invars)
            outs = self.body(body, states)
            if replayed and len(outs) == len(eqn.outvars):
                env.update(zip(eqn.outvars, outs, strict=True))


def _ways(pattern: Any) -> list[tuple[Step, ...]]:
    """The paths through a pattern's sites."""
    others = getattr(pattern, "other_steps", ())
    return [pattern.steps, others] if others else [pattern.steps]


def _mark(table: dict[str, int], prims: Iterable[str], bit: int) -> None:
    for prim in prims:
        table[prim] = table.get(prim, 0) | bit


def _read(env: dict[Any, Taken], atom: Any) -> Taken:
    return env.get(atom, NOTHING) if atom.__class__ is _jax.Var else NOTHING


def _bits(taken: Sequence[Taken]) -> int:
    bits = 0
    for mine, _ in taken:
        bits |= mine
    return bits


def _origins(taken: Sequence[Taken]) -> frozenset[int]:
    found = {origins for _, origins in taken if origins}
    if len(found) == 1:
        return found.pop()
    union = frozenset().union(*found)
    return union if len(union) <= MANY else frozenset(sorted(union)[:MANY])


def _joined(taken: Sequence[Taken], move: _Move) -> bool:
    return any(
        mine & move.before and other & move.joins and len(a | b) > 1
        for i, (mine, a) in enumerate(taken)
        for j, (other, b) in enumerate(taken)
        if i != j
    )


def is_contraction(eqn: Any) -> bool:
    """Whether an equation sums over an axis of both operands, if it can."""
    if eqn.primitive.name != "dot_general":
        return True
    return bool(eqn.params["dimension_numbers"][0][0])


def _bodies(eqn: Any) -> list[Any]:
    body = _jax.call_body(eqn)
    if body is not None:
        return [body]
    out = []
    for value in eqn.params.values():
        if hasattr(value, "eqns"):
            out.append(value)
        elif isinstance(value, (tuple, list)):
            out += [v for v in value if hasattr(v, "eqns")]
    return out
