"""Makes one equation of a site and its gradients, where the cotangent is known first.

    y, r = site x …    …    d = backward x … r g    →    y, d = together x … g

The cotangent g must not depend on y. What it is computed from moves in front.
"""

from __future__ import annotations

from typing import Any

from rewriter import _jax
from rewriter.program.bodies import map_bodies
from rewriter.program.equations import Equations
from rewriter.site import site, site_with_gradients


def compute_together(program: Any) -> Any:
    """Returns a program in which such sites and their gradients are one equation.

    Args:
        program: The program; it is returned itself if there are none.
    """
    return map_bodies(program, _with_one_equation, wanted={site.backward_p.name})


def _with_one_equation(jaxpr: Any) -> Any:
    """A body, closed or not, with one equation for each such pair."""
    done: set[int] = set()
    while True:
        backwards = (
            i for i, e in enumerate(jaxpr.eqns) if e.primitive is site.backward_p
        )
        at = next((i for i in backwards if _is_wanted(jaxpr.eqns[i], done)), None)
        if at is None:
            return jaxpr
        done.add(id(jaxpr.eqns[at].outvars[0]))
        jaxpr = _joined(jaxpr, at)


def _is_wanted(eqn: Any, done: set[int]) -> bool:
    return (
        not eqn.params["batch"]
        and id(eqn.outvars[0]) not in done
        and site_with_gradients.may_be_one(eqn.params["use"])
    )


def _joined(jaxpr: Any, at: int) -> Any:
    """The body with a backward in one equation with its site, if that may be."""
    body, backward = Equations(jaxpr), jaxpr.eqns[at]
    use, n = backward.params["use"], len(backward.params["use"].names)
    operands, saved = backward.invars[:n], backward.invars[n:-1]
    names = [body.made_at(v) for v in saved]
    if not names or any(k < 0 for k in names):
        return jaxpr
    named = [k for k in names if jaxpr.eqns[k].primitive.name == "name"]
    sources = [jaxpr.eqns[k].invars[0] if k in named else v
               for k, v in zip(names, saved, strict=True)]  # fmt: skip
    (first, *others) = {body.made_at(v) for v in sources}
    if others or first < 0 or not _is_site(jaxpr.eqns[first], use, operands):
        return jaxpr
    made = jaxpr.eqns[first].outvars
    readers = {k for v in made[1:] for k in body.readers(v)}
    again = {k for k in named for v in jaxpr.eqns[k].outvars for k in body.readers(v)}
    if not readers <= {*named, at} or not again <= {at}:
        return jaxpr  # a residual is saved
    moved = _before(body, backward.invars[-1], first)
    if moved is None:
        return jaxpr
    whole = backward.replace(
        primitive=site_with_gradients.together_p,
        invars=[*operands, backward.invars[-1]],
        outvars=[made[0], *backward.outvars],
        params={"use": use, "wrt": backward.params["wrt"]},
    )
    gone = {first, at, *named, *moved}
    eqns = [
        *jaxpr.eqns[:first],
        *(jaxpr.eqns[k] for k in moved),
        whole,
        *(e for k, e in enumerate(jaxpr.eqns) if k > first and k not in gone),
    ]
    return _jax.with_equations(jaxpr, eqns, getattr(jaxpr, "jaxpr", jaxpr).outvars)


def _is_site(eqn: Any, use: Any, operands: Any) -> bool:
    return (
        eqn.primitive is site.site_p
        and not eqn.params["batch"]
        and eqn.params["use"] == use
        and len(eqn.invars) == len(operands)
        and all(a is b for a, b in zip(eqn.invars, operands, strict=True))
    )


def _before(body: Equations, value: Any, first: int) -> list[int] | None:
    """Equations behind a position that a value needs; None if it needs that one."""
    found: set[int] = set()
    stack = [value]
    while stack:
        at = body.made_at(stack.pop())
        if at == first:
            return None
        if at < first or at in found:
            continue
        if body.eqns[at].effects:
            return None
        found.add(at)
        stack += body.eqns[at].invars
    return sorted(found)
