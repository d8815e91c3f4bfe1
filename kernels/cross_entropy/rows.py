"""The loss of a row, from the few numbers that are reduced over its classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

OUTSIDE = ("nan", "zero", "clip", "promise")
"""What a label that is no class picks: NaN, as `jax.numpy.take_along_axis` does; 0, as
a one-hot row does; or the nearest class. As `y[rows, labels]` promises that there is no
such label, XLA gives the nearest class, and it no gradient."""

NAN_AT = ("both", "+inf", "-inf", "none")
"""Infinities of a row's maximum that make its log-sum-exp NaN."""


class Sum(NamedTuple):
    """The sum of the exponentials of a row's logits y: ``exp(top) · weight``.

    Gradients hold ``exp(y - top) / weight``. Their log-sum-exp in one number would be
    rounded by its size, and ``exp(y - lse)`` be off by as much.

    Attributes:
        top: The largest logit, or 0 if that is infinite.
        weight: The sum of ``exp(y - top)``. It is 0 if all logits are -inf, and inf if
            one is inf.
    """

    top: jax.Array
    weight: jax.Array

    @property
    def log(self) -> jax.Array:
        """The logarithm of the weight."""
        return jnp.log(self.weight)

    @property
    def lse(self) -> jax.Array:
        """The log-sum-exp."""
        return self.top + self.log


def summed(y: jax.Array) -> Sum:
    """Returns the sum of the exponentials of logits over the last axis."""
    top = finite(y.max(-1))
    return Sum(top, jnp.exp(y - top[..., None]).sum(-1))


def finite(top: jax.Array) -> jax.Array:
    """Returns maxima, and 0 where they are infinite."""
    return jnp.where(jnp.isfinite(top), top, 0)


@dataclass(frozen=True)
class Slopes:
    """Cotangents of rows, each [...].

    Attributes:
        share: Those of the exponentials ``exp(y - top)``.
        picked: Those of the picked logits, beside those through exponentials. Of rows
            with two labels it is [2, ...], beside `each` too.
        each: The same of every other logit.
    """

    share: jax.Array
    picked: jax.Array
    each: jax.Array


@dataclass(frozen=True)
class Loss:
    """The loss of a row as a function of its logits y, one for each of its `classes`.

    With l the log-sum-exp of y, p = y[label] and s the `label_smoothing`, it is
    ``(1 - s) · (l - p) + s · (l - mean y) + z_loss · l²``. Rows may have two
    labels. All numbers of labels are then [2, ...].

    Attributes:
        classes: The number of classes.
        label_smoothing: The share of the target that all classes have alike.
        z_loss: The weight of the squared log-sum-exp.
        outside: What a label that is no class picks, one of `OUTSIDE`.
        of_log_probabilities: Whether it picks of ``y - l`` and not of y. A label that
            is no class then picks no l either.
        whole_slopes: Whether gradients are those of l - p also for a label that is no
            class, whatever its loss is.
        mixed: Whether the program lets both labels pick at once, which gives the same.
        used: Only so many of the first classes have logits, the others have `fill`; 0
            for all.
        fill: What a label picks that is one of the others.
        reduced: Whether only the numbers are wanted that are reduced over these
            classes, which are some of all. They are told apart by `outside` ``"zero"``.
        nan_at: At which infinite maxima the log-sum-exp is NaN, one of `NAN_AT`.
        share: The part of the target that each row's second label has, [...]; None if
            there is one label.
    """

    classes: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    outside: str = "nan"
    of_log_probabilities: bool = False
    whole_slopes: bool = False
    mixed: bool = False
    used: int = 0
    fill: float = -math.inf
    reduced: bool = False
    nan_at: str = "both"
    share: jax.Array | None = None

    def of(self, rows: Mapping[str, Any]) -> Loss:
        """The same for rows, with the `share` that they have, if any."""
        return replace(self, share=rows["share"]) if "share" in rows else self

    def labels(self, labels: jax.Array) -> jax.Array:
        """The classes that have gradients, in at least 32 bits; others are no class.

        Args:
            labels: Those of rows, of the form that `labels_of_rows` gives.
        """
        labels = signed(labels)
        if self.share is not None:
            labels = jnp.moveaxis(labels, -1, 0)
        if self.outside == "clip":
            labels = jnp.clip(labels, 0, self.classes - 1)
        return labels

    def picks(self, labels: jax.Array) -> jax.Array:
        """The classes whose logits are picked, of what `labels` gives."""
        if self.outside == "promise":
            return jnp.clip(labels, 0, self.classes - 1)
        return labels

    def known(self, picks: jax.Array) -> jax.Array:
        """Whether the classes of what `picks` gives have logits."""
        return (picks >= 0) & (picks < (self.used or self.classes))

    def without_slopes(self, picked: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns picked logits without gradients of those that are promised away."""
        if self.outside != "promise":
            return picked
        return jnp.where(self._inside(labels), picked, jax.lax.stop_gradient(picked))

    def total(self, row: Sum) -> Sum:
        """Returns sums as the program has them, NaN at some infinities.

        What is `reduced` over some classes stays infinite: it says so to the others.
        """
        if self.reduced or self.nan_at == "none":
            return row
        infinities = {"+inf": math.inf, "-inf": 0.0}
        lost = jnp.zeros(row.weight.shape, bool)
        for name, weight in infinities.items():
            if self.nan_at in (name, "both"):
                lost |= row.weight == weight
        spoiled = jnp.where(lost, jnp.nan, 1).astype(row.weight.dtype)
        return row._replace(weight=row.weight * spoiled)  # in gradients, too

    def value(
        self, row: Sum, picked: jax.Array, below: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """Returns the losses, from what is reduced over the classes.

        If `reduced`, these numbers themselves: [..., 3], with one more for a second
        label, and one for smoothing.

        Args:
            row: The sum of exponentials.
            picked: The picked logits.
            below: The sum of all logits less the row's top.
            labels: As `self.labels` gives them.
        """
        if self.reduced:
            picks = (picked,) if self.share is None else tuple(picked)
            last = (below,) if self.label_smoothing else ()
            return jnp.stack((*row, *picks, *last), -1)
        lse = row.lse
        own = self.joined(self._own(row, picked, labels))
        out = own
        if self.label_smoothing:
            alike = row.log - below / self.classes
            out = (1 - self.label_smoothing) * own + self.label_smoothing * alike
        return out + self.z_loss * lse * lse if self.z_loss else out

    def results(
        self, row: Sum, picked: jax.Array, below: jax.Array, labels: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns ``{"out": value}``, and how far the losses of two labels are apart.

        The latter is ``"apart"``, and is the derivative by `share`.
        """
        out = {"out": self.value(row, picked, below, labels)}
        if self.share is None:
            return out
        if self.reduced:
            return out | {"apart": jnp.zeros_like(row.top)}
        first, second = self._own(row, picked, labels)
        return out | {"apart": (1 - self.label_smoothing) * (second - first)}

    def joined(self, each: jax.Array) -> jax.Array:
        """What each label has, joined by their shares."""
        if self.share is None:
            return each
        return (1 - self.share) * each[0] + self.share * each[1]

    def _own(self, row: Sum, picked: jax.Array, labels: jax.Array) -> jax.Array:
        """The losses of labels alone."""
        inside = self._inside(labels)
        if self.used:
            picks = self.picks(labels)
            other = (picks >= self.used) & self._inside(picks)
            picked = picked + jnp.where(other, self.fill, 0).astype(picked.dtype)
        if self.outside == "nan":
            picked = jnp.where(inside, picked, jnp.nan)
        own = (row.top - picked) + row.log  # large numbers first, of which less is left
        lse = row.lse
        if self.of_log_probabilities:
            promised = self.outside == "promise"
            other = jax.lax.stop_gradient(lse) if promised else 0
            own = jnp.where(inside, own, other - picked)
        if self.whole_slopes:
            own = own + jnp.where(inside, 0, lse - jax.lax.stop_gradient(lse))
        return own

    def slopes(self, row: Sum, labels: jax.Array, cotangent: jax.Array) -> Slopes:
        """Returns the cotangents of what is reduced, from those of `value`."""
        if self.reduced:
            _, share, *picked = jnp.unstack(cotangent, axis=-1)
            each = picked.pop() if self.label_smoothing else jnp.zeros_like(share)
            if self.share is not None:
                return Slopes(share, jnp.stack(picked), each)
            return Slopes(share, picked[0] + each, each)
        alike, by_lse = self.of_lse(labels, cotangent)
        of_lse = alike + by_lse * row.lse if self.z_loss else alike
        each = self.of_each(cotangent)
        own = cotangent * (self.label_smoothing - 1)
        if self.share is None:
            own = own + each
        else:  # the shares of both add up to 1, or to NaN
            own = jnp.stack([(1 - self.share) * own, self.share * own])
            of_lse = of_lse * jnp.where(jnp.isfinite(self.share), 1, jnp.nan)
        return Slopes(of_lse / row.weight, own, each)

    def of_lse(
        self, labels: jax.Array, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns numbers a and b: ``a + b l`` is the cotangent of a log-sum-exp l."""
        own = jnp.ones_like(cotangent)
        if self.of_log_probabilities and not self.whole_slopes:
            own = self.joined(jnp.where(self._inside(labels), own, 0))
        alike = (1 - self.label_smoothing) * own + self.label_smoothing
        return cotangent * alike, cotangent * (2 * self.z_loss)

    def of_each(self, cotangent: jax.Array) -> jax.Array:
        """Returns the cotangents of every logit beside those through exponentials."""
        return cotangent * (-self.label_smoothing / self.classes)

    def _inside(self, labels: jax.Array) -> jax.Array:
        return (labels >= 0) & (labels < self.classes)


def labels_of_rows(labels: jax.Array, other: jax.Array | None) -> jax.Array:
    """Returns labels [...], or both labels of each row [..., 2]."""
    if other is None:
        return labels
    return jnp.stack([signed(labels), signed(other)], -1)


def shares_of_rows(share: jax.Array | None, dtype: Any) -> dict[str, jax.Array]:
    """Returns ``{"share": share}`` in a dtype, or nothing without one."""
    return {} if share is None else {"share": share.astype(dtype)}


def signed(labels: jax.Array) -> jax.Array:
    """Returns labels in at least 32 bits; what is beyond the largest int32 becomes it.

    Else an unsigned label would wrap around to one below zero.
    """
    if labels.dtype in (jnp.uint32, jnp.uint64):
        most = jnp.iinfo(jnp.int32).max
        return jnp.minimum(labels, labels.dtype.type(most)).astype(jnp.int32)
    return labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
