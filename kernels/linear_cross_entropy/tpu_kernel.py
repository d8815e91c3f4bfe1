"""Four numbers of each row's logits, in the epilogue of their product on a TPU.

A step multiplies a block of rows by a block of classes, over a part of the columns that
are summed. After the last part, the logits join a running maximum of each row, the sum
of their exponentials, the picked logit, and the sum of all less the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rewriter.kernels.cross_entropy.rows import Sum, finite
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.linear_cross_entropy.row_statistics import Reduced
from rewriter.kernels.linear_cross_entropy.tpu import Tiles, sizes_of, vmem
from rewriter.kernels.shared import pallas_tpu

if TYPE_CHECKING:
    from jax import Array

LANES = pallas_tpu.LANES


def reduced(head: Head, x: Array, labels: Array, tiles: Tiles, below: bool) -> Reduced:
    """Returns what is reduced over the classes of rows x [n, k].

    Args:
        head: What makes logits, of float32 or bfloat16 weights.
        x: The rows.
        labels: The classes that are picked, [n].
        tiles: The config.
        below: Whether the sums of logits less their top are wanted; else they are 0.
    """
    (n, k), v = x.shape, head.classes
    sizes = sizes_of(n, k, v, tiles)
    end = v if head.end is None else min(int(head.end), v)
    step = _Step(head, (n, k, v), sizes, end, below)
    rows, columns, classes = sizes
    inputs = [
        pl.BlockSpec((rows, columns), lambda i, j, p: (i, p)),
        pl.BlockSpec((columns, classes), lambda i, j, p: (p, j)),
        pl.BlockSpec((rows, 1), lambda i, j, p: (i, 0)),
    ]
    given = [x, head.w, labels.astype(jnp.int32)[:, None]]
    if head.bias is not None:
        inputs.append(pl.BlockSpec((1, classes), lambda i, j, p: (0, j)))
        given.append(head.bias[None])
    grid = (pl.cdiv(n, rows), pl.cdiv(v, classes), pl.cdiv(k, columns))
    sums = pallas_tpu.VMEM((rows, LANES), jnp.float32)
    call = pallas_tpu.call(
        step.body,
        "linear_cross_entropy",
        pallas_tpu.Grid(grid, 1),
        inputs,
        [pl.BlockSpec((rows, LANES), lambda i, j, p: (i, 0))],
        [pallas_tpu.shaped((n, LANES), jnp.float32, x)],
        [pallas_tpu.VMEM((rows, classes), jnp.float32), *[sums] * 4],
        vmem=vmem(sizes, (x.dtype.itemsize, head.w.dtype.itemsize)),
    )
    (made,) = call(*given)
    top, weight, picked, less = (made[:, i] for i in range(4))
    return Sum(finite(top), weight), picked, less


@dataclass(frozen=True)
class _Step:
    """One step of the grid.

    Attributes:
        head: What makes logits.
        whole: Rows, columns and classes of the arrays.
        sizes: Those of a block.
        end: The column behind the last logit.
        below: Whether sums of logits less their top are wanted.
    """

    head: Head
    whole: tuple[int, int, int]
    sizes: tuple[int, int, int]
    end: int
    below: bool

    def body(self, x: Any, w: Any, labels: Any, *others: Any) -> None:
        """Adds a product; after the last of a block, joins its logits."""
        *bias, out, total, top, weight, picked, less = others
        j, p = pl.program_id(1), pl.program_id(2)

        @pl.when((j == 0) & (p == 0))
        def _() -> None:
            top[...] = jnp.full(top.shape, -jnp.inf, jnp.float32)
            for sums in (weight, picked, less):
                sums[...] = jnp.zeros(sums.shape, jnp.float32)

        product = self.product(x[...], w[...], p)

        @pl.when(p == 0)
        def _() -> None:
            total[...] = product

        @pl.when(p > 0)
        def _() -> None:
            total[...] += product

        @pl.when(p == pl.num_programs(2) - 1)
        def _() -> None:
            y, inside, at = self.logits(total[...], bias, j)
            self.join(y, inside, at == labels[...], j, top, weight, picked, less)

        @pl.when((p == pl.num_programs(2) - 1) & (j == pl.num_programs(1) - 1))
        def _() -> None:
            lane = lax.broadcasted_iota(jnp.int32, out.shape, 1)
            made = less[...]
            for i, sums in enumerate((top, weight, picked)):
                made = jnp.where(lane == i, sums[...], made)
            out[...] = made

    def product(self, x: Array, w: Array, part: Any) -> Array:
        """The product of a part of the columns, without what is beyond their end."""
        k, columns = self.whole[1], self.sizes[1]
        if k % columns:
            rest = k - part * columns
            x, w = pallas_tpu.masked(x, 1, 0, rest), pallas_tpu.masked(w, 0, 0, rest)
        return pallas_tpu.dot(x, w, precision=self.head.precision)

    def logits(self, y: Array, bias: Any, block: Any) -> tuple[Array, Array, Array]:
        """Logits, which of them there are, and their classes."""
        head, classes = self.head, self.sizes[2]
        y = y * head.scale if head.scale != 1 else y
        y = y + bias[0][...].astype(jnp.float32) if bias else y
        y = head.soft_cap * jnp.tanh(y / head.soft_cap) if head.soft_cap else y
        at = lax.broadcasted_iota(jnp.int32, y.shape, 1) + block * classes
        inside = at < self.end
        return jnp.where(inside, y, -jnp.inf), inside, at

    def join(
        self, y: Array, inside: Array, hit: Array, block: Any,
        top: Any, weight: Any, picked: Any, less: Any,
    ) -> None:  # fmt: skip
        """Adds a block's logits to what is reduced."""
        old = top[...][:, :1]
        new = jnp.maximum(old, jnp.max(y, axis=1, keepdims=True))
        shift = self.finite(new)
        before = weight[...][:, :1]
        kept = jnp.where(before == 0, 0.0, before * jnp.exp(old - shift))
        total = kept + jnp.sum(jnp.exp(y - shift), axis=1, keepdims=True)
        own = jnp.where(hit & inside, y, 0.0)
        picked[...] += jnp.sum(own, axis=1, keepdims=True)
        if self.below:
            count = jnp.minimum(block * self.sizes[2], self.end).astype(jnp.float32)
            moved = count * (self.finite(old) - shift)
            rest = jnp.where(inside, y - shift, 0.0)
            less[...] += moved + jnp.sum(rest, axis=1, keepdims=True)
        top[...] = jnp.broadcast_to(new, top.shape)
        weight[...] = jnp.broadcast_to(total, weight.shape)

    @staticmethod
    def finite(top: Array) -> Array:
        """Maxima, and 0 where they are infinite."""
        return jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)
