"""The matrix products that the passes of a ragged dot compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


@dataclass(frozen=True)
class Product:
    """A ragged dot's sizes.

    Attributes:
        mode: "forward", "transposed" or "contracting".
        m: Rows.
        k: Columns of lhs.
        n: Columns of the result.
        groups: The number of groups of rows.
        items: Bytes of a number of lhs, of rhs and of the result.
    """

    mode: str
    m: int
    k: int
    n: int
    groups: int
    items: tuple[int, int, int]


def products(spec: Spec, backward: bool = False) -> Iterator[Product]:
    """Yields the products of a pass: the forward's, or those of both cotangents."""
    mode = spec.param("mode", "forward")
    (m, k), (g,) = spec.shape("lhs"), spec.shape("group_sizes")
    n = spec.shape("rhs")[1 if mode == "transposed" else -1]
    left, right = (jnp.dtype(spec.dtype(x)).itemsize for x in ("lhs", "rhs"))
    dtype = spec.param("out_dtype") or jnp.result_type(
        spec.dtype("lhs"), spec.dtype("rhs")
    )
    out = jnp.dtype(dtype).itemsize
    if not backward:
        yield Product(mode, m, k, n, g, (left, right, out))
    elif mode == "contracting":
        yield Product("transposed", m, n, k, g, (right, out, left))
        yield Product("forward", m, k, n, g, (left, out, right))
    elif mode == "transposed":
        yield Product("forward", m, n, k, g, (out, right, left))
        yield Product("contracting", m, n, k, g, (out, left, right))
    else:
        yield Product("transposed", m, n, k, g, (out, right, left))
        yield Product("contracting", m, k, n, g, (left, out, right))
