"""Widths of heads as kernels read them, which may be more than they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

EDGE = 8
"""Rows that tiles in shared memory are copied by. Other lengths are copied by rows."""

STEP = 16
"""Tensor cores take heads in multiples of this width: copies add columns of zeros."""

WIDE_STEP = 64
"""The width of tiles that are read fastest."""

COPIED = 8
"""Copies take heads in multiples of this width; others are padded with zeros."""


def filled(width: int) -> int:
    """Returns the width that the forward reads, of which copies add zeros.

    An odd number of `STEP` columns makes the narrowest tiles, of 32 bytes, which are
    slow to copy and to read. So such heads are taken as multiples of `WIDE_STEP`. On an
    H100 heads of 72 then took 0.73 to 0.87 of the time, of 112 0.83, of 40 0.76 to
    1.02, of 80 0.99 to 1.01 (``tests/bench/results/attention_in_place_h100.json``).

    Example:
        >>> [filled(x) for x in (16, 40, 64, 72, 96, 112)]
        [16, 64, 64, 128, 96, 128]
    """
    made = -(-width // STEP) * STEP
    narrow = made % (2 * STEP) and made > STEP
    return -(-width // WIDE_STEP) * WIDE_STEP if narrow else made


def filled_backward(width: int) -> int:
    """Returns the width that gradients read, as `filled` does for the forward.

    Products are more of the work here: heads of 112 took 0.93 of the time as 128, but
    heads of 72 and 80 took 1.03 to 1.10.

    Example:
        >>> [filled_backward(x) for x in (40, 72, 80, 112, 176)]
        [48, 80, 80, 128, 192]
    """
    made, wide = (-(-width // step) * step for step in (STEP, WIDE_STEP))
    return wide if made > WIDE_STEP and wide - made <= STEP else made


def widths(spec: Spec) -> tuple[int, int]:
    """Returns the widths of q and v that the forward reads."""
    return filled(spec.shape("q")[3]), filled(spec.shape("v")[3])


def backward_widths(spec: Spec) -> tuple[int, int]:
    """Returns the widths of q and v that gradients read."""
    return filled_backward(spec.shape("q")[3]), filled_backward(spec.shape("v")[3])
