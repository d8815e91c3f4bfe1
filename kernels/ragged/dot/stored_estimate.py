"""Estimates the time of a ragged dot of quantized matrices, fused or dequantized first.

The latter reads all matrices in 8 bits and writes them in 16, even those of groups
without rows. It is then an ordinary ragged dot. Our kernel reads only matrices of
groups with rows, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.ragged.dot.estimate import estimate as of_dot
from rewriter.kernels.ragged.dot.op import OP
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.ops.stored import widened_spec

WIDENED = 0.5
"""The share of the peak with widened matrices: shared memory is written once more, and
read once more. 445 and 500 TF/s of an H200
(``tests/bench/results/quantized_ragged_h200.json``)."""

STREAMED = 0.5
"""The share of the bandwidth where only matrices are read: 2.3 to 2.6 TB/s there, and
2.5 where XLA dequantizes them."""

ROWS = (64, 128)
"""Rows of a tile: for groups of at most that many rows, and for larger ones."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"hopper"``, and of ``"xla"``: dequantized before.

    Gradients need the dequantized matrices, so both then include them.
    """
    (m, k), (groups,) = spec.shape("lhs"), spec.shape("group_sizes")
    n = spec.shape("rhs")[1 if spec.param("mode") == "transposed" else 2]
    size = item(spec, "lhs")
    written = seconds(device, 0.0, float(groups * k * n * (1 + size)), memory=STREAMED)
    plain = widened_spec(OP, spec)
    before = written + min(of_dot(plain, device, passes).values())
    active = groups * -math.expm1(-m / groups) if groups else 0.0  # with rows
    moved = active * k * n + size * m * (k + n)
    rows = ROWS[m > ROWS[0] * groups]
    padded = 2.0 * k * n * rows * (m // rows + active)
    ours = max(
        seconds(device, padded, 0.0, compute=WIDENED, item=size, launches=3),
        seconds(device, 0.0, moved, memory=STREAMED, launches=3),
    )
    if passes != "forward":
        ours += written + min(of_dot(plain, device, "vjp").values())
    return {"xla": before, "hopper": ours}
