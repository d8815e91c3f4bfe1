"""Products of numbers packed by two in a byte: spellings, roundings, look-alikes."""

from __future__ import annotations

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
BF, F32 = jnp.bfloat16, jnp.float32

GIVEN = {
    "x": np.eye(K, dtype=BF),
    "p": R.integers(-128, 128, (K // 2, N)).astype("int8"),
    "u": R.integers(0, 256, (K // 2, N)).astype("uint8"),
    "t": R.integers(-128, 128, (N, K // 2)).astype("int8"),
    "pn": R.integers(-128, 128, (K, N // 2)).astype("int8"),
    "other": R.integers(-128, 128, (K // 2, N)).astype("int8"),
    "s": R.uniform(0.01, 0.03, N).astype("float32"),
    "sg": R.uniform(0.01, 0.03, (G, N)).astype("float32"),
    "layers": R.integers(-128, 128, (2, K // 2, K)).astype("int8"),
    "scales": R.uniform(0.001, 0.003, (2, K)).astype("float32"),
}
"""Arguments by their names in spellings; rows of the identity give matrices."""

SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
spelling, args_of = SPELLED.spelling, SPELLED.args_of
alike = SPELLED.look_alike  # numbers that are packed otherwise, or not


def signed(p: Any) -> tuple[Any, Any]:
    return (p << 4) >> 4, p >> 4


def times(x: Any, w: Any, s: Any) -> Any:
    return x @ (w.astype(BF) * s.astype(BF))


@spelling("k turns low signed int8")
def turns(x, p, s):
    return times(x, jnp.stack(signed(p), 1).reshape(K, N), s)


@spelling("k turns high signed int8")
def turns_high_first(x, p, s):
    return times(x, jnp.stack(signed(p)[::-1], 1).reshape(K, N), s)


@spelling("k turns low signed int8")
def turns_by_a_concatenation(x, p, s):
    both = [y[:, None] for y in signed(p)]
    return times(x, jnp.concatenate(both, 1).reshape(K, N), s)


@spelling("k halves low signed int8")
def halves(x, p, s):
    return times(x, jnp.concatenate(signed(p)), s)


@spelling("k halves high signed int8")
def halves_of_a_stack(x, p, s):
    return times(x, jnp.stack(signed(p)[::-1]).reshape(K, N), s)


@spelling("k halves low signed int8")
def halves_with_groups(x, p, sg):
    w = jnp.concatenate(signed(p)).reshape(G, K // G, N).astype(BF)
    return x @ (w * sg.astype(BF)[:, None]).reshape(K, N)


@spelling("k turns low signed int8")
def turns_with_groups(x, p, sg):
    w = jnp.stack(signed(p), 1).reshape(G, K // G, N).astype(F32)
    return x @ (w * sg[:, None]).reshape(K, N).astype(BF)


@spelling("k turns low unsigned uint8")
def bytes_less_eight(x, u, s):
    w = jnp.stack([u & 15, u >> 4], 1).reshape(K, N)
    return x @ ((w.astype(BF) - 8) * s.astype(BF))


@spelling("k turns low unsigned int8")
def signed_bytes_less_eight(x, p, s):
    w = jnp.stack([p & 15, (p >> 4) & 15], 1).reshape(K, N)
    return x @ ((w.astype(BF) - 8) * s.astype(BF))


@spelling("k turns low unsigned int8")
def by_a_logical_shift(x, p, s):
    w = jnp.stack([15 & p, lax.shift_right_logical(p, jnp.int8(4))], 1)
    return x @ ((w.reshape(K, N).astype(BF) - 8) * s.astype(BF))


@spelling("k halves low unsigned int8")
def through_int32(x, u, s):
    wide = u.astype(jnp.int32)
    w = jnp.concatenate([wide & 15, (wide >> 4) & 15]).astype(jnp.int8)
    return x @ ((w.astype(BF) - 8) * s.astype(BF))


@spelling("n turns low signed int8")
def along_columns(x, pn, s):
    return times(x, jnp.stack(signed(pn), -1).reshape(K, N), s)


@spelling("k turns low signed int8")
def transposed(x, t, s):
    w = jnp.stack(signed(t), -1).reshape(N, K)
    return x @ (w.astype(BF) * s.astype(BF)[:, None]).T


@spelling("k turns low signed int8")
def scaled_behind(x, p, s):
    w = jnp.stack(signed(p), 1).reshape(K, N)
    return (x @ w.astype(BF)) * s.astype(BF)


@spelling("k turns low signed int8")
def in_a_jit(x, p, s):
    unpack = jax.jit(lambda p: jnp.stack(signed(p), 1).reshape(K, N))
    return times(x, unpack(p), s)


@spelling("k turns low signed int8")
def layers_in_a_scan(x, layers, scales):
    def layer(x, one):
        p, s = one
        return times(x, jnp.stack(signed(p), 1).reshape(K, K), s), None

    return lax.scan(layer, x, (layers, scales))[0]


@spelling("k turns low unsigned int8")
def less_eight_before_they_are_joined(x, u, s):
    w = jnp.stack([(u & 15).astype(jnp.int8) - 8, (u >> 4).astype(jnp.int8) - 8], 1)
    return times(x, w.reshape(K, N), s)


@spelling("k turns low unsigned uint8")
def by_remainders(x, u, s):
    w = jnp.stack([u % 16, u // 16], 1).reshape(K, N)
    return x @ ((w.astype(BF) - 8) * s.astype(BF))


@spelling("n turns low signed int8")
def by_remainders_of_signed_bytes(x, pn, s):
    w = jnp.stack([((pn % 16) ^ 8) - 8, pn // 16], -1)
    return times(x, w.reshape(K, N), s)


@spelling("k halves low unsigned uint8")
def by_two_masks(x, u, s):
    w = jnp.concatenate([u & 0x0F, (u & 0xF0) >> 4])
    return x @ ((w.astype(BF) - 8) * s.astype(BF))


@spelling("k turns low signed int8")
def signs_by_a_choice(x, u, s):
    def signed(half):
        half = half.astype(jnp.int8)
        return jnp.where(half > 7, half - 16, half)

    w = jnp.stack([signed(u & 15), signed(u >> 4)], 1).reshape(K, N)
    return times(x, w, s)


@spelling("k turns high signed int8")
def signs_by_shifts_of_int32(x, u, s):
    wide = u.astype(jnp.int32)
    both = (wide << 24) >> 28, (wide << 28) >> 28
    w = jnp.stack([half.astype(jnp.int8) for half in both], 1)
    return times(x, w.reshape(K, N), s)


@spelling("k turns low signed int8")
def less_eight_behind_a_flipped_bit(x, u, s):
    both = [(half ^ 8).astype(jnp.int8) - 8 for half in (u & 15, u >> 4)]
    return times(x, jnp.stack(both, 1).reshape(K, N), s)


@spelling("k turns low unsigned uint8")
def by_sums(x, u, s):
    high = lax.div(u, jnp.uint8(16))
    w = jnp.stack([u - high * 16, high], 1).reshape(K, N)
    return x @ ((w.astype(BF) - 8) * s.astype(BF))


@alike
def one_half_less_seven(x, u, s):
    low, high = (half.astype(jnp.int8) for half in (u & 15, u >> 4))
    return times(x, jnp.concatenate([low - 8, high - 7]), s)


@alike
def three_bits(x, u, s):
    return times(x, jnp.concatenate([u & 7, u >> 4]), s)


@alike
def both_bits_flipped(x, u, s):
    return times(x, jnp.concatenate([(u & 15) ^ 3, (u >> 4) ^ 3]), s)


@alike
def bounded_halves(x, u, s):
    low, high = (half.astype(jnp.int8) - 8 for half in (u & 15, u >> 4))
    return times(x, jnp.maximum(jnp.concatenate([low, high]), -7), s)


@alike
def of_two_arrays(x, p, other, s):
    w = jnp.stack([signed(p)[0], signed(other)[1]], 1).reshape(K, N)
    return times(x, w, s)


@alike
def the_same_half_twice(x, p, s):
    low, _ = signed(p)
    return times(x, jnp.concatenate([low, low]), s)


@alike
def one_half_turned(x, p, s):
    low, high = signed(p)
    return times(x, jnp.concatenate([low, high[::-1]]), s)


@alike
def signs_mixed(x, p, s):
    return times(x, jnp.concatenate([p & 15, p >> 4]), s)


@alike
def shifted_by_three(x, p, s):
    return times(x, jnp.concatenate([(p << 3) >> 3, p >> 4]), s)


@alike
def signs_spread_in_int32(x, p, s):
    wide = lax.shift_right_logical(p.astype(jnp.int32), 4).astype(jnp.int8)
    return times(x, jnp.concatenate([p & 15, wide]), s)


@spelling("k turns low unsigned int8")
def less_eight_in_int8(x, p, s):
    """No difference leaves the range of int8."""
    w = jnp.stack([p & 15, (p >> 4) & 15], 1).reshape(K, N) - jnp.int8(8)
    return times(x, w, s)


@alike
def halves_of_a_part_of_an_axis(x, p, s):
    low, high = (y.reshape(2, K // 4, N) for y in signed(p))
    return times(x, jnp.concatenate([low, high], 1).reshape(K, N), s)


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    SPELLED.assert_packed(name, FORCED)


@pytest.mark.parametrize("names", [
    ("turns_with_groups", "through_int32"),
    pytest.param(None, marks=pytest.mark.once),
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
    assert [s.form for s in report.sites] == [""]


@pytest.mark.once
@pytest.mark.parametrize("columns", [32, 64, 256])
@pytest.mark.parametrize("mode", ["forward", "transposed"])
@pytest.mark.parametrize("axis", ["k", "n"])
def test_blocks_give_what_the_whole_gives(axis: str, mode: str, columns: int) -> None:
    x = R.standard_normal((3, K)).astype("float32")
    shape = (K // 2, N) if axis == "k" else (K, N // 2)
    w = R.integers(-128, 128, shape if mode == "forward" else shape[::-1])
    scale = R.uniform(0.01, 0.03, (G, N)).astype("float32")
    given = {"x": x, "w": jnp.asarray(w, "int8"), "w_scale": scale}
    packing = str(Packing(axis, "turns", "high", "signed", "int8"))
    params = {"widen": "float32 *scale", "packing": packing, "mode": mode}
    want = PACKED.reference(**given, **params)
    got = packed.KERNEL.forward(**given, **params, config=packed.Block(columns))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    shapes = {n: a.shape for n, a in given.items()}
    dtypes = {n: a.dtype.name for n, a in given.items()}
    cost = PACKED.cost(shapes, dtypes, {**PACKED.defaults, **params})
    assert cost.flops == 2 * 3 * K * N
    made = PACKED.sample(jax.random.key(0), given, params)
    assert {n: a.shape for n, a in made.items()} == shapes


@pytest.mark.once
def test_bytes_are_unpacked_as_numpy_does() -> None:
    every = np.arange(256, dtype=np.uint8).view(np.int8).reshape(16, 16)
    low = np.where(every & 8, (every & 15) - 16, every & 15)
    high = every >> 4
    for order, join in (("turns", np.stack), ("halves", np.concatenate)):
        packing = Packing("k", order, "low", "signed", "int8")
        got = np.asarray(unpacked(jnp.asarray(every), packing, 0))
        both = [low, high]
        want = join(both, 1) if order == "turns" else join(both)
        np.testing.assert_array_equal(got, want.reshape(32, 16))


@pytest.mark.once
def test_gradients_and_the_choice() -> None:
    f = SPELLINGS["turns_with_groups"][1]
    x, p, sg = args_of(f)
    x = jnp.asarray(R.standard_normal((5, K)), BF)
    loss = lambda f: lambda x, s: jnp.square(f(x, p, s).astype(F32)).sum()
    want = jax.grad(loss(f), (0, 1))(x, sg)
    got = jax.grad(loss(rewriter.optimize(f, implementation=FORCED)), (0, 1))(x, sg)
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(y, "f8") for y in (a, b))
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())

    def use(m: int, k: int, n: int) -> Any:
        given = {"x": jax.ShapeDtypeStruct((m, k), "float32"),
                 "w": jax.ShapeDtypeStruct((k // 2, n), "int8")}  # fmt: skip
        return spec_of(PACKED, given, {"packing": "k turns low signed int8"})

    assert packed.profitable(use(1, 4096, 8192), "cpu").ok
    assert not packed.profitable(use(1, 128, 128), "cpu").ok
    assert not packed.profitable(use(512, 4096, 8192), "cpu").ok
    assert not packed.profitable(use(1, 4096, 8192), "cuda").ok
