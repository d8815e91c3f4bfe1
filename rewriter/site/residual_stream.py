"""Three primitives for a site whose operand is also read elsewhere.

In a residual stream ``h = x + addend; y = norm(h)``, h goes on to the next layer. So in
the gradients, the cotangent from the next layer is added to the norm's own cotangent of
h. A kernel that `adds_to` that operand does both additions in the same pass over
memory. It takes a site's operands and the addend; it returns a site's results and the
sum.

- ``rewriter_site`` gives ``[result, *residuals, sum]``. Without an addend the sum is
  the operand itself, and only its gradients gain.
- ``rewriter_site_tangent`` gives the tangents of the result and, handed on, of the sum.
- ``rewriter_site_backward`` gives the cotangents. Its last argument is the cotangent of
  the sum, which it adds.

Each is a primitive of `site` and an addition. Everything else is as for those: under
`jax.vmap`, in derivatives of derivatives, and on a platform whose kernel does not add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad

from rewriter.ops.kernel import Kernel
from rewriter.site import implement, site
from rewriter.site.composed import batch_rule, jvp_rule
from rewriter.site.lowering import register
from rewriter.site.result_types import backward_aval, site_aval, tangent_aval
from rewriter.site.uses import Use
from rewriter.support.dtypes import is_inexact

site_p = Primitive(site.site_p.name)
tangent_p = Primitive(site.tangent_p.name)
backward_p = Primitive(site.backward_p.name)


def may_add(eqn: Any) -> bool:
    """Whether an equation is a site, or its backward, whose kernel adds."""
    if eqn.primitive not in (site.site_p, site.backward_p) or eqn.params["batch"]:
        return False
    name = eqn.params["use"].adds_to
    return bool(name) and name in eqn.params.get("wrt", (name,))


def adding(eqns: Sequence[Any]) -> list[int]:
    """The positions of the equations that `may_add`."""
    sites = (site.site_p, site.backward_p)
    return [i for i, e in enumerate(eqns) if e.primitive in sites and may_add(e)]


def place_of_operand(eqn: Any) -> int:
    """The position of the operand that a site's kernel adds to."""
    return _added(eqn.params["use"])


# --------------------------------------------------------- of what each is composed
def _composed_site(*, use: Use, residuals: bool) -> Callable[..., Sequence[Any]]:
    at, n = _added(use), len(use.names)

    def run(*args: Any) -> list[Any]:
        operands = list(args[:n])
        for addend in args[n:]:
            operands[at] = operands[at] + addend
        params = {"use": use, "batch": (), "residuals": residuals}
        return [*site.site_p.bind(*operands, **params), operands[at]]

    return run


def _composed_tangent(
    *, use: Use, active: tuple[str, ...]
) -> Callable[..., Sequence[Any]]:
    handed = active.index(use.adds_to) - len(active)

    def run(*args: Any) -> list[Any]:
        tangent = site.tangent_p.bind(*args, use=use, active=active, batch=())
        return [tangent, args[handed]]

    return run


def _composed_backward(
    *, use: Use, wrt: tuple[str, ...]
) -> Callable[..., Sequence[Any]]:
    at = wrt.index(use.adds_to)

    def run(*args: Any) -> list[Any]:
        grads = site.backward_p.bind(*args[:-1], use=use, wrt=wrt, batch=(), summed=())
        grads[at] = grads[at] + args[-1]
        return grads

    return run


def _added(use: Use) -> int:
    """The position of the operand that a use `adds_to`."""
    return use.names.index(use.adds_to)


# ------------------------------------------------------------ abstract values
def _site_aval(*avals: Any, use: Use, residuals: bool) -> list[Any]:
    n = len(use.names)
    outs = site_aval(*avals[:n], use=use, batch=(), residuals=residuals)
    return [*outs, avals[_added(use)]]


def _tangent_aval(*avals: Any, use: Use, active: tuple[str, ...]) -> list[Any]:
    tangent = tangent_aval(*avals, use=use, active=active, batch=())
    return [tangent, avals[active.index(use.adds_to) - len(active)]]


def _backward_aval(*avals: Any, use: Use, wrt: tuple[str, ...]) -> list[Any]:
    return backward_aval(*avals[:-1], use=use, wrt=wrt, batch=(), summed=())


# ------------------------------------------------------------ differentiation
def _site_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, use: Use, residuals: bool
) -> tuple[list[Any], list[Any]]:
    n, at = len(use.names), _added(use)
    sums = list(tangents[:n])
    for tangent in tangents[n:]:
        sums[at] = ad.add_tangents(sums[at], tangent)
    moving = [
        i for i, t in enumerate(sums) if is_inexact(primals[i]) and not site.is_zero(t)
    ]
    if not moving:
        outs = site_p.bind(*primals, use=use, residuals=residuals)
        return outs, [site.zero_of(x) for x in outs]
    *outs, total = site_p.bind(*primals, use=use, residuals=True)
    outs = [checkpoint_name(x, f"rewriter.{use.op.name}") for x in outs]
    operands = [*primals[:at], total, *primals[at + 1 : n]]
    values = [*operands, *(outs if use.keeps_out else outs[1:])]
    values += [sums[i] for i in moving]
    active = tuple(use.names[i] for i in moving)
    if at in moving:
        of_result, of_total = tangent_p.bind(*values, use=use, active=active)
    else:
        of_result = site.tangent_p.bind(*values, use=use, active=active, batch=())
        of_total = site.zero_of(total)
    outs = outs if residuals else outs[:1]
    zeros = [site.zero_of(x) for x in outs[1:]]
    return [*outs, total], [of_result, *zeros, of_total]


def _site_transpose(
    cotangents: Sequence[Any], *args: Any, use: Use, residuals: bool
) -> list[Any]:
    """Transposes a use that is linear in other operands, as a norm is in its scale."""
    n, at = len(use.names), _added(use)
    operands = list(args[:n])
    for addend in args[n:]:
        operands[at] = operands[at] + addend
    results = site.site_transpose(
        cotangents[:-1], *operands, use=use, batch=(), residuals=residuals
    )
    return [*results, *(None for _ in args[n:])]


def _tangent_transpose(
    cotangents: Sequence[Any], *args: Any, use: Use, active: tuple[str, ...]
) -> list[Any]:
    of_result, passing = cotangents
    first = len(args) - len(active)
    at = first + active.index(use.adds_to)
    handed = ad.is_undefined_primal(args[at]) and not site.is_zero(passing)
    if site.is_zero(of_result) or not handed:
        results = site.tangent_transpose(
            of_result, *args, use=use, active=active, batch=()
        )
        results[at] = passing if handed else results[at]
        return results
    linear = [i for i in range(first, len(args)) if ad.is_undefined_primal(args[i])]
    wrt = tuple(active[i - first] for i in linear)
    grads = backward_p.bind(*args[:first], of_result, passing, use=use, wrt=wrt)
    results = [None] * len(args)
    for i, grad in zip(linear, grads, strict=True):
        results[i] = grad
    return results


def _backward_transpose(
    cotangents: Sequence[Any], *args: Any, use: Use, wrt: tuple[str, ...]
) -> list[Any]:
    results = site.backward_transpose(
        cotangents, *args[:-1], use=use, wrt=wrt, batch=(), summed=()
    )
    back = cotangents[wrt.index(use.adds_to)]
    handed = ad.is_undefined_primal(args[-1]) and not site.is_zero(back)
    return [*results, back if handed else None]


# --------------------------------------------------------------------- lowering
def _site_made(
    kernel: Kernel | None, *, use: Use, residuals: bool
) -> Callable[..., list[Any]]:
    with_addend = implement.forward_of_sum(use, kernel, residuals)
    alone = implement.forward(use, kernel, (), residuals)

    def run(*args: Any) -> list[Any]:
        if len(args) > len(use.names):
            return with_addend(*args)
        return [*alone(*args), args[_added(use)]]

    return run


def _tangent_made(
    kernel: Kernel | None, *, use: Use, active: tuple[str, ...]
) -> Callable[..., list[Any]]:
    del kernel
    tangent_of = implement.tangent(use, active, ())
    return lambda *args: [
        tangent_of(*args),
        args[active.index(use.adds_to) - len(active)],
    ]


def _backward_made(
    kernel: Kernel | None, *, use: Use, wrt: tuple[str, ...]
) -> Callable[..., list[Any]]:
    return implement.backward_to_sum(use, kernel, wrt)


for _primitive, _aval, _composed, _made in (
    (site_p, _site_aval, _composed_site, _site_made),
    (tangent_p, _tangent_aval, _composed_tangent, _tangent_made),
    (backward_p, _backward_aval, _composed_backward, _backward_made),
):
    _primitive.multiple_results = True
    register(_primitive, _aval, batch_rule(_composed), _made)
for _primitive, _composed in (
    (tangent_p, _composed_tangent),
    (backward_p, _composed_backward),
):
    ad.primitive_jvps[_primitive] = jvp_rule(_composed)
ad.primitive_jvps[site_p] = _site_jvp
ad.primitive_transposes[site_p] = _site_transpose
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
