"""Ragged dots of 8-bit matrices: spellings, look-alikes, numbers, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.kernels.ragged.dot import STORED as OP
from rewriter.ops.stored import EIGHT_BITS as DTYPES
from rewriter.ops.stored import numbers_of as quantized
from tests.kernels.ragged.test_dot import exact

NAME = "quantized_ragged_dot"
M, K, N, G = 40, 256, 128, 6
SIZES = np.array([9, 0, 14, 1, 11, 2], np.int32)
PLAIN, SCALED = "lhs rhs group_sizes", "lhs rhs group_sizes rhs_scale"


def given(stored: str = "int8", rows: str = "bfloat16", turned: bool = False) -> Any:
    """Rows, matrices, group sizes and a scale for each group and column."""
    r = np.random.default_rng(0)
    matrices = r.standard_normal((G, N, K) if turned else (G, K, N))
    return (
        jnp.asarray(r.standard_normal((M, K)), rows),
        quantized(jnp.asarray(matrices, "float32"), stored),
        jnp.asarray(SIZES),
        jnp.asarray(r.uniform(0.01, 0.03, (G, N)), "float32"),
    )


def site_of(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The only site of a program on an H200, but for rows of scales that are taken."""
    forced = {"implementation": {NAME: ["hopper", "xla"]}}
    sites = rewriter.explain(f, target="h200", **(forced | options))(*args).sites
    (site,) = (s for s in sites if s.op != "embedding_lookup")
    return site


def operands_of(site: Any) -> str:
    return " ".join(word for word in site.shapes.split() if "[" not in word)


def check_numbers(f: Callable[..., Any], args: Any) -> None:
    """The program rewritten, with the op's reference, gives what it gives."""
    fast = rewriter.optimize(f, implementation={NAME: "reference"})
    (site,) = fast.report(*args).sites
    assert (site.op, site.form, site.kernel) == ("ragged_dot", NAME, "reference")
    got, want = (np.asarray(x(*args), np.float64) for x in (fast, f))
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


# ----------------------------------------------------------------------- spellings
SPELLINGS: dict[str, tuple[str, Callable[..., Any]]] = {}


def spelling(operands: str) -> Callable[..., Any]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        SPELLINGS[f.__name__] = operands, f
        return f

    return keep


@spelling(PLAIN)
def cast(x, w, n, s):
    return lax.ragged_dot(x, w.astype(x.dtype), n)


@spelling(PLAIN)
def mixed(x, w, n, s):
    return lax.ragged_dot(x, w, n, preferred_element_type=x.dtype)


@spelling(PLAIN)
def wide_result(x, w, n, s):
    y = lax.ragged_dot(x, w.astype(x.dtype), n, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


@spelling(PLAIN)
def scaled_after(x, w, n, s):
    y = lax.ragged_dot(x, w.astype(x.dtype), n)
    return y * jnp.repeat(s.astype(x.dtype), n, axis=0, total_repeat_length=M)


@spelling(PLAIN)
def scaled_after_by_group_of_row(x, w, n, s):
    group = jnp.repeat(jnp.arange(G), n, total_repeat_length=M)
    y = lax.ragged_dot(x, w.astype(x.dtype), n, preferred_element_type=jnp.float32)
    return (y * s[group]).astype(x.dtype)


@spelling(PLAIN)
def scaled_rows(x, w, n, s):
    return lax.ragged_dot(x * s[0, 0].astype(x.dtype), w.astype(x.dtype), n)


@spelling(SCALED)
def scaled(x, w, n, s):
    return lax.ragged_dot(x, w.astype(x.dtype) * s.astype(x.dtype)[:, None, :], n)


@spelling(SCALED)
def scaled_in_float32(x, w, n, s):
    return lax.ragged_dot(x, (w.astype(jnp.float32) * s[:, None]).astype(x.dtype), n)


@spelling(SCALED)
def scale_first(x, w, n, s):
    wide = s[:, None, :] * w.astype(jnp.float32)
    return lax.ragged_dot(x, wide.astype(x.dtype), n)


@spelling(SCALED)
def scale_of_each_group(x, w, n, s):
    scale = s[:, 0].reshape(G, 1, 1)
    return lax.ragged_dot(x, (w.astype(jnp.float32) * scale).astype(x.dtype), n)


@spelling(SCALED)
def scale_of_each_column(x, w, n, s):
    return lax.ragged_dot(x, w.astype(x.dtype) * s[0].astype(x.dtype), n)


@spelling(SCALED)
def one_number(x, w, n, s):
    return lax.ragged_dot(x, w.astype(x.dtype) * (1 / 64), n)


@spelling(SCALED)
def packed(x, w, n, s):
    blocks = w.reshape(G, K // 32, 32, N).astype(jnp.float32) * s[:, None, None]
    return lax.ragged_dot(x, blocks.reshape(G, K, N).astype(x.dtype), n)


@spelling(SCALED)
def vmapped(x, w, n, s):
    def one(w, s):
        return (w.astype(jnp.float32) * s).astype(x.dtype)

    return lax.ragged_dot(x, jax.vmap(one)(w, s), n)


@spelling(SCALED)
def jitted(x, w, n, s):
    dequantize = jax.jit(lambda w, s: w.astype(x.dtype) * s.astype(x.dtype))
    return lax.ragged_dot(x, dequantize(w, s[:, None]), n)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, stored: str) -> None:
    operands, f = SPELLINGS[name]
    args = given(stored)
    site = site_of(f, *args)
    assert (site.op, site.form, site.kernel) == ("ragged_dot", NAME, "hopper")
    assert operands_of(site) == operands
    assert f"rhs {'i8' if stored == 'int8' else 'f8'}[{G},{K},{N}]" in site.shapes
    assert "mode" not in site.params
    if stored == "int8":
        check_numbers(f, args)


TURNED = {
    "general": lambda x, w, n, s: lax.ragged_dot_general(
        x, w.astype(x.dtype) * s.astype(x.dtype)[..., None], n,
        lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0]),
    ),
    "after": lambda x, w, n, s: lax.ragged_dot(
        x, (w.astype(x.dtype) * s.astype(x.dtype)[..., None]).swapaxes(1, 2), n
    ),
    "before": lambda x, w, n, s: lax.ragged_dot(
        x, w.swapaxes(1, 2).astype(x.dtype) * s.astype(x.dtype)[:, None], n
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNED)
def test_matrices_that_are_stored_transposed(name: str) -> None:
    args = given(turned=True)
    site = site_of(TURNED[name], *args)
    assert (site.form, site.params["mode"]) == (NAME, "transposed")
    assert f"rhs i8[{G},{N},{K}] " in site.shapes
    check_numbers(TURNED[name], args)


@pytest.mark.parametrize("stored", DTYPES)
def test_numbers_in_float64(stored: str) -> None:
    x, w, n, s = given(stored, "float32")
    want = np.asarray(w.astype("float32"), np.float64) * np.asarray(s)[:, None]
    want = exact(np.asarray(x, np.float64), want, SIZES, "forward")
    fast = rewriter.optimize(scaled_in_float32, implementation={NAME: "reference"})
    assert fast.report(x, w, n, s).sites[0].form == NAME
    got = np.asarray(fast(x, w, n, s), np.float64)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_layers_in_a_loop() -> None:
    """Each step takes its matrices out of an array of all."""
    x, w, n, s = given()
    square = jnp.concatenate([w, w[..., ::-1]], -1)[:, :, :K]
    scales = jnp.concatenate([s, s], -1)
    stacked = jnp.stack([square, square]), jnp.stack([scales, scales])

    def f(x, ws, n, ss):
        def layer(x, one):
            return scaled_in_float32(x, one[0], n, one[1]), None

        return lax.scan(layer, x, (ws, ss))[0]

    args = x, stacked[0], n, stacked[1]
    assert site_of(f, *args).form == NAME
    check_numbers(f, args)


# ---------------------------------------------------------------------- look-alikes
ALIKE: dict[str, tuple[str, Callable[..., Any]]] = {}


def alike(why: str) -> Callable[..., Any]:
    def keep(f: Callable[..., Any]) -> Callable[..., Any]:
        ALIKE[f.__name__] = why, f
        return f

    return keep


@alike("varies along the axis that is summed")
def scale_of_blocks(x, w, n, s):
    scale = jnp.repeat(s[:, :2], K // 2, axis=1)[..., None]
    return lax.ragged_dot(x, (w.astype(jnp.float32) * scale).astype(x.dtype), n)


@alike("varies along the axis that is summed")
def scale_of_blocks_in_a_reshape(x, w, n, s):
    scale = s.reshape(G, 2, 1, N // 2).repeat(2, -1)
    blocks = w.reshape(G, 2, K // 2, N).astype(jnp.float32) * scale
    return lax.ragged_dot(x, blocks.reshape(G, K, N).astype(x.dtype), n)


@alike("varies along the axis that is summed")
def scale_of_rows_of_matrices(x, w, n, s):
    scale = jnp.arange(K, dtype=x.dtype)[:, None]
    return lax.ragged_dot(x, w.astype(x.dtype) * scale, n)


@alike("rounded otherwise")
def divided(x, w, n, s):
    wide = w.astype(jnp.float32) / (1 / s)[:, None]
    return lax.ragged_dot(x, wide.astype(x.dtype), n)


@alike("2 scales")
def two_scales(x, w, n, s):
    wide = w.astype(jnp.float32) * s[:, None] * s[:, :1, None] * 10
    return lax.ragged_dot(x, wide.astype(x.dtype), n)


@alike("rounded otherwise")
def rounded_twice(x, w, n, s):
    wide = (w.astype(jnp.float16) * s.astype(jnp.float16)[:, None]).astype(x.dtype)
    return lax.ragged_dot(x, wide, n)


@alike("not only multiplied")
def zero_points(x, w, n, s):
    return lax.ragged_dot(x, (w.astype(x.dtype) - s.astype(x.dtype)[:, None]), n)


@alike("not only multiplied")
def squared(x, w, n, s):
    return lax.ragged_dot(x, jnp.square(w.astype(x.dtype)), n)


@alike("not only multiplied")
def twice(x, w, n, s):
    return lax.ragged_dot(x, w.astype(x.dtype) * w[..., ::-1].astype(x.dtype), n)


@alike("not only multiplied")
def through_a_function(x, w, n, s):
    return lax.ragged_dot(x, jnp.tanh(w.astype(jnp.float32) / 9).astype(x.dtype), n)


@alike("")
def from_a_table(x, w, n, s):
    return lax.ragged_dot(x, s[0].astype(x.dtype)[w.astype(jnp.int32) % N], n)


@alike("")
def unsigned(x, w, n, s):
    return lax.ragged_dot(x, w.view(jnp.uint8).astype(x.dtype), n)


@alike("another order")
def groups_last(x, w, n, s):
    return lax.ragged_dot(x, w.transpose(2, 1, 0).astype(x.dtype), n)


@alike("a part of an array")
def every_other_row(x, w, n, s):
    return lax.ragged_dot(x[:, ::2], w.astype(x.dtype)[:, ::2], n)


@pytest.mark.parametrize("name", ALIKE)
def test_look_alikes_are_ordinary_ragged_dots(name: str) -> None:
    why, f = ALIKE[name]
    x, w, n, s = given()
    if name == "groups_last":
        w = w.transpose(2, 1, 0)
    site = site_of(f, x, w, n, s)
    assert (site.op, site.form) == ("ragged_dot", "")
    assert "rhs bf16" in site.shapes
    reasons = [text for form, text in site.not_chosen if form == NAME]
    assert why in "".join(reasons)
    assert bool(reasons) == bool(why)


def test_ragged_dots_without_8_bits_are_as_before() -> None:
    x, w, n, _ = given()
    f = lambda x, w, n: lax.ragged_dot(x, w, n)
    site = site_of(f, x, w.astype(x.dtype), n)
    assert (site.form, dict(site.not_chosen).get(NAME)) == ("", None)


# ------------------------------------------------------------------ around the dot
def test_branches_of_experts_are_two_dots_of_8_bits() -> None:
    """Each reads 8 bits; as one unit they would be dequantised before."""

    def f(x, w, n, s):
        gate = scaled_in_float32(x, w, n, s)
        return jax.nn.silu(gate) * scaled_in_float32(x, w[..., ::-1], n, s)

    args = given()
    report = rewriter.explain(f, target="h200", implementation={NAME: "hopper"})
    assert [site.form for site in report(*args).sites] == [NAME, NAME]


def test_counts_and_text() -> None:
    args = given()
    report = rewriter.explain(scaled, target="h200", implementation={NAME: "hopper"})
    made = report(*args)
    assert made.counts()["ragged_dot"] == 1
    assert "ragged_dot" in str(made)
    assert f"{NAME} hopper" in str(made)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
def test_gradients(stored: str) -> None:
    """Of rows and scales: outside of the program, and within it."""
    x, w, n, s = given(stored, "float32")
    forced = {NAME: "reference"}

    def loss(f):
        return lambda x, s: jnp.square(f(x, w, n, s)).sum()

    want = jax.grad(loss(scaled_in_float32), (0, 1))(x, s)
    fast = rewriter.optimize(scaled_in_float32, implementation=forced)
    outside = jax.grad(loss(fast), (0, 1))(x, s)
    whole = rewriter.optimize(
        jax.grad(loss(scaled_in_float32), (0, 1)), implementation=forced
    )
    for got in (outside, whole(x, s)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


def test_parts_of_the_op_are_described() -> None:
    assert OP.form_of == "ragged_dot"
    assert set(OP.dims) == {*OP.names, "out"}
