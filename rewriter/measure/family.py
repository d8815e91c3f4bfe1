"""Applies measurements of a chip to others with like processors and other memory.

The chips of a family run the same programs on as many processors, or fewer. What limits
a program by memory takes time by the memory's bandwidth, and the rest by the rate of
products. So the order of implementations, and the best configs, carry over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from rewriter.measure.key import PROGRAM, Key
from rewriter.measure.measurement import ESTIMATES, Entry, Measurement


@dataclass(frozen=True)
class Rates:
    """A chip's rates, all from data sheets, so that they compare.

    Attributes:
        flops: FLOP/s of products of bfloat16 matrices, without sparsity.
        bandwidth: Bytes/s of memory.
        processors: The number of multiprocessors.
    """

    flops: float
    bandwidth: float
    processors: int


HOPPER = {
    "NVIDIA H100 PCIe": Rates(756e12, 2.0e12, 114),
    "NVIDIA H100 NVL": Rates(835e12, 3.9e12, 132),
    "NVIDIA H100": Rates(989e12, 3.35e12, 132),
    "NVIDIA H200": Rates(989e12, 4.8e12, 132),
    "NVIDIA H800": Rates(989e12, 3.35e12, 132),
    "NVIDIA GH200 144G": Rates(989e12, 4.9e12, 132),
    "NVIDIA GH200": Rates(989e12, 4.0e12, 132),
    "NVIDIA H20": Rates(148e12, 4.0e12, 78),
}
"""Chips by how their device kinds begin; the first that fits is meant."""

FAMILIES = (HOPPER,)

MEMORY_BOUND = 0.4
"""The share of its time from which on a program is taken to be limited by memory. It is
the time to read each operand once, at the data sheet's rate, which no program reaches.
"""


def carried_over(entries: Iterable[Entry], kind: str) -> Iterator[Entry]:
    """Measurements of relatives of a chip, as if they had been made on it.

    Of several relatives, the one whose rates are nearest serves a use. Estimates and
    whole programs are left out. So are configs for more processors than the chip has.

    Args:
        entries: Measurements of any chips.
        kind: The chip's device kind, as JAX has it.

    Example:
        >>> list(carried_over([], "NVIDIA H100 80GB HBM3"))
        []
    """
    for family in FAMILIES:
        here = _rates(family, kind)
        if here is None:
            continue
        nearest: dict[Key, tuple[float, tuple[Measurement, ...]]] = {}
        for key, found in entries:
            there = _rates(family, key.device)
            if there is None or key.device == kind or key.op == PROGRAM:
                continue
            scaled = (_scaled(key, m, there, here) for m in found)
            kept = tuple(m for m in scaled if m is not None)
            use, distance = (
                dataclasses.replace(key, device=kind),
                _distance(there, here),
            )
            if kept and distance < nearest.get(use, (math.inf,))[0]:
                nearest[use] = distance, kept
        yield from ((use, kept) for use, (_, kept) in nearest.items())


def _distance(there: Rates, here: Rates) -> float:
    """How far apart the rates of two chips are, 0 for equal ones."""
    pairs = (
        (there.flops, here.flops),
        (there.bandwidth, here.bandwidth),
        (there.processors, here.processors),
    )
    return sum(abs(math.log(a / b)) for a, b in pairs)


def relatives(kind: str) -> tuple[str, ...]:
    """Returns how the device kinds of a chip's relatives begin.

    Example:
        >>> "NVIDIA H200" in relatives("NVIDIA H100 80GB HBM3"), relatives("cpu")
        (True, ())
    """
    families = (tuple(family) for family in FAMILIES if _rates(family, kind))
    return next(families, ())


def _rates(family: dict[str, Rates], kind: str) -> Rates | None:
    return next((r for name, r in family.items() if kind.startswith(name)), None)


def _scaled(key: Key, m: Measurement, there: Rates, here: Rates) -> Measurement | None:
    """A measurement on another chip; None where it says nothing about it."""
    if m.method in ESTIMATES or m.median_us is None:
        return None
    configs = (m.implementation.config, m.implementation.backward_config)
    programs = [int(dict(c).get("programs") or 0) for c in configs if c is not None]
    if max(programs, default=0) > here.processors:
        return None
    reading = 1e6 * _bytes(key) / there.bandwidth
    bound = reading >= MEMORY_BOUND * m.median_us
    slower = there.bandwidth / here.bandwidth if bound else there.flops / here.flops
    return dataclasses.replace(
        m,
        median_us=m.median_us * slower,
        sigma_us=m.sigma_us * slower,
        by_inputs=tuple((name, us * slower) for name, us in m.by_inputs),
        note=f"measured on {key.device}",
    )


def _bytes(key: Key) -> float:
    """Bytes of the operands, each read once."""
    dtypes = dict(key.dtypes)
    sizes = (math.prod(s) * jnp.dtype(dtypes[n]).itemsize for n, s in key.shapes)
    return float(sum(sizes))
