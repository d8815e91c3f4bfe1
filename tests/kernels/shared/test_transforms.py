"""Attention and ragged dot, as sites, under every transformation."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rewriter.ops.registry import registry
from rewriter.site import site
from tests import slow
from tests.support import transforms

KERNELS = (("default", "memory_bounded"),)
TILED = (("default", "tiled"),)
PLAIN = {"q": (2, 4, 4, 3), "k": (2, 5, 2, 3), "v": (2, 5, 2, 6)}
FULL = {
    **PLAIN, "bias": (1, 4, 4, 5), "mask": (2, 1, 1, 5), "kv_lengths": (2,),
    "alibi": (4,), "sinks": (4,),
}  # fmt: skip
DTYPES = {"mask": "bool", "kv_lengths": "int32", "group_sizes": "int32"}
ROWS = {"lhs": (7, 3), "rhs": (3, 3, 4), "group_sizes": (3,)}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal": ("attention", PLAIN, {"window": (None, 0), "shift": 1}),
    "everything": ("attention", FULL, {"scale": 0.5, "empty_rows": "mean"}),
    "ragged": ("ragged_dot", ROWS, {}),
    "ragged_tiled": ("ragged_dot", ROWS, {}),
    "ragged_transposed": (
        "ragged_dot", {**ROWS, "rhs": (3, 4, 3)}, {"mode": "transposed"},
    ),
    "ragged_contracting": (
        "ragged_dot", {**ROWS, "rhs": (7, 4)}, {"mode": "contracting"},
    ),
}  # fmt: skip

FEW = (
    "jvp", "jit_grad", "hessian", "grad_of_grad", "vmap_last_axis",
    "vmap_one_operand", "vmap_of_grad", "grad_of_vmap_first",
)  # fmt: skip


def _both(case: str, dtype: str = "float32") -> tuple[Any, Any, list[jax.Array]]:
    name, shapes, params = CASES[case]
    op = registry().op(name)
    specs = {
        n: jax.ShapeDtypeStruct(s, DTYPES.get(n, dtype)) for n, s in shapes.items()
    }
    if name == "ragged_dot":
        made = {n: jax.random.normal(jax.random.key(3), s) for n, s in shapes.items()}
        made["group_sizes"] = jnp.array([2, 0, 4])  # the last row in no group
        operands = {n: v.astype(specs[n].dtype) for n, v in made.items()}
    else:
        operands = op.sample(jax.random.key(4), specs, params)

    def bound(*args: jax.Array) -> jax.Array:
        operands = dict(zip(shapes, args, strict=True))
        return site.bind(op, operands, params, TILED if "tiled" in case else KERNELS)

    def plain(*args: jax.Array) -> jax.Array:
        function = op.general or op.reference
        return function(**dict(zip(shapes, args, strict=True)), **params)

    return bound, plain, [operands[n] for n in shapes]


@pytest.mark.parametrize("transform", transforms.EACH)
@pytest.mark.parametrize("case", slow.first(1, ["everything", "causal", "ragged"]))
def test_every_transform_agrees_with_float64(case: str, transform: str) -> None:
    transforms.check(transform, *_both(case))


@pytest.mark.parametrize(
    ("case", "transform"),
    slow.unless(
        lambda case, transform: "tiled" in case or transform in FEW[1::5],
        itertools.product(
            ["ragged_transposed", "ragged_contracting", "ragged_tiled"], FEW
        ),
        several=True,
    ),
)
def test_other_modes_agree_with_float64(case: str, transform: str) -> None:
    transforms.check(transform, *_both(case))


@pytest.mark.parametrize(
    ("case", "transform"),
    slow.unless(
        lambda case, transform: case == "ragged" or transform == "jit_grad",
        itertools.product(
            ["causal", "everything", "ragged"], ["jit", "jit_grad", "vmap_of_grad"]
        ),
        several=True,
    ),
)
def test_bfloat16_is_as_accurate_as_the_reference(case: str, transform: str) -> None:
    transforms.check(transform, *_both(case, "bfloat16"))


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("ragged")])
def test_the_general_ragged_dot_is_the_reference(case: str) -> None:
    _, general, args = _both(case)
    name, shapes, params = CASES[case]
    named = dict(zip(shapes, args, strict=True))
    wanted = registry().op(name).reference(**named, **params)
    assert jnp.allclose(general(*args), wanted, atol=1e-5)


def test_the_gradient_of_attention_holds_no_scores() -> None:
    op = registry().op("attention")
    b, t, n, h = 1, 4096, 2, 16
    specs = [jax.ShapeDtypeStruct((b, t, n, h), jnp.float32)] * 3

    def loss(q: Any, k: Any, v: Any, kernels: Any) -> jax.Array:
        out = site.bind(op, {"q": q, "k": k, "v": v}, {"window": (None, 0)}, kernels)
        return (out**2).sum()

    def temporary(kernels: Any) -> int:
        grad = jax.jit(jax.grad(lambda *a: loss(*a, kernels), (0, 1, 2)))
        memory = grad.lower(*specs).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    scores = 4 * b * n * t * t
    assert temporary(KERNELS) < scores / 8
    assert temporary(()) > scores
