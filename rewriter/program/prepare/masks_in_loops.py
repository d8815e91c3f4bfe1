"""Moves the computation of masks into the loops that read them.

    m = map(mask, (i))                       loop over layers:
    loop over layers:                  →       loop over blocks: … mask(i) …
      loop over blocks, with m: …

JAX differentiates a loop over layers by computing beforehand what does not depend on
their carries. Of a loop over blocks in a layer that is the mask of each block, at full
size for all blocks. Where it is made in the loop that reads it, its structure can be
read. It is a few comparisons, and takes no memory of all blocks then.

A checkpoint puts both into calls, which are opened here. A step that may be skipped
makes its mask in a branch. A loop that counts its blocks becomes one over an array of
numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.counters import added
from rewriter.program.equations import live
from rewriter.program.loops import Loop, loop_of, traced
from rewriter.program.opened_calls import opened

log = logging.getLogger("rewriter.masks_in_loops")

OF_MASKS = frozenset(
    {
        "add", "and", "broadcast_in_dim", "clamp", "convert_element_type", "div",
        "dynamic_slice", "empty", "empty2", "eq", "ge", "gt", "iota", "le", "lt", "max",
        "min", "mul", "ne", "neg", "not", "or", "rem", "reshape", "select_n", "sign",
        "slice", "squeeze", "stop_gradient", "sub", "transpose", "xor",
    }
)  # fmt: skip
"""What a mask is made by: little work for each element."""

LOOP = "scan"
"""The primitive of the loops that are changed."""

DEPTH = 4
"""Of how many loops, one in the other, masks are moved to the innermost one."""


@dataclass(frozen=True, eq=False)
class Made:
    """A stack of masks, with the loop that makes it.

    Attributes:
        loop: The loop.
        k: Which of its results it is.
        consts: What each of its steps reads whole, as atoms of the body at hand.
        xs: What it reads step by step.
    """

    loop: Loop
    k: int
    consts: tuple[Any, ...]
    xs: tuple[Any, ...]

    @property
    def sources(self) -> Sources:
        """The loop and what it reads; other stacks of that loop have the same."""
        return self.loop, self.consts, self.xs


Sources = tuple[Loop, tuple[Any, ...], tuple[Any, ...]]
"""A loop that makes masks, with what it reads whole and what step by step."""


def compute_masks_in_loops(program: Any) -> Any:
    """Returns a program whose loops make their own masks; itself without such loops.

    Args:
        program: The program, closed.
    """
    for _ in range(DEPTH):
        before = program
        program = map_bodies(before, lambda body: _changed(body, {}) or body)
        if program is before:
            break
    return program


def _changed(body: Any, known: Mapping[Any, Made]) -> Any:
    """A body whose loops make the masks that they read; None without such loops.

    Args:
        body: The body.
        known: Its inputs that are stacks of masks.
    """
    known, eqns, found = dict(known), [], False
    same: dict[Any, Any] = {}
    fills: dict[Any, Any] = {}
    left, done = list(reversed(body.eqns)), set[Any]()
    while left:
        eqn = _jax.reading(left.pop(), same)
        instead = _opened(eqn, known)
        if instead is None and done.isdisjoint(eqn.outvars):
            instead = _simpler(eqn, fills)
            done.update(eqn.outvars)
        if instead is not None:
            left += reversed(instead[0])
            same.update(instead[1])
            continue
        if _fills(eqn) and eqn.primitive.name == "broadcast_in_dim":
            fills[eqn.outvars[0]] = eqn.invars[0]
        new = _with_masks(eqn, known) if known else None
        if _jax.call_kind(eqn) == "scan":
            known |= _masks_of(loop_of(0, eqn))
        found = found or new is not None
        eqns += [eqn] if new is None else new
    if not found:
        return None
    outs = getattr(body, "jaxpr", body).outvars
    outs = [a if _jax.is_literal(a) else same.get(a, a) for a in outs]
    return _jax.with_equations(body, live(eqns, outs)[0], outs)


def _opened(
    eqn: Any, known: Mapping[Any, Made]
) -> tuple[list[Any], Mapping[Any, Any]] | None:
    """What is in a call that makes or reads masks of all blocks; None for others."""
    if _jax.call_kind(eqn) != "call" or eqn.effects:
        return None
    body = _jax.call_body(eqn)
    makes = _is_light(body) and (_makes_stacks(body) or all(map(_fills, body.eqns)))
    if makes or any(_reads_made(eqn, k, m) for k, m in _given_masks(eqn, known)):
        return opened(body, eqn.invars, eqn.outvars)
    return None


def _simpler(
    eqn: Any, fills: Mapping[Any, Any]
) -> tuple[list[Any], Mapping[Any, Any]] | None:
    """A loop that makes masks, over arrays of the numbers that it counts.

    It is not given what it does not read, nor arrays of one number: it makes them. None
    for other loops, and for one that is so already.

    Args:
        eqn: An equation.
        fills: Arrays that hold one number, and the number.
    """
    if _jax.call_kind(eqn) != "scan" or eqn.effects:
        return None
    loop = loop_of(0, eqn)
    counts, read = _counted(loop), _read_in(loop)
    if counts is None or not _is_light(loop.body):
        return None
    atoms = {k: eqn.invars[k] for k in read}
    named = {k: a for k, a in atoms.items() if not _jax.is_literal(a)}
    whole = {k: fills[a] for k, a in named.items() if a in fills and k < loop.first}
    if not counts and not whole and len(named) == len(loop.inputs):
        return None
    atoms |= whole
    numbers = {k: a.val for k, a in atoms.items() if _jax.is_literal(a)}
    atoms = {k: a for k, a in atoms.items() if k not in numbers}
    first = range(loop.n_consts, loop.first)

    def code(*given: Any) -> list[Any]:
        known = dict(zip(atoms, given, strict=True))
        for k, number in numbers.items():
            known[k] = np.asarray(number, loop.inputs[k].aval.dtype)[()]
        steps = jnp.arange(loop.length)
        steps = steps[::-1] if eqn.params["reverse"] else steps
        over = {
            k: _numbers(steps, known[k], counts[k - loop.n_consts], numbers.get(k))
            for k in first
        }
        over |= {k: known[k] for k in read if k >= loop.first}

        def turn(_: Any, x: Any) -> Any:
            here = {**known, **x}
            for k in whole:
                here[k] = jnp.full(loop.inputs[k].aval.shape, known[k])
            ins = [here.get(k, 0) for k in range(len(loop.inputs))]
            return None, _jax.inlined(_closed(loop.body), ins)[loop.n_carry :]

        how = {"length": loop.length, "reverse": eqn.params["reverse"]}
        ends = [known[k] + counts[k - loop.n_consts] * loop.length for k in first]
        return [*ends, *lax.scan(turn, None, over, **how)[1]]

    try:
        fragment = _jax.trace_placed(code, [a.aval for a in atoms.values()])
    except Exception as why:  # JAX has no rule for their placement
        log.debug("masks stay in a loop as it is: %s", why)
        return None
    return opened(fragment, [*atoms.values()], eqn.outvars)


def _numbers(steps: Any, first: Any, by: int, start: Any) -> Any:
    """What a loop counts at its steps, from a first number that may be known."""
    steps = steps.astype(first.dtype)
    steps = steps if by == 1 else steps * by
    return steps if start is not None and int(start) == 0 else steps + first


def _read_in(loop: Loop) -> list[int]:
    """The operands of a loop that its masks are made of, and its carries."""
    _, read = live(loop.eqns, loop.outs[loop.n_carry :])
    carries = range(loop.n_consts, loop.first)
    return [k for k, v in enumerate(loop.inputs) if v in read or k in carries]


def _counted(loop: Loop) -> list[int] | None:
    """What each step adds to the carries; None if that is not one integer each."""
    counts = [added(loop.eqn, k) for k in range(loop.n_carry)]
    return None if None in counts else [by for _, by in counts]


def _fills(eqn: Any) -> bool:
    """Whether an equation makes an array of one number, or another such number."""
    return (
        eqn.primitive.name in ("broadcast_in_dim", "convert_element_type")
        and not eqn.invars[0].aval.shape
    )


def _makes_stacks(body: Any) -> bool:
    return any(
        _makes_stacks(_jax.call_body(e))
        if _jax.call_kind(e) == "call"
        else _jax.call_kind(e) == "scan"
        for e in body.eqns
    )


def _given_masks(eqn: Any, known: Mapping[Any, Made]) -> list[tuple[int, Made]]:
    """The operands of an equation that are stacks of masks."""
    if not known:
        return []
    atoms = enumerate(eqn.invars)
    named = ((k, a) for k, a in atoms if not _jax.is_literal(a))
    return [(k, known[a]) for k, a in named if a in known]


def _masks_of(loop: Loop) -> dict[Any, Made]:
    """The results of a loop without carries that makes masks of integers."""
    if loop.n_carry or loop.eqn.effects or _has_constants(loop.body):
        return {}
    if not all(_is_whole(a.aval) for a in loop.eqn.invars) or not _is_light(loop.body):
        return {}
    consts, xs = loop.eqn.invars[: loop.first], loop.xs
    outs = enumerate(loop.eqn.outvars)
    return {v: Made(loop, k, tuple(consts), tuple(xs)) for k, v in outs}


def _is_light(body: Any) -> bool:
    return all(_takes_little(e) for e in body.eqns)


def _takes_little(eqn: Any) -> bool:
    """Whether an equation makes a part of masks, perhaps those of many blocks."""
    kind = _jax.call_kind(eqn)
    if eqn.effects:
        return False
    if kind == "scan":
        loop = loop_of(0, eqn)
        return _counted(loop) is not None and _is_light(loop.body)
    if kind == "cond":
        return all(map(_is_light, eqn.params["branches"]))
    if kind == "call":
        return _is_light(_jax.call_body(eqn))
    return eqn.primitive.name in OF_MASKS


def _is_whole(aval: Any) -> bool:
    """Whether an array is of booleans or integers, or a few numbers for all of it."""
    kinds = jnp.bool_, jnp.integer
    return not aval.shape or any(jnp.issubdtype(aval.dtype, kind) for kind in kinds)


def _has_constants(body: Any) -> bool:
    return bool(getattr(body, "jaxpr", body).constvars)


def _closed(body: Any) -> Any:
    return body if hasattr(body, "consts") else ClosedJaxpr(body, ())


def _reads_steps(body: Any, value: Any, length: Any) -> bool:
    """Whether a loop in a body reads a value step by step."""
    return any(
        _reads_its_steps(eqn, k, length)
        for eqn in body.eqns
        if _jax.call_kind(eqn)
        for k, v in enumerate(eqn.invars)
        if v is value
    )


def _reads_its_steps(eqn: Any, k: int, length: Any) -> bool:
    """Whether an equation is a loop that reads an operand so, or holds such a loop."""
    if _jax.call_kind(eqn) == "scan":
        loop = loop_of(0, eqn)
        if k >= loop.first:
            return loop.length == length
        if k >= loop.n_consts:
            return False
    inputs = ((b, getattr(b, "jaxpr", b).invars) for b in _bodies(eqn))
    first = 1 if _jax.call_kind(eqn) == "cond" else 0
    return k >= first and any(_reads_steps(b, v[k - first], length) for b, v in inputs)


def _reads_made(eqn: Any, k: int, made: Made) -> bool:
    return _reads_its_steps(eqn, k, made.loop.length)


def _bodies(eqn: Any) -> Sequence[Any]:
    """The bodies of an equation that can make masks in them."""
    kind = _jax.call_kind(eqn)
    if kind == "scan":
        return (eqn.params["jaxpr"],)
    if kind == "cond":
        return eqn.params["branches"]
    return (_jax.call_body(eqn),) if kind in ("call", "remat") else ()


def _with_masks(eqn: Any, known: Mapping[Any, Made]) -> list[Any] | None:
    """The equations of a body that makes the masks it reads; None if it reads none."""
    kind, given = _jax.call_kind(eqn), _given_masks(eqn, known)
    if not given or kind not in WRITTEN or eqn.effects:
        return None
    ins = {k: made for k, made in given if _reads_made(eqn, k, made)}
    if not ins or any(map(_has_constants, _bodies(eqn))):
        return None
    try:
        return WRITTEN[kind](eqn, ins)
    except Exception as why:  # JAX has no rule for their placement
        log.debug("masks stay before their loop: %s", why)
        return None


def _in_checkpoint(eqn: Any, ins: Mapping[int, Made]) -> list[Any]:
    """A checkpoint with loops that make their masks."""
    body, atoms = _given(_jax.call_body(eqn), ins)
    name = _jax.call_body_name(eqn)
    if name == "jaxpr" and not hasattr(_jax.call_body(eqn), "consts"):
        body = getattr(body, "jaxpr", body)
    params = {**eqn.params, name: body}
    return [eqn.replace(invars=[*eqn.invars, *atoms], params=params)]


def _in_branches(eqn: Any, ins: Mapping[int, Made]) -> list[Any]:
    """A choice between bodies with loops that make their masks."""
    own = {k - 1: made for k, made in ins.items()}
    both = [_given(body, own) for body in eqn.params["branches"]]
    params = {**eqn.params, "branches": tuple(body for body, _ in both)}
    return [eqn.replace(invars=[*eqn.invars, *both[0][1]], params=params)]


def _in_loop(eqn: Any, ins: Mapping[int, Made]) -> list[Any]:
    """A loop that makes its masks, or has loops that make theirs."""
    loop = loop_of(0, eqn)
    here = {k: made for k, made in ins.items() if k >= loop.first}
    deeper = {k: made for k, made in ins.items() if k < loop.first}
    return _written(loop, here, deeper)


WRITTEN = {"scan": _in_loop, "remat": _in_checkpoint, "cond": _in_branches}
"""How equations with bodies are written with masks made in them."""


def _written(
    loop: Loop, here: Mapping[int, Made], deeper: Mapping[int, Made]
) -> list[Any]:
    """The equations of a loop with masks made in it, or in loops in it.

    Args:
        loop: The loop.
        here: By operand, the masks that it reads step by step.
        deeper: By operand, those that loops in it read.
    """
    body, given = _given(loop.body, deeper)
    consts, carry, xs = _split(loop.eqn.invars, loop.n_consts, loop.n_carry)
    makers = _sources(here)
    more = [a for _, consts, _ in makers for a in consts]
    kept = [a for k, a in enumerate(xs, loop.first) if k not in here]
    steps = [a for _, _, xs in makers for a in xs]

    def step(whole: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Any:
        own, given_here, own_consts = _split(whole, len(consts), len(given))
        rest, each = iter(x[: len(kept)]), iter(x[len(kept) :])
        own_consts, made = iter(own_consts), {}
        for maker in makers:
            whole_ones = [next(own_consts) for _ in maker[1]]
            ins = [*whole_ones, *(next(each) for _ in maker[2])]
            made[maker] = _jax.inlined(_closed(maker[0].body), ins)
        masks = {k: made[m.sources][m.k] for k, m in here.items()}
        read = range(loop.first, len(loop.inputs))
        values = [masks[k] if k in masks else next(rest) for k in read]
        return _jax.inlined(body, [*own, *carry, *values, *given_here])

    equations, results = traced(
        loop, [*consts, *given, *more], carry, [*kept, *steps], step
    )
    made_by = {v for e in equations for v in e.outvars}
    if not made_by.issuperset(results):
        raise ValueError("a result that no equation makes")
    names = dict(zip(results, loop.eqn.outvars, strict=True))
    return [e.replace(outvars=[names.get(v, v) for v in e.outvars]) for e in equations]


def _given(body: Any, deeper: Mapping[int, Made]) -> tuple[Any, list[Any]]:
    """A body whose loops make their masks, and the atoms that it then is given.

    These are its last inputs.
    """
    atoms, inputs, known = [], [], dict[Any, Made]()
    parts: dict[Sources, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
    for maker in _sources(deeper):
        _, consts, xs = maker
        own = [_jax.new_var(a.aval) for a in (*consts, *xs)]
        atoms += [*consts, *xs]
        inputs += own
        parts[maker] = tuple(own[: len(consts)]), tuple(own[len(consts) :])
    its_own = getattr(body, "jaxpr", body).invars
    for k, made in deeper.items():
        known[its_own[k]] = Made(made.loop, made.k, *parts[made.sources])
    if known:
        body = _changed(body, known) or body
    outs = getattr(body, "jaxpr", body).outvars
    return _closed(_jax.with_equations(body, body.eqns, outs, inputs)), atoms


def _sources(masks: Mapping[int, Made]) -> list[Sources]:
    return list(dict.fromkeys(made.sources for made in masks.values()))


def _split(values: Sequence[Any], one: int, two: int) -> tuple[list[Any], ...]:
    return list(values[:one]), list(values[one : one + two]), list(values[one + two :])
