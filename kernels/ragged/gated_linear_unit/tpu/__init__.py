"""The gated linear unit of experts on TPUs: both branches in one pass over the rows.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged.dot import tpu as ragged_dot
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.gated_linear_unit import by_parts
from rewriter.kernels.ragged.gated_linear_unit.by_parts import part_of
from rewriter.kernels.ragged.gated_linear_unit.estimate import estimate
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    NAME,
    SMALLEST,
    Tiles,
    Unit,
    blocks,
    smallest,
    vmem,
)
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import configs as configs
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    configs_of_parts as configs_of_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import default as default
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    default_backward as default_backward,
)
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    default_of_parts as default_of_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import fits as fits
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    fits_backward as fits_backward,
)
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    fits_parts as fits_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import steps as steps
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    steps_of_parts as steps_of_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.use import Use
from rewriter.kernels.shared.activations_tpu import ON_TPU, WITHOUT
from rewriter.ops import tpu
from rewriter.ops.kernel import Kernel, Limits, Space, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: bfloat16 and float32.

    Any sizes; halves of one array of matrices must be whole registers.
    """
    found = [supports_parts(spec)]
    if not found[0].ok:
        return found[0]
    if spec.param("activation") in WITHOUT:
        text = f"{spec.param('activation')} needs expm1, which the compiler lacks"
        found.append(no("activation", text))
    columns = spec.shape("w")[2]
    if spec.param("halves") and columns % (2 * tpu.LANES):
        text = f"half of {columns} columns is not a multiple of {tpu.LANES}"
        found.append(no("halves", text))
    verdict = all_of(YES, *found)
    return smallest(spec) if verdict.ok else verdict


def supports_parts(spec: Spec) -> Verdict:
    """Returns whether kernels of ragged dots support the parts of a use."""
    if spec.symbolic:
        return no("symbolic", "sizes must be known, but some are symbolic")
    found = [ragged_dot.supports(part_of(spec))]
    others = {
        "w_up": dict(spec.dtypes).get("w_up"),
        "the result": spec.param("out_dtype"),
    }
    for name, dtype in others.items():
        if dtype not in (*ragged_dot.DTYPES, None):
            text = f"{name} is {dtype}, not {' or '.join(ragged_dot.DTYPES)}"
            found.append(no("dtype", text))
    if spec.param("precision") not in ragged_dot.PRECISIONS:
        text = f"precision {spec.param('precision')!r} is no choice of the compiler"
        found.append(no("precision", text))
    return all_of(*found)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: the gain depends on the generation, which is unknown here."""
    del spec, platform
    return no("device", "which TPU it is decides, and that is not known")


def forward(
    *, residuals: bool = False, config: Tiles | None = None, **given: Any
) -> Any:
    """Returns the result, as `reference` does, for supported uses.

    Args:
        residuals: Whether to return ``(result, (gate, up))``.
        config: The tiles.
        **given: The fields of `Use`.
    """
    from rewriter.kernels.ragged.dot.products import Product
    from rewriter.kernels.ragged.dot.tpu.by_rows import rows_times_matrices

    use = Use(**given)
    x, w, f, kept = use.x, use.w, use.f, by_parts.saved_dtype(use)
    dtype = jnp.dtype(use.out_dtype or x.dtype)
    wide = max(a.dtype.itemsize for a in (w, use.w_up) if a is not None)
    items = x.dtype.itemsize, wide, dtype.itemsize
    product = Product("forward", *x.shape, f, len(use.group_sizes), items)
    unit, tiles = Unit(product, kept.itemsize, bool(use.halves)), config or SMALLEST
    b = blocks(unit, tiles)
    first = [0, 0]
    if use.halves:
        first = [0, f // b.n] if use.halves == "gate_up" else [f // b.n, 0]

    def finish(gate: Array, up: Array) -> Sequence[Array]:
        out = ON_TPU[use.activation](gate, use.beta) * up
        return (out, gate, up) if residuals else (out,)

    dtypes = [dtype, kept, kept] if residuals else [dtype]
    out, *branches = rows_times_matrices(
        x, [w, w if use.w_up is None else use.w_up], use.group_sizes, product, dtypes,
        use.precision, b, vmem(unit, tiles), NAME, finish, first,
    )  # fmt: skip
    return (out, tuple(branches)) if residuals else out


forward_by_parts = functools.partial(by_parts.forward, product=ragged_dot.forward)
"""Returns the result by the kernels of ragged dots, for supported parts."""

backward = functools.partial(by_parts.backward, product_backward=ragged_dot.backward)
"""The cotangents of x and the matrices, by the kernels of ragged dots."""


BACKWARD = Space(Tiles, default_backward, configs_of_parts, fits_backward)

KERNEL = anywhere(
    Kernel(
        name="mosaic_tpu",
        op="ragged_gated_linear_unit",
        platforms=("tpu",),
        version=1,
        forward=forward,
        backward=backward,
        limits=Limits(supports),
        speed=Speed(profitable, estimate=estimate, steps=steps),
        traits=Traits(memory_bounded=True, saves_out=False, tried=False),
        space=Space(Tiles, default, configs, fits),
        backward_space=BACKWARD,
    ),
    "x",
)
