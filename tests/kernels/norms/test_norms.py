"""RMSNorm and LayerNorm, as sites, under every transformation against float64."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.site import site
from tests import slow
from tests.support import transforms
from tests.support.kernels import extreme_rows

CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "rms": ("rms_norm", {"x": (3, 4, 5)}, {"eps": 1e-6}),
    "rms_scale": ("rms_norm", {"x": (3, 5), "scale": (5,)}, {"eps": 1e-2}),
    "rms_traced": (
        "rms_norm", {"x": (3, 5), "scale": (5,), "epsilon": ()}, {},
    ),
    "rms_row": ("rms_norm", {"x": (5,), "scale": (5,)}, {"eps": 1e-6}),
    "layer": ("layer_norm", {"x": (3, 4, 5)}, {"eps": 1e-5}),
    "layer_scale_bias": (
        "layer_norm", {"x": (3, 5), "scale": (5,), "bias": (5,)}, {"eps": 1e-3},
    ),
    "layer_traced": ("layer_norm", {"x": (3, 5), "bias": (5,), "epsilon": ()}, {}),
}  # fmt: skip

MAIN = ("rms_scale", "layer_scale_bias")
"""Cases that go through every transformation; the others through a few."""

FEW = ("jit_grad", "jvp", "vmap_of_grad", "grad_of_vmap_first")


def _both(case: str, dtype: str) -> tuple[Any, Any, list[jax.Array]]:
    name, shapes, params = CASES[case]
    op = registry().op(name)
    specs = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in shapes.items()}
    operands = op.sample(jax.random.key(1), specs, params)
    kernels = (("default", "memory_bounded"),)

    def bound(*args: jax.Array) -> jax.Array:
        return site.bind(op, dict(zip(shapes, args, strict=True)), params, kernels)

    def plain(*args: jax.Array) -> jax.Array:
        return op.reference(**dict(zip(shapes, args, strict=True)), **params)

    return bound, plain, [operands[n] for n in shapes]


@pytest.mark.parametrize("transform", transforms.EACH)
@pytest.mark.parametrize("case", slow.first(1, MAIN))
def test_every_transform_agrees_with_float64(case: str, transform: str) -> None:
    transforms.check(transform, *_both(case, "float32"))


@pytest.mark.parametrize("transform", FEW)
@pytest.mark.parametrize("case", slow.first(4, sorted(set(CASES) - set(MAIN))))
def test_optional_operands_agree_with_float64(case: str, transform: str) -> None:
    transforms.check(transform, *_both(case, "float32"))


@pytest.mark.parametrize(
    ("case", "transform"),
    slow.unless(
        lambda case, transform: case == MAIN[0] or transform in FEW,
        itertools.product(MAIN, transforms.LOW_PRECISION),
        several=True,
    ),
)
def test_bfloat16_is_as_accurate_as_the_reference(case: str, transform: str) -> None:
    transforms.check(transform, *_both(case, "bfloat16"))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_extreme_rows_are_as_exact_as_the_formula(name: str) -> None:
    kernel = next(k for k in registry().kernels(name) if k.name == "memory_bounded")

    @functools.partial(jax.jit, static_argnums=2)
    def run(given: Any, up: Any, eps: float) -> Any:
        out, kept = kernel.forward(**given, eps=eps, residuals=True)
        assert kernel.backward is not None
        return {"out": out} | kernel.backward(
            **given, eps=eps, out=None, residuals=kept, cotangent=up
        )

    extreme_rows.check(name, 256, run)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_result_dtype_is_the_one_asked_for(name: str) -> None:
    x = jnp.ones((2, 8), jnp.bfloat16)
    op = registry().op(name)
    out = site.bind(
        op, {"x": x}, {"out_dtype": "float32"}, (("default", "memory_bounded"),)
    )
    assert out.dtype == jnp.float32
    assert site.bind(op, {"x": x}).dtype == jnp.bfloat16


def test_rms_norm_of_known_rows() -> None:
    out = site.bind(
        registry().op("rms_norm"), {"x": jnp.array([[3.0, 4.0]])}, {},
        (("default", "memory_bounded"),),
    )  # fmt: skip
    assert jnp.allclose(out, jnp.array([[3.0, 4.0]]) / 12.5**0.5)


def test_layer_norm_of_known_rows() -> None:
    out = site.bind(
        registry().op("layer_norm"), {"x": jnp.array([[1.0, 3.0]])}, {"eps": 3.0},
        (("default", "memory_bounded"),),
    )  # fmt: skip
    assert jnp.allclose(out, jnp.array([[-0.5, 0.5]]))


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_the_gradient_keeps_no_wide_copy_of_a_narrow_input(name: str) -> None:
    op = registry().op(name)

    def normed(x: jax.Array) -> jax.Array:
        kernels = (("default", "memory_bounded"),)
        return site.bind(op, {"x": x}, {"eps": 1e-6}, kernels)

    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    _, back = jax.eval_shape(lambda x: jax.vjp(normed, x), x)
    kept = [a for a in jax.tree.leaves(back) if a.dtype == jnp.float32]
    assert all(a.size <= 64 for a in kept)


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"), [((2, 3), "int32", (3,)), ((2, 3), "float32", (1,))]
)
def test_supports_refuses_with_a_reason(shape: Any, dtype: str, scale: Any) -> None:
    for name in ("rms_norm", "layer_norm"):
        kernels = registry().kernels(name)
        spec = spec_of(
            registry().op(name),
            {
                "x": jax.ShapeDtypeStruct(shape, dtype),
                "scale": jax.ShapeDtypeStruct(scale, "float32"),
            },
            {},
        )
        assert all(kernel.supports(spec).reasons for kernel in kernels)
