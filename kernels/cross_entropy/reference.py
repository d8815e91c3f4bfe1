"""The loss over a vocabulary, given its logits, in plain `jax.numpy`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LIMITS = frozenset({"-inf", "+inf"})
MODES = {"nan": "fill", "clip": "clip", "promise": "promise_in_bounds"}


def reference(
    *,
    logits: jax.Array,
    labels: jax.Array,
    other: jax.Array | None = None,
    share: jax.Array | None = None,
    first: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    outside: str = "nan",
    of_log_probabilities: bool = False,
    whole_slopes: bool = False,
    mixed: bool = False,
    used: int = 0,
    fill: float = -math.inf,
    reduced: bool = False,
    nan_at: str = "both",
    out_dtype: str | None = None,
) -> jax.Array:
    """Returns the cross-entropy of each row with its label.

    With l the log-sum-exp of a row and s the smoothing, it is
    ``(1 - s) · (l - logits[label]) + s · (l - mean logits) + z_loss · l²``. With an
    `other` label, the loss of a row's labels is the sum of both, times ``1 - share``
    and ``share``.

    Args:
        label_smoothing: The share of the target that all classes have alike.
        z_loss: The weight of the squared log-sum-exp.
        outside: What a label that is no class picks: ``"nan"``, ``"zero"``, or
            ``"clip"`` for the nearest class. ``"promise"`` picks the nearest too, but
            passes no gradient to it.
        of_log_probabilities: Whether log-probabilities are picked, and not logits. A
            label that is no class, and picks zero, then has no loss.
        whole_slopes: Whether gradients are those of ``l - logits[label]`` also for a
            label that is no class, as some libraries have them by a rule of their own.
            It needs `of_log_probabilities`, and labels that pick zero.
        mixed: Whether both labels pick of the same log-probabilities, and one-hot rows
            are mixed before. Gradients are added in another order then.
        used: Only so many of the first classes have logits; 0 for all. It is not for
            losses with `label_smoothing`.
        fill: The logit of the other classes, far below all logits.
        reduced: Whether the result is what the loss is made of, for some of all
            classes, from `first` on. These are the largest logit m of each row, the sum
            of ``exp(y - m)``, and the picked logit or 0. With `label_smoothing`, the
            sum of ``y - m`` follows. For infinite m it is 0. Nothing passes a gradient
            to it.
        nan_at: At which infinite maxima of a row the log-sum-exp is NaN: ``"+inf"``,
            ``"-inf"``, ``"both"`` or ``"none"``. It is that infinity at the others.
            `jax.nn.log_softmax` has both, and `jax.nn.logsumexp` none.
        out_dtype: The result's dtype; that in which it is computed by default.

    Returns:
        [...], or [..., 3 to 5] if `reduced`. It is computed in float32, or float64 if
        logits are.
    """
    y = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if reduced:
        start = jnp.zeros(1, jnp.int32) if first is None else first
        both = (labels,) if other is None else (labels, other)
        return _reduced(y, both, start, used, label_smoothing > 0)
    if used:
        y = jnp.where(jnp.arange(y.shape[-1], dtype=jnp.int32) < used, y, fill)
    top = lax.stop_gradient(y.max(-1, keepdims=True))
    for kept in {"both": (), "none": LIMITS}.get(nan_at, LIMITS - {nan_at}):
        top = jnp.where(top == float(kept), 0, top)
    how = outside, of_log_probabilities, whole_slopes
    own, lse = _of_labels(y, top, labels, *how)
    if other is not None:
        assert share is not None
        part = share.astype(own.dtype)
        if mixed:
            logs = y - lse[..., None] if of_log_probabilities else y
            picked = _picked_by_both(logs, labels, other, part, outside)
            own = -picked if of_log_probabilities else lse - picked
        else:
            another, _ = _of_labels(y, top, other, *how)
            own = (1 - part) * own + part * another
    out = own
    if label_smoothing:
        alike = lse - y.mean(-1)
        out = (1 - label_smoothing) * own + label_smoothing * alike
    if z_loss:
        out = out + z_loss * lse * lse
    return out.astype(out_dtype or out.dtype)


def _of_labels(
    y: jax.Array,
    top: jax.Array,
    labels: jax.Array,
    outside: str,
    of_log_probabilities: bool,
    whole_slopes: bool,
) -> tuple[jax.Array, jax.Array]:
    """The loss of each row's label alone, and each row's log-sum-exp.

    `top` is what is subtracted in exponentials, [..., 1].
    """
    lse = top + jnp.log(jnp.exp(y - top).sum(-1, keepdims=True))
    chosen = pick(y - lse if of_log_probabilities else y, labels, outside)
    lse = lse[..., 0]
    if whole_slopes:
        return _by_rule(y, lse, labels), lse
    return -chosen if of_log_probabilities else lse - chosen, lse


def _picked_by_both(
    y: jax.Array, labels: jax.Array, other: jax.Array, share: jax.Array, outside: str
) -> jax.Array:
    """Returns what two labels pick of y, mixed by the share of the other."""
    if outside != "zero":
        first, second = (pick(y, a, outside) for a in (labels, other))
        return (1 - share) * first + share * second
    classes = jnp.arange(y.shape[-1], dtype=jnp.int32)
    first, second = (a[..., None] == classes for a in (labels, other))
    q = share[..., None]
    target = (1 - q) * first.astype(y.dtype) + q * second.astype(y.dtype)
    return jnp.where(first | second, target * y, 0).sum(-1)


def _reduced(
    y: jax.Array,
    labels: Sequence[jax.Array],
    first: jax.Array,
    used: int,
    summed: bool,
) -> jax.Array:
    """What is reduced over some of the classes of logits y, see `reference`."""
    classes = jnp.arange(y.shape[-1], dtype=jnp.int32) + first
    inside = classes < used if used else True
    y = jnp.where(inside, y, -jnp.inf)
    top = lax.stop_gradient(y.max(-1))
    top = jnp.where(jnp.isfinite(top), top, 0)
    less = y - top[..., None]
    hits = [(one[..., None] == classes) & inside for one in labels]
    picked = [jnp.where(hit, y, 0).sum(-1) for hit in hits]
    each = [top, jnp.exp(less).sum(-1), *picked]
    return jnp.stack([*each, less.sum(-1)] if summed else each, -1)


def _by_rule(y: jax.Array, lse: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns ``-(y - lse)[label]`` or 0, with the gradients of ``lse - y[label]``."""
    classes = jnp.arange(y.shape[-1], dtype=jnp.int32)
    hit = labels[..., None] == classes
    none = 1 - jnp.where(hit, 1, 0).sum(-1).astype(y.dtype)
    own = lse - pick(y, labels, "zero")
    return own - none * lax.stop_gradient(lse)


def pick(y: jax.Array, labels: jax.Array, outside: str) -> jax.Array:
    """Returns ``y[..., label]``, see `reference`."""
    if outside == "zero":
        hit = labels[..., None] == jnp.arange(y.shape[-1], dtype=jnp.int32)
        return jnp.where(hit, y, 0).sum(-1)
    n = labels.ndim
    if not n:  # of one row, as of several
        return pick(y[None], labels[None], outside)[0]
    batch = tuple(range(n))
    dims = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(n,), start_index_map=(n,),
        operand_batching_dims=batch, start_indices_batching_dims=batch,
    )  # fmt: skip
    return lax.gather(
        y, labels[..., None], dims, (1,) * (n + 1), mode=MODES[outside],
        fill_value=jnp.nan,
    )  # fmt: skip


def sample(
    key: jax.Array, operands: Mapping[str, Any], params: Mapping[str, object]
) -> dict[str, jax.Array]:
    """Returns logits of a common size, and labels that are classes."""
    del params
    one, other = jax.random.split(key)
    logits, v = operands["logits"], operands["logits"].shape[-1]
    drawn = 3 * jax.random.normal(one, logits.shape)
    return {"logits": drawn.astype(logits.dtype)} | {
        n: sampled_of_rows(n, jax.random.fold_in(other, i), x, v)
        for i, (n, x) in enumerate(operands.items())
        if n != "logits"
    }


def sampled_of_rows(name: str, key: jax.Array, operand: Any, v: int) -> jax.Array:
    """Returns labels that are classes, shares of 1, or the number of the first class.

    Args:
        name: The operand's name.
        key: For random numbers.
        operand: Its shape and dtype.
        v: The number of classes.
    """
    if name == "first":
        return jnp.zeros(operand.shape, operand.dtype)
    if name == "share":
        return jax.random.uniform(key, operand.shape).astype(operand.dtype)
    return jax.random.randint(key, operand.shape, 0, v).astype(operand.dtype)
