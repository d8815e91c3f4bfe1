"""The unit of stored matrices, as a site, under transformations against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.gated_linear_unit import STORED as OP
from rewriter.kernels.gated_linear_unit import stored
from rewriter.ops import device
from rewriter.ops.kernel import spec_of
from rewriter.ops.stored import FEW_BITS, numbers_of
from rewriter.site import site
from tests import slow
from tests.support import transforms

R = np.random.default_rng(0)
M, K, F = 3, 16, 13


def operands(
    dtype: str = "float32", kind: str = "int8", halves: str | None = None
) -> dict[str, Any]:
    made = {"x": jnp.asarray(R.standard_normal((M, K)), dtype)}
    for name in ("w_gate", "w_up")[: 1 if halves else 2]:
        n = 2 * F if halves else F
        made[name] = numbers_of(jnp.asarray(R.standard_normal((K, n)), "float32"), kind)
        made[f"{name}_scale"] = jnp.asarray(R.uniform(0.01, 0.03, (2, n)), dtype)
        made[f"{name}_zero"] = jnp.asarray(R.integers(-3, 3, (1, n)), dtype)
    made["b_up"] = jnp.asarray(R.standard_normal(F), dtype)
    made["rows_gate"] = jnp.asarray(R.standard_normal((M, F)), dtype)
    return made


def both(given: dict[str, Any], **params: Any) -> tuple[Any, Any, list[Any]]:
    """The site, its reference, and the float operands of both."""
    kept = {n: x for n, x in given.items() if n in ("w_gate", "w_up")}
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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = stored.Block(4)
    monkeypatch.setattr(stored, "Block", lambda *columns: small)


FEW = ("jit_grad", "vmap_one_operand")


@pytest.mark.once
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "transform", slow.unless(lambda name: name in FEW, transforms.TRANSFORMS)
)
def test_every_transform_agrees_with_float64(transform: str) -> None:
    transforms.check(transform, *both(operands()))


@pytest.mark.once
@pytest.mark.parametrize("halves", [None, "gate_up", "up_gate"])
@pytest.mark.parametrize("kind", FEW_BITS)
def test_blocks_give_what_the_whole_gives(kind: str, halves: str | None) -> None:
    given = operands("bfloat16", kind, halves)
    params = {**OP.defaults, "halves": halves, "out_dtype": "float32"}
    want = OP.reference(**given, **params)
    for columns in (4, 8, 64):
        got = stored.KERNEL.forward(**given, **params, config=stored.Block(columns))
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.once
@pytest.mark.parametrize("halves", [None, "up_gate"])
def test_cotangents_of_rows(halves: str | None) -> None:
    given = operands(halves=halves)
    params = {**OP.defaults, "halves": halves}
    x, rest = given["x"], {n: a for n, a in given.items() if n != "x"}
    out, back = jax.vjp(lambda x: OP.reference(x=x, **rest, **params), x)
    cotangent = jnp.asarray(R.standard_normal(out.shape), out.dtype)
    (want,) = back(cotangent)
    config = stored.Block(4)
    got = stored.KERNEL.backward(**given, cotangent=cotangent, **params, config=config)
    np.testing.assert_allclose(got["x"], want, atol=1e-5 * np.abs(want).max())


@pytest.mark.once
def test_no_block_holds_a_widened_matrix() -> None:
    given = {
        "x": jax.ShapeDtypeStruct((1, 512), jnp.float32),
        "w_gate": jax.ShapeDtypeStruct((512, 4096), jnp.int8),
        "w_up": jax.ShapeDtypeStruct((512, 4096), jnp.int8),
        "w_gate_scale": jax.ShapeDtypeStruct((1, 4096), jnp.float32),
        "w_up_scale": jax.ShapeDtypeStruct((1, 4096), jnp.float32),
    }
    run = jax.jit(lambda given: stored.KERNEL.forward(**given, **OP.defaults))
    memory = run.lower(given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 4096


@pytest.mark.once
def test_samples_and_cost() -> None:
    structs = {
        "x": jax.ShapeDtypeStruct((16, 64), jnp.bfloat16),
        "w_gate": jax.ShapeDtypeStruct((64, 96), jnp.int8),
        "w_gate_scale": jax.ShapeDtypeStruct((2, 96), jnp.bfloat16),
    }
    params = {**OP.defaults, "halves": "gate_up"}
    made = OP.sample(jax.random.key(0), structs, params)
    for name, want in structs.items():
        assert (made[name].shape, made[name].dtype) == (want.shape, want.dtype)
    out = OP.reference(**made, **params)
    assert out.shape == (16, 48)
    shapes = {n: s.shape for n, s in structs.items()}
    dtypes = {n: s.dtype.name for n, s in structs.items()}
    assert OP.cost(shapes, dtypes, params).flops == 2 * 16 * 64 * 96
    assert OP.spread(params).along == {"..."}
    assert "f" in OP.spread(OP.defaults).along


@pytest.mark.once
def test_it_is_chosen_on_a_cpu_for_few_rows_and_large_matrices() -> None:
    def use(m: int, k: int, f: int) -> Any:
        given = {"x": jax.ShapeDtypeStruct((m, k), "float32"),
                 "w_gate": jax.ShapeDtypeStruct((k, f), "int8"),
                 "w_up": jax.ShapeDtypeStruct((k, f), "int8")}  # fmt: skip
        return spec_of(OP, given, {})

    assert stored.profitable(use(1, 2048, 8192), "cpu").ok
    for spec, platform in (
        (use(1, 128, 128), "cpu"),
        (use(4096, 2048, 8192), "cpu"),
        (use(1, 2048, 8192), "cuda"),
    ):
        assert not stored.profitable(spec, platform).ok
    assert stored.SPACE.default(use(1, 8192, 8192), device.attached()).columns == 64
