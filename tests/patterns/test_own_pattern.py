"""A user's own pattern: found in another spelling, its kernel used, errors clear."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter


def rotary_pattern() -> rewriter.Pattern:
    @rewriter.pattern(dims="x: ... t n h, cos: t h, sin: t h -> ... t n h")
    def rotary(x, cos, sin):
        a, b = jnp.split(x, 2, axis=-1)
        return x * cos[:, None] + jnp.concatenate([-b, a], -1) * sin[:, None]

    @rotary.kernel(version=1)
    def fused(x, cos, sin):
        half = x.shape[-1] // 2
        sign = jnp.where(jnp.arange(x.shape[-1]) < half, -1, 1)
        return x * cos[:, None] + jnp.roll(x, half, -1) * sin[:, None] * sign

    return rotary


def halves(x, cos, sin):
    h = x.shape[-1] // 2
    c, s, a, b = cos[None, :, None], sin[None, :, None], x[..., :h], x[..., h:]
    left = a * c[..., :h] - b * s[..., :h]
    return jnp.concatenate([left, b * c[..., h:] + s[..., h:] * a], -1)


def wrong_sign(x, cos, sin):
    h = x.shape[-1] // 2
    c, s, a, b = cos[None, :, None], sin[None, :, None], x[..., :h], x[..., h:]
    left = a * c[..., :h] + b * s[..., :h]
    return jnp.concatenate([left, b * c[..., h:] + s[..., h:] * a], -1)


@pytest.fixture
def operands():
    x = jax.random.normal(jax.random.key(0), (2, 6, 3, 8))
    angle = jnp.arange(6.0)[:, None] * jnp.tile(jnp.arange(1.0, 5.0), 2)
    return x, jnp.cos(angle), jnp.sin(angle)


def test_another_spelling_runs_the_kernel(operands) -> None:
    fast = rewriter.optimize(halves, patterns=[rotary_pattern()])
    (site,) = fast.report(*operands).sites
    assert (site.op, site.kernel, site.replaced) == ("rotary", "fused", True)
    np.testing.assert_allclose(fast(*operands), halves(*operands), atol=1e-5)

    def loss(f):
        return jax.grad(lambda x: (f(x, *operands[1:]) ** 3).sum())(operands[0])

    np.testing.assert_allclose(loss(fast), loss(halves), atol=1e-4)


def test_wrong_sign_is_refused(operands) -> None:
    fast = rewriter.optimize(wrong_sign, patterns=[rotary_pattern()])
    assert not fast.report(*operands).sites


def test_acts_only_where_it_is_put_in_force(operands) -> None:
    pattern = rotary_pattern()
    assert not rewriter.explain(halves)(*operands).sites
    with rewriter.using(pattern):
        assert len(rewriter.explain(halves)(*operands).sites) == 1
    assert not rewriter.explain(halves)(*operands).sites


def test_parameter_is_read_off() -> None:
    @rewriter.pattern(dims="x: ... d -> ... d", params={"eps": rewriter.scalar()})
    def unit(x, *, eps):
        return x / (jnp.abs(x).sum(-1, keepdims=True) + eps)

    def spelled(x):
        return x * (1 / (0.125 + jnp.sum(jnp.abs(x), axis=-1)[..., None]))

    (site,) = rewriter.explain(spelled, patterns=[unit])(jnp.ones((3, 4))).sites
    assert site.params == {"eps": 0.125}


def test_requires_can_refuse(operands) -> None:
    pattern = rotary_pattern()

    @pattern.requires
    def wide(match: rewriter.Candidate):
        from rewriter.support.verdict import YES, no

        return YES if match.shapes["x"][-1] >= 64 else no("width", "h is below 64")

    assert not rewriter.explain(halves, patterns=[pattern])(*operands).sites


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ("x: d, w: d -> d", "function has no argument w"),
        ("x: d", "operands and result"),
        ("x: t d -> t", "the function gives"),
    ],
)
def test_dims_that_do_not_fit(dims: str, said: str) -> None:
    with pytest.raises(rewriter.PatternError, match=said):

        @rewriter.pattern(dims=dims)
        def double(x):
            return x + x


def test_kernel_of_wrong_shape(operands) -> None:
    pattern = rotary_pattern()
    pattern.kernels = ()

    @pattern.kernel()
    def cut(x, cos, sin):
        return x[..., :1]

    with pytest.raises(rewriter.KernelError, match="cut"):
        rewriter.optimize(halves, patterns=[pattern], strict=True)(*operands)


def test_register_takes_patterns_only() -> None:
    with pytest.raises(rewriter.PatternError, match="decorated"):
        rewriter.register(lambda x: x)  # type: ignore[arg-type]


def test_a_letter_that_an_operand_has_twice_is_one_size() -> None:
    """A value that is not square is no such operand."""

    def program(x, w):
        y = jnp.exp(x)
        for _ in range(3):
            y = y / (1 + jnp.flip(y @ w, 1))
        return y

    @rewriter.pattern(dims="x: m k, w: k k -> m k")
    def chained(x, w):
        return program(x, w)

    @chained.kernel()
    def kernel(x, w):
        return program(x, w)

    x, w = jnp.ones((64, 32)) * 0.1, jnp.ones((32, 32)) * 0.1
    fast = rewriter.optimize(program, patterns=[chained], strict=True)
    assert fast.report(x, w).counts()["chained"] == 1
    np.testing.assert_allclose(fast(x, w), program(x, w), rtol=1e-6)
