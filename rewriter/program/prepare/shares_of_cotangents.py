"""Makes the cotangents of two losses, with shares q and 1 - q, multiples of one array.

    u = q / 24;  v = (1 - q) / 24            c = broadcast (1 / 24)
    a = broadcast u;  b = broadcast v    →   a = q c;  b = (1 - q) c

Where `joined_losses` has made one loss of the two, c is its cotangent. No value of the
differentiated program is.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.program.equations import Equations
from rewriter.program.loops import inserted

CHAIN = 24
"""The most equations, one above the other, of a product of numbers."""

Product = tuple[float, tuple[tuple[Any, int], ...]]
"""A number, and the values of the program that it is multiplied by, with powers."""


def split(
    known: Equations, shares: Collection[Any], shape: tuple[int, ...]
) -> dict[int, list[Any]]:
    """Returns new equations by the positions of those that they replace.

    Args:
        known: The equations of a body.
        shares: The numbers q and 1 - q.
        shape: The shape of the losses, each of a row.
    """
    found = {}
    for position, eqn in enumerate(known.eqns):
        if (
            eqn.primitive.name != "broadcast_in_dim"
            or eqn.outvars[0].aval.shape != shape
        ):
            continue
        (whole, *sizes) = eqn.invars
        if sizes or whole.aval.shape != () or _jax.is_literal(whole):
            continue
        number, factors = _product(known, whole, shares)
        own = [a for a, power in factors if a in shares and power == 1]
        if len(own) == 1:
            rest = tuple(f for f in factors if f[0] is not own[0])
            found[position] = _written(eqn, own[0], (number, rest))
    return found


def _product(
    known: Equations, atom: Any, shares: Collection[Any], depth: int = CHAIN
) -> Product:
    """What a number is a product of, as far as it is one of the same dtype."""
    if _jax.is_literal(atom):
        return float(atom.val), ()
    eqn, alone = known.maker(atom), (1.0, ((atom, 1),))
    if eqn is None or not depth or atom in shares:
        return alone
    name = eqn.primitive.name
    if name not in ("mul", "div", "neg"):
        return alone
    if any(a.aval.dtype != atom.aval.dtype for a in eqn.invars):
        return alone
    parts = [_product(known, a, shares, depth - 1) for a in eqn.invars]
    if name == "neg":
        ((number, factors),) = parts
        return -number, factors
    (number, factors), (other, more) = parts
    if name == "div":
        other, more = 1 / other if other else math.inf, tuple((a, -n) for a, n in more)
    return (number * other, factors + more) if math.isfinite(other) else alone


def _written(eqn: Any, share: Any, rest: Product) -> list[Any]:
    """The equations of a share times the broadcast rest of a product."""
    (out,), (number, factors) = eqn.outvars, rest
    named = list({id(a): a for a in (share, *(f for f, _ in factors))}.values())

    def code(*arrays: jax.Array) -> jax.Array:
        at = dict(zip(map(id, named), arrays, strict=True))
        total = jnp.asarray(number, out.aval.dtype)
        for factor, power in factors:
            for _ in range(abs(power)):
                total = total * at[id(factor)] if power > 0 else total / at[id(factor)]
        each = jnp.full(out.aval.shape, total, out.aval.dtype)
        made = jnp.asarray(at[id(share)], out.aval.dtype) * each
        return _jax.weakly_typed(made) if out.aval.weak_type else made

    fragment = _jax.trace_placed(code, [a.aval for a in named])
    made, _ = inserted(fragment, named, eqn.source_info)
    return [*made[:-1], made[-1].replace(outvars=[out])]
