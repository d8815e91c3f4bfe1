"""Ragged dot on TPUs, in Pallas Mosaic TPU: what the kernels support.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.ragged.dot import xla
from rewriter.kernels.ragged.dot.estimate import estimate
from rewriter.kernels.ragged.dot.products import Product
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.dot.tpu.config import NAMES, Tiles, blocks, smallest, vmem
from rewriter.kernels.ragged.dot.tpu.config import configs as configs
from rewriter.kernels.ragged.dot.tpu.config import default as default
from rewriter.kernels.ragged.dot.tpu.config import default_backward as default_backward
from rewriter.kernels.ragged.dot.tpu.config import fits as fits
from rewriter.kernels.ragged.dot.tpu.config import fits_backward as fits_backward
from rewriter.kernels.ragged.dot.tpu.config import steps as steps
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.ragged.dot.use import forward as forward_of
from rewriter.kernels.shared.kinds import TPU
from rewriter.kernels.shared.limits import known_sizes
from rewriter.kernels.shared.tpu import by_device, refused_dtypes, refused_precision
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernels support a use: bfloat16 and float32, any sizes."""
    base = known_sizes(spec, xla.supports)
    if not base.ok:
        return base
    dtypes = {"lhs": spec.dtype("lhs"), "rhs": spec.dtype("rhs")}
    made = spec.param("out_dtype") or str(jnp.result_type(*dtypes.values()))
    found = refused_dtypes({**dtypes, "the result": made}) + refused_precision(spec)
    return all_of(YES, *found, smallest(spec))


def _product(use: Use, config: Tiles | None) -> Array:
    """The result, by the kernel for its mode."""
    from rewriter.kernels.ragged.dot.tpu.by_groups import product_of_groups
    from rewriter.kernels.ragged.dot.tpu.by_rows import rows_times_matrices

    lhs, rhs, precision = use.lhs, use.rhs, use.precision
    items = lhs.dtype.itemsize, rhs.dtype.itemsize, use.dtype.itemsize
    groups = len(use.group_sizes)
    product = Product(use.mode, *lhs.shape, use.columns, groups, items)
    tiles = config or Tiles()
    if use.contracting:
        return product_of_groups(
            lhs, rhs, use.group_sizes, product, use.dtype, precision, tiles
        )
    (out,) = rows_times_matrices(
        lhs, [rhs], use.group_sizes, product, [use.dtype], precision,
        blocks(product, tiles), vmem(product, tiles), NAMES[use.mode],
    )  # fmt: skip
    return out


forward = functools.partial(forward_of, _product)
"""Returns the ragged dot, as `reference` does, for supported uses."""


backward = functools.partial(xla.backward, product=forward)
"""The cotangents of lhs and rhs, each a ragged dot itself."""


KERNEL = anywhere(
    TPU.kernel(
        "ragged_dot", forward, backward, supports,
        Speed(by_device, estimate=estimate, steps=steps),
        Space(Tiles, default, configs, fits),
        Space(Tiles, default_backward, configs, fits_backward),
    )
)  # fmt: skip
