"""Computes elementwise functions of tiles in a warpgroup's registers.

A function is a program of scalars, see `rewriter.kernels.shared.elementwise`. What its
comparisons and roundings depend on is computed as XLA does, and the rest by the
hardware's instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.shared.elementwise import (
    FLOATS,
    Line,
    Number,
    Program,
    Range,
    range_of,
)
from rewriter.kernels.shared.elementwise_exact import COMPUTE, converted
from rewriter.kernels.shared.elementwise_fast import (
    FAST,
    by_one_divisor,
    is_small,
    is_small_range,
    small_to_float,
)
from rewriter.kernels.shared.elementwise_scaled import (
    Operand,
    Scaled,
    factored,
    is_moderate,
)
from rewriter.kernels.shared.register_tiles import (
    by_number,
    constant,
    fused,
    mapped,
    rounded,
    times,
)

EXACT = frozenset({
    "abs", "ceil", "clamp", "floor", "max", "min", "neg", "round", "select_n", "sign",
})  # fmt: skip
"""Primitives that give numbers of their operands' dtype without rounding."""

WHOLE = frozenset({"abs", "add", "max", "min", "mul", "neg", "sub"})
"""Primitives of small integers that floats compute without rounding."""


def evaluate(
    program: Program,
    given: Sequence[Any],
    ranges: Sequence[Range] = (),
    uniform: Collection[int] = (),
    contract: bool = False,
) -> list[Any]:
    """Returns what a program gives for each number of some tiles.

    Args:
        program: The function.
        given: Tiles of one shape and layout, `mgpu.FragmentedArray`. Floats of any
            dtype are held as float32, bool as one bit.
        ranges: The ranges of those that are integers.
        uniform: The indices of those that are the same for all numbers.
        contract: Whether a product and the sum that alone reads it are rounded once.

    Returns:
        Tiles of that kind.
    """
    products = program.contracted if contract else {}
    run = _Evaluation(program, dict(enumerate(given)), ranges, uniform)
    for at, line in enumerate(program.lines):
        if at not in program.needed or at in products.values():
            continue
        if at in products:
            run.known[program.given + at] = _contracted(run, at, products[at])
        else:
            run.known[program.given + at] = run.as_written(at, line)
    return [run.read(x) for x in program.outs]


def evaluate_scaled(*args: Any, **options: Any) -> list[Any]:
    """Returns the same, with factors of whole tiles joined: see `factored_tiles`."""
    return [x.product for x in factored_tiles(*args, **options)]


def factored_tiles(
    program: Program,
    given: Sequence[Any],
    ranges: Sequence[Range] = (),
    uniform: Collection[int] = (),
    scale: float = 1.0,
    floats: Mapping[int, Any] | None = None,
) -> list[Scaled]:
    """Returns the same as tiles and their factors, which are joined: see `Scaled`.

    Small integers that become floats are computed as floats.

    Args:
        program: The function.
        given: As in `evaluate`.
        ranges: As in `evaluate`.
        uniform: As in `evaluate`.
        scale: What the first tile is multiplied with before.
        floats: Those of the integers that are there as floats too, by index.
    """
    run = _Evaluation(program, dict(enumerate(given)), ranges, uniform)
    first = Scaled(run.known.pop(0))
    run.scaled[0] = (
        first.times(scale) if is_moderate(scale) else Scaled(times(given[0], scale))
    )
    run.floats |= floats or {}
    for at, line in enumerate(program.lines):
        place = program.given + at
        if at not in program.needed or run.is_whole(place):
            continue  # integers are computed where they are read
        if is_small(line, run.ranges):
            run.known[place] = rounded(run.as_float(line.ins[0]), line.out)
            continue
        made = None if at in program.decisive else factored(line, run.operands(line))
        if made is None:
            run.known[place] = run.as_written(at, line)
        else:
            run.scaled[place] = made
    return [run.with_factor(x) for x in program.outs]


class _Evaluation:
    """The values of one evaluation.

    Attributes:
        known: Tiles by their numbers.
        scaled: Tiles with a factor, by their numbers.
        floats: Integers as floats, by their numbers.
    """

    def __init__(
        self,
        program: Program,
        known: dict[int, Any],
        ranges: Sequence[Range],
        uniform: Collection[int],
    ):
        self.program, self.known, self.like = program, known, known[0]
        self.scaled: dict[int, Scaled] = {}
        self.floats: dict[int, Any] = {}
        self.same = program.uniform(uniform)
        known_ranges = [*ranges, *[None] * (program.given - len(ranges))]
        self.ranges = program.ranges(known_ranges)

    def read(self, place: int | Number) -> Any:
        """Returns a value as a tile."""
        if isinstance(place, Number):
            return constant(place.value, place.dtype, self.like)
        if place in self.known:
            return self.known[place]
        if place in self.scaled:
            made = self.scaled[place].product
        else:
            at = place - self.program.given
            made = self.as_written(at, self.program.lines[at])
        return self.known.setdefault(place, made)

    def with_factor(self, place: int | Number) -> Scaled:
        """Returns a value with its factor."""
        there = None if isinstance(place, Number) else self.scaled.get(place)
        return there or Scaled(self.read(place))

    def operands(self, line: Line) -> list[Operand]:
        """Returns an equation's operands with their factors."""
        return [self._operand(x) for x in line.ins] if line.floats else []

    def _operand(self, place: int | Number) -> Operand:
        if isinstance(place, Number):
            value = constant(place.value, place.dtype, self.like)
            return Operand(Scaled(value), float(place.value), True)
        value = self.scaled.get(place) or Scaled(self.known[place])
        return Operand(value, None, place in self.same, place, self._divisor(place))

    def _divisor(self, place: int) -> int | None:
        """Which value a quotient is divided by; None of others."""
        at = place - self.program.given
        line = self.program.lines[at] if at >= 0 else None
        if line is None or line.name != "div" or isinstance(line.ins[1], Number):
            return None
        return line.ins[1]

    def as_written(self, at: int, line: Line) -> Any:
        """Returns an equation's result."""
        ins, decides = [self.read(x) for x in line.ins], at in self.program.decisive
        if is_small(line, self.ranges):
            made = small_to_float(ins[0])
        elif line.name == "div" and not decides and line.floats and (
            line.ins[1] in self.same
        ):  # fmt: skip
            made = by_one_divisor(*ins)
        elif not decides and line.floats and line.name in FAST:
            made = FAST[line.name](ins, line)
        else:
            made = COMPUTE[line.name](ins, line)
        return made if line.name in EXACT else rounded(made, line.out)

    def as_float(self, place: int | Number) -> Any:
        """Returns a small integer as a float, from the floats that it is made of."""
        if isinstance(place, Number):
            return constant(float(place.value), "float32", self.like)
        if place not in self.floats:
            self.floats[place] = self._as_float(place)
        return self.floats[place]

    def _as_float(self, place: int) -> Any:
        if not self.is_whole(place):
            return small_to_float(self.read(place))
        line = self.program.lines[place - self.program.given]
        ins = [self.as_float(x) for x in line.ins]
        return COMPUTE[line.name](ins, replace(line, dtypes=("float32",) * len(ins)))

    def is_whole(self, place: int) -> bool:
        """Whether floats may compute a value: an integer of small integers."""
        at = place - self.program.given
        line = self.program.lines[at] if at >= 0 else None
        if line is None or line.name not in WHOLE or line.out != "int32":
            return False
        ends = [range_of(x, self.ranges) for x in (place, *line.ins)]
        return all(x is not None and is_small_range(x) for x in ends)


def _contracted(run: _Evaluation, at: int, product: int) -> Any:
    """A sum and one of its products, rounded once."""
    first = run.program.given + product
    ins = run.program.lines[at].ins
    other = ins[1] if ins[0] == first else ins[0]
    factors = [run.read(x) for x in run.program.lines[product].ins]
    return fused(*factors, run.read(other))


def looked_up(table: Any, index: Any, dtype: str) -> Any:
    """Returns numbers of a table in global memory, as a program takes them.

    Args:
        table: int64: the address of the first number, float32 for floats and int32.
        index: A tile of int32.
        dtype: The numbers' dtype in the program.
    """
    letter, kind = ("f", ir.F32Type.get()) if dtype in FLOATS else (
        "r", ir.IntegerType.get_signless(32)
    )  # fmt: skip
    text = (
        "{ .reg .b64 a; mad.wide.s32 a, $1, 4, $2; "
        f"ld.global.nc.{letter.replace('r', 'b')}32 $0, [a]; }}"
    )
    load = lambda x: llvm.inline_asm(kind, [x, table], text, f"={letter},r,l")
    found = mapped(functools.partial(by_number, load, kind), index)
    return as_dtype(found, dtype)


def as_dtype(tile: Any, dtype: str) -> Any:
    """Returns numbers as a program takes them: int32 stand for bool."""
    return converted(tile, "int32", "bool") if dtype == "bool" else tile
