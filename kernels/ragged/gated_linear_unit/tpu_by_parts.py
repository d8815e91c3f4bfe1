"""The gated linear unit of experts on TPUs by ragged dots, to compare with.

Where it is best, the parts become sites of their own.
"""

import dataclasses

from rewriter.kernels.ragged.dot.rows import from_any_row
from rewriter.kernels.ragged.gated_linear_unit import tpu

KERNEL = dataclasses.replace(
    tpu.KERNEL,
    name="by_parts",
    forward=from_any_row(tpu.PARTS.forward, "x"),
    supports=tpu.supports_parts,
    steps=tpu.steps_of_parts,
    comparison_only=True,
    space=tpu.PARTS.space,
)
