"""The loss and its gradients, with logits in the memory of the weights' gradient.

All cotangents of logits are needed before the first gradient of the weights is. The
gradient [k, v] has room for those of k rows meanwhile: chunk of classes by chunk, the
gradient replaces them. Those of some more rows are held beside it. Those of the other
rows are computed twice. So no gradient is added up in float32, each is written once,
and the cotangents take the place of the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.cross_entropy.rows import Loss, Slopes
from rewriter.kernels.cross_entropy.xla import gradient
from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.linear_cross_entropy.chunks import Chunk, Rows
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.shared.loops import zero_after
from rewriter.kernels.shared.row_blocks import over_blocks


class Known(NamedTuple):
    """What cotangents of rows follow from, beside their logits.

    Attributes:
        labels: The classes that have gradients.
        top: What is subtracted from logits before their exponentials.
        slopes: The cotangents of what is reduced over the classes.
    """

    labels: jax.Array
    top: jax.Array
    slopes: tuple[jax.Array, ...]


class Found(NamedTuple):
    """Results of some rows.

    Attributes:
        out: Their losses.
        dx: Their cotangents, or None where these are put in their place.
        bias: Their part of the bias's cotangent, or None without a bias.
    """

    out: jax.Array
    dx: jax.Array | None
    bias: jax.Array | None


def takes(head: Head, count: int, classes: int) -> bool:
    """Whether logits fit in place of the weights' gradient: k rows or more, unpadded.

    Args:
        head: What makes logits.
        count: The number of rows.
        classes: The number of classes without padding.
    """
    k, v = head.w.shape
    alike = head.w.dtype == head.held == head.narrow
    return not head.turned and v == classes and count >= k and alike


def together(
    head: Head, loss: Loss, rows: Rows, config: Chunk, steps: Any
) -> tuple[jax.Array, jax.Array, Rows]:
    """Returns losses, cotangents of rows, and those of the weights and the bias.

    Args:
        head: What makes logits, which `takes` that many rows.
        loss: The loss.
        rows: x [n, k], and each row's label and cotangent.
        config: How many rows are held beside, and the bytes of a chunk's cotangents.
        steps: What is done with products, of `steps.Steps`.
    """
    (count, k), v = rows["x"].shape, head.classes
    size = chunks.of_cotangents(count, v, jnp.dtype(head.held).itemsize, config)
    ends = 0, k, k + min(config.beside or 0, count - k), count
    cut = lambda i: {n: a[ends[i] : ends[i + 1]] for n, a in rows.items()}
    dx = jnp.full(rows["x"].shape, zero_after(rows["x"], dtype=rows["x"].dtype))
    made, again = [], None
    if ends[2] < count:
        found, again = _of_others(head, loss, cut(2), config, steps)
        dx, found = _with_rows(dx, found, ends[2])
        rows, dx, found = lax.optimization_barrier((rows, dx, found))
        made = [found]  # the logits of these rows are gone
    held: list[jax.Array] = []
    of = _replaced if steps.replaces(head, loss) else _of_rows
    for i in (1, 0) if ends[1] < ends[2] else (0,):
        d, found, *_ = of(head, loss, cut(i), steps)
        dx, found = _with_rows(dx, found, ends[i])
        held, made = [d, *held], [found, *made]
        rows, held, made, dx = lax.optimization_barrier((rows, held, made, dx))
    sums = {"bias": sum(f.bias for f in made)} if head.bias is not None else {}
    out = jnp.concatenate([f.out for f in made])
    # All readers of the first rows' cotangents come before what takes their place.
    held, dx = lax.optimization_barrier((held, dx))
    put = steps.of_weights if config.one_kernel else None
    w = (put or of_weights)(head, rows["x"], held, cut(2)["x"], again, size)
    return out, dx, {"w": w, **sums}


def _with_rows(dx: jax.Array, found: Found, first: int) -> tuple[jax.Array, Found]:
    """All rows' cotangents with some that are found, and what is found beside them."""
    dx = lax.dynamic_update_slice_in_dim(dx, found.dx, first, 0)
    return dx, found._replace(dx=None)


def _of_rows(
    head: Head, loss: Loss, rows: Rows, steps: Any
) -> tuple[jax.Array, Found, Known]:
    """Cotangents of rows' logits, results, and what the former follow from.

    The cotangents take the place of the logits, since these have no later reader.
    """
    labels, product = loss.labels(rows["labels"]), head.product(rows["x"])
    row, picked, below = steps.reduced(head, product, loss.picks(labels))
    out = loss.value(loss.total(row), picked, below, labels)
    row = loss.total(row)
    slopes = loss.slopes(row, labels, rows["cotangent"])
    known = Known(labels, row.top, (slopes.share, slopes.picked, slopes.each))
    product, out, known = lax.optimization_barrier((product, out, known))
    bias = None
    if head.bias is not None:
        bias = _cotangents(head, product, known).sum(0)
        product, bias = lax.optimization_barrier((product, bias))
    d = narrow(head, product, known)
    return d, Found(out, head.back_of_x(d, rows["x"].dtype), bias), known


def _replaced(
    head: Head, loss: Loss, rows: Rows, steps: Any
) -> tuple[jax.Array, Found]:
    """Cotangents of rows' logits and results, by one step for both."""
    product, labels = head.product(rows["x"]), loss.labels(rows["labels"])
    known = rows | {"classes": labels, "product": product}
    results, d = steps.replaced(head, loss, known)
    return d, Found(results["out"], head.back_of_x(d, rows["x"].dtype), None)


def _of_others(
    head: Head, loss: Loss, rows: Rows, config: Chunk, steps: Any
) -> tuple[Found, Known]:
    """The same without cotangents, of rows whose logits are held for a while only."""
    size = jnp.dtype(head.held).itemsize
    most = max(config.budget // size // max(head.classes, 1), 1)

    def block(part: Rows, total: Any) -> tuple[Any, Rows]:
        _, found, known = _of_rows(head, loss, part, steps)
        total = None if found.bias is None else total + found.bias
        return total, {"found": found._replace(bias=None), "known": known}

    zero = None if head.bias is None else jnp.zeros(head.bias.shape, head.wide)
    count = rows["x"].shape[0]
    bias, made = over_blocks(block, rows, zero, chunks.equal(count, most))
    return made["found"]._replace(bias=bias), made["known"]


def _cotangents(head: Head, product: jax.Array, known: Known) -> jax.Array:
    """Cotangents of the product without its scale, in the wide dtype."""
    y = head.logits(product)
    d = gradient(Slopes(*known.slopes), y, known.top, head.hits(known.labels))
    return head.of_product(y, d)


def narrow(head: Head, product: jax.Array, known: Known) -> jax.Array:
    """Cotangents of the product, in the narrow dtype."""
    d = _cotangents(head, product, known)
    return (d * head.scale if head.scale != 1 else d).astype(head.narrow)


def of_weights(
    head: Head,
    x: jax.Array,
    held: list[jax.Array],
    others: jax.Array,
    known: Known | None,
    size: int,
) -> jax.Array:
    """The cotangent of the weights, in place of those of the first rows' logits.

    Args:
        head: What makes logits.
        x: All rows.
        held: Cotangents of the logits of the first k rows, and of those that follow.
        others: The last rows, whose cotangents are not held.
        known: What these follow from.
        size: Classes of a chunk.
    """

    def step(start: Any, size: int, w: jax.Array) -> jax.Array:
        d = [lax.dynamic_slice_in_dim(a, start, size, 1) for a in (w, *held[1:])]
        if known is not None:
            some = head.chunk(start, size)
            d.append(narrow(some, some.product(others), known))
        found = head.back_of_w(x, jnp.concatenate(d), w.dtype)
        return lax.dynamic_update_slice_in_dim(w, found, start, 1)

    return chunks.over_chunks(step, held[0], head.classes, size)
