"""Computes elementwise functions of tiles in a warpgroup's registers.

A function is a program of scalars, see `rewriter.kernels.shared.elementwise`. What its
comparisons and roundings depend on is computed as XLA does, and the rest by the
hardware's instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.shared.elementwise import FLOATS, Number, Program, Range
from rewriter.kernels.shared.elementwise_exact import COMPUTE, converted
from rewriter.kernels.shared.elementwise_fast import (
    FAST,
    by_one_divisor,
    is_small,
    small_to_float,
)
from rewriter.kernels.shared.register_tiles import (
    by_number,
    constant,
    fused,
    mapped,
    rounded,
)

EXACT = frozenset({
    "abs", "ceil", "clamp", "floor", "max", "min", "neg", "round", "select_n", "sign",
})  # fmt: skip
"""Primitives that give numbers of their operands' dtype without rounding."""


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
    like, known = given[0], dict(enumerate(given))
    products = program.contracted if contract else {}
    same = program.uniform(uniform)
    ranges = program.ranges([*ranges, *[None] * (len(given) - len(ranges))])

    def read(place: int | Number) -> Any:
        if isinstance(place, Number):
            return constant(place.value, place.dtype, like)
        return known[place]

    for at, line in enumerate(program.lines):
        if at in program.needed and at not in products.values():
            if at in products:
                product, more = program.lines[products[at]], line.ins
                first = program.given + products[at]
                other = more[1] if more[0] == first else more[0]
                factors = [read(x) for x in product.ins]
                known[program.given + at] = fused(*factors, read(other))
                continue
            ins = [read(x) for x in line.ins]
            if is_small(line, ranges):
                made = small_to_float(ins[0])
            elif (
                line.name == "div"
                and at not in program.decisive
                and (line.floats and line.ins[1] in same)
            ):
                made = by_one_divisor(*ins)
            elif at not in program.decisive and line.floats and line.name in FAST:
                made = FAST[line.name](ins, line)
            else:
                made = COMPUTE[line.name](ins, line)
            made = made if line.name in EXACT else rounded(made, line.out)
            known[program.given + at] = made
    return [read(x) for x in program.outs]


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
