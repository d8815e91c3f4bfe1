"""Attention with several tables of scores: one table, or a function that adds them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rewriter

BF16 = jnp.bfloat16
WINDOWS, SIDE = 4, 3


def attend(scores: Any, v: Any) -> Any:
    """Values weighed by scores [b, n, t, s]."""
    weights = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(v.dtype)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def shifted(q: Any, k: Any, v: Any, table: Any, mask: Any) -> Any:
    """Swin's shifted windows: a bias of each head, and a mask of each window."""
    b, t, n, h = q.shape
    x = jnp.einsum("btnh,bsnh->bnts", q, k) * h**-0.5 + table
    x = x.reshape(b // len(mask), len(mask), n, t, t) + mask[None, :, None]
    return attend(x.reshape(b, n, t, t), v)


def in_turns(q: Any, k: Any, v: Any, table: Any, mask: Any) -> Any:
    """The mask is added first, and repeated over images."""
    x = jnp.einsum("btnh,bsnh->bnts", q * q.shape[-1] ** -0.5, k)
    x = x + jnp.tile(mask, (len(q) // len(mask), 1, 1))[:, None]
    return attend(x + table[None], v)


def summed(fn: Any) -> Any:
    """The gradients of all but the mask."""
    loss = lambda *x: jnp.sum(jnp.square(fn(*x).astype(jnp.float32)))
    return jax.value_and_grad(loss, (0, 1, 2, 3))


def arrays(b: int, t: int, n: int, h: int, dtype: Any) -> list[Any]:
    """q, k, v, a table of heads and a mask of windows."""
    draws = np.random.default_rng(0)
    made = [draws.normal(size=(b, t, n, h)) for _ in range(3)]
    made.append(draws.normal(size=(n, t, t)))
    part = draws.integers(0, 2, (WINDOWS, t))
    made.append(np.where(part[:, :, None] == part[:, None], 0.0, -100.0))
    return [jnp.asarray(x, dtype) for x in made]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("fn", [shifted, in_turns])
def test_shifted_windows_have_the_kernel_of_short_attention(
    fn: Any, with_gradients: bool
) -> None:
    """It takes one table of biases, and no function that adds two."""
    shapes = [(4096, 49, 6, 32)] * 3 + [(6, 49, 49), (64, 49, 49)]
    given = [jax.ShapeDtypeStruct(x, BF16) for x in shapes]
    run = summed(fn) if with_gradients else fn
    sites = rewriter.explain(run, target="h200")(*given).sites
    (site,) = [s for s in sites if s.replaced]
    assert (site.kernel, site.form, site.backward) == ("hopper", "", with_gradients)
    assert "short=True" in site.config


@pytest.mark.parametrize("tokens", [512, 2048])
def test_long_sequences_keep_the_function_that_adds_two_arrays(tokens: int) -> None:
    """A table of all scores would be written and read."""
    shapes = [(4, tokens, 12, 64)] * 3 + [(12, tokens, tokens), (4, 1, tokens)]

    def two(q: Any, k: Any, v: Any, table: Any, padding: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k) / 8 + table + padding[:, None]
        return attend(x, v)

    given = [jax.ShapeDtypeStruct(x, BF16) for x in shapes]
    (site,) = rewriter.explain(two, target="h200")(*given).sites
    assert (site.kernel, site.form) == ("hopper", "scored_attention")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_function_counts_as_what_xla_does_to_all_scores(
    width: int, with_gradients: bool
) -> None:
    """With gradients XLA took 40 ms for softplus, and the kernel 19."""

    def attention(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        x = jnp.einsum("btnh,bsnh->bnts", q, k) / width**0.5
        return attend(jax.nn.softplus(x * slopes), v)

    given = [jax.ShapeDtypeStruct((8, 4096, 16, width), BF16)] * 3
    given.append(jax.ShapeDtypeStruct((), BF16))
    run = summed(attention) if with_gradients else attention
    (site,) = rewriter.explain(run, target="h200")(*given).sites
    assert (site.kernel, site.form) == ("hopper", "scored_attention")
    assert site.backward == with_gradients


@pytest.mark.parametrize("op", ["attention", "scored_attention"])
@pytest.mark.parametrize("fn", [shifted, in_turns])
def test_both_forms_compute_shifted_windows(fn: Any, op: str) -> None:
    given = arrays(8, 9, 2, 4, jnp.float32)
    fast = rewriter.optimize(summed(fn), implementation={op: "memory_bounded"})
    got = jax.tree.leaves(fast(*given))
    assert any(s.replaced and s.backward for s in fast.report(*given).sites)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in given]
        want = jax.tree.leaves(summed(fn)(*wide))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
