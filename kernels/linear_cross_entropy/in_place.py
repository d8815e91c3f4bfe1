"""The loss and its gradients, with logits in the memory of the weights' gradient.

All logits are needed before the first gradient of the weights is. The gradient [k, v]
has room for the logits of k rows meanwhile: chunk of classes by chunk, the gradient
replaces them. Logits of some more rows are held beside it. Those of the other rows are
computed twice. So no gradient of weights is added up in float32, and each is written
once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.cross_entropy.rows import Loss, Sum
from rewriter.kernels.cross_entropy.xla import gradient
from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.linear_cross_entropy.chunks import Chunk, Rows
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.linear_cross_entropy.row_statistics import Reduced, reduced


def takes(head: Head, count: int, classes: int) -> bool:
    """Whether logits fit in place of the weights' gradient: k rows or more, unpadded.

    Args:
        head: What makes logits.
        count: The number of rows.
        classes: The number of classes without padding.
    """
    k, v = head.w.shape
    return not head.turned and v == classes and count >= k and head.w.dtype == head.held


def together(
    head: Head, loss: Loss, rows: Rows, config: Chunk, steps: Any
) -> tuple[jax.Array, jax.Array, Rows]:
    """Returns losses, cotangents of rows, and those of the weights and the bias.

    Args:
        head: What makes logits, which `takes` that many rows.
        loss: The loss.
        rows: x [n, k], and each row's label and cotangent.
        config: How many rows are held beside, and the bytes of a chunk's cotangents.
        steps: What is done with products, of `xla.Steps`.
    """
    (count, k), v = rows["x"].shape, head.classes
    size = chunks.of_cotangents(count, v, jnp.dtype(head.held).itemsize, config)
    beside = min(config.beside or 0, count - k)
    labels = loss.labels(rows["labels"])
    x = _parts(rows["x"], k, beside)
    held = [head.product(part) for part in x[:2]]
    picks = _parts(loss.picks(labels), k, beside)
    some = [steps.reduced(head, y, p) for y, p in zip(held, picks, strict=False)]
    again = _reduced_again(head, x[2], picks[2], config)
    made = jax.tree.map(lambda *parts: jnp.concatenate(parts), *some, again)
    # All of the logits' other readers come first, so that no copy of them is made.
    held, (row, picked, below) = lax.optimization_barrier((held, made))
    row = loss.total(row)
    known = {"classes": labels, "cotangent": rows["cotangent"], **row._asdict()}
    dx, sums = _gradients(head, loss, rows["x"], x[2], held, known, size)
    return loss.value(row, picked, below, labels), dx.astype(x[0].dtype), sums


def _parts(a: jax.Array, first: int, beside: int) -> list[jax.Array]:
    """The first rows, those beside, and the others."""
    return [a[:first], a[first : first + beside], a[first + beside :]]


def _reduced_again(
    head: Head, x: jax.Array, labels: jax.Array, config: Chunk
) -> Reduced:
    """What is reduced of rows whose logits are not held."""
    if not x.shape[0]:
        none = jnp.zeros((0,), head.wide)
        return Sum(none, none), none, none
    v, size = head.classes, jnp.dtype(head.held).itemsize
    columns = chunks.of_cotangents(x.shape[0], v, size, config)
    return reduced(head, x, labels, columns)


def _gradients(
    head: Head,
    loss: Loss,
    x: jax.Array,
    others: jax.Array,
    held: list[jax.Array],
    known: Rows,
    size: int,
) -> tuple[jax.Array, Rows]:
    """Cotangents of rows in the wide dtype, and those of weights and bias.

    Args:
        head: What makes logits.
        loss: The loss.
        x: All rows.
        others: The last rows, whose logits are not held.
        held: Products of the first k rows, and of those that follow.
        known: Of each row: classes, top, weight and cotangent.
        size: Classes of a chunk.
    """
    v = head.classes
    row = Sum(known["top"], known["weight"])
    slopes = loss.slopes(row, known["classes"], known["cotangent"])
    dtypes = {"x": head.wide, "w": head.w.dtype}
    sums: Rows = {"w": held[0]}
    if head.bias is not None:
        sums["bias"] = jnp.zeros_like(head.bias)
        dtypes["bias"] = head.bias.dtype

    def step(start: Any, size: int, carry: Any) -> Any:
        dx, sums = carry
        some = head.chunk(start, size)
        parts = [
            lax.dynamic_slice_in_dim(a, start, size, 1) for a in (sums["w"], held[1])
        ]
        y = some.logits(jnp.concatenate([*parts, some.product(others)]))
        d = gradient(slopes, y, row.top, some.hits(known["classes"]))
        found = some.back(x, some.of_product(y, d), dtypes)
        put = {
            n: lax.dynamic_update_slice_in_dim(a, found[n], start, a.ndim - 1)
            for n, a in sums.items()
        }
        return dx + found["x"], put

    zero = jnp.zeros(x.shape, head.wide)
    return chunks.over_chunks(step, (zero, sums), v, size)
