"""Estimates the time of sums of rows by their ids, from bytes and collisions.

The figures are fitted to an H100 (``tests/bench/results/embedding_h100.json``). Bytes
count as often as they pass: an addition in memory reads and writes a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.embedding.sums import parts_of
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

ROUND = {2: 6e-6, 4: 7e-9}
"""Seconds for which rows of one id wait for each other, by the bytes of a number."""

SWAP = 8e-12
"""Seconds to swap a number of 16 bits, beside its bytes."""

ADDED = 8
"""Bytes that pass where a number of float32 is added in memory."""

MOVED = 3
"""How often the time passes of reading rows once that are added up along diagonals:
16 x 4096 x 4096 numbers of float32 took an H200 866 µs."""

SORTED = 24
"""Bytes that pass for each number that is sorted and added up in order."""


def pays_in_16_bits(operand: str, spec: Spec, platform: str) -> Verdict:
    """Returns yes for an operand of 16 bits on a GPU, where XLA adds in a loop."""
    if platform not in ("cuda", "rocm"):
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.dtype(operand) == "float32":
        return no("dtype", "XLA adds float32 as fast")
    return YES


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of ``"xla"`` and the kernels.

    Ids are seldom even: the most frequent one is assumed to be that of sqrt(m) / 4 of
    m rows, at least.
    """
    del passes
    *lead, m, d = spec.shape("rows")
    tables = math.prod(lead)
    total, given = tables * spec.param("size"), tables * m
    rows, table, size = given * d, total * d, item(spec, "rows")
    alike = max(given / total, math.sqrt(given) / 4)
    if not spec.has("ids"):
        alike = m / spec.param("period")
    into = spec.has("table")  # in place
    written = 0 if into else 2 * table * size
    swaps = SWAP * rows if size == 2 else 0.0
    plain = rows * (size + ADDED) + written
    wait = ROUND.get(size, 0.0)
    times = {
        "xla": seconds(device, 0.0, plain) + swaps + wait * alike,
        "counted": math.inf,
        "by_distance": math.inf,
        "in_float32": math.inf,
        "in_order": math.inf,
    }
    if device.platform not in ("cuda", "rocm"):
        return times
    if not spec.has("ids"):
        times["counted"] = seconds(device, 0.0, rows * size + written, launches=2.0)
        return times
    if into or total > given:  # as many sums as rows
        owners = 8 * total
        nbytes = rows * (size + 4 + ADDED + 2 * size * into) + written + owners
        kept, parts = rows, 1
    else:
        parts = parts_of(given, total)
        kept = parts * table
        nbytes = rows * (size + ADDED) + kept * 8 + table * size
    times["in_float32"] = (
        seconds(device, 0.0, nbytes, launches=5.0, temporary=4.0 * kept)
        + ROUND[4] * alike / parts
    )
    if across := spec.param("across"):
        few = tables * (m / across + across) * d
        nbytes = MOVED * rows * size + few * ADDED + written
        times["by_distance"] = seconds(device, 0.0, nbytes, launches=6.0)
    times["in_order"] = seconds(
        device, 0.0, rows * SORTED + written, launches=16.0, temporary=6.0 * rows
    )
    return times
