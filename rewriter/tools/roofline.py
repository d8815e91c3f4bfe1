"""Computes rates from work and time: how near they come to the device's peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewriter.errors import ConfigError
from rewriter.ops.cost import Cost
from rewriter.ops.device import Device
from rewriter.support.installed import require_package


@dataclass(frozen=True)
class Rate:
    """The rate of some work: operations and bytes per second.

    Attributes:
        flops: Floating-point operations a second.
        bytes: Bytes to and from memory a second.
        share: The least time that the device needs for the work, over the time that
            it took; None if the device's figures are not known. Its FLOP/s are
            those of bfloat16 products, whatever the program's types.
        bound: ``"compute"`` or ``"memory"``: which of them needs that least time.
        warning: Why the rates cannot be right, or ``""``.
    """

    flops: float
    bytes: float
    share: float | None = None
    bound: str = ""
    warning: str = ""

    def __str__(self) -> str:
        text = f"{quantity(self.flops)}FLOP/s {quantity(self.bytes)}B/s"
        if self.share is None:
            return text
        return f"{text}, {self.share:.0%} of the {self.bound} roof"


def rate(cost: Cost, seconds: float, device: Device) -> Rate:
    """Returns the rates of work that took some time on a device.

    Example:
        >>> h200 = Device("NVIDIA H200", "cuda", flops=840e12, bandwidth=4.3e12)
        >>> print(rate(Cost(420e12, 1e12), 1.0, h200))
        420 TFLOP/s 1 TB/s, 50% of the compute roof
        >>> rate(Cost(1e12, 5e12), 1.0, h200).warning
        'not to be believed: 5 TB/s is more than the 4.3 TB/s of the data sheet'
    """
    flops, moved = cost.flops / seconds, cost.bytes / seconds
    if not (device.flops and device.bandwidth):
        return Rate(flops, moved)
    least = {
        "compute": cost.flops / device.flops,
        "memory": cost.bytes / device.bandwidth,
    }
    bound = max(least, key=lambda name: least[name])
    return Rate(
        flops, moved, least[bound] / seconds, bound, _warning(cost, seconds, device)
    )


def _warning(cost: Cost, seconds: float, device: Device) -> str:
    """Warns, in words, of a rate above the device's peak."""
    parts = []
    source = "measured on such a device" if device.measured else "of the data sheet"
    for amount, most, unit in (
        (cost.flops, device.flops, "FLOP/s"),
        (cost.bytes, device.bandwidth, "B/s"),
    ):
        if amount / seconds > most:
            got = f"{quantity(amount / seconds)}{unit}"
            parts.append(f"{got} is more than the {quantity(most)}{unit} {source}")
    if not parts:
        return ""
    cached = cost.bytes <= device.cache and cost.bytes / seconds > device.bandwidth
    why = "; the operands fit the cache" if cached else ""
    return f"not to be believed: {' and '.join(parts)}{why}"


def quantity(value: float) -> str:
    """Returns a number with its metric prefix, ready for a unit.

    Example:
        >>> quantity(4.3e12) + "B/s", quantity(999.6) + "B", quantity(0.0) + "B"
        ('4.3 TB/s', '1 kB', '0 B')
    """
    value = float(f"{value:.3g}")
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


# ------------------------------------------------------------------ picture
@dataclass(frozen=True)
class Point:
    """One measurement in the picture.

    Attributes:
        implementation: The implementation; each has its own marker.
        cost: The work.
        seconds: The time.
    """

    implementation: str
    cost: Cost
    seconds: float


MARKERS = "os^Dv*PX<>"


def plot(points: Sequence[Point], device: Device, path: str) -> None:
    """Writes the picture: operations a second over operations per byte.

    Args:
        points: What was measured.
        device: Its roof is drawn, if its figures are known.
        path: A file whose ending says its kind, such as ``"roof.svg"``.

    Raises:
        ConfigError: Without matplotlib, or for an ending it does not know.
    """
    require_package("matplotlib", "plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log")
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("FLOP/s")
    _roof(axes, points, device)
    names = list(dict.fromkeys(p.implementation for p in points))
    for i, name in enumerate(names):
        own = [p for p in points if p.implementation == name]
        x, y = [p.cost.intensity for p in own], [p.cost.flops / p.seconds for p in own]
        marker = MARKERS[i % len(MARKERS)]
        axes.plot(x, y, marker, label=name, alpha=0.7, linestyle="none")
    axes.legend()
    try:
        figure.savefig(path)
    except ValueError as problem:
        raise ConfigError(
            f"plot={path!r}: {problem}", next_step="End it in .png or .svg"
        ) from problem


def _roof(axes: Any, points: Sequence[Point], device: Device) -> None:
    if not (device.flops and device.bandwidth):
        axes.set_title(f"{device.kind}: its roof is not known")
        return
    axes.set_title(device.kind)
    ridge = device.flops / device.bandwidth
    found = [p.cost.intensity for p in points if math.isfinite(p.cost.intensity)]
    left, right = min([ridge / 10, *found]), max([ridge * 10, *found])
    x = [left, ridge, right]
    y = [left * device.bandwidth, device.flops, device.flops]
    source = "measured" if device.measured else "data sheet"
    axes.plot(x, y, "k-", label=f"roof ({source})")
