"""Public libraries' own layers, unmodified: what is found, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

Case = tuple[Callable[..., Any], tuple[Any, ...]]
OPS = (
    "attention", "layer_norm", "rms_norm", "group_norm", "gated_linear_unit",
    "ragged_dot",
)  # fmt: skip
FORCED = dict.fromkeys(OPS, "reference")


def normal(shape: tuple[int, ...], seed: int = 0, dtype: Any = None) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), shape)
    return x.astype(dtype or jnp.float32)


def linen(module: Any, *args: Any, **kw: Any) -> Case:
    params = module.init(jax.random.key(0), *args, **kw)
    return (lambda p, *a: module.apply(p, *a, **kw)), (params, *args)


def nnx_case(module: Any, *args: Any, **kw: Any) -> Case:
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def fn(params: Any, rest: Any, *a: Any) -> Any:
        return nnx.merge(graph, params, rest)(*a, **kw)

    return fn, (params, rest, *args)


def eqx_case(module: Any, call: Callable[..., Any], *args: Any) -> Case:
    import equinox as eqx

    arrays, static = eqx.partition(module, eqx.is_inexact_array)
    return (lambda p, *a: call(eqx.combine(p, static), *a)), (arrays, *args)


def haiku_case(build: Callable[..., Any], *args: Any) -> Case:
    import haiku as hk

    model = hk.transform(build)
    params = model.init(jax.random.key(0), *args)
    return (lambda p, *a: model.apply(p, None, *a)), (params, *args)


def linen_self_attention() -> Case:
    import flax.linen as nn

    return linen(
        nn.MultiHeadDotProductAttention(4, deterministic=True), normal((2, 24, 32))
    )


def linen_causal_bf16() -> Case:
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16, deterministic=True)
    x = normal((2, 24, 32), dtype=jnp.bfloat16)
    params = layer.init(jax.random.key(0), x)
    return (lambda p, x: layer.apply(p, x, mask=nn.make_causal_mask(x[..., 0]))), (
        params,
        x,
    )


def linen_dropout() -> Case:
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=False)
    x, keys = normal((2, 24, 32)), jax.random.split(jax.random.key(1))
    params = layer.init({"params": keys[0], "dropout": keys[1]}, x)
    return (lambda p, x, k: layer.apply(p, x, rngs={"dropout": k})), (
        params,
        x,
        jax.random.key(2),
    )


def linen_decode() -> Case:
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(4, decode=True, deterministic=True)
    state = layer.init(jax.random.key(0), jnp.zeros((2, 24, 32)))
    return (
        lambda p, c, x: layer.apply({"params": p, "cache": c}, x, mutable=["cache"])
    ), (state["params"], state["cache"], normal((2, 1, 32)))


def linen_layer_norm() -> Case:
    import flax.linen as nn

    return linen(nn.LayerNorm(), normal((4, 8, 32)))


def linen_two_pass_bf16() -> Case:
    import flax.linen as nn

    layer = nn.LayerNorm(use_fast_variance=False, dtype=jnp.bfloat16)
    return linen(layer, normal((4, 8, 32), dtype=jnp.bfloat16))


def linen_group_norm() -> Case:
    import flax.linen as nn

    return linen(nn.GroupNorm(num_groups=4), normal((2, 4, 4, 32)))


def nnx_attention() -> Case:
    from flax import nnx

    layer = nnx.MultiHeadAttention(
        4, 32, decode=False, deterministic=True, rngs=nnx.Rngs(0)
    )
    x = normal((2, 24, 32))
    return nnx_case(layer, x, mask=nnx.make_causal_mask(x[..., 0]))


def nnx_rms_norm() -> Case:
    from flax import nnx

    return nnx_case(nnx.RMSNorm(32, rngs=nnx.Rngs(0)), normal((4, 8, 32)))


def equinox_attention() -> Case:
    import equinox as eqx

    layer = eqx.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
    return eqx_case(
        layer, lambda m, x: jax.vmap(lambda y: m(y, y, y))(x), normal((2, 24, 32))
    )


def equinox_layer_norm() -> Case:
    import equinox as eqx

    return eqx_case(
        eqx.nn.LayerNorm(32), lambda m, x: jax.vmap(jax.vmap(m))(x), normal((4, 8, 32))
    )


def equinox_group_norm() -> Case:
    import equinox as eqx

    return eqx_case(
        eqx.nn.GroupNorm(4, 32), lambda m, x: jax.vmap(m)(x), normal((2, 32, 4, 4))
    )


def haiku_attention() -> Case:
    import haiku as hk

    def build(x: Any, mask: Any) -> Any:
        init = hk.initializers.VarianceScaling()
        return hk.MultiHeadAttention(4, 8, w_init=init)(x, x, x, mask=mask)

    return haiku_case(
        build, normal((2, 24, 32)), jnp.tril(jnp.ones((2, 1, 24, 24), bool))
    )


def haiku_layer_norm() -> Case:
    import haiku as hk

    return haiku_case(lambda x: hk.LayerNorm(-1, True, True)(x), normal((4, 8, 32)))


def jax_gqa() -> Case:
    q, k, v = (
        normal((2, 24, 8, 16)),
        normal((2, 24, 2, 16), 1),
        normal((2, 24, 2, 16), 2),
    )
    return (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)), (
        q,
        k,
        v,
    )


def jax_window() -> Case:
    q, k, v = (normal((2, 24, 4, 16), i) for i in range(3))
    return (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, local_window_size=8)
    ), (q, k, v)


def jax_glu() -> Case:
    return (lambda x, w: jax.nn.glu(x @ w)), (normal((2, 8, 32)), normal((32, 64), 1))


CASES: tuple[tuple[Callable[[], Case], dict[str, int], dict[str, Any]], ...] = (
    (linen_self_attention, {"attention": 1}, {}),
    (linen_causal_bf16, {"attention": 1}, {"window": (None, 0)}),
    (linen_dropout, {"attention": 1}, {}),
    (linen_decode, {"attention": 1}, {}),
    (linen_layer_norm, {"layer_norm": 1}, {}),
    (linen_two_pass_bf16, {"layer_norm": 1}, {}),
    (linen_group_norm, {"group_norm": 1}, {}),
    (nnx_attention, {"attention": 1}, {"window": (None, 0)}),
    (nnx_rms_norm, {"rms_norm": 1}, {}),
    (equinox_attention, {"attention": 1}, {}),
    (equinox_layer_norm, {"layer_norm": 1}, {}),
    (equinox_group_norm, {"group_norm": 1}, {}),
    (haiku_attention, {"attention": 1}, {}),
    (haiku_layer_norm, {"layer_norm": 1}, {}),
    (jax_gqa, {"attention": 1}, {"window": (None, 0)}),
    (jax_window, {"attention": 1}, {"window": (8, 8)}),
    (jax_glu, {"gated_linear_unit": 1}, {"activation": "sigmoid"}),
)


@pytest.mark.parametrize(
    ("build", "found", "params"), CASES, ids=lambda c: getattr(c, "__name__", "")
)
def test_found_and_the_same(
    build: Callable[[], Case], found: dict[str, int], params: dict[str, Any]
) -> None:
    fn, args = build()
    report = rewriter.explain(fn)(*args)
    counts = report.counts(repeats=False)
    assert {op: counts[op] for op in OPS if counts[op]} == found
    for name, value in params.items():
        assert [s.params[name] for s in report.sites] == [value]
    fast = rewriter.optimize(fn, implementation=FORCED)
    assert all(site.replaced for site in fast.report(*args).sites)
    got, want = jax.jit(fast)(*args), jax.jit(fn)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = (np.asarray(jnp.asarray(x, jnp.float32)) for x in (g, w))
        allowed = 2e-2 if "bf16" in build.__name__ else 2e-5
        np.testing.assert_allclose(g, w, rtol=allowed, atol=allowed)
