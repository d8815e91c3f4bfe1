"""Tiles with a factor that is not multiplied yet, which later equations take along.

``exp(-r * d)`` is ``exp2(d * (-r * log2(e)))``: what is in parentheses is the same for
a whole tile, and costs nothing. Sums take a factor along by one fused instruction.
Which equations do so depends on what they read alone, and never on what reads them: a
value has the same digits in both passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxlib.mlir.dialects import arith

from rewriter.kernels.shared.elementwise import Line
from rewriter.kernels.shared.elementwise_fast import (
    exp2,
    inverse_of_one,
    log2,
    logistic_of_exponent,
    tanh_of_exponent,
)
from rewriter.kernels.shared.register_tiles import (
    filled,
    fused,
    instruction,
    mapped,
    selected,
    times,
)

LOG2E = math.log2(math.e)

LIMIT = 2.0**20
"""Constants between its inverse and it may multiply something else than written."""


@dataclass(frozen=True)
class Scaled:
    """A tile times a number for all of it.

    Attributes:
        tile: The tile.
        by: A tile of one number, perhaps.
        number: A constant.
        value: Which value of the program ``by`` is, if that is known.
        divisor: Which value ``by`` is divided by, if that is known.
    """

    tile: Any
    by: Any = None
    number: float = 1.0
    value: int | None = None
    divisor: int | None = None

    @property
    def factor(self) -> Any:
        """The number for all of the tile, as a tile; None if it is 1."""
        if self.by is None:
            return None if self.number == 1.0 else filled(self.tile, self.number)
        return self.by if self.number == 1.0 else _of_one(self.by, self.number)

    @property
    def product(self) -> Any:
        """The product, as a tile."""
        factor = self.factor
        if factor is None:
            return self.tile
        return mapped(arith.mulf, self.tile, factor)

    def times(self, number: float) -> Scaled:
        """Returns this times a constant that `is_moderate`, which joins the factor."""
        made = self.number * number
        if is_moderate(made):
            return replace(self, number=made)
        return Scaled(self.product, None, number)

    def times_tile(
        self, by: Any, value: int | None = None, divisor: int | None = None
    ) -> Scaled:
        """Returns this times a tile of one number, which joins what it cancels.

        The derivative of ``r * tanh(x / r)`` is divided by r and multiplied with it.

        Args:
            by: The tile.
            value: Which value it is.
            divisor: Which value it is divided by.
        """
        if self.by is None:
            return replace(self, by=by, value=value, divisor=divisor)
        pairs = (self.value, divisor), (self.divisor, value)
        if any(x is not None and x == y for x, y in pairs):
            return Scaled(self.tile, mapped(arith.mulf, self.by, by), self.number)
        return Scaled(self.product, by, 1.0, value, divisor)


def is_moderate(number: float) -> bool:
    """Returns whether a constant may join another factor, by its size."""
    return 1 / LIMIT <= abs(number) <= LIMIT


def _of_one(by: Any, number: float) -> Any:
    """A tile of one number times a constant; what is finite stays so."""
    made, equal = times(by, number), arith.CmpFPredicate.OEQ
    is_infinite = lambda x: mapped(
        lambda a, b: arith.cmpf(equal, a, b),
        instruction("abs.f32")(x), filled(by, math.inf),
    )  # fmt: skip
    largest = filled(by, float(np.finfo(np.float32).max))
    bound = instruction("copysign.f32")(made, largest)  # the sign of the first
    kept = selected(is_infinite(by), made, bound)
    return selected(is_infinite(made), kept, made)


# ---------------------------------------------------------------------- equations
@dataclass(frozen=True)
class Operand:
    """An operand of an equation.

    Attributes:
        value: Its tile, with a factor.
        number: The number, of a constant.
        uniform: Whether it is the same for the whole tile.
        place: Which value of the program it is.
        divisor: Which value it is divided by.
    """

    value: Scaled
    number: float | None
    uniform: bool
    place: int | None = None
    divisor: int | None = None


def _product(x: Operand, y: Operand) -> Scaled | None:
    for a, b in ((x, y), (y, x)):
        if b.number is not None and is_moderate(b.number):
            return a.value.times(b.number)
    for a, b in ((x, y), (y, x)):
        if b.uniform and not a.uniform and b.number is None:
            return a.value.times_tile(b.value.product, b.place, b.divisor)
    return None


def _quotient(x: Operand, y: Operand) -> Scaled | None:
    if y.number is not None:
        number = float(np.float32(1) / np.float32(y.number)) if y.number else 0.0
        return x.value.times(number) if is_moderate(number) else None
    if y.uniform and not x.uniform:
        inverse = inverse_of_one(y.value.product)
        return x.value.times_tile(inverse, divisor=y.place)
    return None


def _sum(x: Operand, y: Operand) -> Scaled | None:
    for a, b in ((x, y), (y, x)):
        factor = a.value.factor
        if factor is not None and not a.uniform:
            return Scaled(fused(a.value.tile, factor, b.value.product))
    return None


def _difference(x: Operand, y: Operand) -> Scaled | None:
    if y.value.factor is not None and not y.uniform:
        minus = y.value.times(-1.0)
        return Scaled(fused(minus.tile, minus.factor, x.value.product))
    if x.value.factor is not None and not x.uniform:
        minus = instruction("neg.f32")(y.value.product)
        return Scaled(fused(x.value.tile, x.value.factor, minus))
    return None


FACTORED: Mapping[str, Callable[..., Scaled | None]] = {
    "add": _sum,
    "add_any": _sum,
    "div": _quotient,
    "exp": lambda x: Scaled(exp2(x.value.times(LOG2E).product)),
    "log": lambda x: Scaled(log2(x.value.product), None, 1 / LOG2E),
    "logistic": lambda x: Scaled(logistic_of_exponent(x.value.times(-LOG2E).product)),
    "mul": _product,
    "neg": lambda x: x.value.times(-1.0),
    "one_minus_square": lambda x: Scaled(_square_less_one(x.value.product), None, -1.0),
    "sub": _difference,
    "tanh": lambda x: Scaled(tanh_of_exponent(x.value.times(2 * LOG2E).product)),
}
"""Primitives of float32 that take factors along; None where there is none to take."""


def _square_less_one(x: Any) -> Any:
    return fused(x, x, filled(x, -1.0))


def factored(line: Line, operands: list[Operand]) -> Scaled | None:
    """Returns an equation's result with a factor; None if it is computed as written.

    Args:
        line: An equation that decides nothing.
        operands: Its operands.
    """
    if line.out != "float32" or set(line.dtypes) != {"float32"}:
        return None
    if line.name not in FACTORED or all(x.uniform for x in operands):
        return None
    return FACTORED[line.name](*operands)
