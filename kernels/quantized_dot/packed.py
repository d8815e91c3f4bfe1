"""A dot of packed numbers of four bits that unpacks one block of columns at a time.

XLA writes all numbers of one byte each, then the widened matrix, and reads it again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rewriter.kernels.quantized_dot.op import PACKED
from rewriter.kernels.quantized_dot.packed_form import computed
from rewriter.kernels.quantized_dot.reference import computed as of_numbers
from rewriter.kernels.shared import columns
from rewriter.kernels.shared.columns import Block
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.products import unturned
from rewriter.ops.kernel import Spec, Speed
from rewriter.ops.packing import WORDS, Packing, packing_of
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array


MOST = 1 << 20
"""The most numbers of a block, unless it has 64 columns."""


def _packing(spec: Spec) -> Packing:
    return packing_of(str(spec.param("packing")))


def _columns(spec: Spec) -> int:
    """Columns of the matrix."""
    mode, packing = str(spec.param("mode")), _packing(spec)
    n = spec.shape("w")[int(mode != "transposed")]
    return packing.count * n if packing.axis == "n" else n


SPACE = columns.space(MOST, _columns, (64, 256, 1024))


def supports(spec: Spec) -> Verdict:
    """Takes rows of floats, and a matrix of known sizes."""
    found = [columns.takes(spec, "w")]
    packing = _packing(spec)
    if packing.axis == "n" and packing.order == "halves":
        text = "two columns in a byte lie half of the columns apart"
        found.append(no("packing", text))
    return all_of(*found)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU for few rows and a large matrix, as for a quantized dot."""
    packing = _packing(spec)
    if packing.order == WORDS and packing.axis == "n":
        text = "words of columns, which XLA unpacks as fast on a CPU"
        return no("packing", text)
    numbers = packing.count * math.prod(spec.shape("w"))
    return columns.pays(spec, platform, numbers)


def forward(
    *,
    x: Array,
    w: Array,
    packing: str,
    mode: str = "forward",
    w_scale: Array | None = None,
    w_zero: Array | None = None,
    residuals: bool = False,
    config: Block | None = None,
    **given: Any,
) -> Any:
    """Returns the result, rounded as the reference does; there are no residuals.

    Operands are those of the op, and parameters are as in the reference.
    """
    x = unturned(x)
    across = int(mode != "transposed")
    how = packing_of(packing)
    each = how.count if how.axis == "n" else 1

    def block(first: Any, size: int) -> Array:
        own = columns.taken(w, first // each, size // each, across)
        others = {
            name: columns.taken(x, first, size)
            for name, x in (("w_scale", w_scale), ("w_zero", w_zero))
            if x is not None
        }
        how = {"packing": packing, "mode": mode, **given}
        return computed(of_numbers, x=x, w=own, **others, **how)

    out = columns.joined(block, w.shape[across] * each, config)
    return (out, ()) if residuals else out


KERNEL = XLA.kernel(
    PACKED.name, forward, None, supports, Speed(profitable),
    SPACE, saves_out=False,
)  # fmt: skip
