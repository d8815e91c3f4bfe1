"""Keys whose rotary part all heads share: read by Hopper's kernel without joining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter
from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper.config import Tiles
from tests.kernels.ragged.test_hopper_dot import on_hopper
from tests.support.kernels import simulator

CAUSAL = (None, 0)


def drawn(
    s: int, n: int = 3, own: int = 128, common: int = 64, e: int = 128
) -> dict[str, np.ndarray]:
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: np.asarray(jax.random.normal(key, shape, "bfloat16"))
    return {
        "q": draw(keys[0], 2, s, n, own + common),
        "own": draw(keys[1], 2, s, n, own),
        "common": draw(keys[2], 2, s, 1, common),
        "v": draw(keys[3], 2, s, n, e),
    }


def joined(own: Any, common: Any, first: bool = False) -> Any:
    """Keys as programs make them."""
    wide = np.broadcast_to(common, (*own.shape[:3], common.shape[3]))
    return np.concatenate([wide, own] if first else [own, wide], -1)


@pytest.mark.parametrize(
    ("s", "sizes", "first", "config", "more"),
    [
        (136, {}, False, Tiles(64, 2, 2), {"window": CAUSAL}),
        (101, {"own": 64}, True, Tiles(64, 2, 2), {"window": (40, 0)}),
        (96, {"own": 64, "common": 128, "n": 2}, False, None, {}),
        (72, {}, False, None, {"kv_lengths": np.array([40, 3], np.int32)}),
    ],
)
def test_both_arrays_are_read(
    s: int, sizes: Any, first: bool, config: Any, more: dict[str, Any]
) -> None:
    """The numbers of joined keys, which must not be read."""
    x = drawn(s, **sizes)
    k = joined(x["own"], x["common"], first)
    both = (x["common"], x["own"]) if first else (x["own"], x["common"])
    given = {"q": x["q"], "v": x["v"], "scale": 0.07, "config": config, **more}
    with simulator.simulated():
        want = hopper.forward(k=k, **given)
        got = hopper.forward(k=np.full_like(k, np.nan), **given, shared={"k": both})
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), 2**-6, 1e-4
    )


def test_other_parts_are_joined() -> None:
    """A part that ends within a tile: the kernel reads the joined keys."""
    x = drawn(64, own=96, common=32)
    k = joined(x["own"], x["common"])
    given = {"q": x["q"], "v": x["v"], "k": k, "scale": 0.07}
    with simulator.simulated():
        want = hopper.forward(**given)
        got = hopper.forward(**given, shared={"k": (x["own"], x["common"])})
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(want, np.float32)
    )


# --------------------------------------------------------------------- in programs
def softmax(scores: Any) -> Any:
    s = scores.shape[-1]
    seen = jnp.tril(jnp.ones((s, s), bool))
    return jax.nn.softmax(jnp.where(seen, scores.astype("float32"), -jnp.inf), -1)


def by_concatenation(q: Any, own: Any, common: Any, v: Any) -> Any:
    wide = jnp.broadcast_to(common, (*own.shape[:3], common.shape[3]))
    k = jnp.concatenate([own, wide], -1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.07
    return jnp.einsum("bnts,bsne->btne", softmax(scores).astype(v.dtype), v)


def rotary_first(q: Any, own: Any, common: Any, v: Any) -> Any:
    rows = common[:, :, 0]
    wide = jnp.repeat(rows[:, :, None], own.shape[2], 2)
    k = jnp.concatenate([wide, own], -1)
    q = jnp.concatenate([q[..., own.shape[3] :], q[..., : own.shape[3]]], -1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.07
    return jnp.einsum("bnts,bsne->btne", softmax(scores).astype(v.dtype), v)


def heads_first(q: Any, own: Any, common: Any, v: Any) -> Any:
    q, own, common, v = (x.swapaxes(1, 2) for x in (q, own, common, v))
    wide = jnp.broadcast_to(common, (*own.shape[:3], common.shape[3]))
    k = jnp.concatenate([own, wide], -1)
    weights = softmax(q @ k.swapaxes(2, 3) * 0.07).astype(v.dtype)
    return (weights @ v).swapaxes(1, 2)


def tiled(q: Any, own: Any, common: Any, v: Any) -> Any:
    wide = jnp.tile(common, (1, 1, own.shape[2], 1))
    k = jnp.concatenate([own, wide], -1).astype(jnp.float32)
    scores = jnp.einsum("btnh,bsnh->bnts", q.astype(jnp.float32), k) * 0.07
    return jnp.einsum("bnts,bsne->btne", softmax(scores).astype(v.dtype), v)


PROGRAMS = [by_concatenation, rotary_first, heads_first, tiled]


@pytest.mark.parametrize("program", PROGRAMS)
def test_found_in_programs(program: Callable[..., Any]) -> None:
    """The kernel reads no joined keys; elsewhere the numbers are as before."""
    x = drawn(72)
    structs = {n: jax.ShapeDtypeStruct((2, 2048, 8, y.shape[3]), y.dtype)
               if n != "common" else jax.ShapeDtypeStruct((2, 2048, 1, 64), y.dtype)
               for n, y in x.items()}  # fmt: skip
    forced = {"attention": "hopper"}
    fast = rewriter.optimize(lambda x: program(**x), implementation=forced)
    artifact = rewriter.export(
        lambda x: program(**x), platforms=("cuda",), implementation=forced
    )(structs)
    lines = artifact.exported.mlir_module().splitlines()
    (call,) = [line for line in lines if "mosaic_gpu_v2" in line]
    assert "2x2048x1x64xbf16" in call
    assert call.count("2x2048x8x192xbf16") == 1  # the queries
    np.testing.assert_allclose(
        np.asarray(fast(x), np.float32), np.asarray(program(**x), np.float32), 0, 3e-2
    )


def of_the_batch(q: Any, own: Any, common: Any, v: Any) -> Any:
    """A part that all sequences share, and heads do not."""
    wide = jnp.broadcast_to(common[:1, :1, :, :1], (*own.shape[:3], 64))
    wide = wide * own[:1, :, :, :64]
    k = jnp.concatenate([own, jnp.broadcast_to(wide[:1], (*own.shape[:3], 64))], -1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.07
    return jnp.einsum("bnts,bsne->btne", softmax(scores).astype(v.dtype), v)


def by_position(q: Any, own: Any, common: Any, v: Any) -> Any:
    """Rows in another order for each head."""
    wide = jnp.tile(common[:, :, 0], (1, own.shape[2], 1)).reshape(*own.shape[:3], 64)
    k = jnp.concatenate([own, wide], -1)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.07
    return jnp.einsum("bnts,bsne->btne", softmax(scores).astype(v.dtype), v)


def shared(program: Callable[..., Any], x: Any) -> bool:
    """Whether a site of the optimized program reads a shared part."""
    fast = rewriter.optimize(program, implementation={"attention": "hopper"})
    return "shared=" in str(jax.make_jaxpr(fast)(**x))


def test_look_alikes_are_joined() -> None:
    x = drawn(64)
    for program in (of_the_batch, by_position):
        assert not shared(program, x)
        fast = rewriter.optimize(program, implementation={"attention": "hopper"})
        want = np.asarray(program(**x), np.float32)
        np.testing.assert_allclose(np.asarray(fast(**x), np.float32), want, 0, 3e-2)
    one = {n: y[:, :, :1] for n, y in x.items()}
    alone = {n: y[:1] for n, y in x.items()}  # reshapes lie behind its keys
    assert shared(by_concatenation, x)
    assert shared(by_concatenation, alone)
    assert not shared(by_concatenation, one)


def test_transformed_it_is_the_site() -> None:
    x = {n: y.astype("float32") for n, y in drawn(32, n=2).items()}
    fast = rewriter.optimize(by_concatenation, implementation={"attention": "hopper"})
    assert shared(by_concatenation, x)
    for name in x:

        def loss(f: Any, y: Any, name: str = name) -> Any:
            return (f(**{**x, name: y}) ** 2).sum()

        want = jax.grad(lambda y: loss(by_concatenation, y))(x[name])
        got = jax.grad(lambda y: loss(fast, y))(x[name])
        np.testing.assert_allclose(got, want, 1e-3, 1e-3)
    many = {n: np.stack([y, 2 * y]) for n, y in x.items()}
    each = lambda f: jax.vmap(lambda x: f(**x))(many)
    np.testing.assert_allclose(each(fast), each(by_concatenation), 1e-3, 1e-3)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("s", [256, 200])
def test_numbers(s: int) -> None:
    x = drawn(s, n=8)
    for program in PROGRAMS:
        fast = rewriter.optimize(program, implementation={"attention": "hopper"})
        want = np.asarray(jax.jit(program)(**x), np.float32)
        np.testing.assert_allclose(np.asarray(fast(**x), np.float32), want, 0, 2e-2)
