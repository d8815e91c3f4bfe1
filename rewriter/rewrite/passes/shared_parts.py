"""Passes operands of which all heads share a part to kernels without joining them.

    k = concatenate x (broadcast p over heads)     the same, but the site's kernel
    y = site q k v                              →  reads x, and p for all heads

Latent attention has keys of which a part is each head's own, and a rotary part that all
heads share. Programs join them before the product. XLA cannot look into a kernel, and
would write the joined keys of all heads. A kernel that `shares` gets both arrays, and
reads the shared one for each head.

Sites whose gradients are in the program stay: these read the joined keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies, map_equations
from rewriter.program.strided_views import row_major, view_of
from rewriter.site import shared_parts, site

HEADS = 2
"""The axis of heads of an operand [b, s, n, h]."""


def use_shared_parts(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program whose kernels read shared parts; itself without any.

    Args:
        program: A rewritten program.
    """
    change = lambda body: map_equations(body, {site.site_p}, _may_read, _shared)
    return map_bodies(program, change, wanted={site.site_p.name})


def _may_read(eqn: Any) -> bool:
    """Whether a site has a kernel that reads shared parts."""
    return (
        not eqn.params["batch"]
        and not eqn.params["residuals"]
        and any(k and k.traits.shares for _, k in eqn.params["use"].kernels)
    )


def _shared(eqn: Any, makers: Mapping[Any, Any]) -> Any:
    """An equation that gets both arrays of such operands."""
    use, found, arrays = eqn.params["use"], [], []
    names = {n for _, k in use.kernels if k for n in k.traits.shares}
    for name in sorted(names & set(use.names)):
        both = _parts(eqn.invars[use.names.index(name)], makers)
        if both is not None:
            found.append((name, *both[1]))
            arrays += both[0]
    if not found:
        return eqn
    return eqn.replace(
        primitive=shared_parts.site_p,
        invars=[*eqn.invars, *arrays],
        params={"use": use, "shared": tuple(found)},
    )


def _parts(atom: Any, makers: Mapping[Any, Any]) -> Any:
    """The two arrays of an operand, the order of their axes, and their shapes.

    The shared one has heads as an axis of size 1. None if there are no such arrays.
    """
    order = tuple(range(4))
    maker = _maker(_as_it_was(atom, makers), makers)
    if maker is not None and maker.primitive.name == "transpose":
        order = tuple(maker.params["permutation"])
        maker = _maker(maker.invars[0], makers)
    if maker is None or maker.primitive.name != "concatenate":
        return None
    if len(maker.invars) != 2 or len(maker.outvars[0].aval.shape) != 4:
        return None
    heads, last = order[HEADS], order[3]
    if maker.params["dimension"] != last:
        return None
    both = [_without_heads(v, heads, makers) for v in maker.invars]
    if sum(x is not None for x in both) != 1:
        return None
    arrays = [
        (v, tuple(v.aval.shape)) if x is None else x
        for v, x in zip(maker.invars, both, strict=True)
    ]
    return [v for v, _ in arrays], (order, tuple(shape for _, shape in arrays))


def _without_heads(atom: Any, heads: int, makers: Mapping[Any, Any]) -> Any:
    """The array that is repeated for all heads, and its shape; None if none is."""
    view = view_of(atom, makers, repeats=True)
    if view is None or view.shape[heads] == 1 or view.strides[heads] != 0:
        return None
    shape = tuple(1 if i == heads else n for i, n in enumerate(view.shape))
    lies = all(
        n == 1 or own == wanted
        for n, own, wanted in zip(shape, view.strides, row_major(shape), strict=True)
    )
    whole = math.prod(view.source.aval.shape) == math.prod(shape)
    return (view.source, shape) if lies and whole and not view.offset else None


def _as_it_was(atom: Any, makers: Mapping[Any, Any]) -> Any:
    """The variable of the same shape from which reshapes make an operand."""
    found = atom
    while (maker := _maker(atom, makers)) is not None:
        if maker.primitive.name != "reshape" or maker.params["dimensions"] is not None:
            break
        atom = maker.invars[0]
        found = atom if atom.aval.shape == found.aval.shape else found
    return found


def _maker(atom: Any, makers: Mapping[Any, Any]) -> Any:
    return None if _jax.is_literal(atom) else makers.get(atom)
