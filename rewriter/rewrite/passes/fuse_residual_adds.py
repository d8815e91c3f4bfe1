"""Moves a residual add into the kernel that can compute it.

    h = add x r        y = site h …      →    y, h = site x … r
    y = site h …       … read h          →    y, k = site h …;  … read k
    d = backward h …   t = add_any p d   →    t = backward h … p

The first two are for kernels that `adds_to` their operand, where h is read elsewhere;
see `residual_stream`. Values stay those of the program as it was, except that t is
rounded once. In the second, k equals h, and only gradients gain: the addition that JAX
would make by itself moves into the kernel. So it is not applied to sites whose
gradients are in the program, which have residuals.

The sites were proved before. This pass only uses that addition is what it is.
`fusable_adds` says which additions count, and `adds_into_shards` moves them to sites
that run inside a `shard_map`.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import Equations
from rewriter.rewrite.passes.adds_into_shards import move_adds_into_shards
from rewriter.site import fusable_adds, residual_stream, site


def fuse_residual_adds(program: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program with additions fused into sites; itself if there are none.

    Args:
        program: A rewritten program.
    """
    sites = {site.site_p.name, site.backward_p.name}
    return map_bodies(program, _with_sums, move_adds_into_shards, sites)


def _with_sums(jaxpr: Any) -> Any:
    """A body whose sites compute the additions beside them."""
    sites = residual_stream.adding(jaxpr.eqns)
    if not sites:
        return jaxpr
    body = Equations(jaxpr)
    for i in sites:
        eqn = body.eqns[i]
        if eqn.primitive is site.backward_p:
            _sum_behind(body, i, eqn)
        elif not _sum_in_front(body, i, eqn) and not eqn.params["residuals"]:
            _redirect_readers(body, i, eqn)
    return _jax.with_equations(jaxpr, *body.finished())


def _sum_in_front(body: Equations, i: int, eqn: Any) -> bool:
    """Fuses the addition that makes a site's operand; returns whether it did."""
    at = residual_stream.place_of_operand(eqn)
    others = [v for k, v in enumerate(eqn.invars) if k != at]
    found = fusable_adds.in_front(body, i, eqn.invars[at], others)
    if found is None:
        return False
    where, place = found
    first, second = body.eqns[where].invars
    new = eqn.replace(
        primitive=residual_stream.site_p,
        invars=[*eqn.invars[:at], first, *eqn.invars[at + 1 :], second],
        outvars=[*eqn.outvars, eqn.invars[at]],
        params={k: eqn.params[k] for k in ("use", "residuals")},
    )
    body.replace((i, where), place, new)
    return True


def _redirect_readers(body: Equations, i: int, eqn: Any) -> None:
    """Makes later readers of a site's operand read the site's copy of it."""
    h = eqn.invars[residual_stream.place_of_operand(eqn)]
    if _jax.is_literal(h) or body.readers(h)[-1] == i:
        return
    new = _jax.new_var(h.aval)
    body.redirect_readers(i, h, new)
    body.eqns[i] = eqn.replace(
        primitive=residual_stream.site_p,
        outvars=[*eqn.outvars, new],
        params={k: eqn.params[k] for k in ("use", "residuals")},
    )


def _sum_behind(body: Equations, i: int, eqn: Any) -> None:
    """Fuses the addition of another cotangent into a backward."""
    use, wrt = eqn.params["use"], eqn.params["wrt"]
    at = wrt.index(use.adds_to)
    others = [v for k, v in enumerate(eqn.outvars) if k != at]
    found = fusable_adds.behind(body, i, eqn.outvars[at], others)
    if found is None:
        return
    positions, place, addend = found
    (total,) = body.eqns[positions[-1]].outvars
    new = eqn.replace(
        primitive=residual_stream.backward_p,
        invars=[*eqn.invars, addend],
        outvars=[*eqn.outvars[:at], total, *eqn.outvars[at + 1 :]],
        params={"use": use, "wrt": wrt},
    )
    body.replace(positions, place, new)
