"""The loss over a vocabulary that holds logits of one chunk only.

The usual form writes all logits, [rows, v], and automatic differentiation keeps them
and their exponentials. This one loops over blocks of rows, and inside over chunks of
classes or not at all. It keeps the sum of exponentials of each row, and computes the
logits again in the backward pass: one more product, for two arrays of [rows, v] fewer
in memory. Where the cotangent is known first, `together` computes the logits once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.cross_entropy.rows import (
    Loss,
    Sum,
    labels_of_rows,
    shares_of_rows,
)
from rewriter.kernels.cross_entropy.xla import (
    cotangents_of_shares,
    gradient,
    is_float,
    known_outside,
    labels_of,
)
from rewriter.kernels.linear_cross_entropy import chunks, in_place
from rewriter.kernels.linear_cross_entropy.chunks import Chunk, Rows
from rewriter.kernels.linear_cross_entropy.estimate import estimate, margin
from rewriter.kernels.linear_cross_entropy.head import Head
from rewriter.kernels.linear_cross_entropy.memory import temporary
from rewriter.kernels.linear_cross_entropy.reference import OF_ROWS
from rewriter.kernels.linear_cross_entropy.row_statistics import (
    reduced,
    reduced_and_held,
)
from rewriter.kernels.linear_cross_entropy.steps import PLAIN, Steps
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.loops import zero_after
from rewriter.kernels.shared.row_blocks import in_parts, over_blocks
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.support.sizes import size_text
from rewriter.support.verdict import YES, Verdict, all_of, no

PAYS_FROM = 1 << 26
"""The fewest bytes of logits for which the memory is worth another product."""

TOO_LARGE = 1 << 33
"""Bytes of logits that are kept for gradients for which a GPU or TPU of unknown size is
likely to have no memory: they are held two or three times."""


def supports(spec: Spec) -> Verdict:
    """Takes real floating operands, weights [k, v] and a label for each row."""
    floats = [n for n in spec.operands if n not in OF_ROWS]
    return all_of(
        *(is_float(spec, n) for n in floats),
        _matrix(spec),
        labels_of(spec, "x"),
        known_outside(spec),
    )


def _matrix(spec: Spec) -> Verdict:
    shape = spec.shape("w")
    if len(shape) == 2 and shape[0] == spec.shape("x")[-1]:
        return YES
    return no("shape", f"w is {shape}, expected ({spec.shape('x')[-1]}, v)")


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for logits of 64 MiB or more in float32."""
    return profitable_backward(spec, platform, 1)


def profitable_backward(spec: Spec, platform: str, count: int) -> Verdict:
    """Returns the same for logits that are kept `count` times for gradients."""
    size = 0 if spec.symbolic else chunks.nbytes(spec) * count
    if platform != "cpu":
        if size >= TOO_LARGE:
            return YES
        return no("platform", f"not measured to be as fast as XLA on {platform}")
    if spec.symbolic or size >= PAYS_FROM:
        return YES
    return no("small", f"logits of {size_text(size)} are so small that XLA is as fast")


def forward(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Chunk | None = None,
    steps: Steps = PLAIN,
    swapped: Sequence[str] = (),
    **how: Any,
) -> Any:
    """Returns the losses, and with `residuals` the sums of exponentials.

    Args:
        config: The chunk.
        swapped: ``("w",)`` if the weights lie in memory as [v, k].
        steps: What is done with the products of a block.
        **how: Parameters of the op, as in `reference`.
    """
    config = (config or chunks.DEFAULT).of_passing
    head, loss = head_and_loss(x, w, bias, first, config, swapped, **how)
    rows, columns = _sizes(head, x, config)

    def block(part: Rows, _: None) -> tuple[None, Rows]:
        own = loss.of(part)
        classes = own.labels(part["labels"])
        picks = own.picks(classes)
        if columns == head.classes:
            row, picked, below = steps.reduced(head, head.product(part["x"]), picks)
        else:
            row, picked, below = reduced(head, part["x"], picks, columns)
        row = own.total(row)
        found = own.results(row, picked, below, classes)
        out = found["out"].astype(out_dtype or found["out"].dtype)
        return None, {**found, "out": out, **row._asdict()}

    parts = _rows(head, x, labels, other, share)
    _, made = over_blocks(block, parts, None, rows)
    names = ("out", "top", "weight", *(["apart"] if share is not None else []))
    out, *saved = (_by_row(made[n], labels) for n in names)
    return (out, tuple(saved)) if residuals else out


def _rows(
    head: Head,
    x: jax.Array,
    labels: jax.Array,
    other: jax.Array | None,
    share: jax.Array | None,
    **more: jax.Array,
) -> Rows:
    """What there is of each row, with one axis of rows."""
    shares = shares_of_rows(share, head.wide)
    return chunks.flat(x, labels_of_rows(labels, other), **shares, **more)


def _by_row(a: jax.Array, labels: jax.Array) -> jax.Array:
    """Numbers of rows [n, ...] with the axes that labels have."""
    return a.reshape(*labels.shape, *a.shape[1:])


def head_and_loss(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    first: jax.Array | None,
    config: Chunk,
    swapped: Sequence[str] = (),
    *,
    join_bias: bool = False,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    precision: str | None = None,
    logits_dtype: str | None = None,
    **loss: Any,
) -> tuple[Head, Loss]:
    """What makes logits, and what a loss is of them, by the op's parameters.

    With `join_bias` products have the bias, see `Head.joined`.
    """
    plain = jnp.result_type(x, w)
    narrow = jnp.dtype(logits_dtype) if logits_dtype else plain
    wide = jnp.promote_types(plain, jnp.float32)
    held = narrow if config.rounded else wide
    start = 0 if first is None else first[0]
    classes, used, turned = w.shape[1], loss.get("used", 0), "w" in swapped
    head = Head(
        w.T if turned else w, bias, scale, soft_cap, precision, narrow, wide, held,
        start, turned=turned,
    )  # fmt: skip
    head = head.padded(chunks.padded(classes, config))
    head = head.with_bias_joined() if join_bias else head
    return head.before(used) if used else head, Loss(classes, **loss)


def _sizes(head: Head, x: jax.Array, config: Chunk) -> tuple[int, int]:
    """Rows of a block, and classes of a chunk."""
    count, classes = math.prod(x.shape[:-1]), head.classes
    size = jnp.dtype(head.held).itemsize
    rows = chunks.whole_rows(count, classes, size, config) if config.whole else 0
    if rows:
        return rows, classes
    return chunks.cut(count, classes, size, config)


def backward(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    out: None,
    residuals: tuple[jax.Array, ...],
    cotangent: jax.Array,
    bias: jax.Array | None = None,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    out_dtype: str | None = None,
    config: Chunk | None = None,
    **how: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every float operand."""
    del out, out_dtype
    top, weight, *apart = residuals
    config = config or chunks.DEFAULT
    head, loss = head_and_loss(x, w, bias, first, config, **how)
    rows, columns = _sizes(head, x, config)

    added = in_parts(math.prod(x.shape[:-1]), rows)

    def block(part: Rows, sums: Rows) -> tuple[Rows, Rows]:
        own = loss.of(part)
        known = part | {"classes": own.labels(part["labels"])}
        return _gradients(head, own, known, sums, columns, added)

    up = cotangent.astype(head.wide)
    more = {"top": top, "weight": weight, "cotangent": up}
    parts = _rows(head, x, labels, other, share, **more)
    sums, by_row = over_blocks(block, parts, _zeros(head, added, cotangent), rows)
    found = _like(x, w, bias, by_row["x"], sums)
    return found | cotangents_of_shares(share, up, *apart)


def _zeros(head: Head, added: bool, cotangent: jax.Array) -> Rows:
    """Where cotangents of weights and bias are put, or added up."""
    shared = {"w": head.w} if head.bias is None else {"w": head.w, "bias": head.bias}
    zero = zero_after(cotangent, dtype=head.wide)
    return {
        n: jnp.full(a.shape, zero.astype(head.wide if added else a.dtype))
        for n, a in shared.items()
    }


def _like(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    dx: jax.Array,
    sums: Rows,
    turned: bool = False,
) -> Rows:
    """Cotangents like the operands, without those of padding."""
    v = w.shape[1]
    dw = sums["w"][:v].astype(w.dtype).T if turned else sums["w"][:, :v]
    found = {"x": dx.reshape(x.shape), "w": dw.astype(w.dtype)}
    if bias is None:
        return found
    return found | {"bias": sums["bias"][:v].astype(bias.dtype)}


def _gradients(
    head: Head,
    loss: Loss,
    known: Rows,
    sums: Rows,
    columns: int,
    added: bool,
    in_sums: bool = False,
) -> tuple[Rows, Rows]:
    """Sums with the cotangents of some rows, and ``{"x": those of the rows}``.

    Args:
        head: What makes logits.
        loss: The loss.
        known: Of each row: x, classes, top, weight and cotangent; and the product with
            the weights, if it is held.
        sums: Cotangents of weights and bias so far.
        columns: Classes of a chunk.
        added: Whether these are added to `sums`, and not put there.
        in_sums: Whether the product lies in the first rows of ``sums["w"]``.
    """
    rows, product = known["x"], known.get("product")
    dtypes = {n: s.dtype for n, s in sums.items()}

    def of(some: Head, product: jax.Array, of_x: Any) -> Rows:
        y, classes = some.logits(product), known["classes"]
        row = Sum(known["top"], known["weight"])
        slopes = loss.slopes(row, classes, known["cotangent"])
        d = gradient(slopes, y, row.top, some.hits(classes))
        return some.back(rows, some.of_product(y, d), {**dtypes, "x": of_x})

    if columns == head.classes:
        product = head.product(rows) if product is None else product
        found = of(head, product, rows.dtype)
        more = {n: s + found[n] if added else found[n] for n, s in sums.items()}
        return more, {"x": found["x"]}

    def step(start: Any, size: int, carry: Any) -> Any:
        dx, sums = carry
        some = head.chunk(start, size)
        if in_sums:
            part = lax.dynamic_slice(sums["w"], (0, start), (rows.shape[0], size))
            part = lax.optimization_barrier(part)  # read before it is replaced
        elif product is None:
            part = some.product(rows)
        else:
            part = lax.dynamic_slice_in_dim(product, start, size, 1)
        found = of(some, part, head.wide)
        axes = {"w": head.axis, "bias": 0}
        put = {n: _put(s, found[n], start, added, axes[n]) for n, s in sums.items()}
        return dx + found["x"], put

    zero = jnp.full(rows.shape, zero_after(rows, dtype=head.wide))
    dx, sums = chunks.over_chunks(step, (zero, sums), head.classes, columns)
    return sums, {"x": dx.astype(rows.dtype)}


def _put(
    sums: jax.Array, more: jax.Array, start: Any, added: bool, axis: int
) -> jax.Array:
    """An array with some classes put there, or added to."""
    if added:
        more += lax.dynamic_slice_in_dim(sums, start, more.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(sums, more, start, axis)


def together(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    cotangent: jax.Array,
    bias: jax.Array | None = None,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    out_dtype: str | None = None,
    config: Chunk | None = None,
    steps: Steps = PLAIN,
    swapped: Sequence[str] = (),
    **how: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the losses and all cotangents, from logits that are computed once.

    It holds all logits of a block of rows. Where the budget is too small for that it is
    `forward` and `backward`.

    Args:
        steps: What is done with the products of a block.
        swapped: ``("w",)`` if the weights lie in memory as [v, k].
    """
    config = config or chunks.DEFAULT
    head, loss = head_and_loss(x, w, bias, first, config, swapped, **how)
    count, classes = math.prod(x.shape[:-1]), head.classes
    size = jnp.dtype(head.held).itemsize
    up = cotangent.astype(head.wide)
    parts = _rows(head, x, labels, other, share, cotangent=up)
    one = other is None
    made: Any = None
    if one and _has_room(head, count, w.shape[1], config):
        made = _by_classes(head, loss, parts, config)
    elif config.beside is not None and one and in_place.takes(head, count, w.shape[1]):
        made = in_place.together(head, loss, parts, config, steps)
    if made is not None:
        out, dx, sums = made
        out = _by_row(out, labels).astype(out_dtype or head.wide)
        return out, _like(x, w, bias, dx, sums)
    rows = chunks.whole_rows(count, classes, size, config)
    if not rows:
        own = {"x": x, "w": w, "labels": labels, "bias": bias, "first": first,
               "other": other, "share": share, "config": config,
               "out_dtype": out_dtype, **how}  # fmt: skip
        return _in_two_passes(cotangent, own)
    columns = classes if config.whole else chunks.classes_held(classes, config)
    added = in_parts(count, rows)

    def block(part: Rows, sums: Rows) -> tuple[Rows, Rows]:
        own = loss.of(part)
        product, hits = head.product(part["x"]), own.labels(part["labels"])
        known = part | {"classes": hits, "product": product}
        if steps.gradients is not None and columns == classes:
            results, d = steps.of(head, own)(head, own, known)
            dtypes = {"x": x.dtype} | {n: s.dtype for n, s in sums.items()}
            found = head.back_of_narrow(part["x"], d, dtypes)
            if head.bias is not None:
                found["bias"] = d.sum(0, dtype=head.wide).astype(dtypes["bias"])
            sums = {n: s + found[n] if added else found[n] for n, s in sums.items()}
            return sums, {"x": found["x"], **results}
        row, picked, below = steps.reduced(head, product, own.picks(hits))
        row = own.total(row)
        results = own.results(row, picked, below, hits)
        known |= row._asdict()
        sums, found = _gradients(head, own, known, sums, columns, added)
        return sums, found | results

    sums, made = over_blocks(block, parts, _zeros(head, added, cotangent), rows)
    out = _by_row(made["out"], labels).astype(out_dtype or head.wide)
    found = _like(x, w, bias, made["x"], sums, head.turned)
    if share is None:
        return out, found
    apart = _by_row(made["apart"], labels)
    return out, found | cotangents_of_shares(share, cotangent, apart)


def _has_room(head: Head, count: int, classes: int, config: Chunk) -> bool:
    """Whether the weights' gradient has room for the logits of all rows."""
    k, v = head.w.shape
    alike = head.w.dtype == head.held == head.narrow == head.wide
    room = not head.turned and v == classes and isinstance(count, int)
    return room and 0 < count <= k and alike and config.beside == 0 and not config.whole


def _by_classes(
    head: Head, loss: Loss, rows: Rows, config: Chunk
) -> tuple[jax.Array, jax.Array, Rows]:
    """Losses, cotangents of rows, and those of the weights and the bias.

    It goes over chunks of classes twice. First it puts logits where the weights'
    gradient will be. Then it reads them, and puts the gradient there. So logits are
    computed once, and no gradient is added up.
    """
    x, labels = rows["x"], loss.labels(rows["labels"])
    some = replace(config, passing=2 * config.passing)  # by less, products are slower
    columns = _sizes(head, x, some.of_passing)[1]
    sums = _zeros(head, False, rows["cotangent"])
    held = reduced_and_held(head, x, loss.picks(labels), columns, sums["w"])
    sums["w"], (row, picked, below) = held
    row = loss.total(row)
    results = loss.results(row, picked, below, labels)
    known = {**rows, "classes": labels, **row._asdict()}
    if columns == head.classes:
        known["product"] = sums["w"][: x.shape[0]]
    sums, found = _gradients(head, loss, known, sums, columns, False, in_sums=True)
    return results["out"], found["x"], sums


def _in_two_passes(
    cotangent: jax.Array, given: dict[str, Any]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The losses and all cotangents, from logits that are computed twice."""
    out, saved = forward(**given, residuals=True)
    return out, backward(**given, out=None, residuals=saved, cotangent=cotangent)


def _saves(spec: Spec) -> list[Any]:
    """The sum of exponentials of each row: its top and its weight.

    Of two labels also how far their losses are apart.
    """
    narrow = jnp.result_type(spec.dtype("x"), spec.dtype("w"))
    wide = jnp.promote_types(narrow, jnp.float32)
    return [(spec.shape("labels"), wide)] * (2 + spec.has("other"))


KERNEL = XLA.kernel(
    "linear_cross_entropy", forward, backward, supports,
    Speed(profitable, profitable_backward, estimate=estimate, margin=margin,
          temporary=temporary),
    Space(Chunk, chunks.default, chunks.configs),
    version=3, together=together, saves=_saves, flat=True,
)  # fmt: skip
