"""Rows that a program rounds to 8 bits before it multiplies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.patterns.quantized.spelled import Spelled
from tests.support.arrays import stored

NAME = "quantized_dot"
M, K, N = 6, 64, 48
R = np.random.default_rng(0)
BF, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
E4, E5 = jnp.float8_e4m3fn, jnp.float8_e5m2


drawn = functools.partial(stored, R)


GIVEN = {
    "x": R.standard_normal((M, K)).astype("float32"),
    "w": drawn((K, N), "int8"),
    "u": drawn((K, N), "int8"),
    "t": drawn((N, K), "int8"),
    "w4": drawn((K, N), "int4"),
    "e4": drawn((K, N), "float8_e4m3fn"),
    "e5": drawn((K, N), "float8_e5m2"),
    "s": R.uniform(0.01, 0.03, N).astype("float32"),
    "b": R.uniform(-1, 1, N).astype("float32"),
    "norm": R.standard_normal(K).astype("float32"),
    "fw": R.standard_normal((K, N)).astype("float32"),
    "layers": drawn((2, K, K), "int8"),
    "scales": R.uniform(0.001, 0.003, (2, K)).astype("float32"),
}
"""Arguments by their names in spellings."""

SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
alike, args_of = SPELLED.look_alike, SPELLED.args_of


def spelling(sums: str = "int32", **more: str) -> Callable[..., Any]:
    """Keeps a program, and what is to be read off it."""
    return SPELLED.spelling({"widen": "", "sums": sums, **more})


def rounded(x: Any, axis: int | None = -1) -> tuple[Any, Any]:
    """Rows in int8, and their scales."""
    scale = jnp.max(jnp.abs(x), axis, keepdims=axis is not None) / 127
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale


def rounded_to(x: Any, dtype: Any) -> tuple[Any, Any]:
    """An array in 8-bit floats, and its scale."""
    most = float(jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x)) / most
    return jnp.clip(x / scale, -most, most).astype(dtype), scale


def dot(x: Any, w: Any, sums: Any = I32) -> Any:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=sums)


@spelling(behind="float32 *scale *rows")
def scale_of_columns_first(x, w, s):
    q, m = rounded(x)
    return (dot(q, w).astype(F32) * s) * m


@spelling(behind="float32 *rows *scale bfloat16")
def scale_of_rows_first(x, w, s):
    q, m = rounded(x)
    return (dot(q, w).astype(F32) * m * s).astype(BF)


@spelling(behind="float32 *scale*rows")
def both_scales_at_once(x, w, s):
    q, m = rounded(x)
    return dot(q, w) * (m * s)


@spelling(behind="float32 *scale")
def one_scale_of_rows(x, w, s):
    q, m = rounded(x, None)
    return dot(q, w).astype(F32) * (m * s)


@spelling(behind="float32 *scale bfloat16 *rows")
def rounded_between(x, w, s):
    q, m = rounded(x)
    return (dot(q, w).astype(F32) * s).astype(BF) * m.astype(BF)


@spelling(behind="float32 *scale *rows")
def by_floor(x, w, s):
    m = jnp.max(jnp.abs(x), -1, keepdims=True) / 127.5
    q = jnp.floor(x / m + 0.5)
    return dot(jnp.clip(q, -128, 127).astype(jnp.int8), w).astype(F32) * s * m


@spelling(behind="float32 *scale *rows")
def from_16_bits(x, w, s):
    q, m = rounded(x.astype(BF).astype(F32))
    return dot(q, w).astype(F32) * s * m


@spelling(behind="float32 *scale *rows")
def behind_a_norm(x, norm, w, s):
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * norm
    q, m = rounded(x)
    return dot(q, w).astype(F32) * s * m


@spelling(behind="float32 *scale *rows", mode="transposed")
def transposed(x, t, s):
    q, m = rounded(x)
    y = lax.dot_general(q, t, (((1,), (1,)), ((), ())), preferred_element_type=I32)
    return y.astype(F32) * s * m


@spelling(behind="float32 *scale *rows")
def matrix_first(x, w, s):
    q, m = rounded(x)
    y = jnp.einsum("kn,bk->bn", w, q, preferred_element_type=I32)
    return y.astype(F32) * s * m


@spelling(behind="float32 *scale *rows")
def leading_axes(x, w, s):
    q, m = rounded(x.reshape(2, 3, K))
    y = jnp.einsum("abk,kn->abn", q, w, preferred_element_type=I32)
    return y.astype(F32) * s * m


@spelling(behind="float32 *scale *rows")
def in_a_jit(x, w, s):
    q, m = jax.jit(rounded)(x)
    return dot(q, w).astype(F32) * s * m


@spelling(behind="float32 *scale *rows")
def layers_in_a_scan(x, layers, scales):
    def layer(x, one):
        w, s = one
        q, m = rounded(x)
        return dot(q, w).astype(F32) * s * m, None

    return lax.scan(layer, x, (layers, scales))[0]


@spelling("float32", behind="*scale *rows")
def of_e4m3(x, e4, s):
    q, m = rounded_to(x, E4)
    return dot(q, e4, F32) * s * m


@spelling("bfloat16", behind="*scale")
def of_e4m3_in_16_bits(x, e4, s):
    q, m = rounded_to(x, E4)
    return dot(q, e4, BF) * m.astype(BF)


@spelling("float32", behind="*scale *rows")
def of_e4m3_and_e5m2(x, e5, s):
    q, m = rounded_to(x, E4)
    return dot(q, e5, F32) * s * m


@spelling(behind="float32 *scale *rows +bias bfloat16")
def with_a_bias(x, w, s, b):
    q, m = rounded(x)
    return (dot(q, w).astype(F32) * s * m + b).astype(BF)


@spelling(behind="float32 *rows +bias")
def a_bias_first(x, w, b):
    q, m = rounded(x)
    return b[None] + m * dot(q, w).astype(F32)


@spelling(behind="float32 *0.0078125 *scale *rows")
def a_number_too(x, w, s):
    q, m = rounded(x)
    return dot(q, w).astype(F32) * 0.0078125 * s * m


@spelling(behind="float32 /scale *rows")
def over_the_scale(x, w, s):
    q, m = rounded(x)
    return dot(q, w).astype(F32) / s * m


@spelling(behind="float32 *scale *rows bfloat16")
def a_residual_is_no_bias(x, w, s):
    q, m = rounded(x)
    y = (dot(q, w).astype(F32) * s * m).astype(BF)
    return y + x[:, :N].astype(BF)


@spelling(behind="float32 *rows", mode="transposed")
def columns_first(x, t):
    q, m = rounded(x)
    y = lax.dot_general(t, q, (((1,), (1,)), ((), ())), preferred_element_type=I32)
    return y.T.astype(F32) * m


@spelling("float32", behind="*rows +bias bfloat16")
def of_e4m3_by_rows(x, e4, b):
    m = jnp.max(jnp.abs(x), -1, keepdims=True) / 448
    y = dot((x / m).astype(E4), e4, F32)
    return (y * m + b).astype(BF)


@spelling(behind="float32 *scale")
def two_scales_of_columns(x, w, s, b):
    q, _ = rounded(x)
    return dot(q, w).astype(F32) * s * b


@spelling("float32", behind="*scale*rows +bias bfloat16")
def an_outer_product_of_scales(x, e4, s, b):
    m = jnp.max(jnp.abs(x), -1) / 448
    y = dot((x / m[:, None]).astype(E4), e4, F32) * (s[None] * m[:, None]) + b
    return y.astype(BF)


@spelling(behind="float32 *scale*rows", mode="transposed")
def an_outer_product_of_a_turned_matrix(x, t, s):
    q, m = rounded(x)
    y = lax.dot_general(q, t, (((1,), (1,)), ((), ())), preferred_element_type=I32)
    return y.astype(F32) * jnp.outer(m[:, 0], s)


@spelling(behind="float32 *rows")
def a_scale_of_single_numbers_behind(x, w, s):
    q, m = rounded(x)
    return dot(q, w).astype(F32) * m * jnp.outer(x[:, 0], s)


@spelling("float32", behind="*scale")
def both_rounded_here(x, fw):
    (q, m), (w, s) = rounded_to(x, E4), rounded_to(fw, E4)
    return dot(q, w, F32) * (m * s)


@spelling(behind="float32 *rows *scale")
def both_rounded_by_rows_and_columns(x, fw):
    (q, m), (w, s) = rounded(x), rounded(fw, 0)
    return dot(q, w) * m * s


@spelling("float32", behind="*scale *rows bfloat16")
def both_with_scales_of_earlier_steps(x, fw, s):
    half = lambda v, by: jnp.clip(v / by, -448, 448).astype(E4)
    y = dot(half(x, s[0]), half(fw, s[1]), F32)
    return (y * s[0] * s[1]).astype(BF)


@spelling("float32", mode="transposed")
def cotangents_times_a_rounded_matrix(x, fw):
    (q, _), (w, _) = rounded_to(x[:, :N], E5), rounded_to(fw, E4)
    return lax.dot_general(
        q, w, (((1,), (1,)), ((), ())), preferred_element_type=F32,
        precision="highest",
    )  # fmt: skip


@spelling("float32")
def rows_times_cotangents(x, fw):
    (q, _), (w, _) = rounded_to(x, E4), rounded_to(fw[:M], E5)
    return lax.dot_general(q, w, (((0,), (0,)), ((), ())), preferred_element_type=F32)


@alike
def widened_again(x, w, s):
    q, m = rounded(x)
    return ((q.astype(F32) * m) @ (w.astype(F32) * s)).astype(BF)


@alike
def rounded_and_widened(x, fw):
    """Simulated rounding of both: XLA knows such products as ones of 8 bits."""
    (q, m), (w, s) = rounded_to(x, E4), rounded_to(fw, E4)
    return (q.astype(BF) * m.astype(BF)) @ (w.astype(BF) * s.astype(BF))


@alike
def straight_through(x, fw):
    q, m = rounded(x)
    return (x + lax.stop_gradient(q.astype(F32) * m - x)) @ fw


@alike
def integers_by_casts(x, w):
    q, m = rounded(x)
    return (q.astype(I32) @ w.astype(I32)) * m


def read(f: Callable[..., Any], **how: Any) -> Any:
    report = rewriter.explain(f, **how)(*args_of(f))
    assert not report.failures
    return [s for s in report.sites if s.op == NAME]


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    want, f = SPELLINGS[name]
    (site,) = read(f, target="h100")
    params = {n: x for n, x in site.params.items() if n != "mode" or x != "forward"}
    assert {n: params[n] for n in want} == want
    assert ("behind" in params) == ("behind" in want)
    assert site.kernel == "xla"
    kind = "int8_dot" if want["sums"] == "int32" else "fp8_dot"
    assert kind in str(site.not_chosen) + str(rewriter.explain(f)(*args_of(f)))


@pytest.mark.parametrize("names", [
    ("scale_of_columns_first",),
    pytest.param(None, marks=pytest.mark.once),
])  # fmt: skip
def test_numbers_are_exactly_those_of_the_program(names: Any) -> None:
    how = {"implementation": {NAME: "reference"}, "strict": True}
    SPELLED.assert_the_same(SPELLED.programs(names), **how)


@pytest.mark.once
@pytest.mark.parametrize("name", ALIKE)
def test_look_alike(name: str) -> None:
    f = ALIKE[name]
    assert not read(f, implementation={NAME: "reference"})


@pytest.mark.once
def test_gradients_of_a_straight_through_product_are_the_programs() -> None:
    """Products of both passes in 8 bits, by a rule of the user's own."""

    @jax.custom_vjp
    def product(x, w):
        (q, m), (p, s) = rounded_to(x, E4), rounded_to(w, E4)
        return dot(q, p, F32) * (m * s)

    def forward(x, w):
        return product(x, w), (x, w)

    def backward(kept, g):
        x, w = kept
        (q, m), (p, s), (d, n) = (
            rounded_to(y, e) for y, e in ((x, E4), (w, E4), (g, E5))
        )
        return dot(d, p.T, F32) * (n * s), dot(q.T, d, F32) * (m * n)

    product.defvjp(forward, backward)
    args = args_of(both_rounded_here)
    loss = lambda x, w: jnp.square(product(x, w)).sum()
    want = jax.jit(jax.grad(loss, (0, 1)))(*args)
    for f in (
        rewriter.optimize(jax.grad(loss, (0, 1))),
        jax.jit(jax.grad(rewriter.optimize(loss), (0, 1))),
    ):
        for a, b in zip(f(*args), want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.once
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp:DeprecationWarning")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
def test_training_with_histories_of_the_largest_numbers(name: str) -> None:
    """Flax's products in 8 bits: what is learned and the histories stay the same."""
    linen = pytest.importorskip("flax.linen")
    fp8 = pytest.importorskip("flax.linen.fp8_ops")
    if not hasattr(fp8, name):
        pytest.skip("this flax has no such products in 8 bits")
    made = getattr(fp8, name)

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            dense = lambda n: linen.Dense(n, dot_general=made(), use_bias=False)
            gate, up = dense(32)(x), dense(32)(x)
            return dense(16)(jax.nn.silu(gate) * up)

    model = Model()
    x = jnp.asarray(R.standard_normal((8, 16)), F32)
    state = model.init(jax.random.key(0), x)

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.square(model.apply(state, x)).mean()

        return jax.value_and_grad(loss, allow_int=True)(state)

    want = jax.jit(step)(state, x)
    fast = rewriter.optimize(step, implementation={NAME: "reference"})
    found = [s for s in fast.report(state, x).sites if s.op == NAME]
    direct = name == "Fp8DirectDotGeneralOp"
    assert len(found) == (9 if direct else 0)  # three products with their gradients
    for a, b in zip(*map(jax.tree.leaves, (fast(state, x), want)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, "f4"), np.asarray(b, "f4"))
