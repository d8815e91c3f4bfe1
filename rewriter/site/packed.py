"""Three primitives for a site whose operands are parts of one array.

Their arguments are those of the site, or of its gradients, and then the arrays. A
kernel that `packs` reads the operands from these, and XLA leaves out the operands that
nothing reads. Cotangents may be parts of one array too, which is then the last result,
in place of theirs. A kernel that `joins` writes them into it.

An operand equals its part of the array. So the derivative of a site moves with the
array instead of its parts, and its transpose gives the array's cotangent. Everything
else is as for `site`, which reads the operands: under `jax.vmap`, in derivatives of
derivatives, and on a platform whose kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad

from rewriter.ops.kernel import Heads, Kernel
from rewriter.site import implement, implement_parts, site
from rewriter.site.composed import batch_rule, jvp_rule
from rewriter.site.lowering import register
from rewriter.site.result_types import (
    backward_aval,
    joined_avals,
    site_aval,
    tangent_aval,
)
from rewriter.site.uses import Use
from rewriter.support.dtypes import is_inexact

Parts = tuple[tuple[str, int, Heads], ...]
"""Operands that are parts of an array: their name, the array's number, their heads."""

Joined = tuple[tuple[str, Heads], ...]
"""Operands whose cotangents are parts of one array: their name, their heads."""

site_p = Primitive(site.site_p.name)
tangent_p = Primitive(site.tangent_p.name)
backward_p = Primitive(site.backward_p.name)
OF = {site.site_p: site_p, site.backward_p: backward_p}
"""The primitive that also takes arrays, by the one that does not."""


def _given(args: Sequence[Any], parts: Parts) -> Sequence[Any]:
    """The arguments without the arrays."""
    return args[: len(args) - implement_parts.arrays_of(parts)]


# --------------------------------------------------------- of what each is composed
def _composed_site(
    *, use: Use, residuals: bool, parts: Parts
) -> Callable[..., Sequence[Any]]:
    params = {"use": use, "batch": (), "residuals": residuals}
    return lambda *args: site.site_p.bind(*_given(args, parts), **params)


def _composed_backward(
    *, use: Use, wrt: tuple[str, ...], parts: Parts, joined: Joined
) -> Callable[..., Sequence[Any]]:
    params = {"use": use, "wrt": wrt, "batch": (), "summed": ()}

    def run(*args: Any) -> Sequence[Any]:
        grads = site.backward_p.bind(*_given(args, parts), **params)
        return implement_parts.joined_grads(dict(zip(wrt, grads, strict=True)), joined)

    return run


def _composed_tangent(
    *, use: Use, active: tuple[str, ...], parts: Parts
) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        *before, tangent = args
        names = (*active, *(name for name, _, _ in parts))
        count = len(before) - len(active)
        cut = [_part(tangent, heads, args[use.names.index(n)]) for n, _, heads in parts]
        params = {"use": use, "active": names, "batch": ()}
        given = _given(before[:count], parts)
        return site.tangent_p.bind(*given, *before[count:], *cut, **params)

    return run


def _part(array: Any, heads: Heads, like: Any) -> Any:
    """An operand as the part of an array."""
    b, t, _, h = like.shape
    return array.reshape(b, t, heads.all, h)[:, :, heads.indices]


# ------------------------------------------------------------ abstract values
def _site_aval(*avals: Any, use: Use, residuals: bool, parts: Parts) -> list[Any]:
    given = _given(avals, parts)
    return site_aval(*given, use=use, batch=(), residuals=residuals)


def _backward_aval(
    *avals: Any, use: Use, wrt: tuple[str, ...], parts: Parts, joined: Joined
) -> list[Any]:
    given = _given(avals, parts)
    grads = backward_aval(*given, use=use, wrt=wrt, batch=(), summed=())
    return joined_avals(dict(zip(wrt, grads, strict=True)), joined)


def _tangent_aval(*avals: Any, use: Use, active: tuple[str, ...], parts: Parts) -> Any:
    del parts
    return tangent_aval(*avals[: len(use.names)], use=use, active=active, batch=())


# ------------------------------------------------------------------ derivatives
def _whole(parts: Parts) -> Joined:
    """The operands that are an array, each of its heads once; nothing otherwise."""
    taken = [i for _, _, at in parts for i in range(at.all)[at.indices]]
    every = list(range(parts[0][2].all))
    one = implement_parts.arrays_of(parts) == 1 and sorted(taken) == every
    return tuple((n, at) for n, _, at in parts) if one and len(parts) > 1 else ()


def _site_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    use: Use,
    residuals: bool,
    parts: Parts,
) -> tuple[Any, Any]:
    params = {"use": use, "residuals": residuals, "parts": parts}
    if site.is_zero(tangents[-1]) or not _whole(parts):
        return jvp_rule(_composed_site)(primals, tangents, **params)
    outs = site_p.bind(*primals, use=use.differentiated, residuals=True, parts=parts)
    outs = [checkpoint_name(o, f"rewriter.{use.op.name}") for o in outs]
    saved = outs if use.keeps_out else outs[1:]
    inside = {name for name, _, _ in parts}
    others = [
        (name, t)
        for name, x, t in zip(use.names, primals, tangents, strict=False)
        if name not in inside and is_inexact(x) and not site.is_zero(t)
    ]
    n = len(use.names)
    tangent = tangent_p.bind(
        *primals[:n], *saved, primals[-1], *(t for _, t in others), tangents[-1],
        use=use, active=tuple(name for name, _ in others), parts=parts,
    )  # fmt: skip
    outs = outs if residuals else outs[:1]
    return outs, [tangent, *(site.zero_of(r) for r in outs[1:])]


# ------------------------------------------------------------------- transposes
def _tangent_transpose(
    cotangent: Any, *args: Any, use: Use, active: tuple[str, ...], parts: Parts
) -> list[Any]:
    """Cotangents of the tangents: a backward's results."""
    results: list[Any] = [None] * len(args)
    first = len(args) - 1 - len(active)
    linear = [i for i in range(first, len(args)) if ad.is_undefined_primal(args[i])]
    if site.is_zero(cotangent) or not linear:
        return results
    *given, array = args[:first]
    joined = _whole(parts) if len(args) - 1 in linear else ()
    others = [i for i in linear if i < len(args) - 1]
    wrt = (*(active[i - first] for i in others), *(name for name, _ in joined))
    grads = backward_p.bind(
        *given, cotangent, array, use=use, wrt=wrt, parts=parts, joined=joined
    )
    for i, grad in zip(linear, grads, strict=True):
        results[i] = grad
    if joined:
        results[-1] = grads[-1].reshape(args[-1].aval.shape)
    return results


def _site_transpose(
    cotangents: Sequence[Any], *args: Any, use: Use, residuals: bool, parts: Parts
) -> list[Any]:
    given = _given(args, parts)
    results = site.site_transpose(
        cotangents, *given, use=use, batch=(), residuals=residuals
    )
    return [*results, *(None,) * (len(args) - len(given))]


def _backward_transpose(
    cotangents: Sequence[Any],
    *args: Any,
    use: Use,
    wrt: tuple[str, ...],
    parts: Parts,
    joined: Joined,
) -> list[Any]:
    given, places = _given(args, parts), dict(joined)
    rest = iter(cotangents)
    each = {name: next(rest) for name in wrt if name not in places}
    for name, at in joined:
        x = cotangents[-1]
        each[name] = x if site.is_zero(x) else x[:, :, at.indices]
    results = site.backward_transpose(
        [each[name] for name in wrt], *given, use=use, wrt=wrt, batch=(), summed=()
    )
    return [*results, *(None,) * (len(args) - len(given))]


# --------------------------------------------------------------------- lowering
def _site_made(
    kernel: Kernel | None, *, use: Use, residuals: bool, parts: Parts
) -> Callable[..., list[Any]]:
    return implement_parts.forward_of_parts(use, kernel, residuals, parts)


def _backward_made(
    kernel: Kernel | None,
    *,
    use: Use,
    wrt: tuple[str, ...],
    parts: Parts,
    joined: Joined,
) -> Callable[..., list[Any]]:
    return implement_parts.backward_of_parts(use, kernel, wrt, parts, joined)


def _tangent_made(
    kernel: Kernel | None, *, use: Use, active: tuple[str, ...], parts: Parts
) -> Callable[..., Any]:
    del kernel
    n, names = len(use.names), (*active, *(name for name, _, _ in parts))

    def run(*args: Any) -> Any:
        others = args[len(args) - 1 - len(active) : -1]
        cut = [_part(args[-1], at, args[use.names.index(m)]) for m, _, at in parts]
        return implement.tangent(use, names, ())(*args[:n], *others, *cut)

    return run


site_p.multiple_results = backward_p.multiple_results = True
for _primitive, _aval, _composed, _made in (
    (site_p, _site_aval, _composed_site, _site_made),
    (tangent_p, _tangent_aval, _composed_tangent, _tangent_made),
    (backward_p, _backward_aval, _composed_backward, _backward_made),
):
    register(_primitive, _aval, batch_rule(_composed), _made)
    ad.primitive_jvps[_primitive] = jvp_rule(_composed)
ad.primitive_jvps[site_p] = _site_jvp
ad.primitive_transposes[site_p] = _site_transpose
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
