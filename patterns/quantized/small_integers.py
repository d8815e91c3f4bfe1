"""Steps on small integers, as the same steps in floats.

    (q - z).astype(float16) · s      q 0 to 15, z 1 to 16: integers are exact either way

Kernels join zero points in floats. Where a program subtracts integers of 8 or 32 bits,
both are the same if no result leaves its dtype's range. The dtype is the one that the
program casts to afterwards, which holds integers as small as `EXACT`; else float32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize.intervals import held_by, interval, within
from rewriter.algebra.normal_form import TRUE
from rewriter.find.finder import Finder
from rewriter.find.reading import Reading
from rewriter.ops.packing import Packing
from rewriter.ops.widening import JOINS, ZERO

Range = tuple[float, float]

MOST = 1 << 10
"""Larger integers are not small."""

EXACT = 1 << 8
"""Every float of 16 bits holds integers up to here."""


def in_floats(find: Finder, reading: Reading, packing: Packing, dtype: Any) -> str:
    """Returns steps with the leading ones in floats, if that is the same.

    Args:
        find: The search.
        reading: A product; its steps begin with numbers of a dtype.
        packing: How the numbers lie: they have four bits.
        dtype: The dtype.

    Returns:
        Steps from numbers of any dtype that holds them.
    """
    steps = str(reading.params["widen"]).split()
    own: Range = (0.0, 15.0) if packing.sign == "unsigned" else (-8.0, 7.0)
    held, made = jnp.dtype(dtype), []
    small = True
    for i, step in enumerate(steps):
        if step[0] not in JOINS and jnp.issubdtype(step, jnp.floating):
            if small:
                return " ".join([step, *made, *steps[i + 1 :]])
            return " ".join(["float32", *made, *steps[i:]])
        if step[0] not in JOINS:
            held = jnp.dtype(step)
        else:
            other = _joined(find, reading, step)
            if other is None:
                break
            low, high = other if step[0] == "+" else (-other[1], -other[0])
            own = own[0] + low, own[1] + high
            made.append(step)
            bounds = min(other[0], own[0]), max(other[1], own[1])
            small = small and within(bounds, (-EXACT, EXACT))
        if not within(own, held_by(held)):
            break
    return " ".join([jnp.dtype(dtype).name, *steps])


def _joined(find: Finder, reading: Reading, step: str) -> Range | None:
    """The integers that a sum joins, if they are small; else None."""
    if step[0] not in "+-":
        return None
    found = _zeros(find, reading)
    if step[1:] != ZERO:
        number = float(step[1:])
        found = (number, number) if number.is_integer() else None
    return found if found is not None and within(found, (-MOST, MOST)) else None


def _zeros(find: Finder, reading: Reading) -> Range | None:
    """The bounds of zero points, a sum of integers of the program; None if unknown."""
    alg, low, high = reading.algebra, 0.0, 0.0
    if f"w_{ZERO}" not in reading.operands:
        return None
    ((form, _),) = reading.operands[f"w_{ZERO}"].parts
    for (flag, mono), factor in form.items():
        one: Range = (1.0, 1.0)
        for atom, power in mono:
            if len(mono) > 1 or power != 1 or alg.kind(atom) != "leaf":
                return None
            one = interval(find.graph, alg.defs[atom][1])
        if flag != TRUE or not float(factor).is_integer():
            return None
        ends = sorted(float(factor) * x for x in one)
        low, high = low + ends[0], high + ends[1]
    return low, high
