"""Products whose parts are scaled and added up: spellings, and what looks like them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.patterns.quantized.spelled import Spelled
from tests.support.arrays import stored

NAME = "block_scaled_dot"
M, K, N, Z, B = 6, 64, 48, 4, 16
"""Rows, the summed axis, columns; parts of the sum, and columns with one scale."""

R = np.random.default_rng(0)
BF, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
E4 = jnp.float8_e4m3fn
drawn = functools.partial(stored, R)
uniform = lambda *shape: R.uniform(0.5, 1.5, shape).astype("float32")

GIVEN = {
    "x": R.standard_normal((M, K)).astype("float32"),
    "w": drawn((K, N), "int8"),
    "t": drawn((N, K), "int8"),
    "e4": drawn((K, N), "float8_e4m3fn"),
    "s": uniform(Z, N),
    "blocks": uniform(Z, N // B),
    "rows": uniform(M, Z),
    "whole": uniform(M, Z, N),
    "within": uniform(K),
    "fw": R.standard_normal((K, N)).astype("float32"),
    "layers": drawn((2, K, K), "int8"),
    "scales": (uniform(2, Z, K) / 300).astype("float32"),
}
SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
alike = SPELLED.look_alike


def spelling(inside: str, **more: Any) -> Any:
    """Keeps a program, and what is to be read off it."""
    return SPELLED.spelling({"inside": inside, "groups": Z, **more})


def rounded(x: Any) -> tuple[Any, Any]:
    """Parts of rows in int8 [m, z, k / z], and their scales [m, z, 1]."""
    x = x.reshape(*x.shape[:-1], Z, -1)
    scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale


def parts_of(w: Any) -> Any:
    return w.reshape(Z, -1, w.shape[-1])


@spelling("*scale", widen="float32")
def rows_of_floats(x, w, s):
    y = jnp.einsum("mzk,zkn->mzn", x.reshape(M, Z, -1), parts_of(w).astype(F32))
    return (y * s).sum(1)


@spelling("*scale float32", widen="bfloat16", behind="bfloat16")
def rows_of_16_bits(x, w, s):
    x = x.astype(BF)
    y = jnp.einsum("mzk,zkn->mzn", x.reshape(M, Z, -1), parts_of(w).astype(BF))
    return (y * s.astype(BF)).sum(1)


@spelling("*scale", widen="bfloat16", sums="float32", behind="bfloat16")
def blocks_of_the_matrix(x, e4, blocks):
    x = x.astype(BF).reshape(M, Z, -1)
    w = e4.astype(BF).reshape(Z, -1, N // B, B)
    y = jnp.einsum("mzk,zkcb->mzcb", x, w, preferred_element_type=F32)
    return (y * blocks[None, :, :, None]).sum(1).reshape(M, N).astype(BF)


@spelling("float32 *rows *scale", sums="int32")
def parts_first(x, w, s):
    q, m = rounded(x)
    y = lax.dot_general(
        q, parts_of(w), (((2,), (1,)), ((1,), (0,))), preferred_element_type=I32
    )
    return (y.astype(F32) * m.transpose(1, 0, 2) * s[:, None]).sum(0)


@spelling("*rows *scale", sums="float32", behind="bfloat16")
def floats_of_8_bits(x, e4, blocks):
    x = x.reshape(M, Z, -1)
    m = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-4) / 448
    w = e4.reshape(Z, -1, N // B, B)
    y = jnp.einsum("mzk,zkcb->mzcb", (x / m).astype(E4), w, preferred_element_type=F32)
    y = (y * m[..., None] * blocks[None, :, :, None]).sum(1)
    return y.reshape(M, N).astype(BF)


@spelling("float32 *rows*scale", sums="int32")
def both_scales_at_once(x, w, s):
    q, m = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y * (m * s)).sum(1)


@spelling("float32 *scale *rows", sums="int32", mode="transposed")
def transposed(x, t, s):
    q, m = rounded(x)
    t = t.reshape(N, Z, -1)
    y = jnp.einsum("mzk,nzk->mzn", q, t, preferred_element_type=I32)
    return jnp.sum(y.astype(F32) * s * m, axis=1)


@spelling("float32 *rows *scale", sums="int32")
def leading_axes(x, w, s):
    q, m = rounded(x.reshape(2, 3, K))
    y = jnp.einsum("abzk,zkn->abzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * m * s).sum(2)


@spelling("float32 *rows *scale", sums="int32")
def by_vmap(x, w, s):
    q, m = rounded(x)
    dot = functools.partial(jnp.dot, preferred_element_type=I32)
    y = jax.vmap(dot, (1, 0))(q, parts_of(w))
    return (y.astype(F32) * m.swapaxes(0, 1) * s[:, None]).sum(0)


@spelling("float32 *rows", sums="int32")
def scales_of_rows_alone(x, w, rows):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * rows[..., None]).sum(1)


@spelling("float32 /scale", sums="int32")
def over_the_scale(x, w, s):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) / s).sum(1)


@spelling("float32 *scale", sums="int32")
def scales_that_are_repeated(x, w, blocks):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * jnp.repeat(blocks, B, 1)).sum(1)


@spelling("float32 *rows *scale", sums="int32")
def layers_in_a_scan(x, layers, scales):
    def layer(x, one):
        w, s = one
        q, m = rounded(x)
        y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
        return (y.astype(F32) * m * s).sum(1), None

    return lax.scan(layer, x, (layers, scales))[0]


@spelling("*scale *rows", sums="float32", mode="transposed")
def both_rounded_here(x, fw, rows, s):
    q, w = x.reshape(M, Z, -1).astype(E4), parts_of(fw).astype(E4)
    y = jnp.einsum("mzk,zkn->mzn", q, w, preferred_element_type=F32)
    return (y * rows[..., None] * s).sum(1)


@alike
def no_scale(x, w):
    q, _ = rounded(x)
    return jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32).sum(1)


@alike
def the_largest_part(x, w, s):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * s).max(1)


@alike
def the_sum_of_rows(x, w, s):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * s).sum(0)


@alike
def a_scale_of_each_number(x, w, whole):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * whole).sum(1)


@alike
def squares_of_parts(x, w, s):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return jnp.square(y.astype(F32) * s).sum(1)


@alike
def a_bias_of_parts(x, w, s):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * s + s).sum(1)


@alike
def parts_in_turns(x, w, s):
    """Numbers of a part lie apart in the matrix, and not in rows."""
    turns = w.reshape(K // Z, Z, N).swapaxes(0, 1).astype(F32)
    y = jnp.einsum("mzk,zkn->mzn", x.reshape(M, Z, -1), turns)
    return (y * s).sum(1)


@alike
def products_that_are_read_too(x, w, s):
    q, _ = rounded(x)
    y = jnp.einsum("mzk,zkn->mzn", q, parts_of(w), preferred_element_type=I32)
    return (y.astype(F32) * s).sum(1), y


@alike
def a_matrix_rounded_here(x, fw, s):
    w = jnp.round(parts_of(fw)).astype(jnp.int8).astype(F32)
    y = jnp.einsum("mzk,zkn->mzn", x.reshape(M, Z, -1), w)
    return (y * s).sum(1)


def sites(f: Any, **how: Any) -> Any:
    report = rewriter.explain(f, **how)(*SPELLED.args_of(f))
    assert not report.failures
    return [s for s in report.sites if s.op == NAME]


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    want, f = SPELLINGS[name]
    (site,) = sites(f)
    assert {n: site.params.get(n) for n in want} == want
    assert ("mode" in site.params) == ("mode" in want)


@pytest.mark.once
@pytest.mark.parametrize("name", ALIKE)
def test_look_alike(name: str) -> None:
    assert not sites(ALIKE[name], implementation={NAME: "reference"})


@pytest.mark.parametrize("names", [
    ("parts_first", "floats_of_8_bits"),
    pytest.param(None, marks=pytest.mark.once),
])  # fmt: skip
@pytest.mark.parametrize("kernel", ["reference", "memory_bounded"])
def test_numbers(kernel: str, names: Any) -> None:
    how = {"implementation": {NAME: kernel}, "strict": True}
    for name, want, got in SPELLED.both(SPELLED.programs(names), **how):
        a, b = (np.asarray(x, "f8") for x in (got, want))
        limit = 2.0**-7 if got.dtype == BF else 1e-5
        np.testing.assert_allclose(
            a, b, rtol=0, atol=limit * np.abs(b).max(), err_msg=name
        )


@pytest.mark.once
@pytest.mark.parametrize("kernel", ["reference", "memory_bounded"])
@pytest.mark.parametrize("name", ["rows_of_floats", "parts_first", "transposed"])
def test_gradients(name: str, kernel: str) -> None:
    _, f = SPELLINGS[name]
    x, w, s = SPELLED.args_of(f)
    fast = rewriter.optimize(f, implementation={NAME: kernel})
    loss = lambda f: lambda x, s: jnp.square(f(x, w, s)).sum()
    got, want = (jax.jit(jax.grad(loss(g), (0, 1)))(x, s) for g in (fast, f))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(b).max()))
