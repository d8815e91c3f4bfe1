"""A body of a Pallas kernel that is called on several grids sees its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import rewriter

ROWS = 8
BLOCK = pl.BlockSpec((ROWS, 4), lambda i: (i, 0))


def by_share(x: Any, w: Any, out: Any) -> None:
    """Half of the squares; computed from the number of blocks, to be wrong if that is.

    Every block multiplies by its grid's size, which the caller divided by.
    """
    out[...] = x[...] * x[...] * w[...] * pl.num_programs(0)


def blocks_of(x: Any, w: Any) -> Any:
    count = x.shape[0] // ROWS
    call = pl.pallas_call(
        by_share,
        grid=(count,),
        in_specs=[BLOCK, pl.BlockSpec((1, 4), lambda i: (0, 0))],
        out_specs=BLOCK,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )
    return call(x, w[None] / count)


def squares(where: str) -> rewriter.Pattern:
    """The pattern ``x² w``, whose kernel or its gradient calls one body."""

    @rewriter.pattern(dims="x: m d, w: d -> m d")
    def scaled_square(x, w):
        return x * x * w

    def backward(*, x, w, out, residuals, cotangent):
        # The body gives cotangent² w: with the root of 2 |cotangent x|, both gradients.
        both = blocks_of(jnp.sqrt(jnp.abs(2 * cotangent * x)), w)
        signed = both * jnp.sign(cotangent * x)
        return {"x": signed, "w": (cotangent * x * x).sum(0)}

    if where == "backward":

        @scaled_square.kernel(version=1, backward=backward)
        def with_gradient(x, w, *, residuals=False):
            return (x * x * w, ()) if residuals else x * x * w

        return scaled_square

    @scaled_square.kernel(version=1)
    def by_blocks(x, w):
        return blocks_of(x, w)

    return scaled_square


def operands(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(blocks)
    x = draw.standard_normal((blocks * ROWS, 4)).astype(np.float32)
    return x, draw.random(4).astype(np.float32) + 0.5


def written(x: Any, w: Any) -> Any:
    return w * x**2


@pytest.mark.parametrize("around", ["nothing", "scan", "two in one program"])
def test_each_grid_has_its_size(around: str) -> None:
    pattern = squares("forward")

    def fn(x: Any, w: Any) -> Any:
        if around == "scan":
            return jax.lax.scan(lambda c, _: (written(c, w), None), x, None, 2)[0]
        if around == "nothing":
            return written(x, w)
        return written(x, w).sum() + written(x[:ROWS], w).sum()

    fast = rewriter.optimize(fn, patterns=[pattern])
    for blocks in (2, 5, 3, 4):
        args = operands(blocks)
        assert {s.kernel for s in fast.report(*args).sites} == {"by_blocks"}
        np.testing.assert_allclose(fast(*args), fn(*args), rtol=1e-5)


def test_gradients_see_their_grid_too() -> None:
    loss = jax.grad(lambda x, w: written(x, w).sum(), (0, 1))
    pattern = squares("backward")
    fast = rewriter.optimize(
        jax.value_and_grad(lambda x, w: written(x, w).sum(), (0, 1)),
        patterns=[pattern],
    )
    for blocks in (2, 5, 3, 4):
        args = operands(blocks)
        _, grads = fast(*args)
        for got, want in zip(grads, loss(*args), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_equal_calls_are_traced_once() -> None:
    """The guard costs no trace where shapes are equal."""
    traces = []

    @rewriter.pattern(dims="x: m d, w: d -> m d")
    def scaled_square(x, w):
        return x * x * w

    @scaled_square.kernel(version=1)
    def by_blocks(x, w):
        traces.append(x.shape)
        return blocks_of(x, w)

    args = operands(2)
    counts = []
    for _ in range(2):
        fast = rewriter.optimize(lambda x, w: written(x, w), patterns=[scaled_square])
        fast(*args)
        counts.append(len(traces))
    assert counts[1] == counts[0]
