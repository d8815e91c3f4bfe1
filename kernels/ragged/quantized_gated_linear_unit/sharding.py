"""How quantized units of experts are split over devices: like those of 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rewriter.kernels.ragged import gated_linear_unit as plain
from rewriter.ops.op import Sharding


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be split over devices."""
    assert plain.OP.sharding is not None
    made = plain.OP.sharding(params)
    assert made is not None
    columns = "both" if params["halves"] else "f"
    scales = {"w_scale": f"g {columns}", "w_up_scale": "g f"}
    return dataclasses.replace(made, dims={**(made.dims or {}), **scales})
