"""Sizes of one use of attention as the kernels see them: queries, keys, blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.tpu import schedule

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

LANES = 128
FEW_ROWS = 128
"""The most queries of several heads that are stacked: see `decode_layout`."""


def together(spec: Spec) -> str:
    """Returns whose few queries are stacked: ``"all"`` heads', or a ``"group"``'s.

    Empty if there are many, or if stacking gains nothing.
    """
    (_, t, n, _), heads = spec.shape("q"), spec.shape("k")[2]
    tables = [spec.shape(x) for x in ("bias", "mask", "dropout") if spec.has(x)]
    thin = all(x[1] == x[2] == 1 for x in tables)
    power_of_two = heads & (heads - 1) == 0
    if t * n <= FEW_ROWS and thin and power_of_two and heads <= LANES:
        return "all"
    return "group" if 1 < n // heads <= FEW_ROWS // t else ""


def extent(spec: Spec) -> tuple[int, int]:
    """Returns the number of queries and keys that the kernel sees."""
    (_, t, n, _), (_, s, heads, _) = spec.shape("q"), spec.shape("k")
    kind = together(spec)
    if kind == "all":
        return t * n, s * heads
    return (t * n // heads if kind else t), s


def listed(spec: Spec, size: tuple[int, int], blocks: Any) -> int:
    """Returns the number of non-empty blocks of scores of a head."""
    return int(_steps(spec, size, blocks).count)


def kinds(spec: Spec, size: tuple[int, int], blocks: Any) -> int:
    """Returns the number of compiled ways to compute a block: whole, in part."""
    if any(spec.has(name) for name in schedule.HIDING):
        return 2
    return sum(_steps(spec, size, blocks).kinds)


def _steps(spec: Spec, size: tuple[int, int], blocks: Any) -> schedule.Steps:
    t, s = spec.shape("q")[1], spec.shape("k")[1]
    left, right = spec.param("window", (None, None))
    shift = spec.param("shift", 0)
    if spec.has("offset"):
        shift += max(0, s - t)
    if spec.has("prefix"):
        left = right = None
    cut = schedule.Cut(*size, blocks.rows, blocks.keys, left, right, shift)
    if size[0] != t:
        cut = dataclasses.replace(cut, repeat=t, step=size[1] // s)
    return schedule.steps(schedule.states(cut, {}))
