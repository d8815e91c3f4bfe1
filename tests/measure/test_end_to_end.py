"""The oracle: kinds of wrong replacements, each held against what it replaces."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rewriter
from rewriter.errors import RewriterWarning
from rewriter.verification import probes
from rewriter.verification.compare import YOURS, compared
from rewriter.verification.decision_inputs import deciding
from rewriter.verification.judge import judged
from rewriter.verification.rounding import coarsest
from tests.support.arrays import normal
from tests.support.programs import FORCED, attention, block, inputs
from tests.support.swapped import swapped

pytestmark = pytest.mark.once

T = 96
N, J = np.arange(T)[:, None], np.arange(T)[None]


Q, K, V = (normal(1, T, 2, 16, seed=i) for i in range(3))


def attend(mask, q=Q, k=K, v=V, fill=-jnp.inf):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
    weights = jax.nn.softmax(jnp.where(mask, scores, fill))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def unshifted(x, axis=-1):
    """A softmax of real numbers, which overflows."""
    return jnp.exp(x) / jnp.exp(x).sum(axis, keepdims=True)


def pairs(compare):
    return lambda p: compare(p[:, None], p[None])


# Each: arguments, what is written, and what a matcher of real numbers could make of it.
# As positions: i >= j became i - j >= 0, and so on.
def timestamps(t, s):
    return attend(pairs(lambda a, b: a >= b)(t * s))


def timestamps_scaled(t, s):
    return attend((t * s)[:, None] - (t * s * 1.0000002)[None] >= 0)


def window_of_times(t):
    return attend((N >= J) & (t[:, None] - t[None] < 0.3))


def window_of_sums(t):
    return attend((N >= J) & (t[:, None] < 0.3 + t[None]))


def sentinel(t):
    return attend(pairs(lambda a, b: a >= b)(t))


def sentinel_differences(t):
    return attend(pairs(lambda a, b: a - b >= 0)(t))


def low(t):
    p = (5 * t).astype(jnp.bfloat16)
    return attend((p[:, None] >= p[None]) & (p[:, None] - p[None] <= 5))


def low_exactly(t):
    del t
    return attend((5 * N >= 5 * J) & (5 * N - 5 * J <= 5))


def bits(x):
    return attend((x > jnp.uint32(1 << 30)) | (N == J))


def bits_signed(x):
    return attend((x.astype(jnp.int32) > 1 << 30) | (N == J))


def saturated(t):
    return attend(pairs(lambda a, b: a >= b)(t.astype(jnp.uint8)))


def wrapped(t):
    return attend(pairs(lambda a, b: a >= b)(t.astype(jnp.int32) & 255))


def division(n):
    return attend((lax.div(n, 3) >= N) | (J < 2))


def division_floored(n):
    return attend((n // 3 >= N) | (J < 2))


def near_whole(p):
    d = p[:, None] - p[None]
    return attend((d >= 0) & (d <= 2.999999))


def snapped(p):
    d = p[:, None] - p[None]
    return attend((d >= 0) & (d <= 3))


def guarded(x, g):
    y = x - x.mean(-1, keepdims=True)
    var = (y * y).mean(-1, keepdims=True)
    return jnp.where(var > 0, y * lax.rsqrt(jnp.where(var > 0, var, 1)), 0) * g


def unguarded(x, g):
    y = x - x.mean(-1, keepdims=True)
    return y * lax.rsqrt((y * y).mean(-1, keepdims=True)) * g


def finite_scores(q):
    s = jnp.einsum("btnh,bsnh->bnts", q, K)
    w = jax.nn.softmax(jnp.where(jnp.isfinite(s), s, -1e9))
    return jnp.einsum("bnts,bsnh->btnh", w, V)


def all_scores(q):
    w = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, K))
    return jnp.einsum("bnts,bsnh->btnh", w, V)


def length(n):
    return attend((jnp.arange(T, dtype=jnp.uint32) < n - 1)[None, None, None])


def length_signed(n):
    last = n.astype(jnp.int32) - 1
    return attend((jnp.arange(T) < last)[None, None, None])


def window(p):
    return attend(pairs(lambda a, b: a - b < 64)(p))


def window_signed(p):
    return attend(pairs(lambda a, b: a - b < 64)(p.astype(jnp.int32)))


def gate_bias(z):
    return attend(True, v=V + jax.nn.softmax(z)[..., None, None])


def gate_bias_unshifted(z):
    return attend(True, v=V + unshifted(z)[..., None, None])


def gate_mask(z):
    return attend((jax.nn.softmax(z) > 1e-6)[:, None, None], fill=-1e9)


def gate_mask_unshifted(z):
    return attend((unshifted(z) > 1e-6)[:, None, None], fill=-1e9)


def gated_norm(x, z):
    y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return y * jax.nn.softmax(z)


def gated_norm_unshifted(x, z):
    y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return y * unshifted(z)


def pruned(q):
    p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, K) / 4)
    p = jnp.where(p > 1e-3, p, 0.0)
    return jnp.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), V)


def pruned_unshifted(q):
    s = jnp.einsum("btnh,bsnh->bnts", q, K) / 4
    e = jnp.exp(s)
    keep = e > 1e-3 * e.sum(-1, keepdims=True)
    return attend(keep, q=q)


def promised(y, i):
    return jax.grad(lambda y: -jax.nn.log_softmax(y)[N[:, 0], i].sum())(y)


def clipped(y, i):
    pick = lambda y: -jax.nn.log_softmax(y).at[N[:, 0], i].get(mode="clip").sum()
    return jax.grad(pick)(y)


def same_class(s):
    hot = jax.nn.one_hot(s, 3)
    return attend(hot @ hot.T > 0, fill=-1e9)


def any_class(s):
    del s
    return attend(True)


POSITIONS = np.arange(T, dtype=np.float32)
ROWS = np.where(np.arange(64)[:, None] == 5, 0, normal(64, 32, seed=3))
LARGE = 60 * np.asarray(normal(T))
LOGITS = normal(T, 5, seed=4)
BITS = np.random.default_rng(0).integers(0, 2**32, (T, T), dtype=np.uint32)
INFINITE = np.array(Q)
INFINITE[:, -4:] = np.inf
CASES = {
    "timestamps": (timestamps, timestamps_scaled, (POSITIONS, np.float32(0.02))),
    "window of times": (window_of_times, window_of_sums,
                        (POSITIONS * np.float32(0.1),)),
    "inf sentinel": (sentinel, sentinel_differences,
                     (np.where(POSITIONS < T - 8, POSITIONS, np.float32(np.inf)),)),
    "bfloat16 positions": (low, low_exactly, (POSITIONS,)),
    "unsigned bits": (bits, bits_signed,
                      (BITS,)),
    "saturating cast": (saturated, wrapped, (2 * LARGE,)),
    "integer division": (division, division_floored, (np.int32(-1),)),
    "nearly whole threshold": (near_whole, snapped, (POSITIONS,)),
    "guarded variance": (guarded, unguarded, (ROWS, np.ones(32, np.float32))),
    "guarded scores": (finite_scores, all_scores, (INFINITE,)),
    "length - 1": (length, length_signed, (np.uint32(0),)),
    "unsigned window": (window, window_signed, (np.arange(T, dtype=np.uint32),)),
    "operand by softmax": (gate_bias, gate_bias_unshifted, (LARGE[None],)),
    "mask by softmax": (gate_mask, gate_mask_unshifted, (LARGE[None],)),
    "scale by softmax": (gated_norm, gated_norm_unshifted, (ROWS, LARGE[:32])),
    "promised labels": (promised, clipped, (LOGITS, np.where(POSITIONS % 9, 1, -100))),
    "products of one-hot rows": (same_class, any_class, (np.arange(T) // 40,)),
    "pruned weights": (pruned, pruned_unshifted, (40 * np.asarray(Q),)),
}  # fmt: skip
"""Programs that were once rewritten to other numbers."""


def flat(fn):
    return lambda xs: [fn(*xs)]


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_replacement_is_told_on_its_arguments(name, monkeypatch):
    """The rewriter makes the wrong program: both checks say so, one runs yours."""
    written, wrong, args = CASES[name]
    swapped(monkeypatch, wrong)
    found = rewriter.verify(written)(*args)
    assert not found.ok, str(found)
    with pytest.warns(RewriterWarning, match="on your arguments: .*(rows|entries)"):
        got = rewriter.optimize(written, verify="once")(*args)
    np.testing.assert_array_equal(got, jax.jit(written)(*args))


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_agrees_with_itself_under_all_probes(name):
    written, _, args = CASES[name]
    again = lambda *xs: lax.optimization_barrier(written(*xs))
    found = compared(flat(written), flat(again), args)
    assert found.off == ()
    assert found.probes <= probes.MOST


TAME = {
    "inf sentinel": (POSITIONS,),
    "guarded variance": (normal(64, 32), np.ones(32, np.float32)),
    "guarded scores": (Q,),
    "unsigned bits": (np.zeros((T, T), np.uint32),),
    "length - 1": (np.uint32(4),),
    "promised labels": (LOGITS, np.ones(T, np.int32)),
    "products of one-hot rows": (np.zeros(T, np.int32),),
    "operand by softmax": (normal(1, T),),
    "mask by softmax": (normal(1, T),),
    "scale by softmax": (ROWS, normal(32)),
}
"""Arguments with which the wrong program gives the right numbers."""


@pytest.mark.parametrize("name", TAME)
def test_probes_find_what_tame_arguments_hide(name):
    written, wrong, _ = CASES[name]
    args = TAME[name]
    assert compared(flat(written), flat(wrong), args, most=0).off == ()
    found = compared(flat(written), flat(wrong), args)
    assert found.of(0).on != YOURS


def test_gradients_of_masked_keys_stay_zero():
    of = lambda mask: jax.grad(lambda v: attend(mask, v=v)[:, :8].sum())
    written, leaky = of(J < 4), of((J < 4) | ((J == 5) & (N == 7)))
    found = compared(flat(written), flat(leaky), [V], gradients=[0], most=0)
    assert "rows were exactly 0 and are not (the first at [0, 5" in str(found.of(0))
    zero = np.zeros((3, 4), np.float32)
    some = np.ones((3, 4), np.float32)
    was, now = np.concatenate([zero, some]), np.concatenate([zero + 1e-4, some])
    told = judged(was, now, "float32", gradient=True).differs
    assert "3 rows were exactly 0 and are not (the first at [0, 0])" in told
    now[:3] = 1e-9  # a rounding
    assert not judged(was, now, "float32", gradient=True).differs


# ------------------------------------------------------------------ judgement
def test_rounding_is_no_difference():
    x = normal(64, 64)
    other = lambda x: (x[:, ::-1] @ x[::-1]) / 8
    found = compared(flat(lambda x: x @ x / 8), flat(other), [x], most=0)
    assert found.off == ()
    split = lambda x: (x[:, :7] @ x[:7] + x[:, 7:] @ x[7:]) * 0.125
    for dtype in ("float32", "bfloat16", "float16"):
        args = [x.astype(dtype)]
        assert compared(flat(lambda x: x @ x / 8), flat(split), args).off == ()


def test_one_wrong_row_among_many_is_told():
    x = normal(4096, 8)
    wrong = lambda x: x.at[77, 3].add(1e-3)
    found = compared(flat(lambda x: x * 1.0), flat(wrong), [x], most=0)
    assert found.of(0).texts[0].startswith("1 of 4096 rows differ")
    assert "[77]" in found.of(0).texts[0]


def test_an_absorbed_fill_is_judged_in_its_own_type():
    keep = jnp.zeros((T, T), bool)

    def absorbed(q, far):
        s = jnp.einsum("btnh,bsnh->bnts", q, K) + jnp.where(keep, 0.0, far)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), V)

    as_in_float64 = lambda q, far: absorbed(q, 0 * far)
    found = compared(flat(absorbed), flat(as_in_float64), [Q, jnp.float32(-1e9)])
    assert found.of(0).on == YOURS
    again = lambda *xs: absorbed(*xs) * 1.0
    assert compared(flat(absorbed), flat(again), [Q, jnp.float32(-1e9)]).off == ()


def test_the_coarsest_rounding_is_that_of_values_not_of_comparisons():
    x, p = normal(4, 4), jnp.arange(4, dtype=jnp.bfloat16)

    def value(x, p):
        return (x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32)

    def mask(x, p):
        return jnp.where(p[:, None] >= p + jnp.bfloat16(1), x @ x, 0)

    assert coarsest(jax.make_jaxpr(value)(x, p)) == ["bfloat16"]
    assert coarsest(jax.make_jaxpr(mask)(x, p)) == ["float32"]
    assert deciding(jax.make_jaxpr(mask)(x, p)) == [False, True]
    looped = lambda x, p: lax.scan(lambda c, r: (mask(c, p), r), x, x)
    assert coarsest(jax.make_jaxpr(looped)(x, p)) == ["float32", ""]
    assert deciding(jax.make_jaxpr(looped)(x, p)) == [False, True]


# --------------------------------------------------------------------- probes
def test_probes_keep_types_and_keys_and_are_the_same_again():
    args = [normal(4, 8), jnp.arange(4), jnp.ones(3, bool), jax.random.key(0), 2.0,
            jnp.ones((2, 2), jnp.bfloat16), jnp.uint8(3)]  # fmt: skip
    made = [probes.probes(args, [True] * 7) for _ in range(2)]
    assert len(made[0]) == probes.MOST
    for first, second in zip(*made, strict=True):
        assert (first.name, 3 in first.changed) == (second.name, False)
        for old, new, other in zip(args, first.of(args), second.of(args), strict=True):
            assert jnp.result_type(old) == jnp.result_type(new)
            assert jnp.shape(old) == jnp.shape(new)
            assert type(old) is type(new)
            if not jnp.issubdtype(jnp.result_type(old), jax.dtypes.prng_key):
                np.testing.assert_array_equal(np.float64(new), np.float64(other))


def test_integers_reach_the_ends_of_their_types():
    for dtype in (jnp.int8, jnp.uint32):
        probe = probes.probes([jnp.zeros(64, dtype)], [True])[0]
        seen = set(np.asarray(probe.changed[0]).tolist())
        kind = jnp.iinfo(dtype)
        assert {kind.min, kind.max, 0} <= seen


def test_a_program_without_numbers_says_nothing():
    fn = flat(lambda x: jnp.log(-1 - x * x))
    found = compared(fn, fn, [normal(4, 4)])
    assert found.off == ()
    assert len(found.silent) == found.probes


# ---------------------------------------------------------------- public names
def rotary(fault=0.0, late=False):
    """A user's pattern whose kernel is wrong: a little, or from position 5 on."""

    @rewriter.pattern(dims="x: ... t n h, cos: t h, sin: t h -> ... t n h")
    def rotary(x, cos, sin):
        a, b = jnp.split(x, 2, axis=-1)
        return x * cos[:, None] + jnp.concatenate([-b, a], -1) * sin[:, None]

    @rotary.kernel(version=1)
    def fused(x, cos, sin):
        half = x.shape[-1] // 2
        sign = jnp.where(jnp.arange(x.shape[-1]) < half, -1, 1)
        off = fault * (jnp.arange(x.shape[-3]) == 5) if late else fault
        off = jnp.broadcast_to(off, x.shape[-3:-2])[:, None, None]
        return x * cos[:, None] + jnp.roll(x, half, -1) * sin[:, None] * (sign + off)

    return rotary


def turned(x, cos, sin):
    h = x.shape[-1] // 2
    c, s, a, b = cos[None, :, None], sin[None, :, None], x[..., :h], x[..., h:]
    left = a * c[..., :h] - b * s[..., :h]
    return jnp.concatenate([left, b * c[..., h:] + s[..., h:] * a], -1)


@pytest.fixture
def operands():
    angle = jnp.arange(1, 7.0)[:, None] * jnp.tile(jnp.arange(1.0, 5.0), 2)
    return normal(2, 6, 3, 8), jnp.cos(angle), jnp.sin(angle)


@pytest.mark.parametrize("late", [False, True])
def test_a_wrong_kernel_gives_way_to_what_is_written(operands, late):
    pattern = rotary(1e-3, late)
    fast = rewriter.optimize(turned, patterns=[pattern], verify="once")
    with pytest.warns(
        RewriterWarning, match=r"rotary at test_end_to_end.py:\d+ .*rows"
    ):
        got = fast(*operands)
    np.testing.assert_array_equal(got, jax.jit(turned)(*operands))
    (site,) = fast.report(*operands).sites
    assert not site.replaced
    assert "verify found" in dict(site.not_chosen)["fused"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is compared again
        np.testing.assert_array_equal(fast(*operands), got)


def test_strict_turns_a_wrong_kernel_into_an_error(operands):
    options = {"patterns": [rotary(1e-3)], "verify": "once", "strict": True}
    with pytest.raises(rewriter.VerificationFailed, match="rotary at test_end"):
        rewriter.optimize(turned, **options)(*operands)


def test_verify_names_the_site_and_its_rows(operands):
    found = rewriter.verify(turned, patterns=[rotary(1e-3, True)])(*operands)
    assert not found.ok
    rows = {r.name.split(" at ")[0]: r for r in found.rows}
    assert not rows["rotary"].ok
    assert "your arguments" in rows["rotary"].differs
    with pytest.raises(rewriter.VerificationFailed, match="On your arguments"):
        found.check()
    right = rewriter.verify(turned, patterns=[rotary()], grad=True)(*operands)
    assert right.check().probes > 3


def test_a_right_kernel_stays(operands):
    fast = rewriter.optimize(turned, patterns=[rotary()], verify="once", strict=True)
    np.testing.assert_allclose(fast(*operands), turned(*operands), atol=1e-5)
    assert fast.report(*operands).sites[0].replaced
    lowered = fast.lower(*operands).compile()(*operands)
    np.testing.assert_allclose(lowered, turned(*operands), atol=1e-5)


def test_inside_of_another_transformation_arguments_are_drawn(operands):
    options = {"patterns": [rotary(1e-3)], "verify": "once"}
    x, *rest = operands
    loss = lambda f: jax.grad(lambda x: (f(x, *rest) ** 2).sum())(x)
    with pytest.warns(RewriterWarning, match="on drawn arguments"):
        got = loss(rewriter.optimize(turned, **options))
    np.testing.assert_allclose(got, loss(turned), atol=1e-5)
    fast = rewriter.optimize(turned, patterns=options["patterns"])
    with rewriter.config(verify="once"), pytest.warns(RewriterWarning, match="drawn"):
        got = fast(*operands)
    np.testing.assert_allclose(got, turned(*operands), atol=1e-5)


def test_sites_of_a_loop_are_compared_in_its_first_turn(operands):
    x, cos, sin = operands

    def looped(x, cos, sin):
        step = lambda c, s: (turned(c, cos * s, sin), None)
        return lax.scan(step, x, jnp.ones(3))[0].sum()

    options = {"patterns": [rotary(1e-3)], "verify": "once"}
    with pytest.warns(RewriterWarning, match="rotary at test_end_to_end"):
        got = rewriter.optimize(looped, **options)(x, cos, sin)
    np.testing.assert_array_equal(got, jax.jit(looped)(x, cos, sin))


def test_methods_and_errors_are_the_users(operands):
    class Model:
        scale = 2.0

        @rewriter.optimize(verify="once", static_argnums=0)
        def __call__(self, x):
            return x * self.scale

    np.testing.assert_array_equal(Model()(jnp.ones(3)), 2 * jnp.ones(3))
    with pytest.raises(TypeError) as caught:
        rewriter.optimize(lambda x: x + jnp.ones(4), verify="once")(jnp.ones(3))
    assert "rewriter: while tracing" in caught.value.__notes__[0]


def test_shipped_kernels_agree():
    args = inputs()
    fast = rewriter.optimize(block, verify="once", implementation=FORCED, strict=True)
    np.testing.assert_allclose(fast(*args), block(*args), atol=1e-5)
    assert all(s.replaced for s in fast.report(*args).sites)
    few = (x[:, :16] for x in (Q, K, V))
    found = rewriter.verify(attention, grad=True, implementation=FORCED)(*few)
    assert found.ok, str(found)
