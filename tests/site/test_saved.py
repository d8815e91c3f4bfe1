"""A kernel saves what it says, and nothing is traced to know it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter import errors
from rewriter.ops.kernel import PLATFORMS, Kernel
from rewriter.ops.registry import registry
from rewriter.site.site import bind
from rewriter.site.uses import shaped

pytestmark = pytest.mark.once

LABELS = ("int32", (2, 3))
USES: dict[str, dict[str, Any]] = {
    "attention": dict.fromkeys("qkv", (2, 8, 2, 4)),
    "scored_attention": dict.fromkeys("qkv", (2, 8, 2, 4)),
    "rms_norm": {"x": (2, 3, 4), "scale": (4,)},
    "layer_norm": {"x": (2, 3, 4), "bias": (4,)},
    "gated_linear_unit": {"x": (2, 3, 4), "w_gate": (4, 6), "w_up": (4, 6)},
    "ragged_dot": {"lhs": (6, 4), "rhs": (2, 4, 3), "group_sizes": ("int32", (2,))},
    "cross_entropy": {"logits": (2, 3, 8), "labels": LABELS},
    "linear_cross_entropy": {"x": (2, 3, 4), "w": (4, 8), "labels": LABELS},
}
"""Shapes of operands by op; floats but where the dtype is said."""


def operands(op: str, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """The operands of a use, the floats of one dtype."""
    pairs = {n: s if isinstance(s[0], str) else (dtype, s) for n, s in USES[op].items()}
    return {n: jax.ShapeDtypeStruct(s, d) for n, (d, s) in pairs.items()}


def stating(op: str) -> list[Kernel]:
    """The kernels of an op that say what they save."""
    return [k for k in registry().kernels(op) if k.traits.saves is not None]


def test_only_the_largest_unit_of_experts_is_traced_to_know_what_it_saves() -> None:
    """Kernels of several platforms are asked; Pallas takes long to import and trace."""
    traced = {
        op
        for op in registry().ops()
        for kernel in registry().kernels(op)
        if kernel.traits.saves is None
        and set(kernel.platforms) < set(PLATFORMS)
        and not kernel.traits.needs_devices
    }
    assert traced == {
        "ragged_gated_linear_unit", "quantized_ragged_gated_linear_unit"
    }  # fmt: skip


def test_the_plain_kernel_of_each_op_with_gradients_says_what_it_saves() -> None:
    for op in USES:
        assert "memory_bounded" in [k.name for k in stating(op)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("op", USES)
def test_a_kernel_saves_what_it_says(op: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        given = operands(op, dtype)
        known = registry().op(op)
        spec = spec_of(known, given)
        kernels = [k for k in stating(op) if k.limits.supports(spec).ok]
        assert "memory_bounded" in [k.name for k in kernels]
        for kernel in kernels:
            call = lambda by=kernel, **x: by.forward(
                **x, **dict(spec.params), residuals=True
            )
            _, saved = jax.eval_shape(call, **given)
            assert kernel.traits.saves is not None
            stated = [(tuple(s), jnp.dtype(d)) for s, d in kernel.traits.saves(spec)]
            assert stated == [shaped(x) for x in saved]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["hopper", "mosaic_tpu", "memory_bounded"])
@pytest.mark.parametrize("bias", [None, "float32"])
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 64, 4, 64), (2, 64, 2, 64), (2, 64, 2, 32)),
        ((3, 1, 8, 128), (3, 512, 2, 128), (3, 512, 2, 128)),
        ((2, 1, 8, 64), (2, 256, 8, 64), (2, 256, 8, 64)),
        ((1, 200, 3, 40), (1, 77, 3, 40), (1, 77, 3, 40)),
    ],
)
def test_attention_saves_numbers_of_each_row(
    q: Any, k: Any, v: Any, bias: str | None, name: str, dtype: str
) -> None:
    given = {
        n: jax.ShapeDtypeStruct(s, dtype) for n, s in zip("qkv", (q, k, v), strict=True)
    }
    if bias:
        given["bias"] = jax.ShapeDtypeStruct((1, q[2], q[1], k[1]), bias)
    kernel = registry().kernel("attention", name)
    assert kernel is not None
    assert kernel.traits.saves is not None
    spec = spec_of(registry().op("attention"), given)
    if kernel.limits.supports(spec).ok:
        call = lambda **x: kernel.forward(**x, scale=0.1, residuals=True)
        _, saved = jax.eval_shape(call, **given)
        stated = [(tuple(s), jnp.dtype(d)) for s, d in kernel.traits.saves(spec)]
        assert stated == [shaped(x) for x in saved]


def spec_of(op: Any, given: dict[str, jax.ShapeDtypeStruct]) -> Any:
    """The use of an op with its usual parameters."""
    from rewriter.ops.kernel import spec_of as made

    return made(op, given, op.defaults)


def counting(**wrong: Any) -> tuple[Kernel, list[int]]:
    """The plain kernel of RMS norm, and how often it was called."""
    kernel = registry().kernel("rms_norm", "memory_bounded")
    assert kernel is not None
    calls: list[int] = []

    def forward(**given: Any) -> Any:
        calls.append(1)
        return kernel.forward(**given)

    return dataclasses.replace(kernel, forward=forward, **wrong), calls


def site(kernel: Kernel) -> Any:
    """RMS norm by a kernel, as a function of x."""
    op = registry().op("rms_norm")
    kernels = [(p, kernel) for p in PLATFORMS]
    return lambda x: bind(op, {"x": x}, {"eps": 1e-6}, kernels)


def test_a_kernel_is_first_traced_where_it_is_lowered() -> None:
    kernel, calls = counting()
    traced = jax.jit(jax.grad(lambda x: site(kernel)(x).sum())).trace(jnp.ones((4, 8)))
    assert not calls
    traced.lower()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        (lambda spec: [(spec.shape("x")[:1], "float32")] * 2, "returned 1 residuals"),
        (lambda spec: [(spec.shape("x"), "float32")], "returned float32"),
    ],
)
def test_a_kernel_that_saves_something_else_is_refused(saves: Any, said: str) -> None:
    kernel, _ = counting(saves=saves)
    f = jax.jit(lambda x: jax.vjp(site(kernel), x)[1](x))
    with pytest.raises(errors.KernelError, match=said):
        f(jnp.ones((4, 8)))
