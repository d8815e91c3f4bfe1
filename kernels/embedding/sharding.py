"""How sums of rows by their ids may be split over devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.ops.op import Sharding


def of_sums(params: Mapping[str, Any]) -> Sharding:
    """Returns that each device may add up some of the numbers of each row.

    Or some of the rows, if they have ids: the result is the sum over the devices.
    """
    rows = () if params.get("period") else ("m",)
    return Sharding(frozenset({"...", "d"}), frozenset(rows))
