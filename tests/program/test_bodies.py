"""Bodies are changed inner ones first, and only those that hold what is wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from rewriter import _jax
from rewriter.program.bodies import map_bodies

X = jnp.ones(3)


def program(x):
    inner = jax.jit(lambda x: jnp.sin(x) * 2)
    return jax.lax.scan(lambda c, _: (inner(c), None), inner(x), None, length=2)[0] + 1


def bodies_seen(wanted=frozenset()) -> list[set[str]]:
    """The primitives of each body that is handed to the change."""
    seen = []
    before = jax.make_jaxpr(program)(X)
    look = lambda body: seen.append({e.primitive.name for e in body.eqns}) or body
    assert map_bodies(before, look, wanted=wanted) is before
    return seen


def test_inner_bodies_come_first_and_equal_ones_once() -> None:
    first, loop, whole = bodies_seen()
    assert first == {"sin", "mul"}
    assert "sin" not in loop | whole
    assert {"scan", "add"} <= whole


def test_only_bodies_that_hold_a_wanted_primitive_change() -> None:
    assert bodies_seen({"sin", "cos"}) == [{"sin", "mul"}]
    assert bodies_seen({"cos"}) == []


def test_a_changed_body_is_in_each_of_its_calls() -> None:
    def of_cosines(body):
        eqns = [
            e.replace(primitive=jax.lax.cos_p) if e.primitive is jax.lax.sin_p else e
            for e in body.eqns
        ]
        return _jax.with_equations(body, eqns, getattr(body, "jaxpr", body).outvars)

    before = jax.make_jaxpr(program)(X)
    after = map_bodies(before, of_cosines, wanted={"sin"})
    assert "sin" in str(before)
    assert "sin" not in str(after)
    (got,) = jaxpr_as_fun(after)(X)
    want = 2 * jnp.cos(2 * jnp.cos(2 * jnp.cos(X))) + 1
    assert jnp.allclose(got, want)
