"""Saves results that checkpoints would compute again, within a budget of bytes.

    forward                       gradients, in a checkpoint
    a = attention q k v           a, l = attention q k v;   … backward … a, l
    a, l = attention q k v   →    is given a, l;            … backward … a, l

`jax.checkpoint` trades time for memory, and takes all that it may. Where kernels left
memory free, this pass trades some of it back for time. It passes the results that took
most operations per byte to the checkpoint, which still computes the rest again. Each is
the same value, since its equation and its operands are those of the forward.

Saved values are stacked where the forward is a loop and its gradients are in another
one. Programs without checkpoints are the task of `recompute`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import Loop, loops_in, traced
from rewriter.program.repeats import same_params
from rewriter.rewrite.beside_sites import Change
from rewriter.rewrite.passes.flops import flops_of, is_sized, size
from rewriter.site import site
from rewriter.support.sizes import size_text

WORTH = 500.0
"""The fewest operations per byte that make a value worth saving: as many as a Hopper
GPU does while it writes and reads a byte twice."""

WANTED = frozenset({*_jax.REMAT, "scan"})
"""Primitives of bodies in which something is computed again."""


@dataclass(frozen=True)
class Saved(Change):
    """A value saved for a checkpoint, which does not compute it again.

    Attributes:
        turns: How often it is saved: the turns of the loop around it.
        bytes: Bytes of all turns.
        flops: Operations saved, in all turns.
    """

    by: ClassVar[str] = "checkpoint_savings"
    turns: int
    bytes: int
    flops: float

    @classmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns how many values, their bytes, and the operations saved."""
        flops, count = sum(k.flops for k in same), sum(k.turns for k in same)
        memory = size_text(sum(k.bytes for k in same))
        text = f"kept for gradients in {memory}: {flops / 1e12:.3g} TFLOP less"
        return f"×{count}", text


def save(program: ClosedJaxpr, memory: int) -> tuple[ClosedJaxpr, tuple[Saved, ...]]:
    """Returns a program that saves recomputed results within a memory budget.

    Args:
        program: A rewritten program, before adds are fused into its sites; it is
            returned itself if nothing is saved.
        memory: The budget in bytes, for all checkpoints together.
    """
    saved: list[Saved] = []

    def change(body: Any) -> Any:
        while (other := _with_one_place(body, memory, saved)) is not None:
            body = other
        return body

    after = map_bodies(program, change, wanted=WANTED) if memory else program
    return after, tuple(saved)


def _with_one_place(body: Any, memory: int, saved: list[Saved]) -> Any:
    """The body with one more place that saves within the budget; None if none does.

    What is saved there is added to `saved`.
    """
    for place in _places(body):
        chosen = _chosen(place.found, memory - sum(k.bytes for k in saved))
        if chosen:
            saved.extend(a.entry() for a in chosen)
            return place.keep(chosen)
    return None


def unspent(program: ClosedJaxpr) -> tuple[Saved, ...]:
    """Returns what `save` would save with unlimited memory."""
    saved: list[Saved] = []

    def look(body: Any) -> Any:
        for place in _places(body):
            saved.extend(a.entry() for a in _chosen(place.found, math.inf))
        return body

    map_bodies(program, look, wanted=WANTED)
    return tuple(saved)


@dataclass(frozen=True, eq=False)
class _Again:
    """An equation of a checkpoint that repeats one of the forward's.

    Attributes:
        at: The position of the checkpoint among the equations around it.
        eqn: Its equation.
        first: The forward's equation.
        turns: The number of turns of the loop around.
    """

    at: int
    eqn: Any
    first: Any
    turns: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of the saved results, in all turns."""
        return self.turns * sum(map(size, self.results))

    @property
    def results(self) -> list[Any]:
        """The results to save."""
        return [v for v in self.eqn.outvars if not _jax.is_drop(v)]

    @property
    def flops(self) -> float:
        """Operations, in all turns."""
        cost = flops_of(self.eqn)
        return self.turns * cost.flops if cost is not None else 0.0

    def entry(self) -> Saved:
        """Its entry in the report."""
        use = self.eqn.params.get("use")
        what = use.op.name if use is not None else "product"
        where = _jax.source_of(self.eqn)
        return Saved(what, where, self.turns, self.bytes, self.flops)


# ------------------------------------------------------------------------ the same
def _same(
    eqns: Iterable[Any], inner: Iterable[Any], known: dict[Any, Any]
) -> Iterator[tuple[Any, Any]]:
    """Pairs of an equation and the one of another body that repeats it.

    Args:
        eqns: The first body's equations.
        inner: The other body's equations.
        known: Variables of the other body, and their equals in the first; new pairs are
            added. Residuals of a site that only the other body returns are not among
            them.
    """
    table: dict[Any, list[Any]] = {}
    first_of: dict[Any, Any] = {}  # values that the first body makes several times
    for eqn in eqns:
        if eqn.effects:
            continue
        ins = [first_of.get(a, a) if _is_var(a) else a for a in eqn.invars]
        found = table.setdefault((eqn.primitive, *map(_key, ins)), [])
        if not any(_is_same(first, eqn, first_of) for first in found):
            found.append(eqn)
    for eqn in inner:
        ins = [known.get(a) if _is_var(a) else a for a in eqn.invars]
        if any(a is None for a in ins):
            continue
        ins = [first_of.get(a, a) if _is_var(a) else a for a in ins]
        if eqn.primitive.name == "name":  # for policies alone
            known[eqn.outvars[0]] = ins[0]
            continue
        for first in table.get((eqn.primitive, *map(_key, ins)), ()):
            if _is_same(first, eqn, known):
                yield eqn, first
                break


def _key(atom: Any) -> Any:
    return atom if _is_var(atom) else (str(atom.aval), repr(atom.val))


def _is_same(first: Any, eqn: Any, known: dict[Any, Any]) -> bool:
    """Whether equations of the same operands are equal; if so, notes their results."""
    one, other = dict(first.params), dict(eqn.params)
    if eqn.primitive in (site.site_p, site.site_on_devices_p):
        one["residuals"] = other["residuals"]
    elif _jax.call_kind(eqn) == "call":
        return _is_same_call(first, eqn, known)
    if not same_params(one, other):
        return False
    known.update(zip(eqn.outvars, first.outvars, strict=False))
    return True


def _is_same_call(first: Any, eqn: Any, known: dict[Any, Any]) -> bool:
    """The same for calls: perhaps only some of their results are equal."""
    one, other = map(_jax.call_body, (first, eqn))
    if len(getattr(one, "constvars", ())) or len(getattr(other, "constvars", ())):
        return False
    inside = dict(zip(_inputs(other), _inputs(one), strict=True))
    for _ in _same(one.eqns, other.eqns, inside):
        pass
    place = {v: k for k, v in reversed(list(enumerate(_outs(one)))) if _is_var(v)}
    for result, own in zip(eqn.outvars, _outs(other), strict=True):
        found = inside.get(own) if _is_var(own) else None
        if found in place:
            known[result] = first.outvars[place[found]]
    return True


def _is_var(atom: Any) -> bool:
    return not _jax.is_literal(atom)


def _inputs(body: Any) -> list[Any]:
    return getattr(body, "jaxpr", body).invars


def _outs(body: Any) -> list[Any]:
    return getattr(body, "jaxpr", body).outvars


# ------------------------------------------------------------------------- to keep
def _repeated(
    eqns: Sequence[Any], body: Any, known: Mapping[Any, Any], turns: int = 1
) -> list[_Again]:
    """Equations that the checkpoints of a body repeat.

    Args:
        eqns: The forward's equations; if they are in the same body, those before it.
        body: The body with the checkpoints.
        known: Variables of the body, and their equals in the forward.
        turns: The number of turns of the loop around.
    """
    found = []
    for at, eqn in _jax.of_kind("remat", body.eqns):
        if not _jax.is_recomputation(eqn):
            continue
        inner = _jax.call_body(eqn)
        inputs = zip(_inputs(inner), eqn.invars, strict=True)
        inside = {v: a if _jax.is_literal(a) else known.get(a) for v, a in inputs}
        inside = {v: a for v, a in inside.items() if a is not None and _is_var(a)}
        before = eqns[:at] if eqns is body.eqns else eqns
        pairs = _same(before, inner.eqns, inside)
        found += [_Again(at, again, first, turns) for again, first in pairs]
    return found


def _chosen(found: Sequence[_Again], memory: float) -> list[_Again]:
    """The ones with the most operations per byte that fit into the memory budget."""
    sized = [a for a in found if is_sized(a.eqn.outvars)]
    costly = [a for a in sized if a.flops >= WORTH * max(1, a.bytes)]
    chosen = []
    for again in sorted(costly, key=lambda a: -a.flops / max(1, a.bytes)):
        if again.bytes <= memory:
            chosen.append(again)
            memory -= again.bytes
    return chosen


# -------------------------------------------------------------------- what is kept
class _Forward:
    """The forward's equations, some changed to return residuals too.

    Attributes:
        value: The forward's variable for a value, by the position of a checkpoint and
            the variable in its body. Several checkpoints may share one body.
    """

    def __init__(self, chosen: Sequence[_Again]) -> None:
        self.instead: dict[int, Any] = {}
        self.value: dict[tuple[int, Any], Any] = {}
        for again in chosen:
            self._keep(again)

    def _keep(self, again: _Again) -> None:
        first = self.instead.get(id(again.first), again.first)
        if "residuals" in first.params:
            lacking = again.eqn.outvars[len(first.outvars) :]
            first = first.replace(
                params={**first.params, "residuals": True},
                outvars=[*first.outvars, *(_jax.new_var(v.aval) for v in lacking)],
            )
        outs = [_jax.new_var(v.aval) if _jax.is_drop(v) else v for v in first.outvars]
        self.instead[id(again.first)] = first.replace(outvars=outs)
        own = ((again.at, v) for v in again.eqn.outvars)
        self.value.update(zip(own, outs, strict=False))

    def eqns(self, eqns: Iterable[Any]) -> list[Any]:
        """The equations, changed where results are saved."""
        return [self.instead.get(id(e), e) for e in eqns]


def _with_values(eqn: Any, values: Mapping[Any, Any]) -> Any:
    """A checkpoint with values as further operands, by variables of its body."""
    inner = _jax.call_body(eqn)
    new = {v: _jax.new_var(v.aval) for v in values}
    eqns = [_jax.reading(e, new) for e in inner.eqns]
    outs = [new.get(v, v) if _is_var(v) else v for v in _outs(inner)]
    alive, _ = live(eqns, outs)
    body = _jax.with_equations(inner, alive, outs, list(new.values()))
    params = {**eqn.params, _jax.call_body_name(eqn): body}
    return eqn.replace(invars=[*eqn.invars, *values.values()], params=params)


def _with_given(
    eqns: Sequence[Any], chosen: Sequence[_Again], value: Mapping[tuple[int, Any], Any]
) -> list[Any]:
    """Equations whose checkpoints read the saved values."""
    equations = list(eqns)
    for at in sorted({a.at for a in chosen}):
        own = [v for a in chosen if a.at == at for v in a.results]
        equations[at] = _with_values(equations[at], {v: value[at, v] for v in own})
    return equations


@dataclass(frozen=True)
class _Place:
    """Repeated equations in checkpoints of one body, and how to save their results."""

    found: Sequence[_Again]
    keep: Callable[[Sequence[_Again]], Any]


def _places(body: Any) -> Iterator[_Place]:
    """Places to save results: among a body's own equations, or between loops."""
    if _jax.of_kind("remat", body.eqns):
        known = {v: v for e in body.eqns for v in e.outvars}
        known.update({v: v for v in (*_inputs(body), *getattr(body, "constvars", ()))})
        found = _repeated(body.eqns, body, known)
        yield _Place(found, functools.partial(_handing, body))
    loops = loops_in(body)
    for first in loops:
        if not isinstance(first.length, int) or _jax.consts_of(first.body):
            continue
        for second in loops:
            if second.position > first.position and second.length == first.length:
                known = _carried_over(first, second)
                found = _repeated(first.eqns, second.body, known, first.length)
                yield _Place(found, functools.partial(_stacking, body, first, second))


def _handing(body: Any, chosen: Sequence[_Again]) -> Any:
    """The body, where checkpoints read values computed before them."""
    forward = _Forward(chosen)
    eqns = _with_given(body.eqns, chosen, forward.value)
    return _jax.with_equations(body, forward.eqns(eqns), _outs(body))


def _carried_over(first: Loop, second: Loop) -> dict[Any, Any]:
    """Variables of a loop that equal those of another loop: operands and results."""
    outer = {
        a: v
        for a, v in zip(first.eqn.outvars, first.outs, strict=True)
        if a in first.eqn.outvars[first.n_carry :] and _is_var(v)
    }
    turn = dict(zip(first.xs, first.inputs[first.first :], strict=True))
    outer.update({a: v for a, v in turn.items() if _is_var(a)})
    inputs = second.inputs
    pairs = zip(inputs[second.first :], second.xs, strict=True)
    known = {v: outer[a] for v, a in pairs if _is_var(a) and a in outer}
    whole = zip(first.eqn.invars, first.inputs[: first.n_consts], strict=False)
    consts = {a: v for a, v in whole if _is_var(a)}
    pairs = zip(inputs[: second.n_consts], second.eqn.invars, strict=False)
    known.update({v: consts[a] for v, a in pairs if _is_var(a) and a in consts})
    return known


def _stacking(body: Any, first: Loop, second: Loop, chosen: Sequence[_Again]) -> Any:
    """The body where one loop stacks values that the other's checkpoints read."""
    forward = _Forward(chosen)
    handed = [forward.value[a.at, v] for a in chosen for v in a.results]
    values = list(dict.fromkeys(handed))
    eqns = forward.eqns(first.eqns)
    one = jaxpr_as_fun(_jax.with_equations(first.body, eqns, [*first.outs, *values]))
    ins = first.eqn.invars
    equations, results = traced(
        first, ins[: first.n_consts], ins[first.n_consts : first.first], first.xs,
        lambda consts, carry, x: one(*consts, *carry, *x),
    )  # fmt: skip
    stacks = results[len(first.outs) :]
    new = {v: _jax.new_var(v.aval) for v in values}
    value = {at: new[v] for at, v in forward.value.items() if v in new}
    eqns = _with_given(second.eqns, chosen, value)
    inner = _jax.with_equations(
        second.body, eqns, second.outs, [new[v] for v in values]
    )
    other = jaxpr_as_fun(inner)
    ins = second.eqn.invars
    behind, ends = traced(
        second,
        ins[: second.n_consts],
        ins[second.n_consts : second.first],
        [*second.xs, *stacks],
        lambda consts, carry, x: other(*consts, *carry, *x),
    )
    became = dict(zip(first.eqn.outvars, results, strict=False))
    became.update(zip(second.eqn.outvars, ends, strict=True))
    instead = {first.position: equations, second.position: behind}
    eqns = [e for k, own in enumerate(body.eqns) for e in instead.get(k, [own])]
    outs = [became.get(v, v) if _is_var(v) else v for v in _outs(body)]
    eqns = [_jax.reading(e, became) for e in eqns]
    return _jax.with_equations(body, eqns, outs)
