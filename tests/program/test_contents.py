"""What a body holds is found once, and freed with the body."""

import gc

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.program import contents
from rewriter.program.contents import contents_of


def _body():
    return jax.make_jaxpr(lambda x: jnp.tanh(lax.exp(lax.sin(x)) + lax.exp(x)))(1.0)


def test_positions_are_in_the_order_of_the_program():
    body = _body()
    held = contents_of(body)
    names = [eqn.primitive.name for eqn in body.eqns]
    assert names == ["sin", "exp", "exp", "add", "tanh"]
    assert held.names == set(names)
    assert held.positions({lax.exp_p}) == [1, 2]
    assert held.positions({lax.tanh_p, lax.exp_p, lax.cos_p}) == [1, 2, 4]
    assert held.positions({lax.cos_p}) == []
    assert held.named({"tanh", "sin"}) == [body.eqns[0], body.eqns[4]]
    assert all(held.makers[v] is e for e in body.eqns for v in e.outvars)


def test_a_body_is_looked_through_once_closed_or_not():
    body = _body()
    assert contents_of(body) is contents_of(body)
    assert contents_of(body.jaxpr).eqns is contents_of(body).eqns


def test_nothing_is_kept_of_a_body_that_is_freed():
    gc.collect()
    before = len(contents._KNOWN)
    body = _body()
    assert contents_of(body).makers
    assert len(contents._KNOWN) > before
    del body
    gc.collect()
    assert len(contents._KNOWN) <= before
