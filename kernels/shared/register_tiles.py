"""Tiles of numbers in a warpgroup's registers, and operations on each of them.

Floats are float32, integers have 32 bits, and flags one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from rewriter.kernels.shared.elementwise import FLOATS


def moved(index: Any, by: int) -> Any:
    """Returns integers plus a constant, in a way that compilers do not see through.

    They would compute what is the same in every turn of a loop before it, for all
    columns of a tile, in half as many registers as the tile has. Floats stay floats.
    """
    if isinstance(ir.VectorType(index.registers.flat[0].type).element_type, ir.F32Type):
        return instruction("add.f32")(index, filled(index, by))
    return instruction("add.s32", "r", "r")(index, filled(index, by, "int32"))


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
    return tile_of(made, like)


def tile_of(registers: np.ndarray, like: Any) -> Any:
    """Returns a tile of some registers, laid out as another one."""
    kind = ir.VectorType(registers.flat[0].type).element_type
    signed = False if isinstance(kind, ir.IntegerType) else None
    return mgpu.FragmentedArray(
        _registers=registers, _layout=like.layout, _is_signed=signed
    )


def mapped(op: Callable[..., Any], *tiles: Any) -> Any:
    """Applies an operation to the registers of some tiles."""
    made = np.empty_like(tiles[0].registers)
    for at, first in np.ndenumerate(tiles[0].registers):
        made[at] = op(first, *(x.registers[at] for x in tiles[1:]))
    return tile_of(made, tiles[0])


def lane(value: int) -> Any:
    """Returns the index of a number in a register."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def by_number(op: Callable[..., Any], kind: Any, *registers: Any) -> Any:
    """Applies an operation of numbers to registers that hold a few."""
    (lanes,) = ir.VectorType(registers[0].type).shape
    result = llvm.mlir_undef(ir.VectorType.get((lanes,), kind))
    for i in range(lanes):
        at = lane(i)
        value = op(*(llvm.extractelement(x, at) for x in registers))
        result = llvm.insertelement(result, value, at)
    return result


def instruction(name: str, kind: str = "f", result: str = "f") -> Callable[..., Any]:
    """Returns one PTX instruction as an operation of tiles."""
    types = {"f": ir.F32Type.get(), "r": ir.IntegerType.get_signless(32)}

    def run(*tiles: Any) -> Any:
        places = ", ".join(f"${i}" for i in range(len(tiles) + 1))
        letters = f"={result}" + f",{kind}" * len(tiles)
        one = lambda *x: llvm.inline_asm(
            types[result], list(x), f"{name} {places};", letters
        )
        return mapped(functools.partial(by_number, one, types[result]), *tiles)

    return run


def with_type(tile: Any, kind: Any, op: Callable[..., Any]) -> Any:
    """Converts a tile's registers by an operation that takes the type of the result."""
    lanes = ir.VectorType(tile.registers.flat[0].type).shape
    return mapped(lambda x: op(ir.VectorType.get(lanes, kind), x), tile)


def rounded(tile: Any, dtype: str) -> Any:
    """Rounds float32 numbers to a float dtype; other dtypes stay."""
    kinds = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}
    if dtype not in kinds:
        return tile
    return tile.astype(kinds[dtype].get()).astype(ir.F32Type.get())


def filled(like: Any, value: float, dtype: str = "float32") -> Any:
    """Returns a tile of one number, shaped as another tile."""
    return constant(value, dtype, like)


def selected(condition: Any, yes: Any, no: Any) -> Any:
    """Returns numbers of one tile where flags are set, and of another elsewhere."""
    return mapped(arith.select, condition, yes, no)


def times(x: Any, factor: float) -> Any:
    """Returns floats times a constant."""
    return mapped(arith.mulf, x, filled(x, factor))


def plus(x: Any, addend: float) -> Any:
    """Returns floats plus a constant."""
    return mapped(arith.addf, x, filled(x, addend))


def fused(x: Any, y: Any, z: Any) -> Any:
    """Returns x * y + z, rounded once."""
    return instruction("fma.rn.f32")(x, y, z)
