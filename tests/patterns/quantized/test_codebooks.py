"""Products of numbers that are looked up in a codebook: spellings, look-alikes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from tests.bench.packed_dot import NF4
from tests.patterns.quantized.spelled import Spelled

NAME = "packed_dot"
FORCED = {NAME: ["memory_bounded", "xla"]}
K, N, BLOCK = 128, 96, 64
R = np.random.default_rng(0)
BF, F32 = jnp.bfloat16, jnp.float32
OTHER = np.sort(R.standard_normal(16)).astype("float32")
"""Another codebook, as of k-means."""

GIVEN = {
    "x": np.eye(K, dtype=BF),
    "p": R.integers(0, 256, N * K // 2).astype("uint8"),
    "pt": R.integers(0, 256, (N, K // 2)).astype("uint8"),
    "pk": R.integers(0, 256, (K // 2, N)).astype("uint8"),
    "w": R.integers(-(2**31), 2**31, (K // 8, N)).astype("int32"),
    "s": R.uniform(0.01, 0.03, N * K // BLOCK).astype("float32"),
    "sc": R.uniform(0.01, 0.03, N).astype("float32"),
    "sk": R.uniform(0.01, 0.03, (K // BLOCK, N)).astype("float32"),
    "s8": R.integers(0, 256, N * K // BLOCK).astype("uint8"),
    "s8s": np.float32(0.0001),
    "table": NF4,
    "index": R.integers(0, 16, (K, N)).astype("int32"),
}
"""Arguments by their names in spellings; rows of the identity give matrices."""

SPELLED = Spelled(GIVEN)
SPELLINGS, ALIKE = SPELLED.spellings, SPELLED.alike
spelling, args_of = SPELLED.spelling, SPELLED.args_of
alike = SPELLED.look_alike


def both(p: Any) -> Any:
    """Numbers of bytes in the order of bitsandbytes: the high ones first."""
    return jnp.stack([p >> 4, p & 15], -1).reshape(*p.shape[:-1], -1)


@spelling("k turns high unsigned uint8")
def bitsandbytes(x, p, s):
    w = jnp.array(NF4)[both(p)].reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(x.dtype).T


@spelling("k turns high unsigned uint8")
def by_take(x, p, s):
    index = both(p).astype(jnp.int32)
    w = jnp.take(jnp.array(NF4), index, axis=0).reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(x.dtype).T


@spelling("k turns high unsigned uint8")
def a_codebook_of_16_bits(x, p, s):
    w = jnp.array(NF4, BF)[both(p)].reshape(-1, BLOCK) * s.astype(BF)[:, None]
    return jnp.einsum("mk,nk->mn", x, w.reshape(N, K))


@spelling("k turns high unsigned uint8")
def cast_before_the_scale(x, p, s):
    w = jnp.array(NF4)[both(p)].astype(BF).reshape(-1, BLOCK) * s.astype(BF)[:, None]
    return x @ w.reshape(N, K).T


@spelling("k turns low unsigned uint8")
def the_low_ones_first(x, pt, sk):
    index = jnp.stack([pt & 15, pt >> 4], -1).reshape(N, K // BLOCK, BLOCK)
    w = jnp.array(OTHER)[index] * sk.T[..., None]
    return x @ w.reshape(N, K).astype(BF).T


@spelling("k turns high unsigned uint8")
def clipped_indices(x, pt, sk):
    index = jnp.clip(both(pt).astype(jnp.int32), 0, 15)
    w = jnp.array(NF4)[index].reshape(N, -1, BLOCK) * sk.T[..., None]
    return x @ w.reshape(N, K).astype(BF).T


@spelling("k turns high unsigned uint8")
def along_rows(x, pk, sk):
    index = jnp.stack([pk >> 4, pk & 15], 1).reshape(K // BLOCK, BLOCK, N)
    w = jnp.array(NF4)[index] * sk[:, None]
    return x @ w.reshape(K, N).astype(BF)


@spelling("k halves low unsigned uint8")
def halves(x, pk, sc):
    w = jnp.array(NF4)[jnp.concatenate([pk & 15, pk >> 4])]
    return x @ (w * sc).astype(BF)


@spelling("k words 01234567 unsigned uint8")
def words_of_indices(x, w, sk):
    index = ((w[:, None] >> (jnp.arange(8) * 4)[:, None]) & 15).reshape(K, N)
    w = jnp.array(OTHER)[index].reshape(-1, BLOCK, N) * sk[:, None]
    return x @ w.reshape(K, N).astype(BF)


@spelling("k turns high unsigned uint8")
def scaled_behind(x, pt, sc):
    return (x @ jnp.array(NF4, BF)[both(pt)].T) * sc.astype(BF)


@spelling("k turns high unsigned uint8")
def scales_that_are_stored(x, p, s8, s8s):
    """Double quantization: scales are numbers of eight bits, too."""
    s = s8.astype(F32) * s8s + 0.01
    w = jnp.array(NF4)[both(p)].reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(BF).T


@spelling("k turns high unsigned uint8")
def in_a_jit(x, p, s):
    @jax.jit
    def widened(p, s):
        return (jnp.array(NF4)[both(p)].reshape(-1, BLOCK) * s[:, None]).astype(BF)

    return x @ widened(p, s).reshape(N, K).T


@spelling("k turns high unsigned uint8")
def in_float32(x, p, s):
    w = jnp.array(NF4)[both(p)].reshape(-1, BLOCK) * s[:, None]
    return lax.dot_general(x.astype(F32), w.reshape(N, K), (((1,), (1,)), ((), ())))


@alike
def a_given_codebook(x, p, s, table):
    w = table[both(p)].reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(BF).T


@alike
def eight_floats(x, p, s):
    """Of which the last one is taken for larger indices."""
    w = jnp.array(NF4)[:8][both(p)].reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(BF).T


@alike
def one_more_than_the_number(x, p, s):
    w = jnp.array(NF4)[both(p) + 1].reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(BF).T


@alike
def indices_that_are_not_packed(x, index, sc):
    return x @ (jnp.array(NF4)[index] * sc).astype(BF)


@alike
def three_bits(x, p, s):
    index = jnp.stack([p >> 5, p & 7], -1).reshape(-1)
    w = jnp.array(NF4)[index].reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(BF).T


@alike
def blocks_of_columns(x, p, s):
    """A scale for 64 columns of a row."""
    w = jnp.array(NF4)[both(p)].reshape(-1, BLOCK) * s[:, None]
    return x.astype(F32)[:, :N] @ w.reshape(N, K)


@alike
def two_codebooks(x, p, s):
    high, low = jnp.array(NF4)[p >> 4], jnp.array(OTHER)[p & 15]
    w = jnp.stack([high, low], -1).reshape(-1, BLOCK) * s[:, None]
    return x @ w.reshape(N, K).astype(BF).T


@alike
def indices_that_are_chosen(x, p, s):
    """Where another condition holds than that they are below 0."""
    i = both(p).astype(jnp.int32)[:, None]
    i = jnp.where(i < 8, i + 8, i)
    dims = lax.GatherDimensionNumbers((), (0,), (0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    w = lax.gather(jnp.array(NF4), i, dims, (1,), mode=mode)
    return x @ (w.reshape(-1, BLOCK) * s[:, None]).reshape(N, K).astype(BF).T


@alike
def indices_in_another_order(x, pt, sc):
    index = both(pt).reshape(K, N).T.reshape(-1)
    w = jnp.array(NF4)[index].reshape(N, K)
    return x @ (w * sc[:, None]).astype(BF).T


@pytest.mark.once
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    params = SPELLED.assert_packed(name, FORCED)
    assert len(params["codebook"]) == 16


@pytest.mark.parametrize("names", [
    ("bitsandbytes",), pytest.param(None, marks=pytest.mark.once),
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
    assert NAME not in [s.form for s in report.sites]


@pytest.mark.once
def test_values_against_float64() -> None:
    x, p, s = args_of(bitsandbytes)
    x = jnp.asarray(R.standard_normal((5, K)), F32)
    index = np.stack([np.asarray(p) >> 4, np.asarray(p) & 15], -1).reshape(-1)
    wide = NF4.astype("f8")[index].reshape(-1, BLOCK) * np.asarray(s, "f8")[:, None]
    got = rewriter.optimize(bitsandbytes, implementation=FORCED)(x, p, s)
    want = np.asarray(x, "f8") @ wide.reshape(N, K).T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(("name", "near"), [("in_float32", 1e-5), ("along_rows", 1e-2)])
def test_gradients(name: str, near: float) -> None:
    """Of the rows and of scales, outside of a rewritten program and within one.

    Cotangents of a matrix in bfloat16 are rounded to it.
    """
    f = SPELLINGS[name][1]
    x, p, s = args_of(f)
    x = jnp.asarray(R.standard_normal((5, K)), F32)
    grad = lambda f: jax.grad(lambda x, s: jnp.square(f(x, p, s)).sum(), (0, 1))
    want = grad(f)(x, s)
    outside = grad(rewriter.optimize(f, implementation=FORCED))(x, s)
    within = rewriter.optimize(grad(f), implementation=FORCED)(x, s)
    for got in (outside, within):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=near * np.abs(b).max())
