"""Moves the computation of masks into the loops that read them.

    m = map(mask, (i))                       loop over layers:
    loop over layers:                  →       loop over blocks: … mask(i) …
      loop over blocks, with m: …

JAX differentiates a loop over layers by computing beforehand what does not depend on
their carries. Of a loop over blocks in a layer that is the mask of each block, at full
size for all blocks. Where it is made in the loop that reads it, its structure can be
read. It is a few comparisons, and takes no memory of all blocks then.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import Loop, loop_of, traced

log = logging.getLogger("rewriter.masks_in_loops")

OF_MASKS = frozenset(
    {
        "add", "and", "broadcast_in_dim", "convert_element_type", "eq", "ge", "gt",
        "iota", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "reshape",
        "select_n", "squeeze", "stop_gradient", "sub", "transpose",
    }
)  # fmt: skip
"""What a mask is made by: little work for each element."""

LOOP = "scan"
"""The primitive of the loops that are changed."""


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

    def at_a_step(self, consts: Sequence[Any], xs: Sequence[Any]) -> Any:
        """Traces what a step of the loop makes."""
        return _jax.inlined(_closed(self.loop.body), [*consts, *xs])[self.k]


def compute_masks_in_loops(program: Any) -> Any:
    """Returns a program whose loops make their own masks; itself without such loops.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, lambda body: _changed(body, {}) or body)


def _changed(body: Any, known: Mapping[Any, Made]) -> Any:
    """A body whose loops make the masks that they read; None without such loops.

    Args:
        body: The body.
        known: Its inputs that are stacks of masks.
    """
    known, eqns, found = dict(known), [], False
    for position, eqn in enumerate(body.eqns):
        new = None
        if _jax.call_kind(eqn) == "scan":
            loop = loop_of(position, eqn)
            new = _with_masks(loop, known) if known else None
            known |= _masks_of(loop)
        found = found or new is not None
        eqns += [eqn] if new is None else new
    if not found:
        return None
    outs = getattr(body, "jaxpr", body).outvars
    return _jax.with_equations(body, live(eqns, outs)[0], outs)


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
    return all(
        _is_light(_jax.call_body(e))
        if _jax.call_kind(e) == "call"
        else e.primitive.name in OF_MASKS and not e.effects
        for e in body.eqns
    )


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
    for position, eqn in enumerate(body.eqns):
        if _jax.call_kind(eqn) != "scan":
            continue
        loop = loop_of(position, eqn)
        if loop.length == length and any(v is value for v in loop.xs):
            return True
        pairs = zip(eqn.invars[: loop.n_consts], loop.inputs, strict=False)
        if any(v is value and _reads_steps(loop.body, i, length) for v, i in pairs):
            return True
    return False


def _with_masks(loop: Loop, known: Mapping[Any, Made]) -> list[Any] | None:
    """The equations of a loop that makes the masks it reads; None if it reads none."""
    ins = [None if _jax.is_literal(a) else known.get(a) for a in loop.eqn.invars]
    here = {
        k: made
        for k, made in enumerate(ins)
        if made and k >= loop.first and made.loop.length == loop.length
    }
    deeper = {
        k: made
        for k, made in enumerate(ins[: loop.n_consts])
        if made and _reads_steps(loop.body, loop.inputs[k], made.loop.length)
    }
    if not (here or deeper) or loop.eqn.effects or _has_constants(loop.body):
        return None
    try:
        return _written(loop, here, deeper)
    except Exception as why:  # JAX has no rule for their placement
        log.debug("masks stay before their loop: %s", why)
        return None


def _written(
    loop: Loop, here: Mapping[int, Made], deeper: Mapping[int, Made]
) -> list[Any]:
    """The equations of a loop with masks made in it, or in loops in it.

    Args:
        loop: The loop.
        here: By operand, the masks that it reads step by step.
        deeper: By operand, those that loops in it read.
    """
    body, given = _given(loop, deeper)
    consts, carry, xs = _split(loop.eqn.invars, loop.n_consts, loop.n_carry)
    more = [a for made in here.values() for a in made.consts]
    kept = [a for k, a in enumerate(xs, loop.first) if k not in here]
    steps = [a for made in here.values() for a in made.xs]

    def step(whole: Sequence[Any], carry: Sequence[Any], x: Sequence[Any]) -> Any:
        own, given_here, own_consts = _split(whole, len(consts), len(given))
        rest, each = iter(x[: len(kept)]), iter(x[len(kept) :])
        own_consts, masks = iter(own_consts), {}
        for k, made in here.items():
            parts = [next(own_consts) for _ in made.consts]
            masks[k] = made.at_a_step(parts, [next(each) for _ in made.xs])
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


def _given(loop: Loop, deeper: Mapping[int, Made]) -> tuple[Any, list[Any]]:
    """A loop's body whose loops make their masks, and the atoms that it then is given.

    These are its last inputs.
    """
    body, atoms, inputs = loop.body, [], []
    known: dict[Any, Made] = {}
    for k, made in deeper.items():
        own = [_jax.new_var(a.aval) for a in (*made.consts, *made.xs)]
        atoms += [*made.consts, *made.xs]
        inputs += own
        first = len(made.consts)
        parts = tuple(own[:first]), tuple(own[first:])
        known[loop.inputs[k]] = Made(made.loop, made.k, *parts)
    if known:
        body = _changed(body, known) or body
    outs = getattr(body, "jaxpr", body).outvars
    return _closed(_jax.with_equations(body, body.eqns, outs, inputs)), atoms


def _split(values: Sequence[Any], one: int, two: int) -> tuple[list[Any], ...]:
    return list(values[:one]), list(values[one : one + two]), list(values[one + two :])
