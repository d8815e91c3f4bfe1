"""Attention to stored keys and values, as a site, under every transformation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.attention import KERNELS, xla
from rewriter.kernels.attention import STORED as OP
from rewriter.kernels.attention.xla import stored
from rewriter.ops.kernel import spec_of
from rewriter.ops.stored import FEW_BITS, numbers_of
from rewriter.site import site
from tests import slow
from tests.support import transforms

pytestmark = pytest.mark.once

B, T, S, N, K, H = 2, 3, 20, 4, 2, 8
OWN = {k.name: k for k in KERNELS if k.op == OP.name}
KERNEL = OWN["memory_bounded"]
SMALL = xla.Blocks(2, 8, 64, 64)


def operands(dtype: str = "float32", kind: str = "int8") -> dict[str, Any]:
    r = np.random.default_rng(0)  # the same in every test, in whatever order they run
    draw = lambda *shape: jnp.asarray(r.standard_normal(shape), "float32")
    positive = lambda *shape: jnp.asarray(r.uniform(0.01, 0.03, shape), dtype)
    return {
        "q": draw(B, T, N, H).astype(dtype),
        "k": numbers_of(draw(B, S, K, H), kind),
        "v": numbers_of(draw(B, S, K, H), kind),
        "k_scale": positive(B, S, K, 1),
        "k_zero": jnp.ones((1, S, K, 1), dtype),  # one of all tokens would cancel
        "v_scale": positive(1, S, 1, H),
    }


STEPS = {"widen_k": "float32 -zero *scale", "widen_v": "float32 *scale"}


def both(given: dict[str, Any], **params: Any) -> tuple[Any, Any, list[Any]]:
    """The site, its reference, and the float operands of both."""
    kept = {n: given[n] for n in "kv"}
    names = [n for n in given if n not in kept]
    params = {**OP.defaults, **params}

    def arrays(args: Any) -> dict[str, Any]:
        found = kept | dict(zip(names, args, strict=True))
        return {n: found[n] for n in OP.names if n in found}

    def bound(*args: Any) -> Any:
        kernels = (("default", "memory_bounded"),)
        return site.bind(OP, arrays(args), params, kernels)

    def plain(*args: Any) -> Any:
        return OP.reference(**arrays(args), **params)

    return bound, plain, [given[n] for n in names]


@pytest.mark.parametrize(
    "transform",
    slow.unless(lambda name: name in ("jit_grad",), transforms.TRANSFORMS),
)
def test_every_transform_agrees_with_float64(transform: str) -> None:
    transforms.check(transform, *both(operands(), **STEPS, window=(None, 0), shift=9))


@pytest.mark.parametrize("kind", FEW_BITS)
def test_tiles_give_what_the_whole_gives(kind: str) -> None:
    given = operands("bfloat16", kind)
    params = {**OP.defaults, **STEPS, "out_dtype": "float32", "scale": 0.3}
    want = OP.reference(**given, **params)
    got = jax.jit(lambda given: KERNEL.forward(**given, **params, config=SMALL))(given)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_keys_may_be_stored_and_values_not() -> None:
    given = operands()
    del given["v_scale"]
    given["v"] = given["v"].astype("float32")
    params = {**OP.defaults, "widen_k": STEPS["widen_k"]}
    want = OP.reference(**given, **params)
    got = KERNEL.forward(**given, **params, config=SMALL)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_samples_cost_and_sharding() -> None:
    structs = {
        "q": jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.bfloat16),
        "k": jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.int8),
        "v": jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.float8_e4m3fn),
        "k_scale": jax.ShapeDtypeStruct((2, 128, 2, 1), jnp.bfloat16),
    }
    params = {**OP.defaults, "widen_k": "bfloat16 *scale", "widen_v": "bfloat16"}
    made = OP.sample(jax.random.key(0), structs, params)
    for name, want in structs.items():
        assert (made[name].shape, made[name].dtype) == (want.shape, want.dtype)
    assert 0.3 < float(jnp.std(made["k"] * made["k_scale"].astype("float32"))) < 3
    shapes = {n: s.shape for n, s in structs.items()}
    dtypes = {n: s.dtype.name for n, s in structs.items()}
    assert OP.cost(shapes, dtypes, params).bytes == 2 * 2 * 128 * 2 * 64 + 2 * 2048
    assert OP.spread(params).ring is None
    spec = spec_of(OP, structs, params)
    assert stored.supports(spec).ok
    assert not stored.profitable(spec, "cuda").ok
