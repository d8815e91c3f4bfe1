"""Stored forms of ops: what is derived of an op whose matrices are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.ops.kernel import spec_of
from rewriter.ops.op import Op, Operand, Sharding, Stored
from rewriter.ops.registry import registry
from rewriter.ops.stored import (
    EIGHT_BITS,
    stored_form,
    widened,
    widened_operands,
    widened_spec,
)

pytestmark = pytest.mark.once

R = np.random.default_rng(0)
K, N, G = 12, 5, 3
X = R.standard_normal((4, K)).astype("float32")
NUMBERS = R.integers(-100, 100, (G, K, N)).astype("int8")
SCALES = R.uniform(0.5, 2.0, (G, N)).astype("float32")


def product(*, x: Any, w: Any, bias: Any = None, turned: bool = False) -> Any:
    """x times w, or times w turned around."""
    out = jnp.einsum("mk,nk->mn" if turned else "mk,kn->mn", x, w)
    return out if bias is None else out + bias


PRODUCT = Op(
    "product",
    (
        Operand("x", "m k", True, "Rows."),
        Operand("w", "k n", True, "The matrix.", Stored(("int8", "int4"), "k")),
        Operand("bias", "n", doc="Added to each row."),
    ),
    "m n",
    product,
    defaults={"turned": False},
    sharding=lambda params: Sharding(
        frozenset("mn"),
        frozenset("k"),
        dims={"w": "n k" if params["turned"] else "k n", "x": "m k", "bias": "n",
              "out": "m n"},
    ),
)  # fmt: skip
FORM = stored_form(PRODUCT, "stored_product", "x times a matrix of few bits.")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 2, 4, 12])
def test_numbers_are_widened_by_columns_or_groups(
    axis: int, size: int, dtype: str
) -> None:
    """With one scale for `size` numbers along an axis; 0 leaves that axis out."""
    numbers = np.moveaxis(NUMBERS, 1, axis)
    shape = list(numbers.shape)
    shape[axis] = K // size if size else 1
    scales = R.uniform(0.5, 2.0, shape).astype("float32")
    want = numbers * np.repeat(scales.astype("float64"), K // shape[axis], axis)
    given = scales if size else scales.squeeze(axis)
    got = widened(jnp.asarray(numbers), jnp.asarray(given), axis, dtype)
    assert got.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(got, "float64"), want, rtol=2**-8 if dtype == "bfloat16" else 1e-6
    )


def test_without_scales_numbers_are_only_cast() -> None:
    jaxpr = jax.make_jaxpr(lambda w: widened(w, None, 0, "bfloat16"))(NUMBERS)
    assert [e.primitive.name for e in jaxpr.eqns] == ["convert_element_type"]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_form_computes_what_the_op_does_of_widened_matrices(
    dtype: str, turned: bool
) -> None:
    w = jnp.asarray(NUMBERS[0] // 16 if dtype == "int4" else NUMBERS[0], dtype)
    w, bias = (w.T if turned else w), jnp.ones(N)
    got = FORM.reference(x=X, w=w, w_scale=SCALES[0], bias=bias, turned=turned)
    columns = SCALES[0][:, None] if turned else SCALES[0]
    wide = np.asarray(w, "float64") * columns
    want = X.astype("float64") @ (wide.T if turned else wide) + 1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


def test_a_form_declares_its_scales() -> None:
    assert FORM.names == ("x", "w", "bias", "w_scale")
    assert (FORM.form_of, FORM.out, FORM.required) == ("product", "m n", ("x", "w"))
    assert FORM.operand("w_scale").axes == "n"
    assert FORM.operand("w").doc == "The matrix. Stored as int8 or int4."
    assert FORM.operand("x") is PRODUCT.operand("x")
    for turned, axes in ((False, "k n"), (True, "n k")):
        rule = FORM.spread({"turned": turned})
        assert rule is not None
        assert rule.dims is not None
        assert (rule.dims["w"], rule.dims["w_scale"]) == (axes, "n")
        assert (rule.along, rule.sums) == (frozenset("mn"), frozenset("k"))


def test_a_use_of_a_form_is_one_of_its_op() -> None:
    given = {"x": X.astype("bfloat16"), "w": NUMBERS[0], "w_scale": SCALES[0]}
    spec = widened_spec(PRODUCT, spec_of(FORM, given, {}))
    wide = widened_operands(PRODUCT, given | {"turned": False})
    assert spec == spec_of(PRODUCT, {n: wide[n] for n in "xw"}, {})
    assert spec.dtype("w") == "bfloat16"


@pytest.mark.parametrize("stored", EIGHT_BITS)
@pytest.mark.parametrize(
    "name", ["quantized_ragged_dot", "quantized_ragged_gated_linear_unit"]
)
def test_samples_are_as_large_as_those_of_the_op(name: str, stored: str) -> None:
    form = registry().op(name)
    op = registry().op(form.form_of)
    rows, *matrices = ("lhs", "rhs") if "lhs" in op.names else ("x", "w", "w_up")
    given = {rows: (32, 64), **dict.fromkeys(matrices, (2, 64, 48))}
    given |= {f"{m}_scale": (2, 48) for m in matrices} | {"group_sizes": (2,)}
    kinds = {rows: "bfloat16", "group_sizes": "int32"} | dict.fromkeys(matrices, stored)
    structs = {
        n: jax.ShapeDtypeStruct(given[n], kinds.get(n, "float32"))
        for n in form.names
        if n in given
    }
    for draw in form.distributions(structs).values():
        made = draw(jax.random.key(0), structs, dict(form.defaults))
        assert {n: (x.shape, str(x.dtype)) for n, x in made.items()} == {
            n: (x.shape, str(x.dtype)) for n, x in structs.items()
        }
        wide = widened_operands(op, made | dict(op.defaults))
        size = 1.0 if name.endswith("dot") else 64**-0.5
        for m in matrices:
            assert 0.7 < np.std(np.asarray(wide[m], "float32")) / size < 1.4
        assert int(made["group_sizes"].sum()) == 32
