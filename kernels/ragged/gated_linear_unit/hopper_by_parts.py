"""The gated linear unit of experts on Hopper by ragged dots, to compare with.

Where it is best, the parts become sites of their own.
"""

import dataclasses

from rewriter.kernels.ragged.dot.rows import from_any_row
from rewriter.kernels.ragged.gated_linear_unit import hopper

KERNEL = dataclasses.replace(
    hopper.KERNEL,
    name="by_parts_hopper",
    forward=from_any_row(hopper.PARTS.forward, "x"),
    supports=hopper.supports_parts,
    comparison_only=True,
    space=hopper.PARTS.space,
)
