"""Masks of data in layers of flax, equinox and haiku: checkpoints, loops, gradients."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rewriter
from tests import slow
from tests.patterns.attention.test_data_masks import (
    FORCED,
    LAYERS,
    MASKS,
    WRAPS,
    B,
    H,
    N,
    T,
    arguments,
)

pytestmark = pytest.mark.once

WIDTH = N * H


def linen_step(name: str, context: str) -> Any:
    nn = pytest.importorskip("flax.linen")
    scan, _ = WRAPS[context]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, given: Any) -> Any:
            q, k, v = (nn.DenseGeneral((N, H))(x) for _ in "qkv")
            how = {"mask" if given.dtype == bool else "bias": given}
            y = nn.dot_product_attention(q, k, v, **how)
            return x + nn.DenseGeneral(WIDTH, axis=(-2, -1))(y)

    block = nn.remat(Layer) if "checkpoint" in context else Layer

    class Turn(nn.Module):
        @nn.compact
        def __call__(self, x: Any, given: Any) -> Any:
            return block()(x, given), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, data: Any) -> Any:
            given = MASKS[name][0](data)
            if scan:
                turns = nn.scan(
                    Turn,
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    in_axes=nn.broadcast,
                    length=LAYERS,
                )
                return turns()(x, given)[0]
            for _ in range(LAYERS):
                x = block()(x, given)
            return x

    net = Net()
    x, _, data = arguments(name)
    params = jax.eval_shape(net.init, jax.random.key(0), x, data)
    return lambda p, x, d: (net.apply(p, x, d) ** 2).mean(), params


def nnx_step(name: str, context: str) -> Any:
    nnx = pytest.importorskip("flax.nnx")
    scan, _ = WRAPS[context]

    class Layer(nnx.Module):
        def __init__(self, rngs: Any):
            self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
            self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any, given: Any) -> Any:
            q, k, v = jnp.split(self.qkv(x).reshape(B, T, N, 3 * H), 3, -1)
            how = {"mask" if given.dtype == bool else "bias": given}
            y = nnx.dot_product_attention(q, k, v, **how)
            return x + self.out(y.reshape(x.shape))

    def apply(layer: Any, x: Any, given: Any) -> Any:
        return layer(x, given)

    turn = nnx.remat(apply) if "checkpoint" in context else apply
    if scan:
        many = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, in_axes=0, out_axes=0))
        made = many(nnx.Rngs(0))
    else:
        made = nnx.List([Layer(nnx.Rngs(i)) for i in range(LAYERS)])
    graph, params = nnx.split(made)

    def loss(p: Any, x: Any, d: Any) -> Any:
        layers, given = nnx.merge(graph, p), MASKS[name][0](d)
        if not scan:
            for one in layers:
                x = turn(one, x, given)
            return (x**2).mean()
        step = lambda x, layer: turn(layer, x, given)
        scanned = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return (scanned(x, layers) ** 2).mean()

    return loss, params


def equinox_step(name: str, context: str) -> Any:
    eqx = pytest.importorskip("equinox")
    scan, _ = WRAPS[context]

    class Layer(eqx.Module):
        qkv: Any
        out: Any

        def __init__(self, key: Any):
            self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=key)
            self.out = eqx.nn.Linear(WIDTH, WIDTH, key=key)

        def __call__(self, x: Any, given: Any) -> Any:
            q, k, v = jnp.split(jax.vmap(self.qkv)(x).reshape(T, N, 3 * H), 3, -1)
            s = jnp.einsum("tnh,snh->nts", q, k) / H**0.5
            s = jnp.where(given, s, -jnp.inf) if given.dtype == bool else s + given
            y = jnp.einsum("nts,snh->tnh", jax.nn.softmax(s), v)
            return x + jax.vmap(self.out)(y.reshape(T, WIDTH))

    def apply(layer: Any, x: Any, given: Any) -> Any:
        whole = given.shape[0] == 1 and given.dtype != bool
        axes = (0, None) if whole else (0, 0)
        return jax.vmap(layer, axes)(x, given[0] if whole else given)

    turn = eqx.filter_checkpoint(apply) if "checkpoint" in context else apply
    keys = jax.random.split(jax.random.key(0), LAYERS)
    made = eqx.filter_vmap(Layer)(keys) if scan else [Layer(key) for key in keys]
    params, static = eqx.partition(made, eqx.is_array)

    def loss(p: Any, x: Any, d: Any) -> Any:
        given = MASKS[name][0](d)
        if scan:
            step = lambda x, one: (turn(eqx.combine(one, static), x, given), None)
            x, _ = jax.lax.scan(step, x, p)
        else:
            for one in eqx.combine(p, static):
                x = turn(one, x, given)
        return (x**2).mean()

    return loss, params


def haiku_step(name: str, context: str) -> Any:
    hk = pytest.importorskip("haiku")
    scan, _ = WRAPS[context]

    def layer(x: Any, given: Any) -> Any:
        q, k, v = (hk.Linear(WIDTH)(x).reshape(B, T, N, H) for _ in "qkv")
        s = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
        s = jnp.where(given, s, -1e30) if given.dtype == bool else s + given
        y = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)
        return x + hk.Linear(WIDTH)(y.reshape(x.shape))

    def net(x: Any, data: Any) -> Any:
        block = hk.remat(layer) if "checkpoint" in context else layer
        given = MASKS[name][0](data)
        if scan:
            stack = hk.experimental.layer_stack(LAYERS)
            return stack(lambda x: block(x, given))(x)
        for _ in range(LAYERS):
            x = block(x, given)
        return x

    pure = hk.without_apply_rng(hk.transform(net))
    x, _, data = arguments(name)
    params = jax.eval_shape(pure.init, jax.random.key(0), x, data)
    return lambda p, x, d: (pure.apply(p, x, d) ** 2).mean(), params


STEPS = {
    "linen": linen_step,
    "nnx": nnx_step,
    "equinox": equinox_step,
    "haiku": haiku_step,
}
QUICK = {"linen": "packed", "nnx": "padding", "equinox": "bias", "haiku": "prefix"}


@pytest.mark.parametrize(
    ("library", "context", "name"),
    slow.unless(
        lambda library, context, name: (
            context in ("checkpoint", "scan+checkpoint") and QUICK[library] == name
        ),
        itertools.product(STEPS, WRAPS, MASKS),
        several=True,
    ),
)
def test_every_layer_is_replaced_with_its_gradient(library, context, name):
    loss, params = STEPS[library](name, context)
    x, _, data = arguments(name)
    wrt = (0, 2) if name == "bias" else 0
    step = jax.value_and_grad(loss, wrt)
    report = rewriter.explain(step, implementation=FORCED)(params, x, data)
    assert not report.failures
    sites = [s for s in report.sites if s.op == "attention"]
    assert sum(s.repeats for s in sites) == LAYERS, report
    assert all(s.replaced and s.backward for s in sites), report


def combined(nn: Any, data: Any) -> Any:
    same = nn.make_attention_mask(data, data, jnp.equal)
    return nn.combine_masks(nn.make_causal_mask(data), same)


def of_tokens(nn: Any, data: Any) -> Any:
    return nn.make_attention_mask(data > 0, data > 0)


def weighed(nn: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    weights = nn.dot_product_attention_weights(q, k, mask=mask)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize("context", WRAPS)
@pytest.mark.parametrize("make", [combined, of_tokens])
def test_masks_and_weights_of_flax_helpers(make: Any, context: str) -> None:
    nn = pytest.importorskip("flax.linen")
    scan, wrap = WRAPS[context]
    x, w, segments = arguments("packed")

    def layer(x: Any, w: Any, mask: Any) -> Any:
        q, k, v = ((x @ w[i]).reshape(B, T, N, H) for i in range(3))
        first = nn.dot_product_attention(q, k, v, mask=mask)
        out = first + weighed(nn, first, k, v, mask)
        return x + out.reshape(x.shape) @ w[3]

    def loss(x: Any, w: Any, data: Any) -> Any:
        mask = make(nn, data)
        step = wrap(lambda x, w: layer(x, w, mask))
        if scan:
            return (jax.lax.scan(lambda x, w: (step(x, w), None), x, w)[0] ** 2).mean()
        for one in w:
            x = step(x, one)
        return (x**2).mean()

    step = jax.value_and_grad(loss, (0, 1))
    fast = rewriter.optimize(step, implementation=FORCED)
    sites = [s for s in fast.report(x, w, segments).sites if s.op == "attention"]
    assert sum(s.repeats for s in sites) == 2 * LAYERS
    assert all(s.replaced and s.backward for s in sites)
    assert all("segments" in s.shapes and "mask" not in s.shapes for s in sites)
    for got, want in zip(
        *map(jax.tree.leaves, (fast(x, w, segments), jax.jit(step)(x, w, segments))),
        strict=True,
    ):
        assert jnp.abs(got - want).max() <= 2e-5 * jnp.abs(want).max()
