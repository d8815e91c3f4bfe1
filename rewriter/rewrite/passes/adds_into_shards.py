"""Moves additions beside a `shard_map` into it, next to a site that can fuse them.

    h = add x r     y = shard_map(site) h …      →    y, h = shard_map(add, site) x … r
    y = shard_map(site) h …    … read h          →    y, k = shard_map(site) h …
    d = shard_map(backward) h …   t = add p d    →    t = shard_map(backward, add) h … p

Each device then adds its own parts, which are split like the site's operand. The
addition stands beside the site, in the same body, where `fuse_residual_adds` finds it.
"""

from __future__ import annotations

from typing import Any

from rewriter import _jax
from rewriter.program.equations import Equations
from rewriter.site import fusable_adds, residual_stream, site


def move_adds_into_shards(jaxpr: Any) -> Any:
    """Returns a body, closed or not, with such additions beside their sites.

    Args:
        jaxpr: The body; it is returned itself if there are none.
    """
    found = _jax.of_kind("shard_map", jaxpr.eqns)
    inside = [(i, e, _site_in(e)) for i, e in found]
    those = [(i, e, inner) for i, e, inner in inside if inner is not None]
    if not those:
        return jaxpr
    body = Equations(jaxpr)
    for i, eqn, inner in those:
        if inner.primitive is site.backward_p:
            _pull_behind(body, i, eqn, inner)
        elif not _pull_in_front(body, i, eqn, inner) and not inner.params["residuals"]:
            _pull_handing_on(body, i, eqn, inner)
    return _jax.with_equations(jaxpr, *body.finished())


def _site_in(eqn: Any) -> Any:
    """The only site in a shard_map, if its kernel adds; else None."""
    sites = [
        e
        for e in _jax.call_body(eqn).eqns
        if e.primitive in (site.site_p, site.backward_p)
    ]
    if len(sites) == 1 and residual_stream.may_add(sites[0]):
        return sites[0]
    return None


def _operand_of_sum(eqn: Any, inner: Any) -> int | None:
    """The operand of a shard_map that its site adds to, if both are split alike."""
    inside = _jax.call_body(eqn)
    into, _, around = _jax.parts_of(eqn)
    x = inner.invars[residual_stream.place_of_operand(inner)]
    if x not in inside.invars:
        return None
    at = inside.invars.index(x)
    return at if _jax.is_parts(into[at], x.aval, around) else None


def _pull_in_front(body: Equations, i: int, eqn: Any, inner: Any) -> bool:
    at = _operand_of_sum(eqn, inner)
    if at is None:
        return False
    h = eqn.invars[at]
    others = [v for k, v in enumerate(eqn.invars) if k != at]
    if h in others or (found := fusable_adds.in_front(body, i, h, others)) is None:
        return False
    where, place = found
    add = body.eqns[where]
    inside = _jax.call_body(eqn)
    x = inside.invars[at]
    addend, total = _jax.new_var(x.aval), _jax.new_var(x.aval)
    moved = inner.replace(
        primitive=add.primitive, invars=[x, addend], outvars=[total], params=add.params
    )
    env = {x: total}
    eqns = [moved, *(_jax.reading(e, env) for e in inside.eqns)]
    outs = [v if _jax.is_literal(v) else env.get(v, v) for v in inside.outvars]
    into, out_of, _ = _jax.parts_of(eqn)
    first, second = add.invars
    new = _jax.with_parts(
        eqn.replace(
            invars=[*eqn.invars[:at], first, *eqn.invars[at + 1 :], second],
            outvars=[*eqn.outvars, h],
        ),
        _jax.with_equations(inside, eqns, [*outs, total], [addend]),
        (*into, into[at]),
        (*out_of, into[at]),
    )
    body.replace((i, where), place, new)
    return True


def _pull_handing_on(body: Equations, i: int, eqn: Any, inner: Any) -> None:
    at = _operand_of_sum(eqn, inner)
    if at is None or body.readers(eqn.invars[at])[-1] == i:
        return
    inside, h = _jax.call_body(eqn), eqn.invars[at]
    new = _jax.new_var(h.aval)
    into, out_of, _ = _jax.parts_of(eqn)
    outs = [*inside.outvars, inside.invars[at]]
    body.redirect_readers(i, h, new)
    body.eqns[i] = _jax.with_parts(
        eqn.replace(outvars=[*eqn.outvars, new]),
        _jax.with_equations(inside, inside.eqns, outs),
        into,
        (*out_of, into[at]),
    )


def _pull_behind(body: Equations, i: int, eqn: Any, inner: Any) -> None:
    inside = _jax.call_body(eqn)
    own = inner.outvars[inner.params["wrt"].index(inner.params["use"].adds_to)]
    value = _returned(Equations(inside), own)
    into, out_of, around = _jax.parts_of(eqn)
    if value is None or value.aval.dtype != own.aval.dtype:
        return
    at = inside.outvars.index(value)
    if not _jax.is_parts(out_of[at], value.aval, around):
        return
    others = [v for k, v in enumerate(eqn.outvars) if k != at]
    found = fusable_adds.behind(body, i, eqn.outvars[at], others)
    if found is None:
        return
    positions, place, addend = found
    add = body.eqns[positions[-1]]
    part, total = _jax.new_var(value.aval), _jax.new_var(value.aval)
    moved = inner.replace(
        primitive=add.primitive,
        invars=[part, value],
        outvars=[total],
        params=add.params,
    )
    outs = [*inside.outvars[:at], total, *inside.outvars[at + 1 :]]
    new = _jax.with_parts(
        eqn.replace(
            invars=[*eqn.invars, addend],
            outvars=[*eqn.outvars[:at], *add.outvars, *eqn.outvars[at + 1 :]],
        ),
        _jax.with_equations(inside, [*inside.eqns, moved], outs, [part]),
        (*into, out_of[at]),
        out_of,
    )
    body.replace(positions, place, new)


def _returned(inside: Equations, own: Any) -> Any:
    """The result that carries a value out of a body, if nothing else reads it."""
    value = own
    while True:
        readers = inside.readers(value)
        if len(readers) != 1:
            return None
        if readers[0] == inside.end:
            return value
        reader = inside.eqns[readers[0]]
        if not fusable_adds.keeps_all(reader, own):
            return None
        value = reader.outvars[0]
