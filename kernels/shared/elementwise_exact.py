"""Elementwise functions as XLA computes them on a GPU, partly by NVIDIA's libdevice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as library

from rewriter.kernels.shared.elementwise import FLOATS, Line, Number
from rewriter.kernels.shared.register_tiles import (
    filled,
    instruction,
    mapped,
    plus,
    rounded,
    selected,
    with_type,
)


def _arithmetic(float_op: Any, integer_op: Any) -> Callable[..., Any]:
    def run(ins: Sequence[Any], line: Line) -> Any:
        return mapped(float_op if line.floats else integer_op, *ins)

    return run


def _of_library(name: str) -> Callable[..., Any]:
    op = getattr(library, name)
    return lambda ins, line: mapped(lambda *x: op(*x), *ins)


def _compare(float_kind: str, signed: str, unsigned: str) -> Callable[..., Any]:
    def run(ins: Sequence[Any], line: Line) -> Any:
        if line.floats:
            kind = getattr(arith.CmpFPredicate, float_kind)
            return mapped(lambda x, y: arith.cmpf(kind, x, y), *ins)
        kind = getattr(arith.CmpIPredicate, signed if line.signed else unsigned)
        return mapped(lambda x, y: arith.cmpi(kind, x, y), *ins)

    return run


def _extreme(name: str) -> Callable[..., Any]:
    signed, unsigned, of_bool = {
        "max": (arith.maxsi, arith.maxui, arith.ori),
        "min": (arith.minsi, arith.minui, arith.andi),
    }[name]

    def run(ins: Sequence[Any], line: Line) -> Any:
        if line.floats:
            return instruction(f"{name}.NaN.f32")(*ins)
        if line.dtypes[0] == "bool":
            return mapped(of_bool, *ins)
        return mapped(signed if line.signed else unsigned, *ins)

    return run


def _negated(ins: Sequence[Any], line: Line) -> Any:
    (x,) = ins
    if line.floats:
        return mapped(arith.negf, x)
    return mapped(arith.subi, filled(x, 0, line.dtypes[0]), x)


def _absolute(ins: Sequence[Any], line: Line) -> Any:
    (x,) = ins
    if line.floats:
        return instruction("abs.f32")(x)
    return mapped(library.absi, x) if line.signed else x


def _sign(ins: Sequence[Any], line: Line) -> Any:
    (x,), dtype = ins, line.dtypes[0]
    zero, one = filled(x, 0, dtype), filled(x, 1, dtype)
    above = COMPUTE["gt"]([x, zero], line)
    below = COMPUTE["lt"]([x, zero], line)
    return selected(above, one, selected(below, _negated([one], line), x))


def _power(ins: Sequence[Any], line: Line) -> Any:
    x, y = ins
    if line.dtypes[1] in ("int32", "uint32"):
        y = converted(y, line.dtypes[1], "float32")
    return mapped(library.powf, x, y)


def _integer_power(ins: Sequence[Any], line: Line) -> Any:
    (x,), y = ins, line.params["y"]
    multiply = arith.mulf if line.floats else arith.muli
    if y == 0:
        return filled(x, 1, line.dtypes[0])
    left, made = abs(y), None
    while left:
        if left & 1:
            made = x if made is None else mapped(multiply, made, x)
        left >>= 1
        x = mapped(multiply, x, x) if left else x
    return made if y > 0 else mapped(arith.divf, filled(x, 1.0), made)


def _divided(ins: Sequence[Any], line: Line) -> Any:
    if line.floats:
        return mapped(arith.divf, *ins)
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
        return mapped(op, x, y)
    zero, one = filled(x, 0, dtype), filled(x, 1, dtype)
    none = COMPUTE["eq"]([y, zero], line)
    other = x if by_zero is None else filled(x, by_zero % (1 << 32), "uint32")
    if not line.signed:
        return selected(none, other, mapped(op, x, selected(none, one, y)))
    turned = COMPUTE["eq"]([y, filled(x, -1, dtype)], line)
    safe = selected(mapped(arith.ori, none, turned), one, y)
    by_minus_one = zero if by_zero is None else _negated([x], line)
    return selected(none, other, selected(turned, by_minus_one, mapped(op, x, safe)))


def _known(line: Line) -> int | None:
    """The second operand, if it is known while tracing."""
    other = line.ins[1]
    return int(other.value) if isinstance(other, Number) else None


def _shift(op: Any, keeps_sign: bool) -> Callable[..., Any]:
    """Shifts, by 32 bits and more as XLA defines it."""

    def run(ins: Sequence[Any], line: Line) -> Any:
        x, y = ins
        known = _known(line)
        if known is not None and 0 <= known < 32:
            return mapped(op, x, y)
        most, zero = filled(x, 31, "uint32"), filled(x, 0, "int32")
        under = arith.CmpIPredicate.ule
        inside = mapped(lambda a, b: arith.cmpi(under, a, b), y, most)
        moved = mapped(op, x, selected(inside, y, most if keeps_sign else zero))
        return moved if keeps_sign else selected(inside, moved, zero)

    return run


def _not(ins: Sequence[Any], line: Line) -> Any:
    (x,), dtype = ins, line.dtypes[0]
    every = 1 if dtype == "bool" else -1
    return mapped(
        arith.xori, x, filled(x, every, "bool" if dtype == "bool" else "int32")
    )


def _finite(ins: Sequence[Any], line: Line) -> Any:
    (x,) = ins
    size = instruction("abs.f32")(x)
    below = arith.CmpFPredicate.OLT
    return mapped(lambda a, b: arith.cmpf(below, a, b), size, filled(x, math.inf))


def _clamped(ins: Sequence[Any], line: Line) -> Any:
    low, x, high = ins
    return COMPUTE["min"]([COMPUTE["max"]([x, low], line), high], line)


def _round(ins: Sequence[Any], line: Line) -> Any:
    even = int(line.params["rounding_method"]) == 1
    return mapped(library.roundeven if even else library.round, *ins)


def _to_dtype(ins: Sequence[Any], line: Line) -> Any:
    return converted(ins[0], line.dtypes[0], line.out)


def converted(x: Any, old: str, new: str) -> Any:
    """A tile of another dtype. Rounding to 16 bits follows where it is needed."""
    f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
    if new == "bool" and old != "bool":
        if old in FLOATS:
            other = arith.CmpFPredicate.UNE
            return mapped(lambda a, b: arith.cmpf(other, a, b), x, filled(x, 0.0))
        other = arith.CmpIPredicate.ne
        return mapped(lambda a, b: arith.cmpi(other, a, b), x, filled(x, 0, "int32"))
    if old in FLOATS:
        if new in FLOATS:
            return x
        sign = "s" if new == "int32" else "u"
        return instruction(f"cvt.rzi.{sign}32.f32", result="r")(x)
    if new in FLOATS:
        return with_type(x, f32, arith.sitofp if old == "int32" else arith.uitofp)
    return with_type(x, i32, arith.extui) if old == "bool" and new != "bool" else x


def _less_precise(ins: Sequence[Any], line: Line) -> Any:
    narrow = line.params["mantissa_bits"] == 7
    return rounded(ins[0], "bfloat16") if narrow else ins[0]


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
    "logistic": lambda ins, line: mapped(
        arith.divf,
        filled(ins[0], 1.0),
        plus(mapped(library.exp, mapped(arith.negf, ins[0])), 1.0),
    ),
    "lt": _compare("OLT", "slt", "ult"),
    "max": _extreme("max"),
    "min": _extreme("min"),
    "mul": _arithmetic(arith.mulf, arith.muli),
    "ne": _compare("UNE", "ne", "ne"),
    "neg": _negated,
    "not": _not,
    "one_minus_square": lambda ins, line: plus(
        mapped(arith.negf, mapped(arith.mulf, ins[0], ins[0])), 1.0
    ),
    "or": _arithmetic(None, arith.ori),
    "pow": _power,
    "reduce_precision": _less_precise,
    "rem": _remainder,
    "round": _round,
    "select_n": lambda ins, line: selected(ins[0], ins[2], ins[1]),
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
