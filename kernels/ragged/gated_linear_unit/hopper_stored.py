"""Units of experts with quantized matrices on Hopper: both branches in one pass.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged.dot.hopper import stored as of_dot
from rewriter.kernels.ragged.dot.hopper.config import STEP
from rewriter.kernels.ragged.dot.hopper.stored import Tiles as Tiles
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.gated_linear_unit import hopper as plain
from rewriter.kernels.ragged.gated_linear_unit.by_parts import refused_halves
from rewriter.kernels.ragged.gated_linear_unit.hopper_estimate import modelled
from rewriter.kernels.ragged.gated_linear_unit.op import OP, STORED
from rewriter.kernels.ragged.gated_linear_unit.stored_estimate import (
    estimate,
    part_of,
)
from rewriter.kernels.ragged.gated_linear_unit.use import Use
from rewriter.kernels.shared import gated_tiles
from rewriter.kernels.shared.hopper import by_estimate
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.kernel import Speed
from rewriter.ops.stored import widened_operands
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

NAME = STORED.name
"""The name of the kernel in profiles."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: as a ragged dot, k and f by 64."""
    found = [
        of_dot.supports(part_of(spec)),
        gated_tiles.computes(spec.param("activation")),
    ]
    if not found[0].ok:
        return found[0]
    dtypes, x = dict(spec.dtypes), spec.dtype("x")
    if (up := dtypes.get("w_up", spec.dtype("w"))) != spec.dtype("w"):
        found.append(no("dtype", f"w_up is {up}, and w {spec.dtype('w')}"))
    if (out := spec.param("out_dtype")) not in (x, None):
        found.append(no("dtype", f"the result is {out}, and x {x}"))
    return all_of(YES, *found, *refused_halves(spec, STEP))


SPACE = gated_tiles.of_product(of_dot.SPACE, part_of)


def forward(
    *,
    w_scale: Array | None = None,
    w_up_scale: Array | None = None,
    residuals: bool = False,
    config: Tiles | None = None,
    **given: Any,
) -> Any:
    """Returns the result, as `reference` does, for supported uses.

    Args:
        w_scale: [g, columns], of `w`.
        w_up_scale: [g, columns], of `w_up`.
        residuals: Whether to return ``(result, (gate, up))``.
        config: The tiles; their columns are those of both branches.
        **given: The fields of `Use`.
    """
    from rewriter.kernels.ragged.dot.hopper import widen

    use = Use(**given)
    scales = w_scale, w_scale if use.w_up is None else w_up_scale
    if (scales[0] is None) != (scales[1] is None):  # both are scaled, or neither
        scales = tuple(_ones(use) if s is None else s for s in scales)
    steps = () if scales[0] is None else widen.SCALED
    side = functools.partial(widen.side, steps=steps)
    return plain.unit(NAME, use, residuals, config or Tiles(), scales, matrices=side)


def _ones(use: Use) -> Array:
    """Scales of matrices that have none."""
    return jnp.ones((use.w.shape[0], use.w.shape[2]), jnp.float32)


def backward(
    *,
    out: None = None,
    residuals: Any,
    cotangent: Array,
    config: Any = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangent of x, by the dequantized matrices.

    The reference computes those of scales, and of float matrices.

    Args:
        out: Not needed.
        residuals: Both branches.
        cotangent: [m, f].
        config: Not needed.
        **given: As for `forward`.
    """
    del out, config
    found = plain.PARTS.backward(
        **widened_operands(OP, given), residuals=residuals, cotangent=cotangent
    )
    return {"x": found["x"]}


KERNEL = anywhere(
    HOPPER.kernel(
        NAME, forward, backward, supports,
        Speed(by_estimate, estimate=estimate, modelled=modelled),
        SPACE, version=2, saves=None,
    ),
    "x",
)  # fmt: skip
