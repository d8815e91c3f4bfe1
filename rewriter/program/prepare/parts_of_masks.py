"""Makes a part of a mask from parts of what the mask is made of.

    slice(iota)              →   iota + start
    slice(a == b)            →   slice(a) == slice(b)
    slice(broadcast(a))      →   broadcast(slice(a))

From a part of a finished mask no structure can be read. From the part of its segments,
and from positions with an offset, it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax

from rewriter import _jax
from rewriter.program.loops import inserted

ELEMENTWISE = frozenset({
    "abs", "add", "and", "convert_element_type", "div", "eq", "ge", "gt", "le", "lt",
    "max", "min", "mul", "ne", "neg", "not", "or", "rem", "select_n", "sign",
    "stop_gradient", "sub", "xor",
})  # fmt: skip
LAYOUT = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
VARYING = frozenset({"pcast", "pvary"})
"""What states that a value varies over devices; a part states it itself."""
LIGHT = {"iota", "transpose"} | ELEMENTWISE | LAYOUT | VARYING
MOST = 200
"""The most equations that a mask may be made by."""
FEWER = 4
"""So many times smaller than a mask is what it is made of, at least."""
SMALL = 4096
"""Bytes that what a mask is made of may have in any case."""


@dataclass(frozen=True)
class Cut:
    """A part of an axis.

    Attributes:
        start: What its first position is computed from: axes of a mesh, or a variable.
        size: The number of positions.
    """

    start: Any
    size: Any


Cuts = tuple[Cut | None, ...]
"""For each axis of an array, the part that is wanted; None for all of it."""
Source = tuple[Any, Cuts]
"""A variable that is not made by light equations, and the part of it that is read."""


@dataclass(frozen=True, eq=False)
class Makers:
    """The equations that make the values of a body; calls of `jax.jit` are inlined.

    Attributes:
        eqns: By variable, the equation.
        same: By the result of a call, the atom in the call that it is.
    """

    eqns: dict[Any, Any] = field(default_factory=dict)
    same: dict[Any, Any] = field(default_factory=dict)

    def add(self, eqns: Sequence[Any]) -> None:
        """Adds the equations of a body."""
        for eqn in eqns:
            body = _jax.call_body(eqn) if _jax.call_kind(eqn) == "call" else None
            jaxpr = getattr(body, "jaxpr", body)
            if jaxpr is None or jaxpr.constvars or not _is_light(jaxpr):
                self.eqns.update((v, eqn) for v in eqn.outvars)
                continue
            inner, results = inserted(jaxpr, eqn.invars, eqn.source_info)
            self.add(inner)
            self.same.update(zip(eqn.outvars, results, strict=True))

    def of(self, atom: Any) -> tuple[Any, Any]:
        """(the atom that an atom is, the equation that makes it or None)."""
        while not _jax.is_literal(atom) and atom in self.same:
            atom = self.same[atom]
        return atom, None if _jax.is_literal(atom) else self.eqns.get(atom)

    def sources(self, atom: Any, cuts: Cuts) -> list[Source] | None:
        """What a part of a value is made of; None if it is not light work."""
        found: dict[Source, bool] = {}
        queue, made = [(atom, cuts)], 0
        while queue:
            value, its = queue.pop()
            value, eqn = self.of(value)
            if (value.aval.shape and _jax.is_literal(value)) or len(found) > MOST:
                return None
            if _jax.is_literal(value) or (value, its) in found:
                continue
            operands = None if eqn is None else operands_of(eqn, its)
            found[value, its] = operands is None
            made += operands is not None
            queue += operands or ()
        ends = [source for source, is_end in found.items() if is_end]
        return ends if made and all(map(_is_of_mask, ends)) else None


    def copied(self, atom: Any, instead: Mapping[Any, Any]) -> tuple[list[Any], Any]:
        """The equations that make a value of other variables, and the value.

        Args:
            atom: The value.
            instead: By variable that it is made of, the one to read.
        """
        env, eqns = dict(instead), []

        def read(atom: Any) -> Any:
            value, eqn = self.of(atom)
            if _jax.is_literal(value):
                return value
            if value not in env:
                ins = [read(x) for x in eqn.invars]
                outs = [_jax.new_var(v.aval) for v in eqn.outvars]
                eqns.append(_jax.with_atoms(eqn, ins, outs, eqn.source_info))
                env.update(zip(eqn.outvars, outs, strict=True))
            return env[value]

        return eqns, read(atom)


def _is_light(jaxpr: Any) -> bool:
    """Whether a function called by a mask makes masks or positions only."""
    return len(jaxpr.eqns) < MOST and all(
        eqn.primitive.name in LIGHT or _jax.call_kind(eqn) == "call"
        for eqn in jaxpr.eqns
    )


def _is_of_mask(source: Source) -> bool:
    """Whether a mask may be made of an array: integers, booleans or a few floats."""
    aval = source[0].aval
    if _jax.is_key(aval):
        return False
    return not jnp.issubdtype(aval.dtype, jnp.inexact) or len(aval.shape) < 3


def is_smaller(sources: Sequence[Source], aval: Any) -> bool:
    """Whether what a mask is made of takes much less memory than the mask."""
    if not all(isinstance(n, int) for v in (aval, *_avals(sources)) for n in v.shape):
        return False
    size = sum(map(_bytes, _avals(sources)))
    return size <= SMALL or FEWER * size <= _bytes(aval)


def _avals(sources: Sequence[Source]) -> list[Any]:
    return [value.aval for value, _ in sources]


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def operands_of(eqn: Any, cuts: Cuts) -> list[Source] | None:
    """The parts of its operands that a part of an equation's result is made of.

    None if the equation is none of those that make masks.
    """
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if eqn.params.get("sharding") is not None or eqn.effects:
        return None
    if name == "iota" and not eqn.invars:
        return [] if jnp.issubdtype(eqn.params["dtype"], jnp.integer) else None
    if name in VARYING and eqn.params.get("to", "varying") != "varying":
        return None
    if name in ELEMENTWISE | VARYING:
        return [(a, cuts if a.aval.shape else ()) for a in eqn.invars]
    if name not in LAYOUT | {"transpose"} or len(eqn.invars) != 1:
        return None
    (operand,) = eqn.invars
    if name == "transpose":
        order = eqn.params["permutation"]
        return [(operand, tuple(cuts[order.index(k)] for k in range(len(order))))]
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        pairs = zip(operand.aval.shape, axes, strict=True)
        return [(operand, tuple(cuts[d] if n == shape[d] else None for n, d in pairs))]
    long = [(n, c) for n, c in zip(shape, cuts, strict=True) if n != 1]
    if [n for n, _ in long] != [n for n in operand.aval.shape if n != 1]:
        return None
    rest = iter(long)
    return [(operand, tuple(None if n == 1 else next(rest)[1] for n in operand.aval.shape))]


@dataclass(frozen=True, eq=False)
class Parts:
    """Computes parts of masks, within a trace.

    Attributes:
        makers: The equations that make them.
        given: The parts of what they are made of.
        start: Returns the first position of a cut, an int32 number.
        known: Parts that were computed.
    """

    makers: Makers
    given: Mapping[Source, Any]
    start: Callable[[Cut], Any]
    known: dict[Source, Any] = field(default_factory=dict)

    def of(self, atom: Any, cuts: Cuts) -> Any:
        """A part of a value."""
        value, eqn = self.makers.of(atom)
        if _jax.is_literal(value):
            return jnp.asarray(value.val, value.aval.dtype)
        if (value, cuts) in self.given:
            return self.given[value, cuts]
        if (value, cuts) not in self.known:
            operands = [self.of(*x) for x in operands_of(eqn, cuts)]
            self.known[value, cuts] = self._computed(eqn, cuts, operands)
        return self.known[value, cuts]

    def _computed(self, eqn: Any, cuts: Cuts, operands: list[Any]) -> Any:
        """A part of an equation's result, from the parts of its operands."""
        name, whole = eqn.primitive.name, eqn.outvars[0].aval.shape
        pairs = zip(whole, cuts, strict=True)
        shape = tuple(n if cut is None else cut.size for n, cut in pairs)
        if name in VARYING:
            return operands[0]
        if name == "iota":
            axis, dtype = eqn.params["dimension"], eqn.params["dtype"]
            numbers = lax.broadcasted_iota(dtype, shape, axis)
            first = cuts[axis]
            if first is None:
                return numbers
            return numbers + self.start(first).astype(dtype)
        if name == "broadcast_in_dim":
            axes = tuple(map(int, eqn.params["broadcast_dimensions"]))
            return lax.broadcast_in_dim(operands[0], shape, axes)
        if name in LAYOUT:
            return lax.reshape(operands[0], shape)
        if name == "transpose":
            return lax.transpose(operands[0], eqn.params["permutation"])
        return eqn.primitive.bind(*_jax.with_common_varying(operands), **eqn.params)
