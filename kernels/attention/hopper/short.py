"""Which uses one warpgroup computes at once: up to 64 queries and keys of a head.

Windows of vision models, such as Swin's 49 positions, fill less than half of the tiles
of the other kernels, which read every operand once for each kernel. Here a warpgroup
takes a head of a batch entry as a whole: see
`rewriter.kernels.attention.hopper.short_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from rewriter.kernels.attention.empty_rows import NAN
from rewriter.kernels.attention.hopper.widths import filled_backward
from rewriter.kernels.attention.weights import PARAM
from rewriter.kernels.shared.hopper import SHARED_MEMORY, processors
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

Config = TypeVar("Config")

ROWS = 64
"""Queries and keys that a warpgroup takes, at most."""

WIDEST = 64
"""Columns of the widest heads, whose gradients fit into registers beside scores."""

TAKEN = frozenset({"q", "k", "v", "bias"})
"""The operands."""

ALIGNED = 1 << 10
"""Bytes for barriers, and where memory begins."""

MOST_WARPGROUPS = 4
"""Warpgroups of a block."""


def widths_of(spec: Spec) -> tuple[int, int]:
    """Returns the widths of q and of v that both passes read."""
    return filled_backward(spec.shape("q")[3]), filled_backward(spec.shape("v")[3])


def takes(spec: Spec) -> Verdict:
    """Returns whether a use is short, and has nothing that these kernels lack."""
    (_, t, n, _), (_, s, heads, _) = spec.shape("q"), spec.shape("k")
    found = [YES]
    if max(t, s) > ROWS:
        found.append(no("short", f"{t} queries of {s} keys, more than {ROWS}"))
    if n != heads:
        found.append(no("short", f"{n} heads of queries, and {heads} of keys"))
    if max(widths_of(spec)) > WIDEST:
        found.append(no("short", f"heads wider than {WIDEST}"))
    if spec.param("open_bias"):
        found.append(no("short", "rows that may weigh hidden keys"))
    if not _seen(spec) or spec.param("empty_rows", "nan") not in NAN:
        found.append(no("short", "rows that may see no key"))
    dtype = spec.dtype("q")
    if dtype == "float32" or (spec.param("out_dtype") or dtype) != dtype:
        found.append(no("short", "numbers of 32 bits"))
    others = set(spec.operands) - TAKEN
    if others or any(spec.param(x) for x in ("softcap", "score", PARAM)):
        found.append(no("short", "operands or functions of scores beside a bias"))
    if spec.has("bias"):
        entries, of_heads, *pair = spec.shape("bias")
        if entries != 1 or of_heads not in (1, n) or 1 in pair:
            found.append(no("short", "a bias that is not a table for each head"))
    return all_of(*found)


def _seen(spec: Spec) -> bool:
    """Whether every query sees a key: all, or those up to a position from 0 on."""
    left, right = spec.param("window", (None, None))
    return left is None and (right is None or right + spec.param("shift", 0) >= 0)


def fits(spec: Spec, config: Any, backward: bool) -> Verdict:
    """Returns whether a config of short uses can run: see `takes`.

    Args:
        spec: The use.
        config: Has the warpgroups, stages and programs.
        backward: Whether gradients are computed.
    """
    verdict = takes(spec)
    if not verdict.ok:
        return verdict
    found, (h, e) = [YES], widths_of(spec)
    if not 1 <= config.warpgroups <= MOST_WARPGROUPS:
        text = f"{config.warpgroups} warpgroups, not 1 to {MOST_WARPGROUPS}"
        found.append(no("warpgroups", text))
    if config.stages < 2:
        found.append(no("stages", f"{config.stages} stages, fewer than 2"))
    lanes, n = config.warpgroups * config.programs, spec.shape("q")[2]
    if n > lanes:
        found.append(no("heads", f"{n} heads, and {lanes} warpgroups"))
    size = 2 * ROWS * config.stages * (2 * h + e + (2 * e if backward else 0))
    size += 2 * 2 * ROWS * ROWS * backward + 4 * ROWS
    wide = spec.has("bias") and spec.dtype("bias") == "float32"
    size += (4 if wide else 2) * ROWS * ROWS * spec.has("bias")
    size = config.warpgroups * (size + ALIGNED) + ALIGNED
    if size > SHARED_MEMORY:
        text = f"{size >> 10} KiB of shared memory of {SHARED_MEMORY >> 10} KiB"
        found.append(no("shared_memory", text))
    return all_of(*found)


def likely(config: Config, spec: Spec, device: Device, backward: bool) -> Config | None:
    """Returns the default config; None if the use is not short.

    Args:
        config: One of the pass, with ``short``.
        spec: The use.
        device: Where it will run.
        backward: Whether gradients are computed.
    """
    return next(iter(configs(config, spec, device, backward)), None)


def configs(
    config: Config, spec: Spec, device: Device, backward: bool
) -> Iterator[Config]:
    """Yields configs worth measuring, most promising first; see `likely`."""
    own = {"programs": processors(device), "stages": 2}
    for warpgroups in range(MOST_WARPGROUPS, 0, -1):
        made = replace(config, warpgroups=warpgroups, **own)  # type: ignore
        if fits(spec, made, backward).ok:
            yield made
