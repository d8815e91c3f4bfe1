"""Multiplies a softmax by the values at once, where the program adds up parts of it.

    o = (w_0 - l w_1) v       →     y = w v             o = y_0 - l y_1
    dv = (w_0 - l w_1)' do    →     dv = w' c           c = (do, -l do)
    dw = (do v', -l (do v'))  →     dw = c v'
    dl = sum(-(do v') w_1)    →     dl = sum(-do y_1)

A differential attention may have both of its maps in one softmax, on an axis of two. It
may also be half of the heads, or every other one. Nothing in the program is the product
of that softmax with values, nor the cotangent of one. Afterwards it is one attention,
whose parts are subtracted.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.prepare.differences_of_softmaxes import (
    Body,
    Derivative,
    Product,
    Term,
    computes_in,
    derivative,
    factors_gradient,
    in_place_of,
    multiplies_sums,
    places_of,
    scaled,
)

STACKED, HALVES, STRIDED = "stacked", "halves", "strided"
PART = "Z"
"""The letter of the axis of parts, in a sum of products."""


@dataclass(frozen=True)
class Parts:
    """Parts of an array along one of its axes.

    Attributes:
        axis: The axis.
        count: How many parts there are.
        how: ``"stacked"`` if a part has no such axis, else whether it is a run of
            entries (``"halves"``) or one entry of each few (``"strided"``).
    """

    axis: int
    count: int
    how: str

    def letters(self, own: str) -> str:
        """The axes of the whole, by those of a part."""
        at = self.axis + (self.how == STRIDED)
        return own[:at] + PART + own[at:]

    def with_axis_of_parts(self, whole: jax.Array) -> jax.Array:
        """The whole with an axis of parts."""
        if self.how == STACKED:
            return whole
        n = whole.shape[self.axis] // self.count
        pair = (self.count, n) if self.how == HALVES else (n, self.count)
        shape = whole.shape
        return whole.reshape(*shape[: self.axis], *pair, *shape[self.axis + 1 :])


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of all parts of one softmax.

    Attributes:
        whole: The softmax.
        parts: How it is cut.
        terms: The parts in order.
    """

    whole: Any
    parts: Parts
    terms: tuple[Term, ...]


def multiply_at_once(program: Any) -> Any:
    """Returns a program that multiplies all parts of a softmax by values at once.

    Itself, if it multiplies no sum of such parts.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, lambda body: changed(body) or body)


def changed(body: Any) -> Any:
    """A body with products of whole softmaxes; None without sums of their parts."""
    if not multiplies_sums(body):
        return None
    here = Body(body)
    sums: dict[Any, Sum] = {}
    eqns, found = [], False
    for eqn in here.eqns:
        new = _product(here, sums, eqn)
        if new is None and found:
            new = _whole_cotangent(here, sums, eqn) or factors_gradient(here, eqn)
        found = found or new is not None
        eqns += [eqn] if new is None else new
    if not found:
        return None
    return _jax.with_equations(body, live(eqns, here.outs)[0], here.outs)


# ---------------------------------------------------------------- parts of a softmax
def _sum_of_parts(here: Body, atom: Any) -> Sum | None:
    """The softmax whose parts add up to an array; None for another one."""
    eqn = here.maker(atom)
    if eqn is None or eqn.primitive.name not in ("add", "sub", "convert_element_type"):
        return None
    terms = here.all_terms(atom)
    cuts = [_part(here, t.weights) for t in terms or ()]
    if len(cuts) < 2 or None in cuts:
        return None
    (whole, parts, _), *others = cuts
    numbers = [number for _, _, number in cuts]
    same = all(w is whole and p == parts for w, p, _ in others)
    if not same or sorted(numbers) != list(range(parts.count)):
        return None
    if parts.axis == len(whole.aval.shape) - 1:  # of keys
        return None
    order = sorted(range(len(cuts)), key=numbers.__getitem__)
    return Sum(whole, parts, tuple(terms[k] for k in order))


def _part(here: Body, atom: Any) -> tuple[Any, Parts, int] | None:
    """The array that an array is a part of, how it is cut, and the part's number."""
    eqn, gone = here.maker(atom), ()
    while eqn is not None and eqn.primitive.name == "convert_element_type":
        if not computes_in(eqn):
            return None
        eqn = here.maker(eqn.invars[0])
    if eqn is not None and eqn.primitive.name == "squeeze":
        gone, eqn = eqn.params["dimensions"], here.maker(eqn.invars[0])
    if eqn is None or eqn.effects:
        return None
    if eqn.primitive.name in ("split", "unstack") and not gone:
        if atom not in eqn.outvars:
            return None
        number, axis = eqn.outvars.index(atom), eqn.params["axis"]
        parts = Parts(axis, len(eqn.outvars), STACKED)
        if eqn.primitive.name == "split":
            parts = Parts(axis, len(eqn.outvars), HALVES)
            if len(set(eqn.params["sizes"])) > 1:
                return None
        return eqn.invars[0], parts, number
    if eqn.primitive.name != "slice":
        return None
    return _slice(eqn, gone)


def _slice(eqn: Any, gone: Sequence[int]) -> tuple[Any, Parts, int] | None:
    """A slice along one axis as a part; None for another slice."""
    whole, out = eqn.invars[0], eqn.outvars[0]
    sizes, taken = whole.aval.shape, out.aval.shape
    axes = [d for d, (n, m) in enumerate(zip(sizes, taken, strict=True)) if n != m]
    if len(axes) != 1 or (gone and tuple(gone) != tuple(axes)):
        return None
    (axis,) = axes
    n, count = taken[axis], sizes[axis] // taken[axis]
    start = eqn.params["start_indices"][axis]
    step = (eqn.params["strides"] or (1,) * len(sizes))[axis]
    if n * count != sizes[axis]:
        return None
    if gone:
        return whole, Parts(axis, count, STACKED), start
    if step == 1 and start % n == 0:
        return whole, Parts(axis, count, HALVES), start // n
    if step == count and start < count:
        return whole, Parts(axis, count, STRIDED), start
    return None


# -------------------------------------------------------------------------- products
def _product(here: Body, sums: dict[Any, Sum], eqn: Any) -> list[Any] | None:
    """A product of a sum of parts, by a product of the whole."""
    if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding"):
        return None
    for side in (0, 1):
        found = _sum_of_parts(here, eqn.invars[side])
        if found is not None:
            return _of_whole(here, sums, eqn, side, found)
    return None


def _of_whole(
    here: Body, sums: dict[Any, Sum], eqn: Any, side: int, found: Sum
) -> list[Any] | None:
    """The product of a whole; None if a factor does not allow it."""
    weights, other = eqn.invars[side], eqn.invars[1 - side]
    keys = len(weights.aval.shape) - 1
    contracted, batch = eqn.params["dimension_numbers"]
    over_keys = keys in contracted[side]
    mine, theirs, out = _letters(eqn, side)
    shared = zip(
        (*batch[side], *contracted[side]),
        (*batch[1 - side], *contracted[1 - side]),
        strict=True,
    )
    places = places_of(eqn, side) if over_keys else dict(shared)
    axes = {d for t in found.terms if t.factor for d in t.factor[1]}
    if not all(isinstance(places.get(d), int) for d in axes):
        return None
    given = [t.factor[0] for t in found.terms if t.factor]
    named = [a for a in given if not _jax.is_literal(a)]

    def code(w: jax.Array, y: jax.Array, *more: jax.Array) -> list[jax.Array]:
        w = found.parts.with_axis_of_parts(w).astype(weights.aval.dtype)
        known = iter(more)
        factors = []
        for t in found.terms:
            value = None
            if t.factor:
                literal = _jax.is_literal(t.factor[0])
                value = t.factor[0].val if literal else next(known)
                value = value, tuple(places[d] for d in t.factor[1])
            factors.append(value)
        whole = found.parts.letters(mine)
        pairs = list(zip(found.terms, factors, strict=True))
        if not over_keys:
            y = jnp.stack([scaled(y, t.negative, f) for t, f in pairs])
            return [_einsum(eqn, f"{whole},{PART}{theirs}->{out}", w, y)]
        product = _einsum(eqn, f"{whole},{theirs}->{PART}{out}", w, y)
        parts = list(product)
        total = sum(
            scaled(p, t.negative, f) for p, (t, f) in zip(parts, pairs, strict=True)
        )
        return [total.astype(eqn.outvars[0].aval.dtype), *parts]

    made = in_place_of(eqn, code, [found.whole, other, *named])
    if made is None:
        return None
    eqns, products = made
    if over_keys:
        sums[weights] = found
        at = tuple(places.get(d) for d in range(keys + 1))
        for term, product in zip(found.terms, products, strict=True):
            here.products.append(Product(term.weights, other, product, at))
    return eqns


def _letters(eqn: Any, side: int) -> tuple[str, str, str]:
    """The axes of an operand, of the other one and of the product, as letters."""
    contracted, batch = eqn.params["dimension_numbers"]
    count = len(eqn.invars[side].aval.shape)
    mine = string.ascii_lowercase[:count]
    theirs = list(
        string.ascii_lowercase[count : count + len(eqn.invars[1 - side].aval.shape)]
    )
    for pair in (contracted, batch):
        for a, b in zip(pair[side], pair[1 - side], strict=True):
            theirs[b] = mine[a]
    out = {k: mine[d] for d, k in places_of(eqn, side).items()}
    out |= {k: theirs[d] for d, k in places_of(eqn, 1 - side).items()}
    return mine, "".join(theirs), "".join(out[k] for k in sorted(out))


def _einsum(eqn: Any, axes: str, *arrays: jax.Array) -> jax.Array:
    how = {k: eqn.params[k] for k in ("precision", "preferred_element_type")}
    return jnp.einsum(axes, *arrays, **how)


# ------------------------------------------------------------------------ gradients
def _whole_cotangent(here: Body, sums: dict[Any, Sum], eqn: Any) -> list[Any] | None:
    """The cotangent of a whole, which is put together of those of its parts."""
    placed = _placed(here, eqn)
    if placed is None:
        return None
    parts, atoms = placed
    found = [derivative(here, a, sums) for a in atoms]
    if None in found or not any(s.parts == parts for s in sums.values()):
        return None
    first = found[0]
    alike = all(
        x.eqn.params["dimension_numbers"] == first.eqn.params["dimension_numbers"]
        and x.eqn.invars[1 - x.side] is first.eqn.invars[1 - first.side]
        and x.side == first.side
        and x.axes == first.axes
        for x in found
    )
    own = {k: d for d, k in places_of(first.eqn, first.side).items()}
    factored = [x.factor for x in found if x.factor]
    if not alike or not all(d in own for f in factored for d in f[1]):
        return None
    return _stacked(eqn, parts, found, own)


def _stacked(
    eqn: Any, parts: Parts, found: Sequence[Derivative], own: dict[int, int]
) -> list[Any] | None:
    """The product of all cotangents of parts with the values."""
    first = found[0]
    values = first.eqn.invars[1 - first.side]
    cotangents = [x.eqn.invars[x.side] for x in found]
    factors = [x.factor[0] for x in found if x.factor]
    named = [a for a in factors if not _jax.is_literal(a)]
    mine, theirs, out = _letters(first.eqn, first.side)
    order = "".join(out[d] for d in first.axes)

    def code(v: jax.Array, *more: jax.Array) -> list[jax.Array]:
        known = iter(more[len(found) :])
        stack = []
        for x, c in zip(found, more[: len(found)], strict=True):
            factor = None
            if x.factor:
                literal = _jax.is_literal(x.factor[0])
                value = x.factor[0].val if literal else next(known)
                factor = value, tuple(own[d] for d in x.factor[1])
            stack.append(scaled(c, x.negative, factor))
        axes = f"{PART}{mine},{theirs}->{parts.letters(order)}"
        whole = _einsum(first.eqn, axes, jnp.stack(stack), v)
        aval = eqn.outvars[0].aval
        return [whole.reshape(aval.shape).astype(aval.dtype)]

    made = in_place_of(eqn, code, [values, *cotangents, *named])
    return made and made[0]


def _placed(here: Body, eqn: Any) -> tuple[Parts, list[Any]] | None:
    """How an array is put together of parts, and the parts in order."""
    if eqn.primitive.name == "stack":
        parts = Parts(eqn.params["axis"], len(eqn.invars), STACKED)
        return parts, list(eqn.invars)
    if eqn.primitive.name == "concatenate":
        axis = eqn.params["dimension"]
        sizes = {a.aval.shape[axis] for a in eqn.invars}
        alike = len(sizes) == 1 and len(eqn.invars) > 1
        parts = Parts(axis, len(eqn.invars), HALVES)
        return (parts, list(eqn.invars)) if alike else None
    if eqn.primitive.name not in ("add", "add_any"):
        return None
    pads = _added(here, eqn.outvars[0])
    found = [_padded(here, p) for p in pads]
    if None in found or len(found) < 2:
        return None
    by_number = {number: atom for _, number, atom in found}
    parts = found[0][0]
    whole = sorted(by_number) == list(range(parts.count)) and len(found) == parts.count
    if not whole or any(p != parts for p, _, _ in found):
        return None
    return parts, [by_number[k] for k in range(parts.count)]


def _added(here: Body, atom: Any) -> list[Any]:
    """The pads that add up to an array."""
    eqn = here.maker(atom)
    if eqn is None or eqn.primitive.name not in ("add", "add_any"):
        return [eqn]
    return [p for a in eqn.invars for p in _added(here, a)]


def _padded(here: Body, eqn: Any) -> tuple[Parts, int, Any] | None:
    """How a pad by zeros places a part: among how many, its number, and the part."""
    if eqn is None or eqn.primitive.name != "pad":
        return None
    x, zero = eqn.invars
    if not _jax.is_literal(zero) or zero.val != 0:
        return None
    config = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
    axes = [d for d, c in enumerate(config) if c != (0, 0, 0)]
    if len(axes) != 1:
        return None
    (axis,) = axes
    (low, high, inner), n = config[axis], x.aval.shape[axis]
    made = here.maker(x)
    if n == 1 and made is not None and _adds_axis(made, axis):
        return Parts(axis, low + high + 1, STACKED), low, made.invars[0]
    if inner == 0 and low % n == 0 and high % n == 0:
        return Parts(axis, (low + n + high) // n, HALVES), low // n, x
    if inner and low + high == inner:
        return Parts(axis, inner + 1, STRIDED), low, x
    return None


def _adds_axis(eqn: Any, axis: int) -> bool:
    """Whether an equation adds an axis of one entry."""
    if eqn.primitive.name not in ("broadcast_in_dim", "reshape", "expand_dims"):
        return False
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    rest = tuple(d for d in range(len(out)) if d != axis)
    dims = eqn.params.get("broadcast_dimensions", rest)
    return shape == tuple(out[d] for d in rest) and tuple(map(int, dims)) == rest
