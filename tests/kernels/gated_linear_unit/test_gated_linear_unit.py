"""The gated linear unit, as a site, under every transformation against float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.gated_linear_unit import xla
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.kernel import spec_of
from rewriter.ops.registry import registry
from rewriter.site import site
from tests import slow
from tests.support import transforms

KERNELS = (("default", "memory_bounded"),)
WEIGHTS = {"x": (3, 4), "w_gate": (4, 5), "w_up": (4, 5)}
BIASES = {"b_gate": (5,), "b_up": (5,)}
ADDED = {"rows_gate": (3, 5), "rows_up": (3, 5)}
CLAMPED = {
    "activation": "swish", "beta": 1.702, "clip_gate": (None, 0.5),
    "clip_up": (-0.5, 0.5), "up_shift": 1.0,
}  # fmt: skip
FEW = ("jit_grad", "jvp", "hessian", "vmap_of_grad", "grad_of_vmap_first")


def _both(
    shapes: dict[str, tuple[int, ...]], params: dict[str, Any], dtype: str = "float32"
) -> tuple[Any, Any, list[jax.Array]]:
    op = registry().op("gated_linear_unit")
    specs = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in shapes.items()}
    operands = op.sample(jax.random.key(2), specs, params)

    def bound(*args: jax.Array) -> jax.Array:
        return site.bind(op, dict(zip(shapes, args, strict=True)), params, KERNELS)

    def plain(*args: jax.Array) -> jax.Array:
        return op.reference(**dict(zip(shapes, args, strict=True)), **params)

    return bound, plain, [operands[n] for n in shapes]


@pytest.mark.parametrize("transform", transforms.EACH)
def test_every_transform_agrees_with_float64(transform: str) -> None:
    transforms.check(transform, *_both({**WEIGHTS, **BIASES, **ADDED}, {}))


@pytest.mark.parametrize("transform", transforms.LOW_PRECISION)
def test_bfloat16_is_as_accurate_as_the_reference(transform: str) -> None:
    transforms.check(transform, *_both(WEIGHTS, {}, "bfloat16"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transform", slow.first(1, ["jit_grad", "jvp_of_last_float"]))
def test_every_activation_agrees_with_float64(transform: str, activation: str) -> None:
    params = {"activation": activation, "beta": 0.7}
    transforms.check(transform, *_both(WEIGHTS, params))


@pytest.mark.parametrize("transform", FEW)
def test_clamped_branches_agree_with_float64(transform: str) -> None:
    transforms.check(transform, *_both({**WEIGHTS, "b_up": (5,)}, CLAMPED))


@pytest.mark.parametrize(
    ("transform", "rows"),
    slow.unless(
        lambda transform, rows: transform == "jit_grad" or rows == 9,
        itertools.product(["jit", "jit_grad", "vmap_of_grad"], [3, 4, 8, 9, 11]),
        several=True,
    ),
)
def test_blocks_of_rows_and_a_rest_agree_with_float64(
    transform: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla, "DEFAULT", xla.Block(rows=4))
    shapes = {**WEIGHTS, **BIASES, "x": (rows, 4), "rows_up": (rows, 5)}
    transforms.check(transform, *_both(shapes, CLAMPED))


def test_no_rows() -> None:
    bound, _, args = _both({**WEIGHTS, "x": (2, 0, 4)}, {})
    grads = jax.grad(lambda *a: bound(*a).sum(), (0, 1))(*args)
    assert bound(*args).shape == (2, 0, 5)
    assert [g.shape for g in grads] == [(2, 0, 4), (4, 5)]


def test_activations_are_jaxs() -> None:
    x = jnp.linspace(-4, 4, 41)
    for name, theirs in {
        "silu": jax.nn.silu, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid,
        "gelu_tanh": jax.nn.gelu, "gelu_erf": lambda x: jax.nn.gelu(x, False),
        "relu6": jax.nn.relu6, "hard_sigmoid": jax.nn.hard_sigmoid,
        "hard_silu": jax.nn.hard_silu, "elu": jax.nn.elu, "celu": jax.nn.celu,
        "selu": jax.nn.selu, "softplus": jax.nn.softplus, "mish": jax.nn.mish,
    }.items():  # fmt: skip
        np.testing.assert_allclose(ACTIVATIONS[name](x, 1.0), theirs(x), atol=2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_none(activation: str) -> None:
    """NaN of a branch is NaN of the product, as of ``max(x, 0)``, and of no other."""
    params = {"activation": activation, "beta": 0.7}
    _, _, args = _both({**WEIGHTS, "x": (7, 4)}, params)
    for given, want in with_nan(dict(zip(WEIGHTS, args, strict=True))):
        out, grads = _gradients(given, params)
        np.testing.assert_array_equal(np.isnan(out), want)
        _, plain = jax.vjp(
            lambda x: registry().op("gated_linear_unit").reference(**x, **params), given
        )
        for name, g in plain(jnp.ones_like(out))[0].items():
            assert np.isfinite(np.asarray(grads[name])[np.isfinite(g)]).all(), name


def with_nan(given: dict[str, Any]) -> Any:
    """Yields operands with NaN in a row or a column, and where the result is NaN."""
    rows, f = given["x"].shape[0], given["w_gate"].shape[1]
    for name, at in (
        ("x", (rows - 2, 1)),
        ("w_gate", (1, f - 2)),
        ("w_up", (1, f - 2)),
    ):
        made = jnp.asarray(given[name]).at[at].set(jnp.nan)
        want = np.zeros((rows, f), bool)
        want[(at[0], slice(None)) if name == "x" else (slice(None), at[1])] = True
        yield {**given, name: made}, want


def _gradients(given: dict[str, Any], params: dict[str, Any]) -> Any:
    block = xla.Block(rows=4)  # of which the last one has rows left over
    out, kept = xla.forward(**given, **params, residuals=True, config=block)
    up = jnp.ones_like(out)
    return out, xla.backward(
        **given, **params, out=None, residuals=kept, cotangent=up, config=block
    )


def test_the_gradient_keeps_the_operands_alone() -> None:
    shapes = {**WEIGHTS, "x": (64, 4), "w_gate": (4, 32), "w_up": (4, 32)}
    bound, _, args = _both(shapes, {})
    _, back = jax.eval_shape(lambda *a: jax.vjp(bound, *a), *args)
    kept = {leaf.shape for leaf in jax.tree.leaves(back)}
    assert (64, 32) not in kept


def test_blocks_need_less_memory_than_the_reference() -> None:
    f = 256
    shapes = {"x": (8192, 32), "w_gate": (32, f), "w_up": (32, f)}
    bound, plain, args = _both(shapes, {})

    def temporary(function: Any) -> int:
        grad = jax.jit(jax.grad(lambda *a: (function(*a) ** 2).sum(), (0, 1, 2)))
        memory = grad.lower(*args).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    assert temporary(bound) < 0.7 * temporary(plain)


@pytest.mark.parametrize(
    ("changed", "params", "code"),
    [
        ({"x": ((3, 4), "int32")}, {}, "dtype"),
        ({"w_up": ((4, 1, 5), "float32")}, {}, "shape"),
        ({}, {"activation": "softmax"}, "activation"),
    ],
)
def test_supports_refuses_with_a_reason(
    changed: dict[str, Any], params: dict[str, Any], code: str
) -> None:
    kernels = registry().kernels("gated_linear_unit")
    kernel = next(k for k in kernels if k.name == "memory_bounded")
    operands = {n: (s, "float32") for n, s in WEIGHTS.items()} | changed
    structs = {n: jax.ShapeDtypeStruct(*v) for n, v in operands.items()}
    spec = spec_of(registry().op("gated_linear_unit"), structs, params)
    assert [r.code for r in kernel.supports(spec).reasons] == [code]
