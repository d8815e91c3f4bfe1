"""Computes elementwise functions of tiles in a warpgroup's registers.

A function is a program of scalars, see `rewriter.kernels.shared.elementwise`. It runs
on eight columns of a tile at a time, so that what it keeps in between takes few
registers. Exponentials, logarithms and quotients are the hardware's, to an error of 2
** -22: of quotients and exponentials relative, of logarithms relative or absolute, by
which is larger. What comparisons depend on, and what is less common, is computed by
NVIDIA's library, libdevice, as XLA does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as library

from rewriter.kernels.shared.elementwise import (
    FLOATS,
    Line,
    Number,
    Program,
    Range,
)

LOG2E = math.log2(math.e)

EXACT = frozenset({
    "abs", "ceil", "clamp", "floor", "max", "min", "neg", "round", "select_n", "sign",
})  # fmt: skip
"""Primitives that give numbers of their operands' dtype without rounding."""


def evaluate(
    program: Program,
    given: Sequence[Any],
    ranges: Sequence[Range] = (),
    uniform: Collection[int] = (),
) -> list[Any]:
    """Returns what a program gives for each number of some tiles.

    Args:
        program: The function.
        given: Tiles of one shape and layout, `mgpu.FragmentedArray`. Floats of any
            dtype are held as float32, bool as one bit.
        ranges: The ranges of those that are integers.
        uniform: The indices of those that are the same for all numbers.

    Returns:
        Tiles of that kind.
    """
    like, known = given[0], dict(enumerate(given))
    same = program.uniform(uniform)
    ranges = program.ranges([*ranges, *[None] * (len(given) - len(ranges))])

    def read(place: int | Number) -> Any:
        if isinstance(place, Number):
            return constant(place.value, place.dtype, like)
        return known[place]

    for at, line in enumerate(program.lines):
        if at in program.needed:
            ins = [read(x) for x in line.ins]
            if _is_small(line, ranges):
                made = _small_to_float(ins[0])
            elif line.name == "div" and at not in program.decisive and (
                line.floats and line.ins[1] in same
            ):
                made = _by_one_divisor(*ins)
            elif at not in program.decisive and line.floats and line.name in FAST:
                made = FAST[line.name](ins, line)
            else:
                made = COMPUTE[line.name](ins, line)
            made = made if line.name in EXACT else _rounded(made, line.out)
            known[program.given + at] = made
    return [read(x) for x in program.outs]


def moved(index: Any, by: int) -> Any:
    """Returns integers plus a constant, in a way that compilers do not see through.

    They would compute what is the same in every turn of a loop before it, for all
    columns of a tile, in half as many registers as the tile has.
    """
    return _instruction("add.s32", "r", "r")(index, _fill(index, by, "int32"))


SMALL = 1 << 22
"""Integers up to it become floats by two simple instructions."""


def _is_small(line: Line, ranges: Sequence[Range]) -> bool:
    """Whether a line converts small integers to floats."""
    if line.name != "convert_element_type" or line.out not in FLOATS:
        return False
    ends = ranges[line.ins[0]] if isinstance(line.ins[0], int) else None
    return ends is not None and ends[0] >= -SMALL and ends[1] <= SMALL


def _small_to_float(x: Any) -> Any:
    """Adds an integer to the last digits of a float, and takes away the float."""
    base = 3 << 22  # its last digit counts one
    bits = int(np.float32(base).view(np.int32))
    moved = _map(arith.addi, x, _fill(x, bits, "int32"))
    return _plus(_as(moved, ir.F32Type.get(), llvm.bitcast), -float(base))


def constant(value: Any, dtype: Any, like: Any) -> Any:
    """Returns a tile of one number, shaped as another tile."""
    dtype = str(jnp.dtype(dtype))
    number = np.asarray(value).astype(np.float32 if dtype in FLOATS else dtype).item()
    if dtype in FLOATS:
        scalar = mgpu.c(float(number), ir.F32Type.get())
    else:
        width = 1 if dtype == "bool" else 32
        number = number - (1 << 32) if number >= 1 << 31 else number
        kind = ir.IntegerType.get_signless(width)
        scalar = arith.constant(kind, ir.IntegerAttr.get(kind, int(number)))
    made = np.empty_like(like.registers)
    lanes = ir.VectorType(like.registers.flat[0].type).shape
    made[...] = vector.broadcast(ir.VectorType.get(lanes, scalar.type), scalar)
    return _tile(made, like)


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
    found = _map(functools.partial(_by_number, load, kind), index)
    return as_dtype(found, dtype)


def as_dtype(tile: Any, dtype: str) -> Any:
    """Returns numbers as a program takes them: int32 stand for bool."""
    return _converted(tile, "int32", "bool") if dtype == "bool" else tile


# -------------------------------------------------------------------- registers
def _tile(registers: np.ndarray, like: Any) -> Any:
    kind = ir.VectorType(registers.flat[0].type).element_type
    signed = False if isinstance(kind, ir.IntegerType) else None
    return mgpu.FragmentedArray(
        _registers=registers, _layout=like.layout, _is_signed=signed
    )


def _map(op: Callable[..., Any], *tiles: Any) -> Any:
    """Applies an operation to the registers of some tiles."""
    made = np.empty_like(tiles[0].registers)
    for at, first in np.ndenumerate(tiles[0].registers):
        made[at] = op(first, *(x.registers[at] for x in tiles[1:]))
    return _tile(made, tiles[0])


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _by_number(op: Callable[..., Any], kind: Any, *registers: Any) -> Any:
    """Applies an operation of numbers to registers that hold a few."""
    (lanes,) = ir.VectorType(registers[0].type).shape
    result = llvm.mlir_undef(ir.VectorType.get((lanes,), kind))
    for i in range(lanes):
        at = _i32(i)
        value = op(*(llvm.extractelement(x, at) for x in registers))
        result = llvm.insertelement(result, value, at)
    return result


def _instruction(name: str, kind: str = "f", result: str = "f") -> Callable[..., Any]:
    """Returns one PTX instruction as an operation of tiles."""
    types = {"f": ir.F32Type.get(), "r": ir.IntegerType.get_signless(32)}

    def run(*tiles: Any) -> Any:
        places = ", ".join(f"${i}" for i in range(len(tiles) + 1))
        letters = f"={result}" + f",{kind}" * len(tiles)
        one = lambda *x: llvm.inline_asm(
            types[result], list(x), f"{name} {places};", letters
        )
        return _map(functools.partial(_by_number, one, types[result]), *tiles)

    return run


def _as(tile: Any, kind: Any, op: Callable[..., Any]) -> Any:
    """Converts a tile's registers by an operation that takes the type of the result."""
    lanes = ir.VectorType(tile.registers.flat[0].type).shape
    return _map(lambda x: op(ir.VectorType.get(lanes, kind), x), tile)


def _rounded(tile: Any, dtype: str) -> Any:
    """Rounds float32 numbers to a float dtype; other dtypes stay."""
    kinds = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}
    if dtype not in kinds:
        return tile
    return tile.astype(kinds[dtype].get()).astype(ir.F32Type.get())


# ------------------------------------------------------------------- primitives
def _arithmetic(float_op: Any, integer_op: Any) -> Callable[..., Any]:
    def run(ins: Sequence[Any], line: Line) -> Any:
        return _map(float_op if line.floats else integer_op, *ins)

    return run


def _of_library(name: str) -> Callable[..., Any]:
    op = getattr(library, name)
    return lambda ins, line: _map(lambda *x: op(*x), *ins)


def _compare(float_kind: str, signed: str, unsigned: str) -> Callable[..., Any]:
    def run(ins: Sequence[Any], line: Line) -> Any:
        if line.floats:
            kind = getattr(arith.CmpFPredicate, float_kind)
            return _map(lambda x, y: arith.cmpf(kind, x, y), *ins)
        kind = getattr(arith.CmpIPredicate, signed if line.signed else unsigned)
        return _map(lambda x, y: arith.cmpi(kind, x, y), *ins)

    return run


def _extreme(name: str) -> Callable[..., Any]:
    signed, unsigned, of_bool = {
        "max": (arith.maxsi, arith.maxui, arith.ori),
        "min": (arith.minsi, arith.minui, arith.andi),
    }[name]

    def run(ins: Sequence[Any], line: Line) -> Any:
        if line.floats:
            return _instruction(f"{name}.NaN.f32")(*ins)
        if line.dtypes[0] == "bool":
            return _map(of_bool, *ins)
        return _map(signed if line.signed else unsigned, *ins)

    return run


def _fill(like: Any, value: float, dtype: str = "float32") -> Any:
    return constant(value, dtype, like)


def _negated(ins: Sequence[Any], line: Line) -> Any:
    (x,) = ins
    if line.floats:
        return _map(arith.negf, x)
    return _map(arith.subi, _fill(x, 0, line.dtypes[0]), x)


def _absolute(ins: Sequence[Any], line: Line) -> Any:
    (x,) = ins
    if line.floats:
        return _instruction("abs.f32")(x)
    return _map(library.absi, x) if line.signed else x


def _sign(ins: Sequence[Any], line: Line) -> Any:
    (x,), dtype = ins, line.dtypes[0]
    zero, one = _fill(x, 0, dtype), _fill(x, 1, dtype)
    above = COMPUTE["gt"]([x, zero], line)
    below = COMPUTE["lt"]([x, zero], line)
    return _select(above, one, _select(below, _negated([one], line), x))


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return _map(arith.select, condition, yes, no)


def _exp2(x: Any) -> Any:
    return _instruction("ex2.approx.ftz.f32")(x)


def _times(x: Any, factor: float) -> Any:
    return _map(arith.mulf, x, _fill(x, factor))


def _plus(x: Any, addend: float) -> Any:
    return _map(arith.addf, x, _fill(x, addend))


def _inverse(x: Any) -> Any:
    return _instruction("rcp.approx.ftz.f32")(x)


NEAR = 0.02
"""Below it a few terms of a series are more exact than a difference."""


def _by_series(x: Any, variable: Any, terms: Sequence[float], far: Any) -> Any:
    """Returns x times a polynomial for x near 0, and `far` elsewhere."""
    near = _fill(x, terms[-1])
    for term in reversed(terms[:-1]):
        near = _fused(near, variable, _fill(x, term))
    size = _instruction("abs.f32")(x)
    below = arith.CmpFPredicate.OLT
    close = _map(lambda a, b: arith.cmpf(below, a, b), size, _fill(x, NEAR))
    return _select(close, _map(arith.mulf, near, x), far)


def _fused(x: Any, y: Any, z: Any) -> Any:
    """Returns x * y + z, rounded once."""
    return _instruction("fma.rn.f32")(x, y, z)


def _tanh(x: Any) -> Any:
    """1 - 2 / (exp(2x) + 1)."""
    far = _inverse(_plus(_exp2(_times(x, 2 * LOG2E)), 1.0))
    far = _fused(far, _fill(x, -2.0), _fill(x, 1.0))
    return _by_series(x, _map(arith.mulf, x, x), (1.0, -1 / 3), far)


def _log(x: Any) -> Any:
    return _times(_instruction("lg2.approx.f32")(x), 1 / LOG2E)


def _log1p(x: Any) -> Any:
    far = _log(_plus(x, 1.0))
    return _by_series(x, x, (1.0, -1 / 2, 1 / 3, -1 / 4), far)


def _by_one_divisor(x: Any, y: Any) -> Any:
    """A quotient by what is the same for a whole tile: compilers invert it once."""
    size, below = _instruction("abs.f32")(y), arith.CmpFPredicate.OLT
    tiny = _map(lambda a, b: arith.cmpf(below, a, b), size, _fill(y, 2.0**-100))
    scale = _select(tiny, _fill(y, 2.0**64), _fill(y, 1.0))
    one, scaled = _fill(y, 1.0), _map(arith.mulf, y, scale)
    inverse = _instruction("div.full.f32")(one, scaled)
    return _map(arith.mulf, _map(arith.mulf, x, scale), inverse)


def _quotient(ins: Sequence[Any], line: Line) -> Any:
    """By a constant, a product; otherwise the hardware's quotient."""
    x, y = ins
    if isinstance(line.ins[1], Number):
        inverse = np.float32(1) / np.float32(line.ins[1].value)
        if np.isfinite(inverse) and abs(inverse) >= np.finfo(np.float32).tiny:
            return _times(x, float(inverse))
    return _instruction("div.full.f32")(x, y)


def _power(ins: Sequence[Any], line: Line) -> Any:
    x, y = ins
    if line.dtypes[1] in ("int32", "uint32"):
        y = _converted(y, line.dtypes[1], "float32")
    return _map(library.powf, x, y)


def _integer_power(ins: Sequence[Any], line: Line) -> Any:
    (x,), y = ins, line.params["y"]
    multiply = arith.mulf if line.floats else arith.muli
    if y == 0:
        return _fill(x, 1, line.dtypes[0])
    left, made = abs(y), None
    while left:
        if left & 1:
            made = x if made is None else _map(multiply, made, x)
        left >>= 1
        x = _map(multiply, x, x) if left else x
    return made if y > 0 else _map(arith.divf, _fill(x, 1.0), made)


def _divided(ins: Sequence[Any], line: Line) -> Any:
    if line.floats:
        return _map(arith.divf, *ins)
    return _whole(ins, line, arith.divsi, arith.divui, -1)


def _remainder(ins: Sequence[Any], line: Line) -> Any:
    return _whole(ins, line, arith.remsi, arith.remui, None)


def _whole(
    ins: Sequence[Any], line: Line, signed: Any, unsigned: Any, by_zero: Any
) -> Any:
    """A quotient or remainder of integers, as XLA defines it for 0 and -1.

    Args:
        by_zero: The quotient by zero; None for the dividend.
    """
    (x, y), dtype = ins, line.dtypes[0]
    op = signed if line.signed else unsigned
    if _known(line) not in (None, 0, -1):
        return _map(op, x, y)
    zero, one = _fill(x, 0, dtype), _fill(x, 1, dtype)
    none = COMPUTE["eq"]([y, zero], line)
    other = x if by_zero is None else _fill(x, by_zero % (1 << 32), "uint32")
    if not line.signed:
        return _select(none, other, _map(op, x, _select(none, one, y)))
    turned = COMPUTE["eq"]([y, _fill(x, -1, dtype)], line)
    safe = _select(_map(arith.ori, none, turned), one, y)
    by_minus_one = zero if by_zero is None else _negated([x], line)
    return _select(none, other, _select(turned, by_minus_one, _map(op, x, safe)))


def _known(line: Line) -> int | None:
    """The second operand, if it is known while tracing."""
    other = line.ins[1]
    return int(other.value) if isinstance(other, Number) else None


def _shift(op: Any, filled: bool) -> Callable[..., Any]:
    def run(ins: Sequence[Any], line: Line) -> Any:
        x, y = ins
        known = _known(line)
        if known is not None and 0 <= known < 32:
            return _map(op, x, y)
        most = _fill(x, 31, "uint32")
        under = arith.CmpIPredicate.ule
        inside = _map(lambda a, b: arith.cmpi(under, a, b), y, most)
        moved = _map(
            op, x, _select(inside, y, most if filled else _fill(x, 0, "int32"))
        )
        return moved if filled else _select(inside, moved, _fill(x, 0, "int32"))

    return run


def _not(ins: Sequence[Any], line: Line) -> Any:
    (x,), dtype = ins, line.dtypes[0]
    every = 1 if dtype == "bool" else -1
    return _map(arith.xori, x, _fill(x, every, "bool" if dtype == "bool" else "int32"))


def _finite(ins: Sequence[Any], line: Line) -> Any:
    (x,) = ins
    size = _instruction("abs.f32")(x)
    below = arith.CmpFPredicate.OLT
    return _map(lambda a, b: arith.cmpf(below, a, b), size, _fill(x, math.inf))


def _clamped(ins: Sequence[Any], line: Line) -> Any:
    low, x, high = ins
    return COMPUTE["min"]([COMPUTE["max"]([x, low], line), high], line)


def _round(ins: Sequence[Any], line: Line) -> Any:
    even = int(line.params["rounding_method"]) == 1
    return _map(library.roundeven if even else library.round, *ins)


def _to_dtype(ins: Sequence[Any], line: Line) -> Any:
    return _converted(ins[0], line.dtypes[0], line.out)


def _converted(x: Any, old: str, new: str) -> Any:
    """A tile of another dtype. Rounding to 16 bits follows where it is needed."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    if new == "bool" and old != "bool":
        if old in FLOATS:
            other = arith.CmpFPredicate.UNE
            return _map(lambda a, b: arith.cmpf(other, a, b), x, _fill(x, 0.0))
        other = arith.CmpIPredicate.ne
        return _map(lambda a, b: arith.cmpi(other, a, b), x, _fill(x, 0, "int32"))
    if old in FLOATS:
        if new in FLOATS:
            return x
        sign = "s" if new == "int32" else "u"
        return _instruction(f"cvt.rzi.{sign}32.f32", result="r")(x)
    if new in FLOATS:
        return _as(x, f32, arith.sitofp if old == "int32" else arith.uitofp)
    return _as(x, i32, arith.extui) if old == "bool" and new != "bool" else x


def _less_precise(ins: Sequence[Any], line: Line) -> Any:
    narrow = line.params["mantissa_bits"] == 7
    return _rounded(ins[0], "bfloat16") if narrow else ins[0]


COMPUTE: Mapping[str, Callable[[Sequence[Any], Line], Any]] = {
    "abs": _absolute,
    "add": _arithmetic(arith.addf, arith.addi),
    "add_any": _arithmetic(arith.addf, arith.addi),
    "and": _arithmetic(None, arith.andi),
    "ceil": _of_library("ceil"),
    "clamp": _clamped,
    "convert_element_type": _to_dtype,
    "div": _divided,
    "eq": _compare("OEQ", "eq", "eq"),
    "floor": _of_library("floor"),
    "ge": _compare("OGE", "sge", "uge"),
    "gt": _compare("OGT", "sgt", "ugt"),
    "integer_pow": _integer_power,
    "is_finite": _finite,
    "le": _compare("OLE", "sle", "ule"),
    "logistic": lambda ins, line: _map(
        arith.divf,
        _fill(ins[0], 1.0),
        _plus(_map(library.exp, _map(arith.negf, ins[0])), 1.0),
    ),
    "lt": _compare("OLT", "slt", "ult"),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "mul": _arithmetic(arith.mulf, arith.muli),
    "ne": _compare("UNE", "ne", "ne"),
    "neg": _negated,
    "not": _not,
    "one_minus_square": lambda ins, line: _plus(
        _map(arith.negf, _map(arith.mulf, ins[0], ins[0])), 1.0
    ),
    "or": _arithmetic(None, arith.ori),
    "pow": _power,
    "reduce_precision": _less_precise,
    "rem": _remainder,
    "round": _round,
    "select_n": lambda ins, line: _select(ins[0], ins[2], ins[1]),
    "shift_left": _shift(arith.shli, False),
    "shift_right_arithmetic": _shift(arith.shrsi, True),
    "shift_right_logical": _shift(arith.shrui, False),
    "sign": _sign,
    "square": lambda ins, line: _arithmetic(arith.mulf, arith.muli)(
        [ins[0], ins[0]], line
    ),
    "sub": _arithmetic(arith.subf, arith.subi),
    "xor": _arithmetic(None, arith.xori),
    **{
        name: _of_library(name)
        for name in (
            "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos",
            "cosh", "erf", "erfc", "exp", "exp2", "expm1", "log", "log1p", "rsqrt",
            "sin", "sinh", "sqrt", "tan", "tanh",
        )
    },
}  # fmt: skip
"""How each primitive of `elementwise.INSTRUCTIONS` is computed."""

FAST: Mapping[str, Callable[[Sequence[Any], Line], Any]] = {
    "div": _quotient,
    "exp": lambda ins, line: _exp2(_times(ins[0], LOG2E)),
    "exp2": lambda ins, line: _exp2(ins[0]),
    "log": lambda ins, line: _log(ins[0]),
    "log1p": lambda ins, line: _log1p(ins[0]),
    "logistic": lambda ins, line: _inverse(_plus(_exp2(_times(ins[0], -LOG2E)), 1.0)),
    "sqrt": lambda ins, line: _instruction("sqrt.approx.f32")(ins[0]),
    "tanh": lambda ins, line: _tanh(ins[0]),
}
"""Primitives of floats that the hardware computes where nothing is decided by them."""
