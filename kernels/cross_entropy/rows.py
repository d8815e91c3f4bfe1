"""The loss of a row, from the few numbers that are reduced over its classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

OUTSIDE = ("nan", "zero", "clip")
"""What a label that is no class picks: NaN, as `jax.numpy.take_along_axis` does; 0, as
a one-hot row does; or the nearest class."""


@dataclass(frozen=True)
class Loss:
    """How the loss of a row is made of its logits y, one for each of its `classes`.

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
    """

    classes: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    outside: str = "nan"
    of_log_probabilities: bool = False
    whole_slopes: bool = False
    used: int = 0
    fill: float = -math.inf

    def labels(self, labels: jax.Array) -> jax.Array:
        """The classes that are picked, in at least 32 bits; others are no class."""
        labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
        if self.outside == "clip":
            labels = jnp.clip(labels, 0, self.classes - 1)
        return labels

    def value(
        self, lse: jax.Array, picked: jax.Array, total: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """Returns the losses, from log-sum-exps, picked logits and sums of logits."""
        inside = self._inside(labels)
        if self.used:
            other = (labels >= self.used) & inside
            picked = picked + jnp.where(other, self.fill, 0).astype(picked.dtype)
        own = self._of_label(lse, inside) - picked
        if self.outside == "nan":
            own = jnp.where(inside, own, jnp.nan)
        out = own
        if self.label_smoothing:
            alike = lse - total / self.classes
            out = (1 - self.label_smoothing) * own + self.label_smoothing * alike
        return out + self.z_loss * lse * lse if self.z_loss else out

    def by_lse(self, lse: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the derivatives by the log-sum-exps, labels fixed."""
        own = jnp.ones_like(lse)
        if not self.whole_slopes:
            own = self._of_label(own, self._inside(labels))
        out = (1 - self.label_smoothing) * own + self.label_smoothing
        return out + 2 * self.z_loss * lse if self.z_loss else out

    @property
    def by_picked(self) -> float:
        """The derivative by the picked logit."""
        return self.label_smoothing - 1

    @property
    def by_each(self) -> float:
        """The derivative by each logit, beside those of log-sum-exp and picked one."""
        return -self.label_smoothing / self.classes

    def _inside(self, labels: jax.Array) -> jax.Array:
        return (labels >= 0) & (labels < self.classes)

    def _of_label(self, lse: jax.Array, inside: jax.Array) -> jax.Array:
        """The log-sum-exp that the picked log-probability holds."""
        return jnp.where(inside, lse, 0) if self.of_log_probabilities else lse
