"""Changes a loop, and the loop over its gradients, as if they were one body.

    loop:  w, d = f(x)             loop:  w, y = f(x)
    back:  g(w, d, c)        →     back:  h(w, y, c)

A loop over layers without checkpoints keeps what its gradients read, in arrays with one
entry for each layer. What a change joins may then lie in two bodies, such as a sum of
softmaxes and its cotangent. Each equation stays in its loop, and the first loop keeps
what the second one reads now. It must not be more than before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import Loop, loops_in, traced

Change = Callable[[Any], Any]
"""Maps a body to another one with the same results; to None if nothing changes."""

LIGHT = frozenset({
    "div", "mul", "neg", "reshape", "squeeze", "expand_dims", "broadcast_in_dim",
    "transpose", "convert_element_type",
})  # fmt: skip
"""What the second loop computes again, and does not read from memory."""

MOST = 8
"""The most pairs of one body that are changed."""


def change_pairs(program: Any, change: Change) -> Any:
    """Returns a program whose pairs of loops are changed; itself without such.

    Args:
        program: The program, closed.
        change: Changes the two bodies of a pair as one.
    """
    return map_bodies(program, lambda body: _changed(body, change))


def _changed(body: Any, change: Change) -> Any:
    for _ in range(MOST):
        pairs = itertools.permutations(loops_in(body), 2)
        found = (Pair(body, *p) for p in pairs if _belong_together(*p))
        new = next(filter(None, (pair.changed(change) for pair in found)), None)
        if new is None:
            return body
        body = new
    return body


def _belong_together(first: Loop, back: Loop) -> bool:
    """Whether a loop goes back over the steps of another one."""
    reverse = [x.eqn.params["reverse"] for x in (first, back)]
    plain = not any(
        x.eqn.effects or getattr(x.body, "consts", ()) for x in (first, back)
    )
    stacks = set(first.eqn.outvars[first.n_carry :])
    return (
        plain
        and reverse[0] != reverse[1]
        and isinstance(first.length, int)
        and first.length == back.length
        and any(x in stacks for x in back.xs if not _jax.is_literal(x))
    )


@dataclass(frozen=True, eq=False)
class Pair:
    """A loop of a body, and the loop over its gradients.

    Attributes:
        around: The body that both are in.
        first: The loop.
        back: The one that goes back over its steps.
    """

    around: Any
    first: Loop
    back: Loop

    def changed(self, change: Change) -> Any:
        """The body with both loops changed; None if that is not possible."""
        first, back = self.first, self.back
        if not set(_variables(first)).isdisjoint(_variables(back)):
            return None
        names = self._names()
        own = [v for v in back.inputs if v not in names]
        kept = self._kept(names)
        results = [
            *first.outs[: first.n_carry], *(first.outs[k] for k in kept),
            *(a if _jax.is_literal(a) else names.get(a, a) for a in back.outs),
        ]  # fmt: skip
        eqns = [*first.eqns, *(_jax.reading(e, names) for e in back.eqns)]
        joined = _jax.with_signature(
            _open(first.body), [*first.inputs, *own], eqns, results
        )
        new = change(joined)
        if new is None:
            return None
        mine, theirs = self._divided(list(new.eqns), own, results, len(kept))
        count = first.n_carry + len(kept)
        read = _read(theirs, results[count:])
        made = {v for e in mine for v in e.outvars}
        carries = first.inputs[first.n_consts : first.first]
        crossing = [v for v in read if v in made or v in carries]
        crossing, again = _made_again(mine, crossing, set(first.inputs) - set(carries))
        theirs = [*again, *theirs]
        before = [
            v for k, v in enumerate(first.outs)
            if k >= first.n_carry and k not in kept and not _jax.is_literal(v)
        ]  # fmt: skip
        if _bytes(crossing) > _bytes(before):
            return None
        return self._placed(mine, theirs, results, kept, crossing, own)

    def _names(self) -> dict[Any, Any]:
        """Inputs of the second body that are values of the first one."""
        first, back = self.first, self.back
        outs = zip(first.eqn.outvars, first.outs, strict=True)
        steps = {v: a for v, a in outs if not _jax.is_literal(a)}
        for v in first.eqn.outvars[: first.n_carry]:  # the last carries
            steps.pop(v, None)
        steps |= _pairs(first.xs, first.inputs[first.first :])
        whole = _pairs(first.eqn.invars, first.inputs[: first.n_consts])
        found = {}
        for k, (outer, v) in enumerate(zip(back.eqn.invars, back.inputs, strict=True)):
            given = whole if k < back.n_consts else steps if k >= back.first else {}
            if not _jax.is_literal(outer) and outer in given:
                found[v] = given[outer]
        return found

    def _kept(self, names: dict[Any, Any]) -> list[int]:
        """The results of the first loop that others than the second one read."""
        first, back = self.first, self.back
        read = {
            a for e in self.around.eqns if e is not back.eqn for a in e.invars
            if not _jax.is_literal(a)
        }  # fmt: skip
        read |= {a for a in _outs(self.around) if not _jax.is_literal(a)}
        pairs = zip(back.eqn.invars, back.inputs, strict=True)
        read |= {a for a, v in pairs if v not in names and not _jax.is_literal(a)}
        outs = enumerate(first.eqn.outvars)
        return [k for k, v in outs if k >= first.n_carry and v in read]

    def _divided(
        self, eqns: Sequence[Any], own: Sequence[Any], results: Sequence[Any], kept: int
    ) -> tuple[list[Any], list[Any]]:
        """The equations of each loop; what is new is in the first if that needs it."""
        late = set(own)
        for eqn in eqns:
            if any(a in late for a in eqn.invars if not _jax.is_literal(a)):
                late.update(eqn.outvars)
        before = {v for e in self.first.eqns for v in e.outvars}
        ends = results[: self.first.n_carry + kept]
        needed = {a for a in ends if not _jax.is_literal(a)}
        mine, theirs = [], []
        for eqn in reversed(eqns):
            early = late.isdisjoint(eqn.outvars)
            if early and any(v in before or v in needed for v in eqn.outvars):
                mine.append(eqn)
                needed.update(a for a in eqn.invars if not _jax.is_literal(a))
            else:
                theirs.append(eqn)
        return mine[::-1], theirs[::-1]

    def _placed(
        self,
        mine: Sequence[Any],
        theirs: Sequence[Any],
        results: Sequence[Any],
        kept: Sequence[int],
        crossing: Sequence[Any],
        own: Sequence[Any],
    ) -> Any:
        """The body around with both loops, given their equations."""
        first, back = self.first, self.back
        count = first.n_carry + len(kept)
        outs = [*results[:count], *crossing]
        made, given = _loop(first, first.inputs, first.eqn.invars, mine, outs)
        at = [*range(first.n_carry), *kept]
        env = {first.eqn.outvars[k]: a for k, a in zip(at, given, strict=False)}
        stacks = dict(zip(crossing, given[count:], strict=True))
        atoms = dict(zip(back.inputs, back.eqn.invars, strict=True))
        whole, steps = ([], [])
        for k, v in enumerate(back.inputs):
            if v in own and not back.n_consts <= k < back.first:
                (whole if k < back.n_consts else steps).append((v, atoms[v]))
        read = set(_read(theirs, results[count:]))
        for k, (v, a) in enumerate(zip(first.inputs, first.eqn.invars, strict=True)):
            if v in read and v not in stacks:
                (whole if k < first.n_consts else steps).append((v, a))
        steps += [(v, stacks[v]) for v in crossing]
        carries = [
            (v, atoms[v]) for v in back.inputs[back.n_consts : back.first]
        ]  # fmt: skip
        inputs, ins = zip(*whole, *carries, *steps, strict=True)
        ins = [a if _jax.is_literal(a) else env.get(a, a) for a in ins]
        loop = Loop(
            back.position, back.eqn, back.body, len(whole), back.n_carry, back.length
        )
        last, ends = _loop(loop, inputs, ins, theirs, results[count:])
        env |= dict(zip(back.eqn.outvars, ends, strict=True))
        eqns: list[Any] = []
        for eqn in self.around.eqns:
            own_eqns = made if eqn is first.eqn else last if eqn is back.eqn else None
            eqns += [_jax.reading(eqn, env)] if own_eqns is None else own_eqns
        final = [a if _jax.is_literal(a) else env.get(a, a) for a in _outs(self.around)]
        return _jax.with_equations(self.around, live(eqns, final)[0], final)


def _loop(
    loop: Loop,
    inputs: Sequence[Any],
    ins: Sequence[Any],
    eqns: Sequence[Any],
    outs: Any,
) -> tuple[list[Any], list[Any]]:
    """A loop with other inputs, equations and results, and the atoms of its results."""
    body = _jax.with_signature(
        _open(loop.body), inputs, live(list(eqns), list(outs))[0], outs
    )
    closed = ClosedJaxpr(body, ())
    step = lambda whole, carry, x: _jax.inlined(closed, [*whole, *carry, *x])
    whole, carry = ins[: loop.n_consts], ins[loop.n_consts : loop.first]
    return traced(loop, whole, carry, ins[loop.first :], step)


def _made_again(
    eqns: Sequence[Any], crossing: Sequence[Any], at_hand: Collection[Any]
) -> tuple[list[Any], list[Any]]:
    """What need not be kept, since light equations make it of the rest.

    Args:
        eqns: Those of the first loop.
        crossing: What the second loop reads of their results.
        at_hand: What both loops are given.

    Returns:
        What is left to keep, and equations for the other values.
    """
    makers = {v: e for e in eqns for v in e.outvars}
    known = {*crossing, *at_hand}

    def made_of_known(v: Any) -> list[Any] | None:
        eqn = makers.get(v)
        if eqn is None or eqn.primitive.name not in LIGHT:
            return None
        found = [eqn]
        for a in eqn.invars:
            if not _jax.is_literal(a) and a not in known:
                more = made_of_known(a)
                if more is None:
                    return None
                found += more
        return found

    made = {v: made_of_known(v) for v in crossing}
    again = {id(e) for found in made.values() for e in found or ()}
    left = [v for v in crossing if made[v] is None]
    return left, [e for e in eqns if id(e) in again]


def _open(body: Any) -> Any:
    return getattr(body, "jaxpr", body)


def _outs(body: Any) -> Sequence[Any]:
    return _open(body).outvars


def _variables(loop: Loop) -> Iterator[Any]:
    yield from loop.inputs
    for eqn in loop.eqns:
        yield from (v for v in eqn.outvars if not _jax.is_drop(v))


def _pairs(atoms: Sequence[Any], variables: Sequence[Any]) -> dict[Any, Any]:
    pairs = zip(atoms, variables, strict=False)
    return {a: v for a, v in pairs if not _jax.is_literal(a)}


def _read(eqns: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The values that equations and results read, each once, made by others."""
    made = {v for e in eqns for v in e.outvars}
    atoms = [a for e in eqns for a in e.invars] + list(outs)
    read = (a for a in atoms if not _jax.is_literal(a) and a not in made)
    return list(dict.fromkeys(read))


def _bytes(variables: Sequence[Any]) -> int:
    size = lambda v: math.prod(v.aval.shape) * v.aval.dtype.itemsize
    return sum(size(v) for v in dict.fromkeys(variables))
