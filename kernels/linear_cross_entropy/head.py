"""The head that turns rows into logits: weights, a bias, a scale and a soft cap."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.shared.products import unturned

ROWS = 16
"""The weights have a multiple of so many rows where the bias is one of them."""


@dataclass(frozen=True)
class Head:
    """The function from rows to logits, for all classes or some.

    Attributes:
        w: The weights, [k, v], or [v, k] if they are `turned`.
        bias: What is added, [v], or None.
        scale: Multiplies the product.
        soft_cap: The bound of the logits; 0 for none.
        precision: Of the products.
        narrow: The dtype of the logits' gradients.
        wide: The dtype in which logits are computed: float32 or float64.
        held: The dtype in which the product x·w is held.
        start: The first class.
        end: The class behind the last one that has a logit; columns from there on have
            none. None if all have.
        turned: Whether the weights are [v, k], as a table of embeddings is.
        joined: The weights with the bias behind their last row, and zeros up to a
            multiple of 16 rows: the product then has the bias. None if it has not.
    """

    w: jax.Array
    bias: jax.Array | None
    scale: float
    soft_cap: float
    precision: str | None
    narrow: Any
    wide: Any
    held: Any
    start: Any = 0
    end: Any = None
    turned: bool = False
    joined: jax.Array | None = None

    @property
    def classes(self) -> int:
        """The number of columns, with padding."""
        return self.w.shape[self.axis]

    @property
    def axis(self) -> int:
        """The axis of the weights that counts classes."""
        return 0 if self.turned else 1

    def padded(self, classes: int) -> Head:
        """The same with columns of zeros behind the classes, which have no logits."""
        count = self.classes
        if classes == count:
            return self
        more = (0, classes - count)
        bias = None if self.bias is None else jnp.pad(self.bias, more)
        w = jnp.pad(self.w, (more, (0, 0)) if self.turned else ((0, 0), more))
        return dataclasses.replace(self, w=w, bias=bias, end=self.start + count)

    def before(self, end: int) -> Head:
        """The same without logits of the classes from some number on."""
        if self.end is None:
            return dataclasses.replace(self, end=end)
        known = isinstance(self.end, int)
        least = min(end, self.end) if known else jnp.minimum(end, self.end)
        return dataclasses.replace(self, end=least)

    def with_bias_joined(self) -> Head:
        """The same with products that have the bias, of weights with one more row."""
        if self.bias is None:
            return self
        axis = 1 - self.axis
        k = self.w.shape[axis]
        row = jnp.expand_dims(self.bias.astype(self.w.dtype), axis)
        more = [(0, 0), (0, 0)]
        more[axis] = (0, -(k + 1) % ROWS)
        joined = jnp.pad(jnp.concatenate((self.w, row), axis), more)
        return dataclasses.replace(self, joined=joined)

    def chunk(self, start: Any, size: int) -> Head:
        """The same for some of the classes; `start` is the first's column."""
        cut = lambda a, axis: (
            None if a is None else lax.dynamic_slice_in_dim(a, start, size, axis)
        )
        return dataclasses.replace(
            self, w=cut(self.w, self.axis), bias=cut(self.bias, 0),
            joined=cut(self.joined, self.axis), start=self.start + start,
        )  # fmt: skip

    def product(self, x: jax.Array) -> jax.Array:
        """Rows [n, k] times the weights, as they are held."""
        w = self.w
        if self.joined is not None:
            w, k = self.joined, x.shape[1]
            one = (jnp.arange(w.shape[1 - self.axis] - k) == 0).astype(x.dtype)
            ones = jnp.broadcast_to(one, (x.shape[0], one.size))
            x = jnp.concatenate((x, ones), 1)
        return lax.dot_general(
            unturned(x),
            w,
            (((1,), (1 - self.axis,)), ((), ())),
            precision=self.precision,
            preferred_element_type=self.held,
        )

    def logits(self, product: jax.Array) -> jax.Array:
        """Logits of a product, in the wide dtype; -inf in padding."""
        y = product.astype(self.wide)
        y = y * self.scale if self.scale != 1 else y
        if self.bias is not None and self.joined is None:
            y = y + self.bias.astype(self.wide)
        y = self.soft_cap * jnp.tanh(y / self.soft_cap) if self.soft_cap else y
        return self._inside(y, -jnp.inf)

    def hits(self, labels: jax.Array) -> jax.Array:
        """Which of the classes each row picks, [n, v]; of two labels [2, n, v]."""
        return self._inside(labels[..., None] == self._columns(), False)

    def total(self, y: jax.Array) -> jax.Array:
        """Sums of logits, [n]."""
        return self._inside(y, 0).sum(1)

    def of_product(self, y: jax.Array, d: jax.Array) -> jax.Array:
        """Cotangents of the product without its scale, from those of logits y."""
        if self.soft_cap:
            d = d * (1 - jnp.square(y / self.soft_cap))
        return self._inside(d, 0)

    def back(
        self, x: jax.Array, d: jax.Array, dtypes: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """Cotangents of rows, weights and bias, from those `of_product`.

        Args:
            x: The rows, [n, k].
            d: The cotangents, [n, v].
            dtypes: The dtype of each result, by its name.
        """
        sums = {} if self.bias is None else {"bias": d.sum(0).astype(dtypes["bias"])}
        d = d * self.scale if self.scale != 1 else d
        return self.back_of_narrow(x, d.astype(self.narrow), dtypes) | sums

    def back_of_narrow(
        self, x: jax.Array, d: jax.Array, dtypes: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """Cotangents of rows and weights, from those of the product.

        Args:
            x: The rows, [n, k].
            d: The cotangents, [n, v], narrow and with the scale.
            dtypes: The dtype of each result, by its name.
        """
        dw = self.back_of_w(x, d, dtypes["w"])
        return {"x": self.back_of_x(d, dtypes["x"]), "w": dw}

    def back_of_x(self, d: jax.Array, dtype: Any) -> jax.Array:
        """Cotangents of rows [n, k], from narrow ones of the product with the scale."""
        return self._dot(d, self.w.astype(self.narrow), (1, self.axis), dtype)

    def back_of_w(self, x: jax.Array, d: jax.Array, dtype: Any) -> jax.Array:
        """Cotangents of weights, from rows x [n, k] and narrow ones of the product."""
        rows = x.astype(self.narrow)
        both = (d, rows) if self.turned else (rows, d)
        return self._dot(*both, (0, 0), dtype)

    def _dot(
        self, a: jax.Array, b: jax.Array, contract: tuple[int, int], out: Any
    ) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        made = jnp.promote_types(out, self.narrow)
        found = lax.dot_general(
            unturned(a), b, dims, precision=self.precision, preferred_element_type=made
        )
        return found.astype(out)

    def _columns(self) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (self.classes,), 0) + self.start

    def _inside(self, y: jax.Array, otherwise: Any) -> jax.Array:
        """An array of classes, with a number in place of those that are padding."""
        if self.end is None:
            return y
        return jnp.where(self._columns() < self.end, y, otherwise)
