"""Group norms and instance norms of real libraries, beside look-alikes of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.measure.oracle import in_float64

FORCED = {"group_norm": "memory_bounded"}
B, H, W, C, G = 2, 4, 5, 12, 3


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0.5, 1.0, shape), "f4")


LAST, FIRST = normal(B, H, W, C), normal(B, C, H, W)


def varied(params: Any) -> Any:
    """Parameters that are not all ones and zeros."""
    leaves, tree = jax.tree.flatten(params)
    changed = [v + normal(*v.shape, seed=k) / 4 for k, v in enumerate(leaves)]
    return jax.tree.unflatten(tree, changed)


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def linen(layer: Any, *args: Any, **more: Any) -> Case:
    params = varied(layer.init(jax.random.key(0), *args))
    return lambda p, *a: layer.apply(p, *a, **more), (params, *args)


def nnx(layer: Any, x: Any) -> Case:
    from flax import nnx as lib

    definition, state = lib.split(layer)
    return lambda s, x: lib.merge(definition, s)(x), (varied(state), x)


def equinox(layer: Any, x: Any, samples: bool = True) -> Case:
    import equinox

    arrays, rest = equinox.partition(layer, equinox.is_array)

    def run(arrays: Any, x: Any) -> Any:
        whole = equinox.combine(arrays, rest)
        return (jax.vmap(whole) if samples else whole)(x)

    return run, (varied(arrays), x)


def haiku(make: Callable[[], Any], x: Any, **more: Any) -> Case:
    import haiku as lib

    made = lib.transform_with_state(lambda x: make()(x, **more))
    params, state = made.init(jax.random.key(0), x)
    return lambda p, x: made.apply(p, state, None, x)[0], (varied(params), x)


def of_linen() -> dict[str, Case]:
    nn = pytest.importorskip("flax.linen")
    return {
        "fast": linen(nn.GroupNorm(G), LAST),
        "two passes": linen(nn.GroupNorm(G, use_fast_variance=False), LAST),
        "by size": linen(nn.GroupNorm(None, group_size=4), normal(B, 7, C)),
        "volume": linen(nn.GroupNorm(G), normal(B, 3, H, W, C)),
        "no scale": linen(nn.GroupNorm(G, use_scale=False), LAST),
        "bare": linen(nn.GroupNorm(G, use_scale=False, use_bias=False), LAST),
        "instance": linen(nn.InstanceNorm(), LAST),
        "layer norm of images": linen(nn.LayerNorm(reduction_axes=(1, 2, 3)), LAST),
    }


def of_nnx() -> dict[str, Case]:
    lib = pytest.importorskip("flax.nnx")
    rngs = lib.Rngs(0)
    slow = lib.GroupNorm(C, G, use_fast_variance=False, rngs=rngs)
    return {
        "fast": nnx(lib.GroupNorm(C, G, rngs=rngs), LAST),
        "two passes": nnx(slow, LAST),
        "instance": nnx(lib.InstanceNorm(C, rngs=rngs), LAST),
    }


def of_equinox() -> dict[str, Case]:
    nn = pytest.importorskip("equinox").nn
    return {
        "vmapped": equinox(nn.GroupNorm(G, C), FIRST),
        "one sample": equinox(nn.GroupNorm(G, C), FIRST[0], samples=False),
        "instance": equinox(nn.GroupNorm(C, C), FIRST),
    }


def of_haiku() -> dict[str, Case]:
    hk = pytest.importorskip("haiku")
    return {
        "last": haiku(lambda: hk.GroupNorm(G), LAST),
        "first": haiku(lambda: hk.GroupNorm(G, data_format="channels_first"), FIRST),
        "instance": haiku(lambda: hk.InstanceNorm(True, True), LAST),
    }


def keras_norm(scale: Any, bias: Any, x: Any, axis: int = -1) -> Any:
    """What `keras.layers.GroupNormalization` of Keras 3 computes."""
    axis %= x.ndim
    split = (*x.shape[:axis], G, C // G, *x.shape[axis + 1 :])
    y = x.reshape(split)
    reduced = [k for k in range(1, y.ndim) if k != axis]
    mean = jnp.mean(y, reduced, keepdims=True)
    var = jnp.mean(jnp.square(y), reduced, keepdims=True) - jnp.square(mean)
    along = [1] * y.ndim
    along[axis : axis + 2] = G, C // G
    inverse = jax.lax.rsqrt(var + 1e-3) * scale.reshape(along)
    return (y * inverse + (bias.reshape(along) - mean * inverse)).reshape(x.shape)


def of_keras() -> dict[str, Case]:
    given = 1 + normal(C, seed=1) / 4, normal(C, seed=2)
    return {
        "last": (keras_norm, (*given, LAST)),
        "first": (lambda s, b, x: keras_norm(s, b, x, 1), (*given, FIRST)),
    }


def of_diffusers() -> dict[str, Case]:
    resnet = pytest.importorskip("diffusers.models.resnet_flax")
    block = resnet.FlaxResnetBlock2D(64, 64, dropout_prob=0.0)
    return {"block": linen(block, normal(1, 4, 4, 64), normal(1, 16))}


LIBRARIES = {
    "linen": of_linen,
    "nnx": of_nnx,
    "equinox": of_equinox,
    "haiku": of_haiku,
    "keras": of_keras,
    "diffusers": of_diffusers,
}


def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    def weighted(*args: Any) -> Any:
        out = jnp.sin(fn(*args).astype(jnp.float32))
        return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    return weighted


@pytest.mark.once
@pytest.mark.parametrize("library", LIBRARIES)
def test_norms_of_a_library_are_found_with_gradients(library: str) -> None:
    wanted, got = {}, {}
    for name, (fn, args) in LIBRARIES[library]().items():
        both = jax.value_and_grad(loss(fn), (0, len(args) - 1))
        fast = rewriter.optimize(fn, implementation=FORCED, strict=True)
        ours = rewriter.optimize(both, implementation=FORCED, strict=True)
        count = 2 if library == "diffusers" else 1
        for found in (fast.report(*args), ours.report(*args)):
            sites = [s for s in found.sites if s.op == "group_norm"]
            assert [s.kernel for s in sites] == ["memory_bounded"] * count, name
        assert all(s.backward for s in sites), name
        flat, tree = jax.tree.flatten(args)
        leaves = lambda *flat, both=both, tree=tree: jax.tree.leaves(
            both(*jax.tree.unflatten(tree, flat))
        )
        wanted[name], _ = in_float64(jax.make_jaxpr(leaves)(*flat), flat)
        theirs = jax.value_and_grad(loss(fast), (0, len(args) - 1))
        got[name] = theirs, ours, args
    run = jax.jit(lambda all_: {n: (a(*x), b(*x)) for n, (a, b, x) in got.items()})
    for name, results in run(0).items():
        largest = max(float(np.abs(w).max()) for w in wanted[name])
        for result in results:
            for g, w in zip(jax.tree.leaves(result), wanted[name], strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-4, atol=4e-5 * largest)


def of_rows(x: Any) -> Any:
    y = x.reshape(x.shape[0], 32, -1)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return y.reshape(x.shape)


def of_axes(x: Any) -> Any:
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], 32, -1)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    return ((y - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)


def of_moments(x: Any) -> Any:
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], 32, -1)
    mean, square = y.mean((1, 2, 4)), (y * y).mean((1, 2, 4))
    r = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + 1e-6)
    mean, r = (jnp.repeat(v, x.shape[-1] // 32, -1)[:, None, None] for v in (mean, r))
    return (x - mean) * r


IMAGES = {
    "rows": (lambda x, s, b: of_rows(x) * s[:, None, None] + b[:, None, None], 1),
    "axes": (lambda x, s, b: of_axes(x) * s + b, -1),
    "moments": (lambda x, s, b: jax.nn.silu(of_moments(x) * s + b), -1),
    "checkpoint": (jax.checkpoint(lambda x, s, b: of_axes(x) * s + b), -1),
}


@pytest.mark.parametrize("name", IMAGES)
def test_all_gradients_of_large_images_are_in_the_site(name: str) -> None:
    """Numbers as n to the power of 1.5 are in the gradients of groups of n numbers."""
    fn, axis = IMAGES[name]
    shape = [2, 512, 512]
    shape.insert(axis % 4, 128)
    given = jax.ShapeDtypeStruct(tuple(shape), jnp.bfloat16)
    channels = jax.ShapeDtypeStruct((128,), jnp.float32)
    both = jax.value_and_grad(loss(fn), (0, 1, 2))
    fast = rewriter.optimize(both, implementation=FORCED, strict=True)
    report = fast.report(given, channels, channels)
    assert [s.op for s in report.sites] == ["group_norm"]
    assert re.findall(r"wrt=(.*)", str(report.after)) == ["('x', 'scale', 'bias')"]


def batch_norm(lib: str) -> Case:
    if lib == "haiku":
        hk = pytest.importorskip("haiku")
        return haiku(lambda: hk.BatchNorm(True, True, 0.9), LAST, is_training=True)
    nn = pytest.importorskip("flax.linen")
    layer = nn.BatchNorm(use_running_average=False)
    given = layer.init(jax.random.key(0), LAST)
    return lambda p, x: layer.apply(p, x, mutable=["batch_stats"])[0], (given, LAST)


def masked() -> Case:
    nn = pytest.importorskip("flax.linen")
    keep = jnp.broadcast_to(normal(B, H, W, 1, seed=3) > 0, LAST.shape)
    return linen(nn.GroupNorm(G), LAST, mask=keep)


def masked_by_hand() -> Case:
    keep = jnp.asarray(normal(B, H * W, seed=3) > 0, "f4")

    def run(x: Any, keep: Any) -> Any:
        y, m = x.reshape(B, H * W, G, -1), keep[:, :, None, None]
        n = m.sum((1, 3), keepdims=True) * C / G
        mean = (y * m).sum((1, 3), keepdims=True) / n
        var = (((y - mean) ** 2) * m).sum((1, 3), keepdims=True) / n
        return ((y - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)

    return run, (LAST, keep)


def standardized_weights() -> Case:
    def run(w: Any, gain: Any) -> Any:
        mean, var = w.mean((0, 1, 2)), w.var((0, 1, 2))
        return (w - mean) * jax.lax.rsqrt(var + 1e-5) * gain

    return run, (normal(3, 3, 8, C), normal(C))


def layer_norm_of_axes() -> Case:
    nn = pytest.importorskip("flax.linen")
    axes = (1, 2, 3)
    return linen(nn.LayerNorm(reduction_axes=axes, feature_axes=axes), LAST)


def interleaved() -> Case:
    def run(x: Any, scale: Any) -> Any:
        y = x.reshape(B, H, W, C // G, G)
        mean, var = y.mean((1, 2, 3), keepdims=True), y.var((1, 2, 3), keepdims=True)
        return ((y - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape) * scale

    return run, (LAST, normal(C))


LOOK_ALIKES: dict[str, tuple[Callable[[], Case], str]] = {
    "batch norm of haiku": (lambda: batch_norm("haiku"), "a batch norm"),
    "batch norm of flax": (lambda: batch_norm("flax"), "a batch norm"),
    "masked": (masked, "a mask leaves some positions out"),
    "masked by hand": (masked_by_hand, "a mask leaves some positions out"),
    "weights": (standardized_weights, "weight standardisation"),
    "interleaved": (interleaved, "interleaved groups"),
    "layer norm": (layer_norm_of_axes, ""),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_is_no_group_norm_is_left_with_the_reason(name: str) -> None:
    build, reason = LOOK_ALIKES[name]
    fn, args = build()
    for program in (fn, jax.grad(loss(fn))):
        report = rewriter.explain(program)(*args)
        assert "group_norm" not in [s.op for s in report.sites]
    misses = rewriter.explain(fn)(*args).misses
    assert [reason in m.reasons[0].text for m in misses] == ([True] if reason else [])
