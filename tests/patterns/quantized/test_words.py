"""Products of numbers packed by eight in words: spellings, roundings, look-alikes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.kernels.quantized_dot import PACKED, packed
from rewriter.ops.kernel import spec_of
from rewriter.ops.packing import Packing, unpacked
from tests.patterns.quantized.spelled import Spelled

NAME = "packed_dot"
FORCED = {NAME: ["memory_bounded", "xla"]}
K, N, G = 128, 96, 4
R = np.random.default_rng(0)
F16, BF, F32 = jnp.float16, jnp.bfloat16, jnp.float32
AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where AutoAWQ puts each of eight numbers."""


def words(*shape: int) -> np.ndarray:
    return R.integers(-(2**31), 2**31, shape).astype("int32")


GIVEN = {
    "x": np.eye(K, dtype=F16),
    "w": words(K // 8, N),
    "u": words(K // 8, N).view("uint32"),
    "z": words(G, N // 8),
    "t": words(N, K // 8),
    "a": words(K, N // 8),
    "other": words(K // 8, N),
    "s": R.uniform(0.01, 0.03, (G, N)).astype("float16"),
    "sc": R.uniform(0.01, 0.03, N).astype("float32"),
    "st": R.uniform(0.01, 0.03, (N, G)).astype("float16"),
    "layers": words(2, K // 8, K),
    "scales": R.uniform(0.001, 0.003, (2, K)).astype("float32"),
    "g_idx": R.permutation(np.arange(K) // (K // G)).astype("int32"),
}
"""Arguments by their names in spellings; rows of the identity give matrices."""

SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
spelling, args_of = SPELLED.spelling, SPELLED.args_of
alike = SPELLED.look_alike  # numbers that are packed otherwise, or not

ALONG_K, ALONG_N = "k words 01234567 unsigned uint8", "n words 01234567 unsigned uint8"
IN_ORDER = "n words 04152637 unsigned uint8"


def rows(w: Any) -> Any:
    """Numbers along rows, as AutoGPTQ unpacks its matrix."""
    shifts = jnp.arange(0, 32, 4)
    return ((w[:, None, :] >> shifts[None, :, None]) & 0xF).reshape(-1, w.shape[1])


def columns(z: Any) -> Any:
    """Numbers along columns, as AutoGPTQ unpacks its zero points."""
    shifts = jnp.arange(8) * 4
    return ((z[:, :, None] >> shifts) & 0xF).reshape(z.shape[0], -1)


def in_awq_order(x: Any) -> Any:
    order = jnp.arange(x.shape[1]).reshape(-1, 8)[:, AWQ].reshape(-1)
    return x[:, order]


def by_groups(w: Any, z: Any, s: Any) -> Any:
    w = w.reshape(G, K // G, N)
    return ((w - z[:, None]) * s[:, None]).reshape(K, N)


@spelling(ALONG_K)
def gptq(x, w, z, s):
    return x @ by_groups(rows(w), columns(z) + 1, s)


@spelling(ALONG_K)
def gptq_of_the_second_version(x, w, z, s):
    return x @ by_groups(rows(w), columns(z), s)


@spelling(ALONG_K)
def gptq_with_repeated_scales(x, w, z, s):
    each = K // G
    zeros = jnp.repeat(columns(z) + 1, each, axis=0)
    return x @ ((rows(w) - zeros).astype(F16) * jnp.repeat(s, each, axis=0))


@spelling(ALONG_K)
def gptq_with_scales_by_index(x, w, z, s):
    group = jnp.arange(K) // (K // G)
    return x @ ((rows(w) - (columns(z) + 1)[group]).astype(F16) * s[group])


@spelling(ALONG_K)
def symmetric(x, w, s):
    w = rows(w).reshape(G, -1, N).astype(F16) - 8
    return x @ (w * s[:, None]).reshape(K, N)


@spelling(ALONG_K)
def less_eight_as_integers(x, w, s):
    w = (rows(w) - 8).reshape(G, -1, N).astype(F16)
    return x @ (w * s[:, None]).reshape(K, N)


@spelling(ALONG_K)
def unsigned_words(x, u, s):
    shifts = jnp.arange(8, dtype=jnp.uint32) * 4
    w = ((u[:, None] >> shifts[:, None]) & 15).reshape(G, -1, N).astype(F16)
    return x @ ((w - 8) * s[:, None]).reshape(K, N)


@spelling(ALONG_K)
def through_int8(x, w, z, s):
    """As AutoGPTQ does in PyTorch: the mask comes behind the cast."""
    shifts = jnp.arange(0, 32, 4, dtype=jnp.int32)[None, :, None]
    w = jnp.bitwise_and(jnp.right_shift(w[:, None], shifts).astype(jnp.int8), 15)
    z = jnp.right_shift(z[:, :, None], shifts.reshape(1, 1, 8)).astype(jnp.int8)
    z = jnp.bitwise_and(z, 15).reshape(G, N) + 1
    return x @ by_groups(w.reshape(K, N), z, s)


@spelling(ALONG_K)
def by_a_stack(x, w, sc):
    w = jnp.stack([(w >> (4 * i)) & 15 for i in range(8)], 1).reshape(K, N)
    return x.astype(F32) @ ((w.astype(F32) - 8) * sc)


@spelling(ALONG_K)
def by_logical_shifts(x, w, sc):
    shift = lambda i: lax.shift_right_logical(w, jnp.int32(4 * i))
    w = jnp.stack([shift(i) & 15 for i in range(7)] + [shift(7)], 1).reshape(K, N)
    return x.astype(F32) @ ((w.astype(F32) - 8) * sc)


@spelling(ALONG_K)
def by_repeated_words(x, w, sc):
    shifts = jnp.tile(jnp.arange(0, 32, 4), K // 8)[:, None]
    w = (jnp.repeat(w, 8, axis=0) >> shifts) & 15
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@spelling("k words 76543210 unsigned uint8")
def highest_first(x, w, sc):
    shifts = 28 - 4 * jnp.arange(8)
    w = ((w[:, None] >> shifts[:, None]) & 15).reshape(K, N)
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@spelling("k words 01234567 signed int8")
def signed(x, w, sc):
    up = 28 - 4 * jnp.arange(8)[:, None]
    w = ((w[:, None] << up) >> 28).reshape(K, N)
    return (x.astype(BF) @ w.astype(BF)) * sc.astype(BF)


@spelling(IN_ORDER)
def awq(x, a, z, s):
    """As AutoAWQ unpacks matrix and zero points."""
    return x @ by_groups(in_awq_order(columns(a)), in_awq_order(columns(z)), s)


@spelling(IN_ORDER)
def awq_by_shifts(x, a, z, s):
    def numbers(a: Any) -> Any:
        return ((a[:, :, None] >> (4 * AWQ)) & 15).reshape(a.shape[0], -1)

    return x @ by_groups(numbers(a), numbers(z), s)


@spelling(IN_ORDER)
def awq_ordered_before_it_is_flat(x, a, s):
    w = ((a[:, :, None] >> (jnp.arange(8) * 4)) & 15)[..., AWQ].reshape(K, N)
    return x @ by_groups(w.astype(F16), jnp.full((G, N), 8.0, F16), s)


@spelling(IN_ORDER)
def awq_masked_last(x, a, z, s):
    """As AutoAWQ does in PyTorch: a cast, the order, and then the mask."""

    def numbers(a: Any) -> Any:
        shifted = (a[:, :, None] >> (jnp.arange(8) * 4)).astype(jnp.int8)
        return jnp.bitwise_and(in_awq_order(shifted.reshape(a.shape[0], -1)), 15)

    return x @ by_groups(numbers(a), numbers(z), s)


@spelling(ALONG_N)
def along_columns(x, a, sc):
    return x.astype(BF) @ (columns(a).astype(BF) * sc.astype(BF))


@spelling(ALONG_K)
def transposed(x, t, st):
    shifts = jnp.arange(0, 32, 4)
    w = ((t[:, :, None] >> shifts) & 15).reshape(N, G, K // G)
    return x @ ((w.astype(F16) - 8) * st[..., None]).reshape(N, K).T


@spelling(ALONG_K)
def scaled_behind(x, w, sc):
    return (x.astype(BF) @ rows(w).astype(BF)) * sc.astype(BF)


@spelling(ALONG_K)
def rounded_once(x, w, z, s):
    w = by_groups(rows(w).astype(F32), columns(z).astype(F32), s.astype(F32))
    return jnp.einsum("mk,kn->mn", x.astype(BF), w.astype(BF))


@spelling(ALONG_K)
def layers_in_a_scan(x, layers, scales):
    def layer(x, one):
        w, s = one
        return x @ ((rows(w).astype(F32) - 8) * s), None

    return lax.scan(layer, x.astype(F32), (layers, scales))[0]


@spelling(ALONG_K)
def in_a_jit(x, w, z, s):
    return x @ jax.jit(lambda w, z: by_groups(rows(w), columns(z), s))(w, z)


@alike
def groups_in_any_order(x, w, z, s, g_idx):
    return x @ ((rows(w) - columns(z)[g_idx]).astype(F16) * s[g_idx])


@alike
def three_bits(x, w, sc):
    shifts = jnp.arange(0, 32, 4)
    w = ((w[:, None, :] >> shifts[None, :, None]) & 7).reshape(K, N)
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@alike
def shifted_by_three(x, w, sc):
    shifts = jnp.arange(0, 24, 3)
    w = ((w[:, None, :] >> shifts[None, :, None]) & 15).reshape(K, N)
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@alike
def one_place_twice(x, w, sc):
    shifts = np.array([0, 4, 8, 12, 16, 20, 24, 24])
    w = ((w[:, None, :] >> shifts[None, :, None]) & 15).reshape(K, N)
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@alike
def of_two_arrays(x, w, other, sc):
    both = [(w, other)[i % 2] >> (4 * i) & 15 for i in range(8)]
    w = jnp.stack(both, 1).reshape(K, N)
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@alike
def behind_each_other(x, w, sc):
    """Number i + j k/8 is in word i."""
    shifts = jnp.arange(8)[:, None, None] * 4
    w = ((w >> shifts) & 15).reshape(K, N)
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@alike
def rows_in_another_order(x, w, sc):
    w = rows(w)[np.roll(np.arange(K), 3)]
    return x.astype(BF) @ (w.astype(BF) * sc.astype(BF))


@alike
def half_of_the_words(x, w, sc):
    w = rows(w)[: K // 2]
    return x.astype(BF)[:, : K // 2] @ (w.astype(BF) * sc.astype(BF))


@alike
def shifted_by_a_word(x, w, other, sc):
    w = ((w[:, None, :] >> (other & 3)[:, None]) & 15) * jnp.ones((8, 1), jnp.int32)
    return x.astype(BF) @ (w.reshape(K, N).astype(BF) * sc.astype(BF))


@alike
def signs_by_a_mask(x, w, sc):
    """The places of a sign are those of the words, and not of the numbers."""
    w = jnp.stack([w >> (4 * i) for i in range(8)], 1).reshape(K, N)
    return x.astype(F32) @ (w.astype(F32) * sc)


@alike
def zeros_that_wrap(x, u, z, s):
    """Differences without a sign wrap around."""
    shifts = jnp.arange(8, dtype=jnp.uint32) * 4
    w = ((u[:, None] >> shifts[:, None]) & 15).reshape(G, -1, N)
    z = columns(z).astype(jnp.uint32)
    return x @ ((w - z[:, None]).astype(F16) * s[:, None]).reshape(K, N)


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    SPELLED.assert_packed(name, FORCED)


@pytest.mark.parametrize("names", [
    ("gptq", "awq"), pytest.param(None, marks=pytest.mark.once),
])  # fmt: skip
def test_each_rounding_is_the_programs(names: Any) -> None:
    """Bit by bit, also of programs that are left as written."""
    programs = SPELLED.programs(names) | (ALIKE if names is None else {})
    SPELLED.assert_the_same(programs, implementation=FORCED)


@pytest.mark.once
@pytest.mark.parametrize("name", ALIKE)
def test_look_alike(name: str) -> None:
    f = ALIKE[name]
    report = rewriter.explain(f, implementation=FORCED)(*args_of(f))
    assert not report.failures
    assert not report.sites


def test_groups_in_any_order_are_refused_with_a_reason() -> None:
    f = ALIKE["groups_in_any_order"]
    report = rewriter.explain(f)(*args_of(f))
    assert "lie in any order" in report.why_not(NAME)


def test_steps_of_small_integers_are_those_of_floats() -> None:
    def widen(name: str) -> Any:
        f = SPELLINGS[name][1]
        report = rewriter.explain(f, implementation=FORCED)(*args_of(f))
        return report.sites[0].params["widen"]

    assert widen("gptq") == "float16 -zero *scale"
    assert widen("awq_masked_last") == "float16 -zero *scale"
    assert widen("symmetric") == "float16 -8.0 *scale"


@pytest.mark.once
@pytest.mark.parametrize("mode", ["forward", "transposed"])
@pytest.mark.parametrize("axis", ["k", "n"])
@pytest.mark.parametrize("sign", ["signed", "unsigned"])
def test_blocks_give_what_the_whole_gives(axis: str, mode: str, sign: str) -> None:
    x = R.standard_normal((3, K)).astype("float32")
    shape = (K // 8, N) if axis == "k" else (K, N // 8)
    w = words(*(shape if mode == "forward" else shape[::-1]))
    scale = R.uniform(0.01, 0.03, (G, N)).astype("float32")
    given = {"x": x, "w": w, "w_scale": scale}
    packing = Packing(axis, "words", "75316420", sign, "int8")
    params = {"widen": "float32 *scale", "packing": str(packing), "mode": mode}
    every = [(w.view("uint32") >> (4 * int(p))) & 15 for p in packing.first]
    along = int((axis == "n") != (mode == "transposed"))
    numbers = np.stack(every, along + 1).reshape((K, N)[:: 1 - 2 * (mode != "forward")])
    numbers = numbers.astype("int8")
    numbers = numbers if sign == "unsigned" else (numbers ^ 8) - 8
    np.testing.assert_array_equal(unpacked(jnp.asarray(w), packing, along), numbers)
    matrix = numbers if mode == "forward" else numbers.T
    wide = matrix.astype("f8") * np.repeat(scale.astype("f8"), K // G, 0)
    got = packed.KERNEL.forward(**given, **params, config=packed.Block(32))
    np.testing.assert_allclose(got, x.astype("f8") @ wide, rtol=1e-5, atol=1e-5)
    shapes = {n: a.shape for n, a in given.items()}
    dtypes = {n: a.dtype.name for n, a in given.items()}
    cost = PACKED.cost(shapes, dtypes, {**PACKED.defaults, **params})
    assert cost.flops == 2 * 3 * K * N
    structs = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in given.items()}
    made = PACKED.sample(jax.random.key(0), structs, params)
    assert {n: a.shape for n, a in made.items()} == shapes
    assert made["w"].dtype == jnp.int32


@pytest.mark.once
@pytest.mark.parametrize("name", ["gptq", "awq", "transposed"])
def test_gradients(name: str) -> None:
    """Of the rows and of scales, outside of a rewritten program and within one."""
    f = SPELLINGS[name][1]
    args = [a.astype(F32) if a.dtype == F16 else a for a in args_of(f)]
    args[0] = jnp.asarray(R.standard_normal((5, K)), F32)
    last = len(args) - 1
    loss = lambda f: lambda x, s: jnp.square(f(x, *args[1:last], s)).sum()
    grad = lambda f: jax.grad(loss(f), (0, 1))
    want = grad(f)(args[0], args[last])
    outside = grad(rewriter.optimize(f, implementation=FORCED))
    within = rewriter.optimize(grad(f), implementation=FORCED)
    for got in (outside(args[0], args[last]), within(args[0], args[last])):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())


def test_the_choice() -> None:
    def use(m: int, k: int, n: int) -> Any:
        given = {"x": jax.ShapeDtypeStruct((m, k), "float32"),
                 "w": jax.ShapeDtypeStruct((k // 8, n), "int32")}  # fmt: skip
        return spec_of(PACKED, given, {"packing": ALONG_K})

    assert packed.profitable(use(1, 4096, 8192), "cpu").ok
    of_columns = use(1, 4096, 8192)
    of_columns = dataclasses.replace(of_columns, params=(("packing", IN_ORDER),))
    assert not packed.profitable(of_columns, "cpu").ok
    assert not packed.profitable(use(1, 128, 128), "cpu").ok
    assert not packed.profitable(use(512, 4096, 8192), "cpu").ok
