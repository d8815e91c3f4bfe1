"""Gated linear units with matrices of few bits: spellings, look-alikes, gradients."""

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

NAME = "quantized_gated_linear_unit"
UNIT = "gated_linear_unit"
FORCED = {NAME: ["memory_bounded", "xla"]}
M, K, F, G = 6, 64, 48, 4
R = np.random.default_rng(0)
BF, F32 = jnp.bfloat16, jnp.float32


drawn = functools.partial(stored, R)


GIVEN = {
    "x": R.standard_normal((M, K)).astype("float32"),
    "a": drawn((K, F), "int8"),
    "b": drawn((K, F), "int8"),
    "ab": drawn((K, 2 * F), "int8"),
    "pair": drawn((K, 2, F), "int8"),
    "at": drawn((F, K), "int8"),
    "bt": drawn((F, K), "int8"),
    "a4": drawn((K, F), "int4"),
    "b4": drawn((K, F), "int4"),
    "ab4": drawn((K, 2 * F), "int4"),
    "au": drawn((K, F), "uint8"),
    "bu": drawn((K, F), "uint8"),
    "ae": drawn((K, F), "float8_e4m3fn"),
    "be": drawn((K, F), "float8_e4m3fn"),
    "a5": drawn((K, F), "float8_e5m2"),
    "b5": drawn((K, F), "float8_e5m2"),
    "s": R.uniform(0.001, 0.003, F).astype("float32"),
    "t": R.uniform(0.001, 0.003, F).astype("float32"),
    "st": R.uniform(0.001, 0.003, 2 * F).astype("float32"),
    "two": R.uniform(0.001, 0.003, (2, F)).astype("float32"),
    "sg": R.uniform(0.01, 0.03, (G, F)).astype("float32"),
    "tg": R.uniform(0.01, 0.03, (G, F)).astype("float32"),
    "stg": R.uniform(0.01, 0.03, (G, 2 * F)).astype("float32"),
    "zg": R.integers(-3, 3, (G, F)).astype("int8"),
    "one": np.float32(0.0017),
    "other": np.float32(0.0013),
    "bias": R.standard_normal(F).astype("float32"),
    "layers": drawn((2, K, 2 * F), "int8"),
    "scales": R.uniform(0.001, 0.003, (2, 2 * F)).astype("float32"),
    "down": R.standard_normal((2, F, K)).astype("float32"),
}
"""Arguments by their names in spellings."""

SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
alike, args_of = SPELLED.look_alike, SPELLED.args_of


def spelling(widen: str, **more: Any) -> Callable[..., Any]:
    """Keeps a program, and what is to be read off it."""
    return SPELLED.spelling({"widen": widen, **more})


def grouped(q: Any, s: Any, dtype: Any = None) -> Any:
    dtype = dtype or F32
    parts = q.reshape(len(s), -1, q.shape[1]).astype(dtype) * s.astype(dtype)[:, None]
    return parts.reshape(q.shape)


# ------------------------------------------------------- scales before the product
@spelling("float32 *scale")
def scaled(x, a, b, s, t):
    return jax.nn.silu(x @ (a.astype(F32) * s)) * (x @ (b.astype(F32) * t))


@spelling("float32 *scale")
def up_first(x, a, b, s, t):
    return (x @ (b.astype(F32) * t)) * jax.nn.silu(x @ (s * a.astype(F32)))


@spelling("bfloat16 *scale")
def in_16_bits(x, a, b, s, t):
    x, s, t = (y.astype(BF) for y in (x, s, t))
    return jax.nn.silu(x @ (a.astype(BF) * s)) * (x @ (b.astype(BF) * t))


@spelling("float32 *scale bfloat16")
def scaled_in_float32(x, a, b, s, t):
    x = x.astype(BF)
    gate = x @ (a.astype(F32) * s).astype(BF)
    return jax.nn.silu(gate) * (x @ (b.astype(F32) * t).astype(BF))


@spelling("float32 *scale")
def gelu(x, a, b, s, t):
    return jax.nn.gelu(x @ (a.astype(F32) * s)) * (x @ (b.astype(F32) * t))


@spelling("float32 *scale")
def relu(x, a, b, s, t):
    return jax.nn.relu(x @ (a.astype(F32) * s)) * (x @ (b.astype(F32) * t))


@spelling("float32 *scale")
def one_scale(x, a, b, one, other):
    return jax.nn.silu(x @ (a.astype(F32) * one)) * (x @ (b.astype(F32) * other))


@spelling("float32 *scale")
def a_bias(x, a, b, s, t, bias):
    gate = x @ (a.astype(F32) * s) + bias
    return jax.nn.silu(gate) * (x @ (b.astype(F32) * t) + 2 * bias)


@spelling("float32 *scale")
def of_fp8(x, ae, be, s, t):
    return jax.nn.silu(x @ (ae.astype(F32) * s)) * (x @ (be.astype(F32) * t))


@spelling("bfloat16 *scale")
def of_e5m2(x, a5, b5, s, t):
    x, s, t = (y.astype(BF) for y in (x, s, t))
    return jax.nn.silu(x @ (a5.astype(BF) * s)) * (x @ (b5.astype(BF) * t))


@spelling("float32 -128.0 *scale")
def a_zero_point(x, au, bu, s, t):
    gate = x @ ((au.astype(F32) - 128) * s)
    return jax.nn.silu(gate) * (x @ ((bu.astype(F32) - 128) * t))


@spelling("float32 /scale")
def divided(x, a, b, s, t):
    s, t = 1e6 * s, 1e6 * t
    return jax.nn.silu(x @ (a.astype(F32) / s)) * (x @ (b.astype(F32) / t))


@spelling("float32")
def cast(x, ae, be):
    return jax.nn.silu(x @ ae.astype(F32)) * (x @ be.astype(F32))


# ------------------------------------------------------------------------ groups
@spelling("float32 *scale")
def groups(x, a, b, sg, tg):
    return jax.nn.silu(x @ grouped(a, sg)) * (x @ grouped(b, tg))


@spelling("bfloat16 *scale")
def groups_of_int4(x, a4, b4, sg, tg):
    x = x.astype(BF)
    return jax.nn.silu(x @ grouped(a4, sg, BF)) * (x @ grouped(b4, tg, BF))


@spelling("float32 *scale")
def groups_repeated(x, a4, b4, sg, tg):
    sg, tg = (jnp.repeat(s, K // G, axis=0) for s in (sg, tg))
    return jax.nn.silu(x @ (a4.astype(F32) * sg)) * (x @ (b4.astype(F32) * tg))


@spelling("float32 -zero *scale")
def groups_with_zero_points(x, a4, b4, sg, tg, zg):
    def widened(q, s):
        parts = q.reshape(G, K // G, F).astype(F32) - zg[:, None].astype(F32)
        return (parts * s[:, None]).reshape(K, F)

    return jax.nn.silu(x @ widened(a4, sg)) * (x @ widened(b4, tg))


@spelling("float32 *scale", halves="gate_up")
def packed_groups(x, ab4, stg):
    gate, up = jnp.split(x @ grouped(ab4, stg), 2, -1)
    return jax.nn.silu(gate) * up


@spelling("float32 *scale")
def groups_in_an_einsum(x, a4, b4, sg, tg):
    parts = x.reshape(M, G, K // G)
    gate, up = (
        jnp.einsum("bgk,gkn->bn", parts, q.reshape(G, -1, F).astype(F32) * s[:, None])
        for q, s in ((a4, sg), (b4, tg))
    )
    return jax.nn.silu(gate) * up


# ------------------------------------------------------- scales behind the product
@spelling("float32 *scale")
def scaled_behind(x, a, b, s, t):
    return jax.nn.silu((x @ a.astype(F32)) * s) * ((x @ b.astype(F32)) * t)


@spelling("float32 *scale")
def scaled_behind_in_16_bits(x, a, b, s, t):
    x, s, t = (y.astype(BF) for y in (x, s, t))
    return jax.nn.silu((x @ a.astype(BF)) * s) * ((x @ b.astype(BF)) * t)


@spelling("float32 *scale")
def mixed_scaled_behind(x, a, b, s, t):
    dot = lambda q: lax.dot_general(
        x.astype(BF), q, (((1,), (0,)), ((), ())), preferred_element_type=F32
    )
    return (jax.nn.silu(dot(a) * s) * (dot(b) * t)).astype(BF)


@spelling("float32 *scale", halves="gate_up")
def packed_scaled_behind(x, ab, st):
    gate, up = jnp.split((x @ ab.astype(F32)) * st, 2, -1)
    return jax.nn.silu(gate) * up


# ------------------------------------------------------------------------- packed
@spelling("float32 *scale", halves="gate_up")
def packed(x, ab, st):
    gate, up = jnp.split(x @ (ab.astype(F32) * st), 2, -1)
    return jax.nn.silu(gate) * up


@spelling("float32 *scale", halves="up_gate")
def packed_up_first(x, ab, st):
    y = x @ (ab.astype(F32) * st)
    return y[:, :F] * jax.nn.silu(y[:, F:])


@spelling("float32 *scale", halves="gate_up")
def packed_by_an_axis(x, pair, two):
    y = jnp.einsum("bk,kcf->cbf", x, pair.astype(F32) * two)
    return jax.nn.silu(y[0]) * y[1]


@spelling("float32 *scale", halves="gate_up")
def packed_with_one_scale(x, ab, one):
    gate, up = jnp.split(x @ (ab.astype(F32) * one), 2, -1)
    return jax.nn.silu(gate) * up


@spelling("bfloat16 *scale", halves="gate_up")
def packed_in_16_bits(x, ab, st):
    y = x.astype(BF) @ (ab.astype(BF) * st.astype(BF))
    return jax.nn.silu(y[..., :F]) * y[..., F:]


# -------------------------------------------------------------------- around it
@spelling("float32 *scale")
def leading_axes(x, a, b, s, t):
    x = x.reshape(2, 3, K)
    return jax.nn.silu(x @ (a.astype(F32) * s)) * (x @ (b.astype(F32) * t))


@spelling("float32 *scale")
def one_row(x, a, b, s, t):
    return jax.nn.silu(x[0] @ (a.astype(F32) * s)) * (x[0] @ (b.astype(F32) * t))


@spelling("float32 *scale")
def checkpointed(x, a, b, s, t):
    return jax.checkpoint(scaled)(x, a, b, s, t)


@spelling("float32 *scale")
def vmapped(x, a, b, s, t):
    return jax.vmap(lambda x: scaled(x, a, b, s, t))(x)


@spelling("float32 *scale", halves="gate_up")
def layers_in_a_scan(x, layers, scales, down):
    def layer(x, one):
        q, s, down = one
        gate, up = jnp.split(x @ (q.astype(F32) * s), 2, -1)
        return (jax.nn.silu(gate) * up) @ down, None

    return lax.scan(layer, x, (layers, scales, down))[0]


@spelling("float32 *scale", halves="gate_up")
def layers_taken_apart(x, layers, scales, down):
    for q, s, w in zip(layers, scales, down, strict=True):
        gate, up = jnp.split(x @ (q.astype(F32) * s), 2, -1)
        x = (jax.nn.silu(gate) * up) @ w
    return x


# --------------------------------------------------------------------- look-alikes
@alike
def floats(x, s):
    w = jnp.ones((K, F)) * s
    return jax.nn.silu(x @ w) * (x @ w[:, ::-1])


@alike
def one_branch_of_floats(x, a, s, down):
    return jax.nn.silu(x @ (a.astype(F32) * s)) * (x @ down[0].T)


@alike
def two_kinds_of_steps(x, a, b, s, t):
    up = x @ (b.astype(BF) * t.astype(BF)).astype(F32)
    return jax.nn.silu(x @ (a.astype(F32) * s)) * up


@alike
def transposed(x, at, bt, s, t):
    gate = x @ (at.astype(F32) * s[:, None]).T
    return jax.nn.silu(gate) * (x @ (bt.astype(F32) * t[:, None]).T)


@alike
def clipped(x, a, b, s, t):
    gate = x @ jnp.clip(a.astype(F32) * s, -0.1, 0.1)
    return jax.nn.silu(gate) * (x @ (b.astype(F32) * t))


@alike
def rounded_in_the_program(x, a, b, s):
    w = jnp.round(a.astype(F32) * b.astype(F32) / 99).astype(jnp.int8)
    return jax.nn.silu(x @ (w.astype(F32) * s)) * (x @ (w[::-1].astype(F32) * s))


@alike
def straight_through(x, tg):
    w = jnp.tile(tg, (K // G, 1))
    rounded = jnp.round(w / 0.01).astype(jnp.int8).astype(F32) * 0.01
    w = w + lax.stop_gradient(rounded - w)
    return jax.nn.silu(x @ w) * (x @ w[:, ::-1])


@alike
def stochastically_rounded(x, a, b, s):
    noise = jax.random.uniform(jax.random.key(0), (K, F))
    w = jnp.floor(a.astype(F32) + noise) * s
    return jax.nn.silu(x @ w) * (x @ (b.astype(F32) * s))


@alike
def columns_in_turns(x, ab, st):
    y = x @ (ab.astype(F32) * st)
    return jax.nn.silu(y[:, ::2]) * y[:, 1::2]


@alike
def a_scale_of_each_row_of_the_matrix(x, a, b):
    r = 1e-3 * jnp.arange(1, K + 1, dtype=F32)[:, None]
    return jax.nn.silu(x @ (a.astype(F32) * r)) * (x @ (b.astype(F32) * r))


@alike
def widened_outside_of_a_loop(x, a, b, s, t):
    a, b = a.astype(F32) * s, b.astype(F32) * t
    return lax.map(lambda row: jax.nn.silu(row @ a) * (row @ b), x)


@alike
def a_part(x, ab, st):
    w = ab.astype(F32)[:, :F] * st[:F]
    return jax.nn.silu(x @ w) * (x @ (ab.astype(F32)[:, F:] * st[F:]))[:, ::-1]


def site_of(f: Callable[..., Any], args: list[Any]) -> Any:
    report = rewriter.explain(f, implementation=FORCED)(*args)
    assert not report.failures
    found = [s for s in report.sites if s.op == UNIT]
    assert found, report
    return found[-1]


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    want, f = SPELLINGS[name]
    site = site_of(f, args_of(f))
    assert (site.form, site.kernel) == (NAME, "memory_bounded")
    params = {n: site.params[n] for n in ("widen", "halves") if n in site.params}
    assert params == want
    assert ("w_up" in site.shapes) == ("halves" not in want)
    assert ("w_gate_scale" in site.shapes) == ("scale" in want["widen"])


FEW = ("packed_groups", "scaled_behind")


@pytest.mark.parametrize("names", [FEW, pytest.param(None, marks=pytest.mark.once)])
@pytest.mark.usefixtures("quick_compilation")
def test_numbers_are_those_of_the_stored_numbers(names: Any) -> None:
    """No further from a run in float64 than the program itself, in every spelling."""
    SPELLED.assert_as_near(names, FORCED)


@pytest.mark.once
@pytest.mark.parametrize("name", ALIKE)
def test_look_alike(name: str) -> None:
    f = ALIKE[name]
    report = rewriter.explain(f, implementation=FORCED)(*args_of(f))
    assert not report.failures
    assert not [s for s in report.sites if s.form == NAME]


# ----------------------------------------------------------------------- gradients
@pytest.mark.once
@pytest.mark.parametrize("name", ["packed", "groups"])
def test_gradients_of_rows_and_scales(name: str) -> None:
    """Outside of the program, and within it, where the products may stay."""
    last = len(args_of(SPELLINGS[name][1])) - 1
    SPELLED.assert_same_gradients(name, (0, last), FORCED)


# ------------------------------------------------------------------------ neighbours
@pytest.mark.once
def test_layers_of_floats_between_layers_of_few_bits() -> None:
    """Equal units are proved once: what is above their matrices is looked at."""

    def f(x, a, b, s, t, down):
        for w, v in 2 * [
            (down[0].T, down[1].T),
            (a.astype(F32) * s, b.astype(F32) * t),
        ]:
            x = (jax.nn.silu(x @ w) * (x @ v)) @ down[0]
        return x

    sites = rewriter.explain(f, implementation=FORCED)(*args_of(f)).sites
    assert [s.form for s in sites if s.op == UNIT] == ["", NAME, "", NAME]


@pytest.mark.once
def test_a_unit_that_reads_few_bits_goes_before_its_products() -> None:
    large = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1, 2048), F32), ((2048, 8192), "int8"), ((2048, 8192), "int8"),
            ((8192,), F32), ((8192,), F32),
        )
    ]  # fmt: skip
    sites = rewriter.explain(scaled)(*large).sites
    kernels = {s.op: (s.form, s.kernel) for s in sites}
    assert kernels == {"quantized_dot": ("", "xla"), UNIT: (NAME, "memory_bounded")}
    how = {"quantized_dot": "memory_bounded"}
    sites = rewriter.explain(scaled, implementation=how)(*large).sites
    kernels = {s.op: s.kernel for s in sites}
    assert kernels == {"quantized_dot": "memory_bounded", UNIT: "xla"}
