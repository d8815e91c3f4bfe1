"""Decides when a program runs whether attention is dense or in bounded memory.

Sizes that are symbolic in an exported program are known when it is compiled. Then XLA
keeps one branch. Few scores are computed by the reference, as the original would, and
many by tiles. Sizes that are numbers are decided before, and come here for the tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.attention.reference import reference
from rewriter.kernels.attention.xla.backward import backward as in_tiles_backward
from rewriter.kernels.attention.xla.forward import forward as in_tiles
from rewriter.kernels.shared.loops import zero_after

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.xla.config import Blocks


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    residuals: bool = False,
    config: Blocks | None = None,
    **given: Any,
) -> Any:
    """Returns what `in_tiles` does; below a size it saves zeros."""
    arrays = q, k, v

    def tiled() -> Any:
        how = {"residuals": residuals, "config": config, **given}
        return in_tiles(*arrays, **how)

    if not _is_open(config, q, k):
        return tiled()

    def dense() -> Any:
        out = reference(*arrays, **_as_written(given))
        if not residuals:
            return out
        _, saved = jax.eval_shape(tiled)
        zero = zero_after(*arrays)
        zeros = [jnp.zeros(x.shape, x.dtype) + zero.astype(x.dtype) for x in saved]
        return out, tuple(zeros)

    return lax.cond(_is_large(config, q, k), tiled, dense)


def backward(
    q: Array,
    k: Array,
    v: Array,
    *,
    config: Blocks | None = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns what `in_tiles_backward` does; below a size the reference's."""

    def tiled() -> dict[str, Array]:
        return in_tiles_backward(q, k, v, config=config, **given)

    if not _is_open(config, q, k):
        return tiled()

    def dense() -> dict[str, Array]:
        rest = {"q": q, "k": k, "v": v, **_as_written(given)}
        cotangent = rest.pop("cotangent")
        del rest["out"], rest["residuals"]
        floats = {name: rest.pop(name) for name in jax.eval_shape(tiled)}
        _, vjp = jax.vjp(lambda floats: reference(**floats, **rest), floats)
        (grads,) = vjp(cotangent)
        return grads

    return lax.cond(_is_large(config, q, k), tiled, dense)


def _as_written(given: dict[str, Any]) -> dict[str, Any]:
    """What the reference is given: it always weighs hidden keys by their fill."""
    return {name: x for name, x in given.items() if name != "reaches"}


def _is_open(config: Blocks | None, q: Array, k: Array) -> bool:
    """Whether it is decided when the program runs."""
    sizes = *q.shape[:3], k.shape[1]
    known = all(isinstance(n, int) for n in sizes)
    return config is not None and config.dense_below > 0 and not known


def _is_large(config: Blocks, q: Array, k: Array) -> Array:
    """Whether the scores take more than the bytes of the config."""
    count = jnp.float32(4)
    for n in (*q.shape[:3], k.shape[1]):
        count = count * jnp.asarray(n, jnp.float32)
    return count >= config.dense_below
