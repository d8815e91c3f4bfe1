"""Estimates the time of paged attention, with pages gathered first or read in place.

The constants are those of attention with few queries on an H200. XLA reads and writes
all pages of the table, and then reads what it wrote. Our kernel for Hopper GPUs took
0.99 to 1.06 of its time for keys and values that lie in order, from 256 MiB on
(``tests/bench/results/hopper_decode_h200.json``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.attention.estimate import LEAST, READ, STREAMED
from rewriter.kernels.attention.pages import copied
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec

PAGED = 0.95
"""The share of the bandwidth that remains when reading page by page."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"hopper_decode"``."""
    pages = copied(dict(spec.shapes), dict(spec.dtypes), dict(spec.params))
    gathered = seconds(device, 0.0, 2 * pages, memory=STREAMED)
    ours = seconds(device, 0.0, pages, memory=STREAMED * PAGED, launches=2)
    tried = passes == "forward" and pages >= LEAST
    return {
        "xla": gathered + seconds(device, 0.0, pages, memory=READ),
        "hopper_decode": ours if tried else math.inf,
    }
