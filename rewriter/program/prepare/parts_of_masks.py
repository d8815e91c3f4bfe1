"""Computes a part of a mask from parts of its inputs.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxprs_in_params

from rewriter import _jax
from rewriter.program.constant_tables import affine_constant, pattern_of
from rewriter.program.equations import live
from rewriter.program.loops import inserted

ELEMENTWISE = frozenset({
    "abs", "add", "and", "convert_element_type", "div", "eq", "ge", "gt", "le", "lt",
    "max", "min", "mul", "ne", "neg", "not", "or", "rem", "select_n", "sign",
    "stop_gradient", "sub", "xor",
})  # fmt: skip
LAYOUT = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
VARYING = frozenset({"pcast", "pvary"})
"""What states that a value varies over devices; a part states it itself."""
LIGHT = {"axis_index", "iota", "transpose"} | ELEMENTWISE | LAYOUT | VARYING
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
        start: What its first position is computed from: axes of a mesh, or the number
            of an axis.
        size: The number of positions.
        devices: The mesh and its manual axes, if that is the part of a device.
    """

    start: Any
    size: Any
    devices: Any = None


Cuts = tuple[Cut | None, ...]
"""For each axis of an array, the part that is wanted; None for all of it."""
Source = tuple[Any, Cuts]
"""A variable that is not made by light equations, and the part of it that is read."""


@dataclass(frozen=True, eq=False)
class Makers:
    """The equations that make the values of a body; calls of `jax.jit` are inlined.

    Attributes:
        eqns: By variable, the equation.
        same: By the result of a call, the atom in the call that it is. By a constant
            array with a formula, the result of the formula.
        constants: By variable, other constant arrays.
        inside: By the result of a shard_map without products, the variable in it, and
            the part that a device has.
        outside: By the input of its body, the atom outside, and that part.
    """

    eqns: dict[Any, Any] = field(default_factory=dict)
    same: dict[Any, Any] = field(default_factory=dict)
    constants: dict[Any, Any] = field(default_factory=dict)
    inside: dict[Any, Source] = field(default_factory=dict)
    outside: dict[Any, Source] = field(default_factory=dict)

    @classmethod
    def in_body(cls, body: Any) -> Makers:
        """Returns the makers of a body before its first equation."""
        known = zip(
            getattr(body, "jaxpr", body).constvars, _jax.consts_of(body), strict=False
        )
        return cls(constants={v: c for v, c in known if not _jax.is_opaque(c)})

    def add(self, eqns: Sequence[Any]) -> None:
        """Adds the equations of a body."""
        for eqn in eqns:
            body = _jax.call_body(eqn) if _jax.call_kind(eqn) == "call" else None
            jaxpr = getattr(body, "jaxpr", body)
            if _jax.call_kind(eqn) == "shard_map" and not has_products(eqn):
                self._add_shard_map(eqn)
            if jaxpr is None or jaxpr.constvars or not _is_light(jaxpr):
                self.eqns.update((v, eqn) for v in eqn.outvars)
                continue
            inner, results = inserted(jaxpr, eqn.invars, eqn.source_info)
            self.add(inner)
            self.same.update(zip(eqn.outvars, results, strict=True))

    def _add_shard_map(self, eqn: Any) -> None:
        """Adds what a shard_map computes on each device."""
        into, out_of, around = _jax.parts_of(eqn)
        body = eqn.params["jaxpr"]
        pairs = zip(eqn.outvars, body.outvars, out_of, strict=True)
        for var, inner, spec in pairs:
            cuts = cuts_of(var.aval.shape, spec, around)
            if cuts is not None and _jax.is_parts(spec, inner.aval, around):
                self.inside[var] = inner, cuts
        for atom, inner, spec in zip(eqn.invars, body.invars, into, strict=True):
            cuts = cuts_of(atom.aval.shape, spec, around)
            if cuts is not None:
                self.outside[inner] = atom, cuts
        self.add(body.eqns)

    def of(self, atom: Any) -> tuple[Any, Any]:
        """(the atom that an atom is, the equation that makes it or None)."""
        while not _jax.is_literal(atom):
            if atom in self.constants:
                self._add_formula(atom, self.constants.pop(atom))
            if atom not in self.same:
                break
            atom = self.same[atom]
        return atom, None if _jax.is_literal(atom) else self.eqns.get(atom)

    def _add_formula(self, var: Any, array: Any) -> None:
        """Adds the equations of a constant array, if it has a formula."""
        code = formula_of(np.asarray(array)) if np.ndim(array) else None
        if code is None:
            return
        made = _jax.trace_flat(code, ())
        inner, (self.same[var],) = inserted(made.jaxpr, (), made.eqns[0].source_info)
        self.add(inner)

    def operands(self, value: Any, eqn: Any, cuts: Cuts) -> list[Source] | None:
        """The parts of operands that a part of a value is made of; None if unknown.

        Args:
            value: The value.
            eqn: The equation that makes it, if any.
            cuts: The part.
        """
        if value in self.inside:
            inner, its = self.inside[value]
            same = any(cuts) and its == cuts
            return [(inner, (None,) * len(inner.aval.shape))] if same else None
        if value in self.outside:
            return None if any(cuts) else [self.outside[value]]
        return None if eqn is None else operands_of(eqn, cuts)

    def sources(
        self, atom: Any, cuts: Cuts, copied: bool = False
    ) -> list[Source] | None:
        """What a part of a value is made of; None if it is not light work.

        Args:
            atom: The value.
            cuts: The part.
            copied: Whether its equations are copied, those of shard_maps as they are.
        """
        found: dict[Source, bool] = {}
        queue, made = [(atom, cuts)], 0
        while queue:
            value, its = queue.pop()
            value, eqn = self.of(value)
            if (value.aval.shape and _jax.is_literal(value)) or len(found) > MOST:
                return None
            if _jax.is_literal(value) or (value, its) in found:
                continue
            operands = self.operands(value, eqn, its)
            if copied and value in self.inside:
                operands = [
                    (a, (None,) * len(a.aval.shape)) for a in only(eqn, value).invars
                ]
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
                eqn = only(eqn, value) if value in self.inside else eqn
                ins = [read(x) for x in eqn.invars]
                outs = [_jax.new_var(v.aval) for v in eqn.outvars]
                eqns.append(_jax.with_atoms(eqn, ins, outs, eqn.source_info))
                env.update(zip(eqn.outvars, outs, strict=True))
            return env[value]

        return eqns, read(atom)


def only(eqn: Any, var: Any) -> Any:
    """A shard_map that returns one of its results alone, and reads what that needs."""
    body, k = eqn.params["jaxpr"], eqn.outvars.index(var)
    into, out_of, _ = _jax.parts_of(eqn)
    eqns, read = live(body.eqns, body.outvars[k : k + 1])
    kept = [i for i, v in enumerate(body.invars) if v in read]
    ins = [body.invars[i] for i in kept]
    new = _jax.with_signature(body, ins, eqns, body.outvars[k : k + 1])
    new = _jax.with_parts(eqn, new, [into[i] for i in kept], out_of[k : k + 1])
    return new.replace(invars=[eqn.invars[i] for i in kept], outvars=[var])


def _whole_operands(eqn: Any) -> list[Source] | None:
    """The operands of a shard_map, if it makes masks only."""
    if not _is_light(eqn.params["jaxpr"]):
        return None
    return [(a, (None,) * len(a.aval.shape)) for a in eqn.invars]


def has_products(eqn: Any) -> bool:
    """Whether the bodies of an equation compute contractions, at any depth."""
    return any(
        e.primitive.name == "dot_general" or has_products(e)
        for body in jaxprs_in_params(eqn.params)
        for e in body.eqns
    )


def cuts_of(shape: Sequence[Any], spec: Any, around: Any) -> Cuts | None:
    """The part of an array that a device has; None if its size is symbolic.

    Args:
        shape: The array's shape.
        spec: How it is split.
        around: The mesh and its manual axes, as of `_jax.parts_of`.
    """
    sizes, cuts = around[0].shape, []
    for k, n in enumerate(shape):
        axes = spec[k] if k < len(spec) else None
        axes = axes if isinstance(axes, tuple) or axes is None else (axes,)
        if axes and not isinstance(n, int):
            return None
        count = math.prod(sizes[a] for a in axes or ())
        cuts.append(Cut(axes, n // count, around) if axes else None)
    return tuple(cuts)


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


def formula_of(array: np.ndarray) -> Callable[[], jax.Array] | None:
    """Code that makes a constant array from positions; None without a formula."""
    shape, dtype = array.shape, array.dtype
    at = lambda axis: lax.broadcasted_iota(jnp.int32, shape, axis)
    if dtype.kind == "b":
        found = pattern_of(array)
        if not isinstance(found, tuple):
            return None
        rows, columns, lower, upper = found

        def band() -> jax.Array:
            distance = at(columns) - (0 if rows is None else at(rows))
            keep = jnp.full(shape, True)
            keep = keep if lower is None else keep & (distance >= lower)
            return keep if upper is None else keep & (distance <= upper)

        return band
    affine = affine_constant(array) if dtype == np.int32 and array.size > 1 else None
    if affine is None or not all(float(s).is_integer() for s in affine[1]):
        return None

    def positions() -> jax.Array:
        total = jnp.full(shape, int(affine[0]), dtype)
        for axis, slope in enumerate(affine[1]):
            total = total + at(axis) * int(slope) if slope else total
        return total

    return positions


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
    if name == "axis_index":
        return []
    if not _is_unplaced(eqn.params.get("sharding")) or eqn.effects:
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
    return [
        (operand, tuple(None if n == 1 else next(rest)[1] for n in operand.aval.shape))
    ]


def _is_unplaced(sharding: Any) -> bool:
    """Whether an equation says of no axis of its result where it is."""
    return sharding is None or all(axes is None for axes in sharding.spec)


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
            operands = [self.of(*x) for x in self.makers.operands(value, eqn, cuts)]
            linked = value in self.makers.inside or value in self.makers.outside
            self.known[value, cuts] = (
                operands[0] if linked else self._computed(eqn, cuts, operands)
            )
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
