"""Estimates the time of attention with few queries, keys in an array or in pages.

The constants are those of an H200. XLA reads and writes all pages of a table, and then
reads what it wrote. Our kernel took 0.99 to 1.06 of its time for keys and values that
lie in order, from 256 MiB on (``tests/bench/results/hopper_decode_h200.json``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.estimate import LEAST, READ, STREAMED, of_xla
from rewriter.kernels.attention.pages import copied
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

MIB = 1 << 20

PAGED = 0.95
"""The share of the bandwidth that remains when reading page by page."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"hopper_decode"``."""
    own = math.inf
    if modelled(spec, device, passes).ok:
        own = seconds(device, 0.0, _moved(spec), memory=STREAMED, launches=2)
    return {"xla": of_xla(spec, device, passes), "hopper_decode": own}


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether it was measured: without gradients, of as many bytes."""
    return _as_measured(_moved(spec), device, passes)


def pages_modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns the same of keys and values in pages."""
    pages = copied(dict(spec.shapes), dict(spec.dtypes), dict(spec.params))
    return _as_measured(pages, device, passes)


def _moved(spec: Spec) -> float:
    return cost(*map(dict, (spec.shapes, spec.dtypes, spec.params))).bytes


def _as_measured(moved: float, device: Device, passes: str) -> Verdict:
    if device.platform != "cuda":
        return no("platform", f"not measured on {device.platform}")
    if passes != "forward":
        return no("gradients", "it has no gradients of its own")
    if moved >= LEAST:
        return YES
    text = f"{moved / MIB:.3g} MiB to read: not measured below {LEAST >> 20} MiB"
    return no("small", text)


def estimate_pages(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the same of keys and values in pages, which XLA gathers first."""
    pages = copied(dict(spec.shapes), dict(spec.dtypes), dict(spec.params))
    gathered = seconds(device, 0.0, 2 * pages, memory=STREAMED)
    own = seconds(device, 0.0, pages, memory=STREAMED * PAGED, launches=2)
    tried = pages_modelled(spec, device, passes).ok
    return {
        "xla": gathered + seconds(device, 0.0, pages, memory=READ),
        "hopper_decode": own if tried else math.inf,
    }
