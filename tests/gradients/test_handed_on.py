"""Gradients in other bodies than their forwards: residuals are handed to them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import rewriter
from tests.gradients.test_gradients import FORCED, equal
from tests.support.arrays import normal

pytestmark = pytest.mark.once

LAYERS, B, T, N, H, G, F = 2, 2, 6, 2, 4, 3, 5
MESH = jax.sharding.Mesh(jax.devices()[:1], ("x",))
SIZES = jnp.array([1, 0, 11], jnp.int32)


def attention(q, k, v, scale):
    scores = jnp.einsum("btnh,bsnh->bnts", q * scale, k)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)


def experts(x, w, u, d, sizes):
    gate, up = (jax.lax.ragged_dot(x, m, sizes) for m in (w, u))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, d, sizes)


HEADS = [
    normal(B, T, N, H),
    *(normal(LAYERS, B, T, N, H, seed=i) for i in (1, 2)),
    normal(LAYERS, H, seed=3),
]
ROWS = [
    normal(B * T, H),
    *(normal(LAYERS, G, H, F, seed=i) for i in (1, 2)),
    normal(LAYERS, G, F, H, seed=3),
    jnp.stack([SIZES, SIZES[::-1]]),
]
OPS = {"attention": (attention, HEADS, 1), "ragged_dot": (experts, ROWS, 3)}


def mapped(check: bool = False) -> Callable:
    """On each device, with the batch or rows split."""

    def around(f: Callable) -> Callable:
        rest = [P()] * 4 if f.__name__ == "experts" else [P("x"), P("x"), P()]
        specs = (P("x"), *rest)
        return jax.shard_map(
            f, mesh=MESH, in_specs=specs, out_specs=P("x"), check_vma=check
        )

    return around


def again(f: Callable) -> Callable:
    """The layer twice, in a loop of its own."""

    def twice(x, *weights):
        return jax.lax.scan(lambda x, _: (f(x, *weights), None), x, None, length=2)[0]

    twice.__name__ = f.__name__
    return twice


def layers(f: Callable) -> Callable:
    def loss(x, *weights):
        body = lambda x, w: (x + f(x, *w), None)
        return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

    return loss


AROUND = {
    "shard_map": mapped(),
    "shard_map with types": mapped(check=True),
    "shard_map with types in a checkpoint": lambda f: jax.checkpoint(mapped(True)(f)),
    "shard_map in a checkpoint": lambda f: jax.checkpoint(mapped()(f)),
    "checkpoint in a shard_map": lambda f: mapped()(jax.checkpoint(f)),
    "loop in a shard_map with types": lambda f: mapped(True)(again(f)),
    "loop": again,
    "loop in a checkpoint": lambda f: jax.checkpoint(again(f)),
}


def derived(op: str, around: Callable):
    fn, args, count = OPS[op]
    floats = tuple(range(4))
    step = jax.grad(layers(around(fn)), floats)
    report = rewriter.explain(step)(*args)
    assert not report.failures
    return step, args, report.counts(repeats=False, backward=True)[op], count


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("op", OPS)
def test_residuals_reach_gradients(op: str, around: str) -> None:
    step, args, found, count = derived(op, AROUND[around])
    assert found == count
    fast = rewriter.optimize(step, implementation=FORCED, strict=True)
    equal(jax.jit(fast)(*args), jax.jit(step)(*args))
