"""Products by the letters of their axes are those of einsum, in one equation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rewriter.kernels.shared.contraction import contraction
from rewriter.kernels.shared.rows import row_max, row_mean, row_sum

SIZES = dict(zip("bcdefgh", (2, 3, 4, 5, 1, 6, 7), strict=True))


@pytest.mark.parametrize(
    "axes",
    [
        "bc,cd->bd", "bcd,bde->bce", "bcd,bed->bce", "bdc,bde->bec", "b,b->b",
        "bc,de->bcde", "bcdf,bgdh->dghcfb", "bcefh,bdeh->befcd",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_is_einsum(axes: str, dtypes: tuple[str, str]) -> None:
    first, second = axes.split("->")[0].split(",")
    draw = np.random.default_rng(0)
    x, y = (
        jnp.asarray(draw.standard_normal([SIZES[n] for n in letters]), dtype)
        for letters, dtype in zip((first, second), dtypes, strict=True)
    )
    got = contraction(axes, x, y, precision="highest")
    want = np.einsum(axes, np.asarray(x, np.float64), np.asarray(y, np.float64))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", ["crs,cse->cre", "cre,crs->ces", "crh,csh->crs"])
def test_the_equation_is_that_of_einsum(axes: str) -> None:
    first, second = axes.split("->")[0].split(",")
    sizes = {"c": 2, "r": 3, "s": 4, "e": 5, "h": 6}
    x, y = (jnp.ones([sizes[n] for n in part]) for part in (first, second))
    (made,) = jax.make_jaxpr(lambda *a: contraction(axes, *a))(x, y).eqns
    with jax.disable_jit():
        (wanted,) = jax.make_jaxpr(lambda *a: jnp.einsum(axes, *a))(x, y).eqns
    assert made.primitive is wanted.primitive
    assert made.params == wanted.params


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_reductions_of_rows(bad: float) -> None:
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    x[1, 2] = bad
    for ours, theirs in ((row_max, jnp.max), (row_sum, jnp.sum), (row_mean, jnp.mean)):
        np.testing.assert_array_equal(ours(x), theirs(x, -1, keepdims=True))
