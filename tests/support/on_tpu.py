"""Patterns with TPU kernels, one of them steered by prefetched scalars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

import rewriter
from rewriter.kernels.shared import pallas_tpu
from rewriter.ops.kernel import Space, Spec


@dataclass(frozen=True)
class Block:
    """Rows of a block."""

    rows: int = 128


SPACE = Space(
    Block,
    default=lambda spec, device: Block(),
    configs=lambda spec, device: [Block(8), Block(512), Block(2048)],
)


def program(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.sin(y) * y


@rewriter.pattern(dims="x: m k, w: k n -> m n")
def gated(x, w):
    y = x @ w
    return jnp.sin(y) * y


@gated.kernel(platform="tpu", space=SPACE)
def in_blocks(x, w, *, config: Block | None = None):
    """One pass over blocks of rows."""
    rows, (k, n) = (config or Block()).rows, w.shape

    def body(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        y = pallas_tpu.dot(x_ref[...], w_ref[...])
        out_ref[...] = jnp.sin(y) * y

    row = lambda width: pl.BlockSpec((rows, width), lambda i: (i, 0))
    whole = pl.BlockSpec((k, n), lambda i: (0, 0))
    grid = pallas_tpu.Grid((x.shape[0] // rows,), 1)
    out = [pallas_tpu.shaped((x.shape[0], n), x.dtype, x)]
    made = pallas_tpu.call(body, "in_blocks", grid, [row(k), whole], [row(n)], out)
    return made(x, w)[0]


def steps(spec: Spec, config: Any, backward: Any, passes: str) -> dict[str, int]:
    """Half of the blocks are empty, say."""
    del backward, passes
    return {"prefetching": spec.shape("x")[0] // config.rows // 2}


@gated.kernel(platform="tpu", space=SPACE, steps=steps)
def prefetching(x, w, *, config: Block | None = None):
    """One with a loop whose turns come from a prefetched scalar."""
    rows, (k, n) = (config or Block()).rows, w.shape

    def body(turns_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        one = lambda _, y: jnp.sin(pallas_tpu.dot(x_ref[...], w_ref[...])) * y
        y = pallas_tpu.dot(x_ref[...], w_ref[...])
        out_ref[...] = jax.lax.fori_loop(0, turns_ref[0], one, y)

    row = lambda width: pl.BlockSpec((rows, width), lambda i, turns: (i, 0))
    whole = pl.BlockSpec((k, n), lambda i, turns: (0, 0))
    grid = pallas_tpu.Grid((x.shape[0] // rows,), 1)
    out = [pallas_tpu.shaped((x.shape[0], n), x.dtype, x)]
    made = pallas_tpu.call(
        body, "prefetching", grid, [row(k), whole], [row(n)], out, prefetched=1
    )
    return made(jnp.ones((1,), jnp.int32), x, w)[0]
