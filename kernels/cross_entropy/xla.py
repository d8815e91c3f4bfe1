"""Cross-entropy that keeps two numbers per row for gradients.

Automatic differentiation keeps the exponentials of all logits beside the logits. This
one keeps the maximum of each row and the sum of its exponentials, and makes
``exp(y - maximum)`` again where it is used.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.cross_entropy.estimate import estimate
from rewriter.kernels.cross_entropy.rows import (
    OUTSIDE,
    Loss,
    Slopes,
    Sum,
    labels_of_rows,
    shares_of_rows,
    summed,
)
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Spec, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

PAYS_FROM = 1 << 23
"""The fewest bytes of logits for which the memory matters."""


def supports(spec: Spec) -> Verdict:
    """Takes real floating logits and integer labels of their rows."""
    return all_of(
        is_float(spec, "logits"), labels_of(spec, "logits"), known_outside(spec)
    )


def is_float(spec: Spec, name: str) -> Verdict:
    """Whether an operand has a real floating dtype."""
    dtype = jnp.dtype(spec.dtype(name))
    if jnp.issubdtype(dtype, jnp.floating):
        return YES
    return no("dtype", f"{name} is {dtype}, expected a real floating dtype")


def labels_of(spec: Spec, rows: str) -> Verdict:
    """Whether there is an integer for each row of an operand, or two and a share."""
    if spec.has("other") != spec.has("share"):
        return no("share", "another label has a share of the target")
    for name in ("labels", "other", "share"):
        if not spec.has(name):
            continue
        dtype, real = jnp.dtype(spec.dtype(name)), name == "share"
        if not jnp.issubdtype(dtype, jnp.floating if real else jnp.integer):
            wanted = "a real floating dtype" if real else "integers"
            return no("dtype", f"{name} has {dtype}, expected {wanted}")
        if spec.shape(name) != spec.shape(rows)[:-1]:
            wanted = spec.shape(rows)[:-1]
            return no("shape", f"{name} has {spec.shape(name)}, expected {wanted}")
    return YES


def known_outside(spec: Spec) -> Verdict:
    """Whether it is known what labels pick that are no class."""
    outside = spec.param("outside", "nan")
    if outside in OUTSIDE:
        return YES
    return no("outside", f"{outside} is not one of {', '.join(OUTSIDE)}")


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: without gradients XLA fuses as much."""
    del spec, platform
    return no("forward", "without gradients XLA keeps as little")


def profitable_backward(spec: Spec, platform: str, count: int) -> Verdict:
    """Returns yes for logits of 8 MiB or more on a CPU."""
    if platform != "cpu":
        return no("platform", f"not measured to be as fast as XLA on {platform}")
    if spec.symbolic:
        return YES
    size = math.prod(spec.shape("logits")) * 4 * count
    if size >= PAYS_FROM:
        return YES
    return no("small", f"exponentials of {size >> 10} KiB take little memory")


def forward(
    *,
    logits: jax.Array,
    labels: jax.Array,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    **how: Any,
) -> Any:
    """Returns the losses, and with `residuals` the sums of exponentials."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    loss = Loss(logits.shape[-1], **how).of(shares_of_rows(share, wide))
    logits = _rounded(logits)
    labels = loss.labels(labels_of_rows(labels, other))
    classes = _classes(logits, first)
    y = _masked(logits.astype(wide), classes, loss)
    row = loss.total(summed(y))
    picked = jnp.where(_hits(classes, loss.picks(labels), loss), y, 0).sum(-1)
    below = (y - row.top[..., None]).sum(-1)
    found = loss.results(row, picked, below, labels)
    out = found.pop("out").astype(out_dtype or wide)
    return (out, (*row, *found.values())) if residuals else out


def backward(
    *,
    logits: jax.Array,
    labels: jax.Array,
    out: None,
    residuals: tuple[jax.Array, ...],
    cotangent: jax.Array,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    out_dtype: str | None = None,
    **how: Any,
) -> dict[str, jax.Array]:
    """Returns the cotangents of the logits, and of shares."""
    del out, out_dtype
    top, weight, *apart = residuals
    row, wide = Sum(top, weight), top.dtype
    loss = Loss(logits.shape[-1], **how).of(shares_of_rows(share, wide))
    logits, labels = _rounded(logits), loss.labels(labels_of_rows(labels, other))
    classes = _classes(logits, first)
    y = _masked(logits.astype(wide), classes, loss)
    up = cotangent.astype(wide)
    slopes = loss.slopes(row, labels, up)
    d = gradient(slopes, y, row.top, _hits(classes, labels, loss))
    found = {"logits": d.astype(logits.dtype)}
    return found | cotangents_of_shares(share, up, *apart)


def cotangents_of_shares(
    share: jax.Array | None, cotangent: jax.Array, *apart: jax.Array
) -> dict[str, jax.Array]:
    """Returns ``{"share": cotangents}``, or nothing of rows with one label.

    Args:
        share: The shares.
        cotangent: That of the losses.
        *apart: The derivative of these by the shares.
    """
    if share is None:
        return {}
    if cotangent.ndim > share.ndim:  # of what is reduced over some classes
        return {"share": jnp.zeros_like(share)}
    return {"share": (cotangent * apart[0]).astype(share.dtype)}


def gradient(
    slopes: Slopes, y: jax.Array, top: jax.Array, hits: jax.Array
) -> jax.Array:
    """Returns the cotangents of logits y, or of some columns of them."""
    p = jnp.exp(y - top[..., None]) * slopes.share[..., None]
    if hits.ndim > y.ndim:  # of two labels
        own = jnp.where(hits, slopes.picked[..., None], 0).sum(0)
        return p + slopes.each[..., None] + own
    return p + jnp.where(hits, slopes.picked[..., None], slopes.each[..., None])


def _rounded(logits: jax.Array) -> jax.Array:
    """Logits that nothing is computed of before they are rounded.

    A fused multiply-add takes the largest off ``c * y`` before that is rounded, as the
    largest is: of logits of 1e10 the difference may be any.
    """
    return jax.lax.optimization_barrier(logits)


def _masked(y: jax.Array, classes: jax.Array, loss: Loss) -> jax.Array:
    """Logits, and -inf for classes that have none."""
    return jnp.where(classes < loss.used, y, -jnp.inf) if loss.used else y


def _hits(classes: jax.Array, labels: jax.Array, loss: Loss) -> jax.Array:
    """Which logits are picked."""
    hits = labels[..., None] == classes
    return hits & (classes < loss.used) if loss.used else hits


def _classes(y: jax.Array, first: jax.Array | None) -> jax.Array:
    """The numbers of the classes."""
    classes = jax.lax.broadcasted_iota(jnp.int32, (y.shape[-1],), 0)
    return classes if first is None else classes + first


def _saves(spec: Spec) -> list[Any]:
    """The sum of exponentials of each row: its maximum and its weight.

    Of two labels also how far their losses are apart.
    """
    wide = jnp.promote_types(spec.dtype("logits"), jnp.float32)
    return [(spec.shape("logits")[:-1], wide)] * (2 + spec.has("other"))


KERNEL = XLA.kernel(
    "cross_entropy", forward, backward, supports,
    Speed(profitable, profitable_backward, estimate=estimate), saves=_saves,
    version=2, flat=True,
)  # fmt: skip
