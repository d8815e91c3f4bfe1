"""Attention on Hopper: its kernels are lowered without such a GPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.hopper.backward_config import BackwardTiles
from rewriter.kernels.attention.hopper.config import Tiles
from rewriter.measure.programs import Task, function
from rewriter.ops.registry import registry
from rewriter.site.implementation import Implementation, settings
from tests.kernels.attention.test_hopper import CAUSAL, H200, X, spec

LOWERED = {
    "odd": ((2, 257, 300, 4, 2, 64, 64), {"window": (100, 0)}, (128, 4, 3)),
    "average": (
        (2, 257, 300, 4, 2, 128, 128),
        {"window": CAUSAL, "empty_rows": "mean", "lengths": True},
        (160, 2, 2),
    ),
    "prefix": (
        (2, 257, 300, 4, 2, 64, 64),
        {"window": CAUSAL, "prefix": True},
        (128, 4, 3),
    ),
    "soft cap": ((1, 64, 64, 2, 2, 64, 64), {"softcap": 30.0}, (128, 4, 3, 0)),
    "wide": ((1, 257, 300, 4, 2, 256, 256), {"window": CAUSAL}, (80, 2, 2)),
    "other values": ((1, 300, 300, 2, 2, 192, 128), {}, (64, 2, 2)),
    "width of 80": ((1, 300, 300, 2, 2, 80, 80), {}, (96, 2, 2)),
    "width of 72": ((1, 300, 300, 2, 2, 72, 40), {}, (96, 2, 2)),
}


@pytest.mark.parametrize("name", LOWERED)
def test_it_is_lowered_without_a_gpu(name: str) -> None:
    (b, t, s, n, heads, h, e), params, tiles = LOWERED[name]
    params = dict(params)
    sizes = {"q": (b, t, n, h), "k": (b, s, heads, h), "v": (b, s, heads, e)}
    given = {i: jax.ShapeDtypeStruct(x, jnp.bfloat16) for i, x in sizes.items()}
    if params.pop("lengths", False):
        given["kv_lengths"] = jax.ShapeDtypeStruct((b,), jnp.int32)
    if params.pop("prefix", False):
        given["prefix"] = jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(given: Any) -> Any:
        more = {"residuals": True, "config": Tiles(*tiles)}
        return hopper.forward(**given, **more, **params)

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(given)
    assert [x.shape for x in exported.out_avals] == [(b, t, n, e), (b, n, t)]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_lowered_with_each_config(fused: bool) -> None:
    """As the autotuner builds them, for a GPU that is not there."""
    given = spec(window=CAUSAL, scale=0.125)
    tiles = BackwardTiles(64, 64, 2, fused=fused)
    if not hopper.fits_backward(tiles, given, H200).ok:
        pytest.skip(f"jax {jax.__version__} cannot add up dq in memory")
    of = registry()
    task = Task(
        of.op("attention"), given, tuple(of.kernels("attention")), "forward_and_vjp"
    )
    made = Implementation("hopper", "", None, settings(tiles))
    lower = jax.export.export(jax.jit(function(task, made)), platforms=["cuda"])
    exported = lower({"q": X, "k": X, "v": X}, X)
    names = [f"attention_{x}" for x in (("backward",) if fused else ("dk_dv", "dq"))]
    text = exported.mlir_module()
    assert all(name in text for name in ("attention", *names))
    assert text.count("mosaic_gpu_v2") == 1 + len(names)


@pytest.mark.once
@pytest.mark.parametrize(
    ("t", "h", "e"),
    [(200, 40, 40), (200, 72, 72), (200, 96, 96), (200, 112, 48), (203, 64, 32)],
)
def test_every_config_offered_for_other_sizes_is_lowered(
    t: int, h: int, e: int
) -> None:
    """Their tiles and swizzles follow the widths, in operands of a product alike."""
    q, v = (jax.ShapeDtypeStruct((1, t, 2, x), jnp.bfloat16) for x in (h, e))
    given = spec(shape=q.shape, values=e)
    offered = hopper.backward_configs(given, H200)
    fitting = [x for x in offered if hopper.fits_backward(x, given, H200).ok]
    assert any(x.fused for x in fitting) == (jax.__version_info__ >= (0, 11))

    def run(q: Any, v: Any) -> Any:
        out, kept = hopper.forward(q=q, k=q, v=v, residuals=True)
        more = {"out": out, "residuals": kept, "cotangent": v}
        return [hopper.backward(q=q, k=q, v=v, **more, config=x) for x in fitting]

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(q, v)
    kernels = 1 + sum(1 if x.fused else 2 for x in fitting)
    assert exported.mlir_module().count("mosaic_gpu_v2") == kernels


@pytest.mark.parametrize("h", [16, 32, 64])
@pytest.mark.parametrize("given", [{}, {"window": CAUSAL}, {"bias": (1, 2, 1, 197)}])
def test_odd_lengths_are_read_and_written_in_place(
    h: int, given: dict[str, Any]
) -> None:
    """Heads as wide as a tile are copied row by row: nothing is padded or sliced."""
    x = jax.ShapeDtypeStruct((64, 197, 2, h), jnp.bfloat16)
    more = dict(given)
    bias = more.pop("bias", None)
    other = {} if bias is None else {"bias": jax.ShapeDtypeStruct(bias, jnp.float32)}

    def both(q: Any, k: Any, v: Any, up: Any, other: Any) -> Any:
        call = functools.partial(hopper.forward, q=q, k=k, v=v, **other, **more)
        out, kept = call(residuals=True)
        back = functools.partial(hopper.backward, q=q, k=k, v=v, **other, **more)
        grads = back(out=out, residuals=kept, cotangent=up)
        return out, *(grads[name] for name in "qkv")

    moves = {"pad", "slice", "concatenate", "transpose", "dynamic_slice", "gather"}
    large = [
        e for e in jax.make_jaxpr(both)(x, x, x, x, other).eqns
        if e.primitive.name in moves and e.invars[0].aval.size >= math.prod(x.shape)
    ]  # fmt: skip
    assert not large


def test_rows_without_keys_need_no_condition() -> None:
    """Their share in gradients is computed by the kernels for dk, dv and dq."""
    x = jax.ShapeDtypeStruct((2, 200, 2, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((2, 1, 1, 200), bool)
    more = {"empty_rows": "mean_passing", "softcap": 9.0}

    def run(q: Any, mask: Any) -> Any:
        given = {"q": q, "k": q, "v": q, "mask": mask, **more}
        out, kept = hopper.forward(**given, residuals=True)
        grads = hopper.backward(**given, out=out, residuals=kept, cotangent=q)
        return [grads[name] for name in "qkv"]

    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(x, mask)
    text = exported.mlir_module()
    assert text.count("mosaic_gpu_v2") == 3
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text
