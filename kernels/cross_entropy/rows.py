"""The loss of a row, from the few numbers that are reduced over its classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

OUTSIDE = ("nan", "zero", "clip", "promise")
"""What a label that is no class picks: NaN, as `jax.numpy.take_along_axis` does; 0, as
a one-hot row does; or the nearest class. As `y[rows, labels]` promises that there is no
such label, XLA gives the nearest class, and it no gradient."""

NAN_AT = ("both", "+inf", "-inf", "none")
"""Infinities of a row's maximum that make its log-sum-exp NaN."""


@dataclass(frozen=True)
class Slopes:
    """Cotangents of rows, each [...].

    Attributes:
        lse: Those of the log-sum-exps.
        picked: Those of the picked logits, beside those through the log-sum-exp.
        each: The same of every other logit.
    """

    lse: jax.Array
    picked: jax.Array
    each: jax.Array


@dataclass(frozen=True)
class Loss:
    """The loss of a row as a function of its logits y, one for each of its `classes`.

    With l the log-sum-exp of y, p = y[label] and s the `label_smoothing`, it is
    ``(1 - s) · (l - p) + s · (l - mean y) + z_loss · l²``.

    Attributes:
        classes: The number of classes.
        label_smoothing: The share of the target that all classes have alike.
        z_loss: The weight of the squared log-sum-exp.
        outside: What a label that is no class picks, one of `OUTSIDE`.
        of_log_probabilities: Whether it picks of ``y - l`` and not of y. A label that
            is no class then picks no l either.
        whole_slopes: Whether gradients are those of l - p also for a label that is no
            class, whatever its loss is.
        used: Only so many of the first classes have logits, the others have `fill`; 0
            for all.
        fill: What a label picks that is one of the others.
        reduced: Whether only the numbers are wanted that are reduced over these
            classes, which are some of all. They are told apart by `outside` ``"zero"``.
        nan_at: At which infinite maxima the log-sum-exp is NaN, one of `NAN_AT`.
    """

    classes: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    outside: str = "nan"
    of_log_probabilities: bool = False
    whole_slopes: bool = False
    used: int = 0
    fill: float = -math.inf
    reduced: bool = False
    nan_at: str = "both"

    def labels(self, labels: jax.Array) -> jax.Array:
        """The classes that have gradients, in at least 32 bits; others are no class."""
        labels = signed(labels)
        if self.outside == "clip":
            labels = jnp.clip(labels, 0, self.classes - 1)
        return labels

    def picks(self, labels: jax.Array) -> jax.Array:
        """The classes whose logits are picked, of what `labels` gives."""
        if self.outside == "promise":
            return jnp.clip(labels, 0, self.classes - 1)
        return labels

    def without_slopes(self, picked: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns picked logits without gradients of those that are promised away."""
        if self.outside != "promise":
            return picked
        return jnp.where(self._inside(labels), picked, jax.lax.stop_gradient(picked))

    def total(self, lse: jax.Array) -> jax.Array:
        """Returns log-sum-exps as the program has them, NaN at some infinities.

        What is `reduced` over some classes stays infinite: it says so to the others.
        """
        if self.reduced or self.nan_at == "none":
            return lse
        both = self.nan_at == "both"
        lost = jnp.isinf(lse) if both else lse == float(self.nan_at)
        return lse * jnp.where(lost, jnp.nan, 1).astype(lse.dtype)  # in gradients, too

    def value(
        self, lse: jax.Array, picked: jax.Array, total: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """Returns the losses, from log-sum-exps, picked logits and sums of logits.

        If `reduced`, these numbers themselves: [..., 2], or 3 with smoothing.
        """
        if self.reduced:
            each = (lse, picked, total) if self.label_smoothing else (lse, picked)
            return jnp.stack(each, -1)
        inside = self._inside(labels)
        if self.used:
            picks = self.picks(labels)
            other = (picks >= self.used) & self._inside(picks)
            picked = picked + jnp.where(other, self.fill, 0).astype(picked.dtype)
        if self.outside == "nan":
            picked = jnp.where(inside, picked, jnp.nan)
        own = self._of_label(lse, inside, lse) - picked
        if self.whole_slopes:
            own = own + jnp.where(inside, 0, lse - jax.lax.stop_gradient(lse))
        out = own
        if self.label_smoothing:
            alike = lse - total / self.classes
            out = (1 - self.label_smoothing) * own + self.label_smoothing * alike
        return out + self.z_loss * lse * lse if self.z_loss else out

    def slopes(self, lse: jax.Array, labels: jax.Array, cotangent: jax.Array) -> Slopes:
        """Returns the cotangents of what is reduced, from those of `value`."""
        if self.reduced:
            of_lse, picked, *total = jnp.unstack(cotangent, axis=-1)
            each = total[0] if total else jnp.zeros_like(picked)
            of_lse = _finite_share(of_lse, lse)
            return Slopes(of_lse, picked + each, each)
        of_lse = _finite_share(cotangent * self._by_lse(lse, labels), lse)
        each = -self.label_smoothing / self.classes
        own = self.label_smoothing - 1 + each
        return Slopes(of_lse, cotangent * own, cotangent * each)

    def subtracted(self, lse: jax.Array) -> jax.Array:
        """Returns what is subtracted from logits in the exponentials of gradients.

        Of some classes of a row, all may have the logit -inf: their exponentials are 0.
        If a logit is inf, exponentials are not divided by their sum: `slopes` is 0.
        """
        lse = jnp.where(lse == jnp.inf, 0, lse)
        return jnp.where(lse == -jnp.inf, 0, lse) if self.reduced else lse

    def _by_lse(self, lse: jax.Array, labels: jax.Array) -> jax.Array:
        """The derivatives by the log-sum-exps, labels fixed."""
        own = jnp.ones_like(lse)
        if not self.whole_slopes:
            own = self._of_label(own, self._inside(labels), jnp.zeros_like(own))
        out = (1 - self.label_smoothing) * own + self.label_smoothing
        return out + 2 * self.z_loss * lse if self.z_loss else out

    def _inside(self, labels: jax.Array) -> jax.Array:
        return (labels >= 0) & (labels < self.classes)

    def _of_label(
        self, lse: jax.Array, inside: jax.Array, promised: jax.Array
    ) -> jax.Array:
        """The log-sum-exp that the picked log-probability holds, or its derivative.

        `promised` is that of a label that is promised to be a class, and is none.
        """
        if not self.of_log_probabilities:
            return lse
        other = jax.lax.stop_gradient(promised) if self.outside == "promise" else 0
        return jnp.where(inside, lse, other)


def signed(labels: jax.Array) -> jax.Array:
    """Returns labels in at least 32 bits; what is beyond the largest int32 becomes it.

    Else an unsigned label would wrap around to one below zero.
    """
    if labels.dtype in (jnp.uint32, jnp.uint64):
        most = jnp.iinfo(jnp.int32).max
        return jnp.minimum(labels, labels.dtype.type(most)).astype(jnp.int32)
    return labels.astype(jnp.promote_types(labels.dtype, jnp.int32))


def _finite_share(slope: jax.Array, lse: jax.Array) -> jax.Array:
    """Cotangents of log-sum-exps, times 0 where these are inf: over an infinite sum."""
    return slope * jnp.where(lse == jnp.inf, 0, 1).astype(slope.dtype)
