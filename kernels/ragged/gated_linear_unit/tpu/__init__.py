"""The gated linear unit of experts on TPUs: both branches in one pass over the rows.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged.dot import tpu as ragged_dot
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.gated_linear_unit import by_parts
from rewriter.kernels.ragged.gated_linear_unit.by_parts import (
    ByParts,
    part_of,
    refused_halves,
)
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
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import default as default
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import fits as fits
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import steps as steps
from rewriter.kernels.ragged.gated_linear_unit.tpu.config import (
    steps_of_parts as steps_of_parts,
)
from rewriter.kernels.ragged.gated_linear_unit.use import Use
from rewriter.kernels.shared.activations_tpu import ON_TPU, WITHOUT
from rewriter.kernels.shared.kinds import TPU
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.tpu import by_device, refused_dtypes, refused_precision
from rewriter.ops import tpu
from rewriter.ops.kernel import Space, Speed
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
    verdict = all_of(YES, *found, *refused_halves(spec, tpu.LANES))
    return smallest(spec) if verdict.ok else verdict


def supports_parts(spec: Spec) -> Verdict:
    """Returns whether kernels of ragged dots support the parts of a use."""
    if spec.symbolic:
        return SYMBOLIC
    found = [ragged_dot.supports(part_of(spec))]
    others = {
        "w_up": dict(spec.dtypes).get("w_up"),
        "the result": spec.param("out_dtype"),
    }
    return all_of(*found, *refused_dtypes(others), *refused_precision(spec))


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


PARTS = ByParts.of(ragged_dot.KERNEL)

KERNEL = anywhere(
    TPU.kernel(
        NAME, forward, PARTS.backward, supports,
        Speed(by_device, estimate=estimate, steps=steps),
        Space(Tiles, default, configs, fits), PARTS.backward_space, saves=None,
    ),
    "x",
)  # fmt: skip
