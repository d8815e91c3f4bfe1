"""Products of matrices of few bits: spellings, roundings, look-alikes, gradients."""

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
from tests.spellings.contexts import CONTEXTS
from tests.support.arrays import stored

NAME = "quantized_dot"
K, N, G = 128, 96, 4
R = np.random.default_rng(0)
BF, F32 = jnp.bfloat16, jnp.float32


drawn = functools.partial(stored, R)


EYE = np.eye(K, dtype=BF)
"""Rows that give the matrix itself: each rounding shows."""

GIVEN = {
    "x": EYE,
    "q": drawn((K, N), "int8"),
    "t": drawn((N, K), "int8"),
    "u": drawn((K, N), "uint8"),
    "i4": drawn((K, N), "int4"),
    "u4": drawn((K, N), "uint4"),
    "e4": drawn((K, N), "float8_e4m3fn"),
    "e5": drawn((K, N), "float8_e5m2"),
    "f4": drawn((K, N), "float4_e2m1fn"),
    "e8": R.integers(117, 125, (G, N)).astype("uint8"),
    "s8": R.uniform(0.5, 2, (K // 16, N)).astype("float8_e4m3fn"),
    "p": R.integers(-128, 128, (K // 2, N)).astype("int8"),
    "pu": R.integers(0, 256, (K // 2, N)).astype("uint8"),
    "s": R.uniform(0.01, 0.03, (N,)).astype("float32"),
    "sg": R.uniform(0.01, 0.03, (G, N)).astype("float32"),
    "sk": R.uniform(0.01, 0.03, (K,)).astype("float32"),
    "one": np.float32(0.0173),
    "zg": R.integers(-9, 9, (G, N)).astype("int8"),
    "zu": R.integers(100, 140, (N,)).astype("uint8"),
    "block": R.uniform(0.01, 0.03, (2, 3)).astype("float32"),
    "layers": drawn((2, K, K), "int8"),
    "scales": R.uniform(0.001, 0.003, (2, K)).astype("float32"),
}
"""Arguments by their names in spellings."""

SPELLED = Spelled(GIVEN)
SPELLINGS, args_of = SPELLED.spellings, SPELLED.args_of


def spelling(widen: str, **more: str) -> Callable[..., Any]:
    """Keeps a program, and what is to be read off it."""
    return SPELLED.spelling({"widen": widen, **more})


# ------------------------------------------------------------- casts and scales
@spelling("bfloat16")
def cast(x, q):
    return x @ q.astype(x.dtype)


@spelling("", sums="bfloat16")
def mixed(x, q):
    dims = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, q, dims, preferred_element_type=x.dtype)


@spelling("", sums="bfloat16")
def promoted(x, q):
    return jnp.dot(x, q)


@spelling("bfloat16 *scale")
def scaled(x, q, s):
    return x @ (q.astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def scale_first(x, q, s):
    return x @ (s.astype(BF)[None, :] * q.astype(BF))


@spelling("float32 *scale bfloat16")
def scaled_in_float32(x, q, s):
    return x @ (q.astype(F32) * s).astype(BF)


@spelling("float32 *scale bfloat16")
def scaled_by_promotion(x, q, s):
    return x @ (q * s).astype(BF)


@spelling("float32 *scale")
def product_in_float32(x, q, s):
    return (x.astype(F32) @ (q.astype(F32) * s)).astype(F32)


@spelling("float32 *scale", behind="bfloat16")
def product_in_float32_rounded(x, q, s):
    return (x.astype(F32) @ (q.astype(F32) * s)).astype(BF)


@spelling("bfloat16 *scale", sums="float32")
def wide_result(x, q, s):
    w = q.astype(BF) * s.astype(BF)
    return jnp.dot(x, w, preferred_element_type=F32)


@spelling("bfloat16 *scale", sums="float32", behind="bfloat16")
def wide_sums(x, q, s):
    w = q.astype(BF) * s.astype(BF)
    return jnp.dot(x, w, preferred_element_type=F32).astype(BF)


@spelling("bfloat16 *scale")
def one_scale(x, q, one):
    return x @ (q.astype(BF) * one.astype(BF))


@spelling("bfloat16 *0.010009765625")
def a_number(x, q):
    return x @ (q.astype(BF) * 0.01)


@spelling("float32 /127.0 *scale bfloat16")
def of_the_largest(x, q, s):
    return x @ (q.astype(F32) / 127.0 * s).astype(BF)


@spelling("float32 *scale bfloat16")
def absmax_scaled_outside(x, q, s):
    return x @ (q.astype(F32) * (s / 127.0)).astype(BF)


@spelling("float32 /scale bfloat16")
def divided(x, q, s):
    return x @ (q.astype(F32) / s).astype(BF)


@spelling("float32 *scale bfloat16")
def mxfp4(x, f4, e8):
    s = jnp.exp2(e8.astype(F32) - 127)
    return x @ (f4.astype(F32) * jnp.repeat(s, K // G, 0)).astype(BF)


@spelling("float32 *scale bfloat16")
def mxfp8(x, e4, e8):
    s = lax.bitcast_convert_type(e8.astype(jnp.uint32) << 23, F32)
    parts = e4.astype(F32).reshape(G, -1, N) * s[:, None]
    return x @ parts.reshape(K, N).astype(BF)


@spelling("float32 *scale bfloat16")
def nvfp4(x, f4, s8, one):
    parts = f4.astype(F32).reshape(K // 16, 16, N) * (s8.astype(F32) * one)[:, None]
    return x @ parts.reshape(K, N).astype(BF)


@spelling("bfloat16 *scale")
def nvfp4_in_16_bits(x, f4, s8):
    return x @ (f4.astype(BF) * jnp.repeat(s8.astype(BF), 16, 0))


@spelling("float32 *scale bfloat16")
def blocks_by_broadcast(x, e4, block):
    s = jnp.broadcast_to(block[:, None, :, None], (2, K // 2, 3, N // 3))
    return x @ (e4.astype(F32) * s.reshape(K, N)).astype(BF)


@spelling("bfloat16 *scale")
def e4m3(x, e4, s):
    return x @ (e4.astype(BF) * s.astype(BF))


@spelling("float32 *scale bfloat16")
def e5m2(x, e5, s):
    return x @ (e5.astype(F32) * s).astype(BF)


@spelling("float32 bfloat16 *scale")
def cast_twice(x, q, s):
    return x @ (q.astype(F32).astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def jitted(x, q, s):
    dequantize = jax.jit(lambda q, s: q.astype(BF) * s.astype(BF))
    return x @ dequantize(q, s)


@spelling("bfloat16 *scale")
def checkpointed(x, q, s):
    return jax.checkpoint(lambda x, q, s: x @ (q.astype(BF) * s.astype(BF)))(x, q, s)


@spelling("bfloat16 *scale")
def behind_a_barrier(x, q, s):
    return x @ lax.optimization_barrier(q.astype(BF) * s.astype(BF))


# ------------------------------------------------------------- behind the product
@spelling("bfloat16", behind="*scale")
def scaled_behind(x, q, s):
    return (x @ q.astype(BF)) * s.astype(BF)


@spelling("bfloat16", behind="float32 *scale bfloat16")
def scaled_behind_in_float32(x, q, s):
    return ((x @ q.astype(BF)).astype(F32) * s).astype(BF)


@spelling("bfloat16", behind="*scale bfloat16", sums="float32")
def sums_scaled_behind(x, q, s):
    return (jnp.dot(x, q.astype(BF), preferred_element_type=F32) * s).astype(BF)


@spelling("", behind="*scale bfloat16", sums="float32")
def mixed_scaled_behind(x, q, s):
    dims = (((1,), (0,)), ((), ()))
    return (lax.dot_general(x, q, dims, preferred_element_type=F32) * s).astype(BF)


@spelling("bfloat16", behind="/scale")
def divided_behind(x, q, s):
    return (x @ q.astype(BF)) / s.astype(BF)


@spelling("bfloat16", behind="*scale")
def one_scale_behind(x, q, one):
    return one.astype(BF) * (x @ q.astype(BF))


@spelling("bfloat16", behind="*scale")
def scale_of_heads_behind(x, q, s):
    y = jnp.einsum("bd,dnh->bnh", x, q.reshape(K, 4, N // 4).astype(BF))
    return y * s.reshape(4, N // 4).astype(BF)


@spelling("bfloat16", behind="*scale")
def reshaped_and_scaled_behind(x, q, s):
    y = (x @ q.astype(BF)).reshape(2, K // 2, 4, N // 4)
    return y * s.reshape(4, N // 4).astype(BF)


# ------------------------------------------------------------------- zero points
@spelling("bfloat16 -8.0 *scale")
def a_zero_point_of_eight(x, u4, s):
    return x @ ((u4.astype(BF) - 8) * s.astype(BF))


@spelling("float32 -128.0 *scale bfloat16")
def a_zero_point_of_bytes(x, u, s):
    return x @ ((u.astype(F32) - 128) * s).astype(BF)


@spelling("float32 -zero *scale bfloat16")
def zero_points_of_columns(x, u, s, zu):
    return x @ ((u.astype(F32) - zu.astype(F32)) * s).astype(BF)


@spelling("int32 -zero float32 *scale bfloat16")
def zero_points_in_integers(x, u, s, zu):
    wide = u.astype(jnp.int32) - zu.astype(jnp.int32)
    return x @ (wide.astype(F32) * s).astype(BF)


@spelling("bfloat16 *scale +zero")
def scaled_and_shifted(x, q, s, one):
    return x @ (q.astype(BF) * s.astype(BF) + one.astype(BF))


@spelling("bfloat16 *scale -zero")
def scaled_and_shifted_back(x, q, s, sg):
    return x @ (q.astype(BF) * s.astype(BF) - sg[0].astype(BF))


@spelling("bfloat16 -zero *scale")
def zero_points_of_groups(x, q, sg, zg):
    parts = q.reshape(G, K // G, N).astype(BF) - zg[:, None].astype(BF)
    return x @ (parts * sg[:, None].astype(BF)).reshape(K, N)


@spelling("bfloat16 -zero *scale")
def zero_points_of_groups_scale_of_columns(x, q, s, zg):
    parts = q.reshape(G, K // G, N).astype(BF) - zg[:, None].astype(BF)
    return x @ (parts.reshape(K, N) * s.astype(BF))


# ------------------------------------------------------------------------ groups
@spelling("bfloat16 *scale")
def groups(x, q, sg):
    parts = q.reshape(G, K // G, N).astype(BF) * sg.astype(BF)[:, None]
    return x @ parts.reshape(K, N)


@spelling("float32 *scale bfloat16")
def groups_in_float32(x, i4, sg):
    parts = i4.reshape(G, K // G, N).astype(F32) * sg[:, None]
    return x @ parts.reshape(K, N).astype(BF)


@spelling("bfloat16 *scale")
def scales_repeated(x, i4, sg):
    return x @ (i4.astype(BF) * jnp.repeat(sg.astype(BF), K // G, axis=0))


@spelling("bfloat16 *scale")
def scales_repeated_before_a_cast(x, i4, sg):
    return x @ (i4.astype(BF) * jnp.repeat(sg, K // G, axis=0).astype(BF))


@spelling("bfloat16 *scale")
def scales_by_the_number_of_the_group(x, i4, sg):
    return x @ (i4.astype(BF) * sg.astype(BF)[jnp.arange(K) // (K // G)])


@spelling("float32 -zero *scale bfloat16")
def zero_points_by_the_number_of_the_group(x, q, sg, zg):
    group = np.arange(K) // (K // G)
    w = q.astype(F32) - jnp.take(zg, group, axis=0).astype(F32)
    return x @ (w * jnp.take(sg, group, axis=0)).astype(BF)


@spelling("bfloat16 *scale")
def scale_of_each_row_of_the_matrix(x, q, sk):
    return x @ (q.astype(BF) * sk.astype(BF)[:, None])


@spelling("bfloat16 *scale", mode="transposed")
def scale_of_each_summed_column(x, t, sk):
    return x @ (t.astype(BF) * sk.astype(BF)).T


@spelling("bfloat16 *scale")
def scales_broadcast(x, i4, sg):
    every = jnp.broadcast_to(sg.astype(BF)[:, None], (G, K // G, N)).reshape(K, N)
    return x @ (every * i4.astype(BF))


@spelling("bfloat16 *scale")
def groups_in_an_einsum(x, q, sg):
    w = q.reshape(G, K // G, N).astype(BF) * sg.astype(BF)[:, None]
    return jnp.einsum("bgk,gkn->bn", x.reshape(K, G, K // G), w)


@spelling("bfloat16 *scale", mode="transposed")
def groups_of_a_transposed_matrix(x, t, sg):
    parts = t.reshape(N, G, K // G).astype(BF) * sg.T.astype(BF)[..., None]
    return x @ parts.reshape(N, K).T


@spelling("float32 *scale bfloat16")
def blocks_of_rows_and_columns(x, e4, block):
    parts = e4.reshape(2, K // 2, 3, N // 3).astype(F32) * block[:, None, :, None]
    return x @ parts.reshape(K, N).astype(BF)


@spelling("bfloat16 *scale")
def one_scale_for_a_group(x, q, sg):
    parts = q.reshape(G, K // G, N).astype(BF) * sg[:, :1, None].astype(BF)
    return x @ parts.reshape(K, N)


# -------------------------------------------------------------------- four bits
@spelling("bfloat16 *scale")
def int4(x, i4, s):
    return x @ (i4.astype(BF) * s.astype(BF))


@spelling("int8 bfloat16 *scale")
def int4_by_int8(x, i4, s):
    return x @ (i4.astype(jnp.int8).astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def packed_in_turns(x, p, s):
    low, high = (p << 4) >> 4, p >> 4
    return x @ (jnp.stack([low, high], 1).reshape(K, N).astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def packed_in_turns_high_first(x, p, s):
    low, high = (p << 4) >> 4, p >> 4
    return x @ (jnp.stack([high, low], 1).reshape(K, N).astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def packed_in_halves(x, p, s):
    low, high = (p << 4) >> 4, p >> 4
    return x @ (jnp.concatenate([low, high]).astype(BF) * s.astype(BF))


@spelling("bfloat16 -8.0 *scale")
def packed_in_bytes(x, pu, s):
    both = jnp.stack([pu & 15, pu >> 4], 1).reshape(K, N)
    return x @ ((both.astype(BF) - 8) * s.astype(BF))


# ---------------------------------------------------------- layouts and einsums
@spelling("bfloat16 *scale", mode="transposed")
def transposed(x, t, s):
    return x @ (t.astype(BF) * s.astype(BF)[:, None]).T


@spelling("bfloat16 *scale", mode="transposed")
def transposed_before(x, t, s):
    return x @ (t.T.astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale", mode="transposed")
def transposed_in_the_product(x, t, s):
    return jnp.einsum("bk,nk->bn", x, t.astype(BF) * s.astype(BF)[:, None])


@spelling("bfloat16 *scale")
def matrix_first(x, q, s):
    return jnp.einsum("kn,bk->nb", q.astype(BF) * s.astype(BF), x)


@spelling("bfloat16 *scale")
def many_leading_axes(x, q, s):
    return x.reshape(2, 4, K // 8, K) @ (q.astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def one_row(x, q, s):
    return x[3] @ (q.astype(BF) * s.astype(BF))


@spelling("bfloat16 *scale")
def packed_qkv(x, q, s):
    w = q.reshape(K, 3, 4, N // 12).astype(BF) * s.reshape(3, 4, N // 12).astype(BF)
    return jnp.einsum("bd,dcnh->cbnh", x, w)


@spelling("bfloat16 *scale")
def scale_of_a_head(x, q, s):
    w = q.reshape(K, 4, N // 4).astype(BF) * s[:4, None].astype(BF)
    return jnp.einsum("bd,dnh->bnh", x, w)


@spelling("bfloat16 *scale")
def out_projection(x, q, s):
    w = q.reshape(4, K // 4, N).astype(BF) * s.astype(BF)
    return jnp.einsum("bnh,nhd->bd", x.reshape(K, 4, K // 4), w)


@spelling("bfloat16 *scale", mode="transposed")
def out_projection_transposed(x, t, s):
    w = t.reshape(N, 4, K // 4).astype(BF) * s.astype(BF)[:, None, None]
    return jnp.einsum("bnh,dnh->bd", x.reshape(K, 4, K // 4), w)


@spelling("bfloat16 *scale")
def vmapped_rows(x, q, s):
    return jax.vmap(lambda x: x @ (q.astype(BF) * s.astype(BF)))(x)


@spelling("bfloat16 *scale")
def with_a_bias(x, q, s):
    return jax.nn.gelu(x @ (q.astype(BF) * s.astype(BF)) + s.astype(BF))


@spelling("bfloat16 *scale")
def low_rank_added(x, q, s, sg):
    low = (x[:, :N] @ sg.T.astype(BF)) @ sg.astype(BF)
    return x @ (q.astype(BF) * s.astype(BF)) + low


# ------------------------------------------------------------------------- loops
@spelling("bfloat16 *scale")
def layers_in_a_scan(x, layers, scales):
    def layer(x, one):
        q, s = one
        return x @ (q.astype(BF) * s.astype(BF)), None

    return lax.scan(layer, x, (layers, scales))[0]


@spelling("bfloat16", behind="*scale")
def layers_by_index(x, layers, scales):
    def layer(i, x):
        return (x @ layers[i].astype(BF)) * scales[i].astype(BF)

    return lax.fori_loop(0, 2, layer, x)


@spelling("bfloat16 *scale")
def layers_taken_apart(x, layers, scales):
    each = [x @ (layers[i].astype(BF) * scales[i].astype(BF)) for i in range(2)]
    return jnp.concatenate(each, -1)


def read(f: Callable[..., Any], args: list[Any]) -> Any:
    """The last site of a program, whose other sites are alike."""
    report = rewriter.explain(f, implementation={NAME: "reference"})(*args)
    assert not report.failures
    sites = [s for s in report.sites if s.op == NAME]
    assert sites, report
    return sites[-1]


FEW = frozenset(list(SPELLINGS)[::6])
"""Spellings that are read by default, on both versions of JAX."""


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.once) for n in SPELLINGS],
)
def test_spelling(name: str) -> None:
    want, f = SPELLINGS[name]
    site = read(f, args_of(f))
    params = {n: site.params[n] for n in ("widen", "behind", "sums", "mode")
              if n in site.params}  # fmt: skip
    assert params == want
    text = want["widen"] + want.get("behind", "")
    assert ("w_scale" in site.shapes) == ("scale" in text)
    assert ("w_zero" in site.shapes) == ("zero" in text)


@pytest.mark.once
@pytest.mark.parametrize("kernel", ["reference", "memory_bounded"])
@pytest.mark.usefixtures("quick_compilation")
def test_each_rounding_is_the_programs(kernel: str) -> None:
    """Rows of the identity give matrices: the same bits, in every spelling."""
    how = {"implementation": {NAME: kernel}, "strict": True}
    SPELLED.assert_the_same(SPELLED.programs(), **how)


# ---------------------------------------------------------------------- look-alikes
ALIKE, alike = SPELLED.alike, SPELLED.look_alike


@alike
def floats(x, s):
    return x @ (jnp.ones((K, N), BF) * s.astype(BF))


@alike
def rounded_between_scale_and_product(x, q, s):
    return x @ jnp.round(q.astype(F32) * s).astype(BF)


@alike
def clipped_between(x, q, s):
    return x @ jnp.clip(q.astype(BF) * s.astype(BF), -1, 1)


@alike
def squared(x, q):
    return x @ jnp.square(q.astype(BF))


@alike
def of_two_matrices(x, q, p):
    return x @ (q.astype(BF) * jnp.concatenate([p, p]).astype(BF))


@alike
def from_a_table(x, q, s):
    return x @ s.astype(BF)[q.astype(jnp.int32) % N]


@alike
def stochastically_rounded(x, q, s):
    noise = jax.random.uniform(jax.random.key(0), (K, N), BF)
    return x @ (jnp.floor(q.astype(BF) + noise) * s.astype(BF))


@alike
def straight_through(x, sg):
    w = jnp.tile(sg, (K // G, 1))
    rounded = jnp.round(w / 0.01).astype(jnp.int8).astype(F32) * 0.01
    return x @ (w + lax.stop_gradient(rounded - w)).astype(BF)


@alike
def rounded_in_the_program(x, sg):
    w = jnp.tile(sg, (K // G, 1))
    return x @ (jnp.round(w / 0.01).astype(jnp.int8).astype(BF) * 0.01)


@alike
def another_order(x, q, s):
    w = q.reshape(4, K, N // 4).astype(BF) * s.reshape(4, 1, N // 4).astype(BF)
    return jnp.einsum("bd,ndh->bnh", x, w)


@alike
def a_part(x, q, s):
    w = q.astype(BF) * s.astype(BF)
    return x[:, ::2] @ w[::2]


@alike
def scales_of_pairs_of_numbers(x, q, s):
    every = jnp.repeat(jnp.tile(s[:48], (K, 1)) * 1.1, 2, 1) * q[:, ::2].repeat(2, 1)
    return x @ (q.astype(BF) * every.astype(BF))


@alike
def scales_that_groups_take_in_turns(x, q, sg):
    return x @ (q.astype(BF) * sg.astype(BF)[jnp.arange(K) % G])


@alike
def of_few_bits_both(x, q, s):
    rows = jnp.clip(jnp.round(x.astype(F32) * 9), -127, 127).astype(jnp.int8)
    return (rows.astype(BF) * 0.1) @ (q.astype(BF) * s.astype(BF))


@alike
def experts(x, layers, scales):
    w = layers.astype(BF) * scales.astype(BF)[:, None]
    return jnp.einsum("eck,ekn->ecn", x.reshape(2, K // 2, K), w)


@alike
def widened_outside_of_a_loop(x, q, s):
    w = q.astype(BF) * s.astype(BF)
    return lax.map(lambda row: row @ w, x)


@pytest.mark.parametrize("name", ALIKE)
def test_look_alike(name: str) -> None:
    f = ALIKE[name]
    report = rewriter.explain(f)(*args_of(f))
    assert not report.failures
    assert not [s for s in report.sites if s.op == NAME]


@pytest.mark.once
def test_a_factor_along_rows_stays_outside() -> None:
    def f(x, q):
        return (x @ q.astype(BF)) * jnp.arange(K, dtype=BF)[:, None]

    site = read(f, args_of(f))
    assert "behind" not in site.params
    assert "w_scale" not in site.shapes


@pytest.mark.once
def test_a_product_that_is_read_twice_is_not_scaled_in_the_site() -> None:
    def f(x, q, s):
        y = x @ q.astype(BF)
        return y * s.astype(BF), jnp.tanh(y)

    assert "behind" not in read(f, args_of(f)).params


@pytest.mark.once
def test_a_product_outside_of_a_loop_is_not_scaled_inside() -> None:
    def f(x, q, s):
        y = x @ q.astype(BF)
        return lax.map(lambda one: y * one, s[:4].astype(BF))

    site = read(f, args_of(f))
    assert "behind" not in site.params
    assert not site.scope


@pytest.mark.once
@pytest.mark.parametrize("name", ["scaled", "groups", "scaled_behind"])
def test_found_in_every_context(name: str) -> None:
    f = SPELLINGS[name][1]
    for context in CONTEXTS:
        if not context.ops:
            wrapped, args = context.wrap(f, tuple(args_of(f)))
            report = rewriter.explain(wrapped, implementation={NAME: "reference"})
            assert report(*args).counts()[NAME], context.name


# ------------------------------------------------------------------------ gradients
ROWS = R.standard_normal((6, K)).astype("float32")


@pytest.mark.parametrize(
    ("behind", "kernel"),
    [
        (False, "memory_bounded"),
        pytest.param(True, "memory_bounded", marks=pytest.mark.once),
        pytest.param(False, "reference", marks=pytest.mark.once),
        pytest.param(True, "reference", marks=pytest.mark.once),
    ],
)
def test_gradients(behind: bool, kernel: str) -> None:
    """Of rows and scales: outside of the program, and within it."""
    q, s = (jnp.asarray(GIVEN[n]) for n in ("q", "s"))

    def program(x: Any, s: Any) -> Any:
        if behind:
            return (x @ q.astype(F32)) * s
        return x @ (q.astype(F32) * s)

    def loss(f: Any) -> Any:
        return lambda x, s: jnp.square(f(x, s)).sum()

    want = jax.grad(loss(program), (0, 1))(ROWS, s)
    how = {"implementation": {NAME: kernel}}
    outside = jax.grad(loss(rewriter.optimize(program, **how)), (0, 1))(ROWS, s)
    within = rewriter.optimize(jax.grad(loss(program), (0, 1)), **how)
    assert [x.op for x in within.report(ROWS, s).sites] == [NAME]
    for got in (outside, within(ROWS, s)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


# ------------------------------------------------------------------------ neighbours
UNIT = "gated_linear_unit"


@pytest.mark.parametrize(
    ("forced", "kept"),
    [
        ({NAME: "memory_bounded"}, {NAME: "memory_bounded", UNIT: "xla"}),
        ({UNIT: "memory_bounded"}, {NAME: "xla", UNIT: "memory_bounded"}),
    ],
    ids=str,
)
def test_a_unit_is_computed_by_one_kernel_or_by_those_of_its_products(
    forced: dict[str, str], kept: dict[str, str]
) -> None:
    def unit(x, q, s):
        gate = x @ (q.astype(F32) * s)
        return jax.nn.silu(gate) * (x @ (q.astype(F32) * s[::-1]))

    args = [jnp.asarray(a) for a in (ROWS, GIVEN["q"], GIVEN["s"])]
    fast = rewriter.optimize(unit, implementation=forced)
    sites = fast.report(*args).sites
    assert {s.op: s.kernel for s in sites} == kept
    text = str(fast.jaxpr(*args))
    assert text.count("rewriter_site") == sum(s.kernel != "xla" for s in sites)
    np.testing.assert_allclose(fast(*args), unit(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.once
def test_a_kernel_of_a_unit_that_was_chosen_yields_to_its_products() -> None:
    def unit(x, gate, up, s):
        return jax.nn.silu(x @ (gate.astype(BF) * s)) * (x @ (up.astype(BF) * s))

    shapes = ((16, 4096), BF), ((4096, 14336), "int8"), ((14336,), BF)
    x, w, s = (jax.ShapeDtypeStruct(*given) for given in shapes)
    how = {NAME: ["hopper", "xla"]}
    report = rewriter.explain(unit, target="h100", implementation=how)(x, w, w, s)
    kernels = {site.op: site.kernel for site in report.sites}
    assert kernels == {NAME: "hopper", UNIT: "xla"}


@pytest.mark.once
def test_it_is_left_to_xla_unless_it_pays() -> None:
    (site,) = rewriter.explain(scaled)(*args_of(scaled)).sites
    assert site.kernel == "xla"
    assert "so small that XLA is as fast" in str(site.not_chosen)
