"""Formats benchmark results as a table: text, JSON, points of a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rewriter.hardware import timing
from rewriter.measure.measurement import time_text
from rewriter.ops import device
from rewriter.support.sizes import size_text
from rewriter.tools.bench import Timing, ms
from rewriter.tools.roofline import Point, quantity, rate


@dataclass(frozen=True)
class Row:
    """One implementation of one use of an op in one mode.

    Attributes:
        implementation: ``"xla"``, a kernel's name or a peer's.
        op: The op's name.
        use: Shapes, dtypes and parameters, in words.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.
        timing: Its figures; None if it has none.
        error: Largest relative error against the reference, on the timed inputs.
        reason: Why it has no figures.
        note: A remark, such as another reference for the comparison.
    """

    implementation: str
    op: str = ""
    use: str = ""
    mode: str = ""
    timing: Timing | None = None
    error: float | None = None
    reason: str = ""
    note: str = ""


@dataclass(frozen=True)
class OpsBenchmark:
    """The result of `bench_ops`.

    Attributes:
        device: The device kind.
        turns: The number of samples of each implementation.
        rows: In the order they were measured.
        sets: The number of input sets that took turns, by use.
        integers: Least, median, largest and sum of each integer operand, by use and
            operand: group sizes, for example.
        versions: Versions that the figures depend on, XLA's flags, and a GPU's driver
            and clock in MHz right after timing, if `nvidia-smi` reports them.
    """

    device: str
    turns: int
    rows: tuple[Row, ...]
    sets: Mapping[str, int]
    integers: Mapping[str, Mapping[str, tuple[int, int, int, int]]]
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as plain dicts and lists; None for infinite ones."""
        return json.loads(json.dumps(asdict(self)), parse_constant=lambda name: None)

    def json(self) -> str:
        """Returns the figures as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def points(self) -> list[Point]:
        """Returns the points of a roofline plot."""
        return [
            Point(f"{r.op} {r.implementation}", cost, 1e-3 * r.timing.median_ms)
            for r in self.rows
            if r.timing and (cost := r.timing.cost) and cost.flops
        ]

    def __str__(self) -> str:
        by_use: dict[str, list[Row]] = {}
        for row in self.rows:
            by_use.setdefault(row.use, []).append(row)
        blocks = [block(rows, self.sets[use]) for use, rows in by_use.items()]
        return "\n".join([heading(self.device, self.turns), *blocks])


# --------------------------------------------------------------------- words
def heading(kind: str, turns: int) -> str:
    """Returns the first line of the table."""
    return f"rewriter bench   {kind}, {turns} interleaved turns, {timing.method()}"


def block(rows: Sequence[Row], sets: int) -> str:
    """Returns the lines of one use.

    Args:
        rows: Its rows.
        sets: The number of input sets that took turns.
    """
    width = max(len(r.implementation) for r in rows)
    inputs = "1 set of inputs" if sets == 1 else f"{sets} sets of inputs in turn"
    lines = [f"\n{rows[0].use}   ({inputs})"]
    for mode in dict.fromkeys(r.mode for r in rows):
        own = [r for r in rows if r.mode == mode]
        lines.append(f" {mode}")
        first = next((r.timing for r in own if r.timing), None)
        lines += [line for r in own for line in _lines(r, width, first)]
    return "\n".join(lines)


def _lines(row: Row, width: int, first: Timing | None) -> list[str]:
    name = f"   {row.implementation:<{width}}  "
    note = [f"{'':<{len(name)}}{row.note}"] if row.note else []
    if row.timing is None or first is None:
        return [f"{name}{row.reason}", *note]
    t = row.timing
    parts = [f"{ms(t)}  best {time_text(1e3 * t.minimum_ms)}"]
    parts.append(f"{first.median_ms / t.median_ms:.2f}×")
    if t.cost:
        parts.append(_rates(t))
    if t.temp_bytes is not None:
        parts.append(f"temporary {size_text(t.temp_bytes)}")
    if row.error is not None:
        parts.append(f"error {row.error:.1g}")
    if t.method != timing.method():
        parts.append(f"by {t.method}")
    warning = [f"{'':<{len(name)}}{t.warning}"] if t.warning else []
    return [name + "   ".join(parts), *warning, *note]


def _rates(t: Timing) -> str:
    assert t.cost is not None
    found = rate(t.cost, 1e-3 * t.median_ms, device.attached())
    if found.bound == "memory":
        return f"{quantity(found.bytes)}B/s, {found.share:.0%} of the roof"
    if found.share is None:
        return str(found)
    return f"{quantity(found.flops)}FLOP/s, {found.share:.0%} of the roof"
