"""Two primitives for a site whose operands are parts of one array.

Their arguments are those of the site, or of its gradients, and then the arrays. A
kernel that `packs` reads the operands from these, and XLA leaves out the operands that
nothing reads. Cotangents may be parts of one array too, which is then the last result,
in place of theirs. A kernel that `joins` writes them into it.

Everything else is as for `site`, which reads the operands: under `jax.vmap`, in
derivatives, and on a platform whose kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad

from rewriter.ops.kernel import Heads, Kernel
from rewriter.site import implement, site
from rewriter.site.composed import batch_rule, jvp_rule
from rewriter.site.lowering import register
from rewriter.site.result_types import backward_aval, joined_avals, site_aval
from rewriter.site.uses import Use

Parts = tuple[tuple[str, int, Heads], ...]
"""Operands that are parts of an array: their name, the array's number, their heads."""

Joined = tuple[tuple[str, Heads], ...]
"""Operands whose cotangents are parts of one array: their name, their heads."""

site_p = Primitive(site.site_p.name)
backward_p = Primitive(site.backward_p.name)
OF = {site.site_p: site_p, site.backward_p: backward_p}
"""The primitive that also takes arrays, by the one that does not."""


def _given(args: Sequence[Any], parts: Parts) -> Sequence[Any]:
    """The arguments without the arrays."""
    return args[: len(args) - implement.arrays_of(parts)]


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
        return implement.joined_grads(dict(zip(wrt, grads, strict=True)), joined)

    return run


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


# ------------------------------------------------------------------- transposes
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
    return implement.forward_of_parts(use, kernel, residuals, parts)


def _backward_made(
    kernel: Kernel | None,
    *,
    use: Use,
    wrt: tuple[str, ...],
    parts: Parts,
    joined: Joined,
) -> Callable[..., list[Any]]:
    return implement.backward_of_parts(use, kernel, wrt, parts, joined)


for _primitive, _aval, _composed, _made, _transpose in (
    (site_p, _site_aval, _composed_site, _site_made, _site_transpose),
    (backward_p, _backward_aval, _composed_backward, _backward_made,
     _backward_transpose),
):  # fmt: skip
    _primitive.multiple_results = True
    register(_primitive, _aval, batch_rule(_composed), _made)
    ad.primitive_jvps[_primitive] = jvp_rule(_composed)
    ad.primitive_transposes[_primitive] = _transpose
