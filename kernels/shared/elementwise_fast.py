"""Elementwise functions by the hardware's instructions, where they decide nothing.

Exponentials, logarithms and quotients have an error of about 2 ** -22: relative, or of
logarithms relative or absolute, by which is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rewriter.kernels.shared.elementwise import FLOATS, Line, Number, Range
from rewriter.kernels.shared.register_tiles import (
    filled,
    fused,
    instruction,
    mapped,
    plus,
    selected,
    times,
    with_type,
)

LOG2E = math.log2(math.e)


SMALL = 1 << 22
"""Integers up to it become floats by two simple instructions."""


def is_small(line: Line, ranges: Sequence[Range]) -> bool:
    """Whether a line converts small integers to floats."""
    if line.name != "convert_element_type" or line.out not in FLOATS:
        return False
    ends = ranges[line.ins[0]] if isinstance(line.ins[0], int) else None
    return ends is not None and is_small_range(ends)


def is_small_range(ends: tuple[int, int]) -> bool:
    """Returns whether all integers of a range are small."""
    return ends[0] >= -SMALL and ends[1] <= SMALL


def small_to_float(x: Any) -> Any:
    """Adds an integer to the last digits of a float, and takes away the float."""
    base = 3 << 22  # its last digit counts one
    bits = int(np.float32(base).view(np.int32))
    moved = mapped(arith.addi, x, filled(x, bits, "int32"))
    return plus(with_type(moved, ir.F32Type.get(), llvm.bitcast), -float(base))


def exp2(x: Any) -> Any:
    """Returns two to the power of floats."""
    return instruction("ex2.approx.ftz.f32")(x)


def log2(x: Any) -> Any:
    """Returns the binary logarithm of floats."""
    return instruction("lg2.approx.f32")(x)


def _inverse(x: Any) -> Any:
    return instruction("rcp.approx.ftz.f32")(x)


NEAR = 0.02
"""Below it a few terms of a series are more exact than a difference."""


def _by_series(
    x: Any, variable: Any, terms: Sequence[float], far: Any, below: float = NEAR
) -> Any:
    """Returns x times a polynomial for x near 0, and `far` elsewhere."""
    near = filled(x, terms[-1])
    for term in reversed(terms[:-1]):
        near = fused(near, variable, filled(x, term))
    size, less = instruction("abs.f32")(x), arith.CmpFPredicate.OLT
    close = mapped(lambda a, b: arith.cmpf(less, a, b), size, filled(x, below))
    return selected(close, mapped(arith.mulf, near, x), far)


def _tanh(x: Any) -> Any:
    far = _far_tanh(times(x, 2 * LOG2E))
    return _by_series(x, mapped(arith.mulf, x, x), (1.0, -1 / 3), far)


def _far_tanh(x: Any) -> Any:
    """The hyperbolic tangent of x / (2 log2(e)): 1 - 2 / (2^x + 1)."""
    far = _inverse(plus(exp2(x), 1.0))
    return fused(far, filled(x, -2.0), filled(x, 1.0))


def tanh_of_exponent(x: Any) -> Any:
    """Returns the hyperbolic tangent of x / (2 log2(e))."""
    unit = 1 / (2 * LOG2E)
    terms = (unit, -(unit**3) / 3)
    return _by_series(x, mapped(arith.mulf, x, x), terms, _far_tanh(x), NEAR / unit)


def logistic_of_exponent(x: Any) -> Any:
    """Returns 1 / (1 + 2^x)."""
    return _inverse(plus(exp2(x), 1.0))


def _log(x: Any) -> Any:
    return times(log2(x), 1 / LOG2E)


def _log1p(x: Any) -> Any:
    far = _log(plus(x, 1.0))
    return _by_series(x, x, (1.0, -1 / 2, 1 / 3, -1 / 4), far)


def inverse_of_one(y: Any) -> Any:
    """Returns the inverse of a tile of one number, which compilers compute once.

    That of a number so small that it has none is the largest float, and of 0 infinite.
    """
    inverse = instruction("div.full.f32")(filled(y, 1.0), y)
    largest = filled(y, float(np.finfo(np.float32).max))
    size, equal = instruction("abs.f32"), arith.CmpFPredicate.OEQ
    same = lambda a, b: arith.cmpf(equal, a, b)
    infinite = mapped(same, size(inverse), filled(y, math.inf))
    bound = selected(infinite, instruction("copysign.f32")(y, largest), inverse)
    return selected(mapped(same, y, filled(y, 0.0)), inverse, bound)


def by_one_divisor(x: Any, y: Any) -> Any:
    """A quotient by what is the same for a whole tile: compilers invert it once."""
    size, below = instruction("abs.f32")(y), arith.CmpFPredicate.OLT
    tiny = mapped(lambda a, b: arith.cmpf(below, a, b), size, filled(y, 2.0**-100))
    scale = selected(tiny, filled(y, 2.0**64), filled(y, 1.0))
    one, scaled = filled(y, 1.0), mapped(arith.mulf, y, scale)
    inverse = instruction("div.full.f32")(one, scaled)
    return mapped(arith.mulf, mapped(arith.mulf, x, scale), inverse)


def _quotient(ins: Sequence[Any], line: Line) -> Any:
    """By a constant, a product; otherwise the hardware's quotient."""
    x, y = ins
    if isinstance(line.ins[1], Number):
        inverse = np.float32(1) / np.float32(line.ins[1].value)
        if np.isfinite(inverse) and abs(inverse) >= np.finfo(np.float32).tiny:
            return times(x, float(inverse))
    return instruction("div.full.f32")(x, y)


FAST: Mapping[str, Callable[[Sequence[Any], Line], Any]] = {
    "div": _quotient,
    "exp": lambda ins, line: exp2(times(ins[0], LOG2E)),
    "exp2": lambda ins, line: exp2(ins[0]),
    "log": lambda ins, line: _log(ins[0]),
    "log1p": lambda ins, line: _log1p(ins[0]),
    "logistic": lambda ins, line: logistic_of_exponent(times(ins[0], -LOG2E)),
    "sqrt": lambda ins, line: instruction("sqrt.approx.f32")(ins[0]),
    "tanh": lambda ins, line: _tanh(ins[0]),
}
"""Primitives of floats that the hardware computes where nothing is decided by them."""
