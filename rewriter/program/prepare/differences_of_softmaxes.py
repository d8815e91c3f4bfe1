"""Multiplies each of several softmaxes by the values, where their sum is.

    o = (a - l b) v           →     o = a v - l (b v)
    dv = (a - l b)' do        →     dv = a' do + b' c          c = -l do
    db = -l (do v')           →     db = c v'
    dl = sum(-(do v') b)      →     dl = sum(-do (b v))

A differential attention is a difference of two attentions over the same values. The
program may subtract the weights first, and multiply by the values then. Nothing in it
is the result of one attention, nor the cotangent of one. Afterwards both are.

Factors of a softmax are the same for all keys. The largest arrays of the program, one
number for each query and key, are no longer read beside their softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import live
from rewriter.program.loops import inserted

LAYOUT = frozenset(
    {"convert_element_type", "reshape", "slice", "squeeze", "split", "transpose"}
) | {"unstack"}
"""What is between a softmax and a sum of several."""

_KEPT = LAYOUT | {"mul", "add", "sub"}
"""What makes of a softmax, or of a sum of some, another one."""

DEPTH = 12
"""The most equations between a softmax and a sum of several."""


Factor = tuple[Any, tuple[int, ...]]
"""An array, and the axes of another one along which it differs."""


@dataclass(frozen=True, eq=False)
class Term:
    """A softmax in a sum of several.

    Attributes:
        weights: The softmax.
        negative: Whether it is subtracted.
        factor: What it is multiplied by, if anything.
    """

    weights: Any
    negative: bool
    factor: Factor | None


@dataclass(frozen=True, eq=False)
class Product:
    """A softmax that is multiplied by values.

    Attributes:
        weights: The softmax.
        values: The values.
        result: The product.
        places: By axis of the softmax, the axis of the product; None for the keys.
    """

    weights: Any
    values: Any
    result: Any
    places: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Derivative:
    """The cotangent of a sum of softmaxes, perhaps scaled.

    Attributes:
        eqn: The product of the result's cotangent with the values.
        side: Which operand the result's cotangent is.
        negative: Whether it is negated.
        factor: As of a `Term`, with axes of the product's result.
        axes: By axis, the axis of the product's result that it is.
    """

    eqn: Any
    side: int
    negative: bool
    factor: Factor | None
    axes: tuple[int, ...]


def multiply_each(program: Any) -> Any:
    """Returns a program that multiplies softmaxes by values one by one.

    Itself, if it multiplies no sum of several.

    Args:
        program: The program, closed.
    """
    return map_bodies(program, lambda body: changed(body) or body)


class Body:
    """The equations of a body, and who makes and reads its values."""

    def __init__(self, body: Any) -> None:
        self.eqns = list(body.eqns)
        self.outs = getattr(body, "jaxpr", body).outvars
        self.made = {v: e for e in self.eqns for v in e.outvars}
        self.products: list[Product] = []
        self._others: set[Any] = set()

    def maker(self, atom: Any) -> Any:
        """The equation that makes an atom, or None."""
        return None if _jax.is_literal(atom) else self.made.get(atom)

    def terms(self, atom: Any) -> list[Term] | None:
        """The softmaxes that add up to an array; None if it is no sum of several.

        Parts of one softmax do not count: each part needs all of it.
        """
        found = self.all_terms(atom, False)
        whole = {self.softmax(t.weights) for t in found or ()}
        return found if found and len(found) == len(whole) > 1 else None

    def all_terms(self, atom: Any, negative: bool = False) -> list[Term] | None:
        """The softmaxes, or parts of some, that add up to an array; None for others."""
        if _jax.is_literal(atom) or atom in self._others:
            return None
        found = self._all_terms(atom, negative)
        if found is None:  # each layer of a residual stream asks about all before it
            self._others.add(atom)
        return found

    def _all_terms(self, atom: Any, negative: bool) -> list[Term] | None:
        eqn = self.maker(atom)
        if eqn is not None and not computes_in(eqn):
            return None
        if eqn is not None and eqn.primitive.name == "convert_element_type":
            found = self.all_terms(eqn.invars[0], negative)
            if found and len(found) > 1:
                return found
        if eqn is not None and eqn.primitive.name in ("add", "sub"):
            one, other = eqn.invars
            minus = negative != (eqn.primitive.name == "sub")
            first = self.all_terms(one, negative)
            second = first and self.all_terms(other, minus)
            return [*first, *second] if second else None
        weights, factor = atom, None
        if eqn is not None and eqn.primitive.name == "mul":
            for one, other in (eqn.invars, eqn.invars[::-1]):
                factor = self.factor(one, atom.aval.shape)
                if factor is not None:
                    weights = other
                    break
        if _jax.is_literal(weights) or self.softmax(weights) is None:
            return None
        return [Term(weights, negative, factor)]

    def factor(self, atom: Any, shape: Sequence[Any]) -> Factor | None:
        """An array that is the same along some axes; None for another one.

        Args:
            atom: The array.
            shape: The shape of what it is multiplied with.
        """
        if _jax.is_literal(atom) or not atom.aval.shape:
            return atom, ()
        if atom.aval.shape != tuple(shape):  # axes of size one are repeated
            return atom, tuple(d for d, n in enumerate(atom.aval.shape) if n != 1)
        eqn = self.maker(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return None
        dims, source = eqn.params["broadcast_dimensions"], eqn.invars[0]
        if _jax.is_literal(source):
            return source, ()
        pairs = zip(dims, source.aval.shape, strict=True)
        return source, tuple(d for d, n in pairs if n != 1)

    def softmax(self, atom: Any) -> Any:
        """The softmax that an array is a part of; None for another array."""
        for _ in range(DEPTH):
            eqn = self.maker(atom)
            if eqn is None:
                return None
            if eqn.primitive.name == "div":
                return atom if self._is_exponential(eqn.invars[0]) else None
            if _jax.call_kind(eqn) in ("call", "custom"):
                inner = Body(_jax.call_body(eqn))
                own = inner.softmax(inner.outs[eqn.outvars.index(atom)])
                return None if own is None else atom
            if eqn.primitive.name not in LAYOUT or len(eqn.invars) != 1:
                return None
            atom = eqn.invars[0]
        return None

    def _is_exponential(self, atom: Any) -> bool:
        eqn = self.maker(atom)
        return eqn is not None and eqn.primitive.name == "exp"


def computes_in(eqn: Any) -> bool:
    """Returns whether an equation's result has a dtype that a kernel computes in.

    A sum that is rounded to integers, or to 8 bits, is not the sum of its terms so.
    """
    dtype = eqn.outvars[0].aval.dtype
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize > 1


def multiplies_sums(body: Any) -> bool:
    """Returns whether a body multiplies sums of what may be softmaxes.

    Few bodies do. It is asked before more is looked at.
    """
    roles = {p: _role(p.name) for p in {eqn.primitive for eqn in body.eqns}}
    if not {"quotient", "sum", "product"} <= set(roles.values()):
        return False
    is_sum: dict[Any, bool] = {}  # of what may be a softmax, or a sum of some
    variable, get = _jax.Var, is_sum.get
    for eqn in body.eqns:
        role = roles[eqn.primitive]
        if not role:
            continue
        if role == "quotient":
            is_sum.update(dict.fromkeys(eqn.outvars, False))
            continue
        known = [get(a) for a in eqn.invars if a.__class__ is variable]
        if True in known:
            if role == "product":
                return True
            is_sum.update(dict.fromkeys(eqn.outvars, True))
        elif False in known and role != "product":
            is_sum.update(dict.fromkeys(eqn.outvars, role == "sum"))
    return False


def _role(name: str) -> str:
    """What a primitive is in a product of sums of softmaxes."""
    if name == "div" or name in _jax.BODIES:
        return "quotient"
    if name == "dot_general":
        return "product"
    if name in ("add", "sub"):
        return "sum"
    return "kept" if name in _KEPT else ""


def changed(body: Any) -> Any:
    """A body with each softmax multiplied by itself; None without sums of several."""
    if not multiplies_sums(body):
        return None
    here = Body(body)
    eqns, found = [], False
    for eqn in here.eqns:
        new = _product_of_terms(here, eqn)
        if new is None and found:
            new = _scaled_cotangent(here, eqn) or factors_gradient(here, eqn)
        found = found or new is not None
        eqns += [eqn] if new is None else new
    if not found:
        return None
    return _jax.with_equations(body, live(eqns, here.outs)[0], here.outs)


def _product_of_terms(here: Body, eqn: Any) -> list[Any] | None:
    """A product of a sum of softmaxes, one by one."""
    if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding"):
        return None
    for side in (0, 1):
        terms = here.terms(eqn.invars[side])
        if terms is not None:
            return _one_by_one(here, eqn, side, terms)
    return None


def _one_by_one(
    here: Body, eqn: Any, side: int, terms: Sequence[Term]
) -> list[Any] | None:
    """The products of all terms, and their sum; None if a factor does not allow it."""
    whole, other = eqn.invars[side], eqn.invars[1 - side]
    contracted, batch = eqn.params["dimension_numbers"]
    keys = len(whole.aval.shape) - 1
    over_keys = keys in contracted[side]
    shared = zip(
        (*batch[side], *contracted[side]),
        (*batch[1 - side], *contracted[1 - side]),
        strict=True,
    )
    places = places_of(eqn, side) if over_keys else dict(shared)
    axes = {d for t in terms if t.factor for d in t.factor[1]}
    if not all(isinstance(places.get(d), int) for d in axes):
        return None
    given = [t.factor[0] for t in terms if t.factor]
    atoms = [other, *(t.weights for t in terms), *given]
    named = [a for a in atoms if not _jax.is_literal(a)]

    def code(*arrays: jax.Array) -> list[jax.Array]:
        known = iter(arrays)
        values = [a.val if _jax.is_literal(a) else next(known) for a in atoms]
        y, softmaxes, factors = (
            values[0], values[1 : 1 + len(terms)], iter(values[1 + len(terms) :])
        )  # fmt: skip
        products, total = [], None
        for term, w in zip(terms, softmaxes, strict=True):
            scale = None
            if term.factor:
                scale = next(factors), tuple(places[d] for d in term.factor[1])
            w, negative = w.astype(whole.aval.dtype), term.negative
            if over_keys:
                products.append(_multiplied(eqn, side, w, y))
                part = scaled(products[-1], False, scale)
            else:
                part = _multiplied(eqn, side, w, scaled(y, negative, scale))
                negative = False
            if total is None:
                total = -part if negative else part
            else:
                total = total - part if negative else total + part
        return [total.astype(eqn.outvars[0].aval.dtype), *products]

    made = in_place_of(eqn, code, named)
    if made is None:
        return None
    eqns, products = made
    if over_keys:
        at = tuple(places.get(d) for d in range(keys + 1))
        for term, product in zip(terms, products, strict=True):
            here.products.append(Product(term.weights, other, product, at))
    return eqns


def in_place_of(
    eqn: Any, code: Callable[..., list[jax.Array]], atoms: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Equations for the result of another one, and the variables of more results."""
    fragment = _jax.trace_placed(code, [a.aval for a in atoms])
    if fragment.constvars:
        return None
    eqns, (first, *rest) = inserted(fragment, atoms, eqn.source_info)
    if not any(first in e.outvars for e in eqns):
        return None
    names = {first: eqn.outvars[0]}
    eqns = [e.replace(outvars=[names.get(v, v) for v in e.outvars]) for e in eqns]
    return [_jax.reading(e, names) for e in eqns], [names.get(v, v) for v in rest]


def places_of(eqn: Any, side: int) -> dict[int, int]:
    """By axis of an operand, the axis of the product's result."""
    contracted, batch = eqn.params["dimension_numbers"]
    gone = [(*c, *b) for c, b in zip(contracted, batch, strict=True)]
    free = [
        [d for d in range(len(a.aval.shape)) if d not in gone[k]]
        for k, a in enumerate(eqn.invars)
    ]
    start = len(batch[0]) + (len(free[0]) if side else 0)
    found = {d: k for k, d in enumerate(batch[side])}
    return found | {d: start + k for k, d in enumerate(free[side])}


def _multiplied(eqn: Any, side: int, w: jax.Array, y: jax.Array) -> jax.Array:
    ins = (y, w) if side else (w, y)
    how = ("dimension_numbers", "precision", "preferred_element_type")
    return lax.dot_general(*ins, **{name: eqn.params[name] for name in how})


def scaled(x: jax.Array, negative: bool, scale: Any) -> jax.Array:
    """An array, negated and multiplied by a factor along some of its axes."""
    x = -x if negative else x
    if scale is None:
        return x
    factor, axes = scale
    factor = jnp.asarray(factor, x.dtype)
    factor = factor.reshape([n for n in factor.shape if n != 1])
    order = sorted(range(len(axes)), key=lambda k: axes[k])
    factor = factor.transpose(order) if len(order) > 1 else factor
    return x * lax.broadcast_in_dim(factor, x.shape, sorted(axes))


# ------------------------------------------------------------------------ gradients
def derivative(here: Body, atom: Any, sums: Collection[Any] = ()) -> Derivative | None:
    """The cotangent of a sum of softmaxes that were multiplied one by one.

    Args:
        here: The body.
        atom: What may be the cotangent.
        sums: Sums of softmaxes: their products are none.
    """
    negative, factor = False, None
    axes = tuple(range(len(atom.aval.shape)))
    for _ in range(DEPTH):
        eqn = here.maker(atom)
        if eqn is None:
            return None
        name, ins = eqn.primitive.name, list(eqn.invars)
        if name == "neg":
            negative, atom = not negative, ins[0]
        elif name == "transpose":
            order = eqn.params["permutation"]
            axes, atom = tuple(order[d] for d in axes), ins[0]
            if factor:
                factor = factor[0], tuple(order[d] for d in factor[1])
        elif name == "mul" and factor is None:
            factors = [here.factor(a, eqn.outvars[0].aval.shape) for a in ins]
            k = 0 if factors[0] else 1
            if factors[k] is None:
                return None
            factor, atom = factors[k], ins[1 - k]
        elif name == "dot_general":
            values = {p.values for p in here.products}
            sides = [k for k in (0, 1) if ins[1 - k] in values]
            if len(sides) != 1 or here.terms(ins[sides[0]]) or ins[sides[0]] in sums:
                return None
            return Derivative(eqn, sides[0], negative, factor, axes)
        else:
            return None
    return None


def _scaled_cotangent(here: Body, eqn: Any) -> list[Any] | None:
    """A multiple of a cotangent, made of a multiple of the result's cotangent."""
    if eqn.primitive.name not in ("mul", "neg"):
        return None
    found = derivative(here, eqn.outvars[0])
    if found is None:
        return None
    cotangent, values = (found.eqn.invars[k] for k in (found.side, 1 - found.side))
    places = {v: k for k, v in places_of(found.eqn, found.side).items()}
    given, scale = [], ()
    if found.factor:
        if not all(d in places for d in found.factor[1]):
            return None
        scale = tuple(places[d] for d in found.factor[1])
        given = [a for a in found.factor[:1] if not _jax.is_literal(a)]

    def code(c: jax.Array, v: jax.Array, *more: jax.Array) -> list[jax.Array]:
        factor = None
        if found.factor:
            factor = (more[0] if more else found.factor[0].val), scale
        c = scaled(c, found.negative, factor)
        out = _multiplied(found.eqn, 1 - found.side, v, c)
        order = found.axes
        out = out.transpose(order) if order != tuple(sorted(order)) else out
        return [out.astype(eqn.outvars[0].aval.dtype)]

    made = in_place_of(eqn, code, [cotangent, values, *given])
    return made and made[0]


def factors_gradient(here: Body, eqn: Any) -> list[Any] | None:
    """The gradient of a factor, as a sum over results and not over weights."""
    if eqn.primitive.name != "reduce_sum":
        return None
    product = here.maker(eqn.invars[0])
    if product is None or product.primitive.name != "mul":
        return None
    for one, other in (product.invars, product.invars[::-1]):
        for known in here.products:
            if known.weights is one and not _jax.is_literal(other):
                found = derivative(here, other)
                if found is not None and not found.factor:
                    return _summed(eqn, known, found)
    return None


def _summed(eqn: Any, known: Product, found: Derivative) -> list[Any] | None:
    cotangent = found.eqn.invars[found.side]
    summed, keys = eqn.params["axes"], len(known.places) - 1
    same = cotangent.aval.shape == known.result.aval.shape
    if (
        not same
        or keys not in summed
        or found.eqn.invars[1 - found.side] is not (known.values)
    ):
        return None
    kept = [known.places[d] for d in range(keys) if d not in summed]
    gone = [d for d in range(len(cotangent.aval.shape)) if d not in kept]

    def code(c: jax.Array, o: jax.Array) -> list[jax.Array]:
        out = (scaled(c, found.negative, None) * o).sum(gone)
        order = [sorted(kept).index(d) for d in kept]
        out = out.transpose(order) if order != sorted(order) else out
        return [out.astype(eqn.outvars[0].aval.dtype)]

    made = in_place_of(eqn, code, [cotangent, known.result])
    return made and made[0]
