"""How ragged dots of quantized matrices are split over devices: like ragged dots.

The scale of a column is the same for every part of the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rewriter.kernels.ragged import dot
from rewriter.ops.op import Sharding


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split over devices."""
    assert dot.OP.sharding is not None
    made = dot.OP.sharding(params)
    assert made is not None
    return dataclasses.replace(made, dims={**(made.dims or {}), "rhs_scale": "g n"})
