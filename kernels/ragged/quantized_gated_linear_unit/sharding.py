"""How quantised units of experts are spread over devices: as those of 16 bits are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rewriter.kernels.ragged import gated_linear_unit as plain
from rewriter.ops.op import Sharding


def sharding(params: Mapping[str, Any]) -> Sharding:
    """Returns how a use may be spread."""
    assert plain.OP.sharding is not None
    made = plain.OP.sharding(params)
    assert made is not None
    columns = "both" if params["halves"] else "f"
    scales = {"w_scale": f"g {columns}", "w_up_scale": "g f"}
    return dataclasses.replace(made, dims={**(made.dims or {}), **scales})
