"""The gated linear unit of experts on TPUs by ragged dots, to compare with.

Where it is best, the parts become sites of their own.
"""

import dataclasses

from rewriter.kernels.ragged.dot.rows import from_any_row
from rewriter.kernels.ragged.gated_linear_unit import tpu
from rewriter.ops.kernel import Space

KERNEL = dataclasses.replace(
    tpu.KERNEL,
    name="by_parts",
    forward=from_any_row(tpu.forward_by_parts, "x"),
    supports=tpu.supports_parts,
    steps=tpu.steps_of_parts,
    comparison_only=True,
    space=Space(tpu.Tiles, tpu.default_of_parts, tpu.configs_of_parts, tpu.fits_parts),
)
