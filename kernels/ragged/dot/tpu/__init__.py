"""Ragged dot on TPUs, in Pallas Mosaic TPU: what the kernels support.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged.dot import xla
from rewriter.kernels.ragged.dot.estimate import estimate
from rewriter.kernels.ragged.dot.forward import forward as forward_of
from rewriter.kernels.ragged.dot.products import Product
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.dot.tpu.config import NAMES, Tiles, blocks, smallest, vmem
from rewriter.kernels.ragged.dot.tpu.config import configs as configs
from rewriter.kernels.ragged.dot.tpu.config import default as default
from rewriter.kernels.ragged.dot.tpu.config import default_backward as default_backward
from rewriter.kernels.ragged.dot.tpu.config import fits as fits
from rewriter.kernels.ragged.dot.tpu.config import fits_backward as fits_backward
from rewriter.kernels.ragged.dot.tpu.config import steps as steps
from rewriter.ops.kernel import Kernel, Limits, Space, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

DTYPES = ("bfloat16", "float32")
PRECISIONS = (None, "default", "high", "highest")


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernels support a use: bfloat16 and float32, any sizes."""
    if spec.symbolic:
        return no("symbolic", "its grid of tiles needs rows that are known")
    base = xla.supports(spec)
    if not base.ok:
        return base
    found = [YES]
    made = spec.param("out_dtype") or str(
        jnp.result_type(spec.dtype("lhs"), spec.dtype("rhs"))
    )
    for name, dtype in (
        ("lhs", spec.dtype("lhs")), ("rhs", spec.dtype("rhs")), ("the result", made),
    ):  # fmt: skip
        if dtype not in DTYPES:
            text = f"{name} is {dtype}, not {' or '.join(DTYPES)}"
            found.append(no("dtype", text))
    if spec.param("precision") not in PRECISIONS:
        text = f"precision {spec.param('precision')!r} is no choice of the compiler"
        found.append(no("precision", text))
    return all_of(*found, smallest(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: the gain depends on the generation, which `estimate` knows."""
    del spec, platform
    return no("device", "which TPU it is decides, and that is not known")


def _product(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    mode: str,
    dtype: Any,
    precision: str | None,
    config: Tiles | None,
) -> Array:
    """The result, by the kernel for its mode."""
    from rewriter.kernels.ragged.dot.tpu.by_groups import product_of_groups
    from rewriter.kernels.ragged.dot.tpu.by_rows import rows_times_matrices

    n = rhs.shape[1 if mode == "transposed" else -1]
    items = lhs.dtype.itemsize, rhs.dtype.itemsize, dtype.itemsize
    product = Product(mode, *lhs.shape, n, len(group_sizes), items)
    tiles = config or Tiles()
    if mode == "contracting":
        return product_of_groups(
            lhs, rhs, group_sizes, product, dtype, precision, tiles
        )
    (out,) = rows_times_matrices(
        lhs, [rhs], group_sizes, product, [dtype], precision,
        blocks(product, tiles), vmem(product, tiles), NAMES[mode],
    )  # fmt: skip
    return out


forward = functools.partial(forward_of, _product)
"""Returns the ragged dot, as `reference` does, for supported uses."""


backward = functools.partial(xla.backward, product=forward)
"""The cotangents of lhs and rhs, each a ragged dot itself."""


KERNEL = anywhere(
    Kernel(
        name="mosaic_tpu",
        op="ragged_dot",
        platforms=("tpu",),
        version=1,
        forward=forward,
        backward=backward,
        limits=Limits(supports),
        speed=Speed(profitable, estimate=estimate, steps=steps),
        traits=Traits(memory_bounded=True, saves_out=False, tried=False),
        space=Space(Tiles, default, configs, fits),
        backward_space=Space(Tiles, default_backward, configs, fits_backward),
    )
)
