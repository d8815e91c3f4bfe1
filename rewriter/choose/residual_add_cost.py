"""Adds the cost of a residual add to kernels that cannot compute it.

    h = add x r;  y = site h;  … read h

A kernel that `adds_to` its operand makes h in the same pass over memory. Other kernels
read h once more. The op's measured times do not contain that read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rewriter.measure.measurement import Measurement
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Spec
from rewriter.ops.registry import REFERENCE
from rewriter.site.implementation import XLA


def reading_us(
    spec: Spec, kernels: Sequence[Kernel], device: Device, name: str
) -> dict[str, float]:
    """Returns the microseconds that each forward takes to read a sum once more.

    Args:
        spec: The site's shapes, dtypes and parameters.
        kernels: The op's kernels.
        device: Where it will run.
        name: The operand that is the sum.

    Returns:
        Microseconds by name, for forwards that cannot add. Empty if no kernel adds, or
        if the device is unknown.
    """
    adding = {
        k.name for k in kernels
        if k.traits.adds_to == name and device.platform in k.platforms
    }  # fmt: skip
    if spec.symbolic or not device.bandwidth or not adding:
        return {}
    us = 1e6 * spec.nbytes(name) / device.bandwidth
    others = [k.name for k in kernels if k.name not in adding]
    return dict.fromkeys((XLA, REFERENCE, *others), us)


def with_reading(m: Measurement, longer: Mapping[str, float]) -> Measurement:
    """Returns a measurement with its forward's extra time added."""
    more = longer.get(m.implementation.forward)
    if m.median_us is None or more is None:
        return m
    return replace(m, median_us=m.median_us + more)


def mention_reading(
    not_chosen: Sequence[tuple[str, str]], longer: Mapping[str, float]
) -> tuple[tuple[str, str], ...]:
    """Returns why implementations lost; says so where the reason is reading the sum.

    Example:
        >>> lost = [("xla", "1.46 times as long"), ("other", "slow")]
        >>> mention_reading(lost, {"xla": 33.0})[0]
        ('xla', '1.46 times as long, as it reads the sum that is its operand once more')
    """
    why = "as it reads the sum that is its operand once more"
    return tuple(
        (name, f"{text}, {why}" if name.split(",")[0] in longer else text)
        for name, text in not_chosen
    )
