"""Widens stored numbers in registers, in the order in which tensor cores read them.

Each function emits instructions for one thread. A word holds the numbers of some
columns in one row of the matrix. Tensor cores read two rows of a column from a
register, so two words of neighbouring rows are joined, number by number.

Sources: PTX ISA, `wgmma` with the first operand in registers. A float whose last digit
counts one holds a whole number in its lowest bits: 128 in bfloat16, 1024 in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.ops.cost import FOUR_BITS

SHORT = {"bfloat16": "bf16", "float16": "f16"}
"""PTX's names of the dtypes of products."""

ANDED_OR, ANDED_XOR = 0xEA, 0x6A
"""Tables of `lop3`: (a & b) | c, and (a & b) ^ c."""

VERBS = {"*": "mul", "-": "sub", "+": "add"}


def i32() -> Any:
    """Returns the type of a register."""
    return ir.IntegerType.get_signless(32)


def f32() -> Any:
    """Returns the type of a float."""
    return ir.F32Type.get()


def emit(text: str, given: Sequence[Any], result: Any = None, effects: bool = False):
    """Returns what an instruction computes.

    Args:
        text: PTX, where ``$0`` is the result and ``$1`` the first argument.
        given: The arguments: registers, floats or 64-bit addresses.
        result: The result's type; a register by default.
        effects: Whether it must stay where it is, as loads must.
    """
    result = i32() if result is None else result
    letters = [_letter(result), *(_letter(x.type) for x in given)]
    constraints = ",".join(["=" + letters[0], *letters[1:]])
    return llvm.inline_asm(
        result, list(given), text, constraints, has_side_effects=effects
    )


def _letter(kind: Any) -> str:
    """The constraint of a type."""
    if isinstance(kind, ir.F32Type):
        return "f"
    if isinstance(kind, ir.IntegerType) and kind.width in (16, 64):
        return {16: "h", 64: "l"}[kind.width]
    return "r"


def constant(value: int) -> Any:
    """Returns a register that holds a constant."""
    return mgpu.utils.c(value, i32())


def pair(values: Iterable[Any]) -> Any:
    """Returns two float32 as a register of a product."""
    made = llvm.mlir_undef(ir.VectorType.get((2,), f32()))
    for e, value in enumerate(values):
        made = llvm.insertelement(made, value, constant(e))
    return made


# ------------------------------------------------------------------- numbers to floats
def neighbours(stored: str, dtype: str, word: Any) -> Any:
    """Returns the first two numbers of a word, as two floats in a register.

    Args:
        stored: The dtype of the numbers.
        dtype: That of the floats: bfloat16 or float16.
        word: The word.
    """
    if stored in FOUR_BITS:
        joined = emit("{ .reg .b32 x; shl.b32 x, $1, 12; or.b32 $0, x, $1; }", [word])
        return _of_nibbles(stored, dtype, joined)
    return numbers(stored, dtype, word, word, 0, 1)


def numbers(
    stored: str, dtype: str, low: Any, high: Any, at: int, above: int | None = None
) -> Any:
    """Returns the numbers of a column in two rows, as two floats in a register.

    Args:
        stored: The dtype of the words' numbers.
        dtype: That of the floats: bfloat16 or float16.
        low: The word of the first row.
        high: That of the second row.
        at: The column among those of the word.
        above: That of the second word, if it is another one.
    """
    if stored in FOUR_BITS:
        return _of_four_bits(stored, dtype, low, high, at)
    above = 4 + (at if above is None else above)
    if stored.startswith("float8"):
        return _of_floats(stored, dtype, low, high, f"0x00{above}{at}")
    joined = emit(f"prmt.b32 $0, $1, $2, 0x{above}{above}{at}{at};", [low, high])
    return _of_eight_bits(stored == "int8", dtype, joined)


def alternate(stored: str, dtype: str, word: Any, first: int) -> Any:
    """Returns a number of a word and the one half a word behind it, in a register.

    Args:
        stored: The dtype of the word's numbers.
        dtype: That of the two floats: bfloat16 or float16.
        word: The word.
        first: The first number, of the first half.
    """
    if stored.startswith("float8"):
        return _of_floats(stored, dtype, word, word, f"0x00{first + 2}{first}")
    bits = 4 if stored in FOUR_BITS else 8
    if bits == 4 and first % 2 and dtype == "float16" and stored != "float4_e2m1fn":
        if first > 1:
            word = emit(f"shr.u32 $0, $1, {bits * (first - 1)};", [word])
        return _of_upper_nibbles(stored, word)
    if first:
        word = emit(f"shr.u32 $0, $1, {bits * first};", [word])
    if bits == 4:
        return _of_nibbles(stored, dtype, word)
    return _of_eight_bits(stored == "int8", dtype, word)


def _of_upper_nibbles(stored: str, word: Any) -> Any:
    """Float16 of the upper numbers of two bytes: the first byte of either half.

    They need no shift, as 16 times themselves: 1024 + 16 x is exact, and so is x, which
    one multiply-add gives.
    """
    signed = stored == "int4"
    base = 0x64806480 if signed else 0x64006400
    whole = _masked(word, "0x00f000f0", hex(base), ANDED_XOR)
    # (1024 + 16 x) / 16 - 64, and with a sign 128 / 16 less
    less = constant(0xD480D480 if signed else 0xD400D400)
    given = [whole, constant(0x2C002C00), less]
    return emit("fma.rn.f16x2 $0, $1, $2, $3;", given)


def looked_up(table: Any, word: Any, at: int) -> Any:
    """Returns the float32 that a word's number of four bits stands for.

    Lanes read each other's register: shared memory needs an address for each number.

    Args:
        table: A register that has float l modulo 16 of the codebook in lane l.
        word: The word.
        at: The place of the number.
    """
    lane = word  # its lowest five bits count, of which the fifth changes nothing
    if at:
        lane = emit(f"shr.u32 $0, $1, {4 * at};", [word])
    text = "{ .reg .b32 x; shfl.sync.idx.b32 x, $1, $2, 31, -1; mov.b32 $0, x; }"
    return emit(text, [table, lane], f32(), True)


def _of_eight_bits(signed: bool, dtype: str, joined: Any) -> Any:
    if dtype == "float16":
        base = "0x64806480" if signed else "0x64006400"
        whole = _masked(joined, "0x00ff00ff", base, ANDED_XOR)
        return emit("sub.rn.f16x2 $0, $1, $2;", [whole, constant(int(base, 16))])
    # 128 + the lowest seven bits, and 128 or 256 by the highest bit. One operation on
    # bits less and two multiply-adds more took 62 instead of 56 µs on an H200.
    most = _masked(joined, "0x007f007f", "0x43004300", ANDED_OR)
    last = _masked(joined, "0x00800080", "0x43004300", ANDED_OR)
    if not signed:  # 128 or 0
        last = emit("sub.rn.bf16x2 $0, $1, $2;", [constant(0x43804380), last])
    return emit("sub.rn.bf16x2 $0, $1, $2;", [most, last])


def _of_four_bits(stored: str, dtype: str, low: Any, high: Any, at: int) -> Any:
    byte, odd = divmod(at, 2)
    order = f"0x{4 + byte}{4 + byte}{byte}{byte}"  # the same for both of a byte
    joined = emit(f"prmt.b32 $0, $1, $2, {order};", [low, high])
    if odd and dtype == "float16" and stored != "float4_e2m1fn":
        return _of_upper_nibbles(stored, joined)
    if odd:
        joined = emit("shr.u32 $0, $1, 4;", [joined])
    return _of_nibbles(stored, dtype, joined)


def _of_nibbles(stored: str, dtype: str, joined: Any) -> Any:
    if stored == "float4_e2m1fn":
        return _of_floats_of_four_bits(dtype, joined)
    base = 0x43004300 if dtype == "bfloat16" else 0x64006400
    base |= 0x00080008 if stored == "int4" else 0
    whole = _masked(joined, "0x000f000f", hex(base), ANDED_XOR)
    kind = SHORT[dtype]
    return emit(f"sub.rn.{kind}x2 $0, $1, $2;", [whole, constant(base)])


def _of_floats_of_four_bits(dtype: str, joined: Any) -> Any:
    """Puts sign, exponent and digit where the dtype has them, and mends the exponent.

    A product with a power of two also makes the numbers without a leading one.
    """
    shift, rest, power = 6, "0x01c001c0", 0x7E807E80
    if dtype == "float16":
        shift, rest, power = 9, "0x0e000e00", 0x74007400
    sign = emit("shl.b32 $0, $1, 12;", [joined])
    digits = emit(f"shl.b32 $0, $1, {shift};", [joined])
    sign = emit("and.b32 $0, $1, 0x80008000;", [sign])
    bits = emit(f"lop3.b32 $0, $1, {rest}, $2, {hex(ANDED_XOR)};", [digits, sign])
    return emit(f"mul.rn.{SHORT[dtype]}x2 $0, $1, $2;", [bits, constant(power)])


def _of_floats(stored: str, dtype: str, low: Any, high: Any, order: str) -> Any:
    kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[stored]
    text = (
        "{ .reg .b32 joined; .reg .b16 both, none;\n"
        f"prmt.b32 joined, $1, $2, {order};\n"
        "mov.b32 {both, none}, joined;\n"
        f"cvt.rn.f16x2.{kind}x2 $0, both; }}"
    )
    halves = emit(text, [low, high])
    if dtype == "float16":
        return halves
    return packed(dtype, *floats("float16", halves))


def _masked(word: Any, mask: str, base: str, table: int) -> Any:
    return emit(f"lop3.b32 $0, $1, {mask}, {base}, {hex(table)};", [word])


def floats(dtype: str, pair: Any) -> tuple[Any, Any]:
    """Returns the two numbers of a register as float32."""
    if dtype == "bfloat16":
        parts = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"
        cast = "mov.b32 $0, $1;"
        first, second = (emit(cast, [emit(text, [pair])], f32()) for text in parts)
        return first, second
    text = "{{ .reg .b16 x, y; mov.b32 {{x, y}}, $1; cvt.f32.f16 $0, {}; }}"
    return emit(text.format("x"), [pair], f32()), emit(text.format("y"), [pair], f32())


def packed(dtype: str, first: Any, second: Any) -> Any:
    """Returns two float32 rounded to 16 bits, in a register."""
    return emit(f"cvt.rn.{SHORT[dtype]}x2.f32 $0, $1, $2;", [second, first])


# -------------------------------------------------------------------------- the steps
@dataclass(frozen=True)
class Steps:
    """Arrays that are joined to the numbers, see `rounding.InFloat32`.

    Attributes:
        steps: Signs, and what they join: the index of an array, a number, or a dtype.
        dtypes: The arrays' dtypes.
        dtype: That of the widened matrix.
    """

    steps: tuple[tuple[str, Any], ...]
    dtypes: tuple[str, ...]
    dtype: str

    @property
    def narrow(self) -> bool:
        """Whether each step rounds to the matrix's dtype, and joins numbers of it.

        Such steps take two numbers at once.
        """
        if any(x != self.dtype for x in self.dtypes):
            return False
        rounds = [*self.steps, ("round", self.dtype)]
        joins = [i for i, (sign, _) in enumerate(rounds) if sign != "round"]
        exact = all(
            float(np.asarray(x, jnp.dtype(self.dtype))) == x
            for sign, x in self.steps
            if sign != "round" and isinstance(x, float)
        )
        return exact and all(rounds[i + 1] == ("round", self.dtype) for i in joins)


def widened(pair: Any, steps: Steps, joined: Sequence[Any]) -> Any:
    """Returns a register of two numbers after the steps.

    Args:
        pair: The numbers, exactly, in the dtype of the steps; or two float32.
        steps: The steps.
        joined: For each array what `factors` gives for this column, or two numbers.
    """
    two = isinstance(pair, list)
    if two and (steps.narrow or not steps.steps):
        pair = packed(steps.dtype, *pair)
    if not steps.steps:
        return pair
    if steps.narrow:
        kind = SHORT[steps.dtype]
        for sign, what in steps.steps:
            if sign != "round":
                other = joined[what] if isinstance(what, int) else twice(what, steps)
                pair = emit(f"{VERBS[sign]}.rn.{kind}x2 $0, $1, $2;", [pair, other])
        return pair
    both = pair if two else list(floats(steps.dtype, pair))
    for sign, what in steps.steps:
        both = in_float32(both, sign, joined[what] if isinstance(what, int) else what)
    return packed(steps.dtype, *both)


def in_float32(values: list[Any], sign: str, what: Any) -> list[Any]:
    """Returns two float32 after one step."""
    if sign == "round":
        if what == "float32":
            return values
        return list(floats(what, packed(what, *values)))
    if isinstance(what, float):
        what = mgpu.utils.c(what, f32())
    text = f"{VERBS[sign]}.rn.f32 $0, $1, $2;"
    each = what if isinstance(what, tuple) else [what] * len(values)
    return [emit(text, pair, f32()) for pair in zip(values, each, strict=True)]


def twice(number: float, steps: Steps) -> Any:
    """Returns a number of 16 bits twice, in a register."""
    bits = int(np.asarray(number, jnp.dtype(steps.dtype)).view(np.uint16))
    return constant(bits << 16 | bits)


def factors(
    steps: Steps, dtype: str, loaded: Callable[[int], Any], count: int
) -> list[Any]:
    """Returns the values of an array for some columns, as `widened` takes them.

    Args:
        steps: The steps.
        dtype: The array's dtype.
        loaded: Gives the i-th register of the array's values for these columns.
        count: The number of columns.
    """
    if dtype == "float32":
        return [emit("mov.b32 $0, $1;", [loaded(i)], f32()) for i in range(count)]
    if count == 1:
        word = loaded(0)
        if steps.narrow:
            return [emit("prmt.b32 $0, $1, $1, 0x1010;", [word])]
        return [floats(dtype, word)[0]]
    words = [loaded(i) for i in range(count // 2)]
    if steps.narrow:
        orders = ("0x1010", "0x3232")
        text = "prmt.b32 $0, $1, $1, {};"
        return [emit(text.format(order), [w]) for w in words for order in orders]
    return [x for w in words for x in floats(dtype, w)]
