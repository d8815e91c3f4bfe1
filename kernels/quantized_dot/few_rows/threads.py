"""Places of a warpgroup's threads in a tile, and the numbers they read and write.

Places of threads: tensor cores give a thread two rows, 8 apart, of each 64 x 8 part of
a product. The matrix's columns are spread over these rows so that a thread has all the
columns of a word: it reads a word once, and stores neighbouring sums together::

    lane 4 q + t of warp w      columns  c (8 w + q) + 0, 1, ... c - 1.
    Rows of the matrix          8 i + 2 t + 0 and 1.
    64 rows of tensor cores     the j-th take columns 2 j and 2 j + 1 of these.

A transposed matrix has two rows of a column in a word, and columns are in order::

    lane 4 q + t of warp w      columns  64 j + 16 w + q + 0 and 8.

In shared memory of the matrix, pieces of 16 bytes are exchanged: piece p of row r lies
at p xor (r mod 8) in rows of 128 bytes. In rows of 64 bytes it is p xor (r / 2 mod 4),
and in rows of 32 bytes p xor (r / 4 mod 2). So a warp's words lie in different banks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from rewriter.kernels.quantized_dot.few_rows.registers import emit, i32
from rewriter.kernels.shared import pallas_gpu


def meet() -> None:
    """Waits until all threads of all blocks that share columns are here."""

    @plgpu.inline_mgpu()
    def run(context: Any) -> None:
        del context
        text = "barrier.cluster.arrive; barrier.cluster.wait;"
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)

    run()


def _key(name: str, row: str, size: int) -> str:
    """Instructions for what the pieces of a row of 128, 64 or 32 bytes are xored by."""
    shift = {128: 0, 64: 1, 32: 2}[size]
    return f"shr.u32 {name}, {row}, {shift}; and.b32 {name}, {name}, {7 >> shift};"


class Thread:
    """The place of a thread in its warpgroup."""

    def __init__(self) -> None:
        thread = emit("mov.u32 $0, %tid.x;", [], effects=True)
        self.warp = emit("bfe.u32 $0, $1, 5, 2;", [thread])
        self.column_of_lane = emit("bfe.u32 $0, $1, 2, 3;", [thread])
        self.row_of_lane = emit("and.b32 $0, $1, 3;", [thread])

    def column(self, each: int) -> Any:
        """The first of its columns in a tile, if it has so many."""
        text = "{ .reg .b32 x; shl.b32 x, $1, 3; add.u32 x, x, $2;" + (
            f" mul.lo.u32 $0, x, {each}; }}"
        )
        return emit(text, [self.warp, self.column_of_lane])

    def swizzled(self, odd: int, size: int) -> Any:
        """The byte of its columns in its first row, or in the one behind it.

        Args:
            odd: 1 for the row behind it.
            size: Bytes of a row: 128, 64 or 32.
        """
        key = _key("key", "row", size)
        text = (
            "{ .reg .b32 row, key, x, piece;\n"
            f"shl.b32 row, $3, 1; add.u32 row, row, {odd}; {key}\n"
            f"shl.b32 x, $1, 3; add.u32 x, x, $2; mul.lo.u32 x, x, {size // 32};\n"
            "shr.u32 piece, x, 4; xor.b32 piece, piece, key; shl.b32 piece, piece, 4;\n"
            "and.b32 x, x, 15; add.u32 x, x, piece;\n"
            f"mad.lo.u32 $0, row, {size}, x; }}"
        )
        return emit(text, [self.warp, self.column_of_lane, self.row_of_lane])

    def own_column(self) -> Any:
        """The first of its columns, if tensor cores' rows are the columns in order."""
        return emit("mad.lo.u32 $0, $1, 16, $2;", [self.warp, self.column_of_lane])

    def piece(self, column: Any, piece: int, size: int, bits: int) -> Any:
        """The byte of its first rows in a piece of 16 bytes of a column.

        Args:
            column: The column, whose rows lie together.
            piece: The index of the piece.
            size: Bytes of a column: 128, 64 or 32.
            bits: Those of a number.
        """
        key = _key("x", "$1", size)
        text = (
            f"{{ .reg .b32 x, y; {key} xor.b32 x, x, {piece}; shl.b32 x, x, 4;\n"
            f"mad.lo.u32 x, $1, {size}, x; mad.lo.u32 $0, $2, {bits // 4}, x; }}"
        )
        return emit(text, [column, self.row_of_lane])

    def word_of_line(self, tile: int, piece: int, row: int) -> Any:
        """The byte of its word in lines of 32 columns, of which each has a word.

        Column 16 w + q of 64 lies in the line's tile w / 2. Row t has its word.

        Args:
            tile: Bytes of a tile.
            piece: What is added to the piece of 16 bytes.
            row: What is added to the row, which the pieces are xored by.
        """
        text = (
            "{ .reg .b32 x, y, z;\n"
            "and.b32 x, $1, 1; shl.b32 x, x, 2; shr.u32 y, $2, 2; add.u32 x, x, y;\n"
            f"add.u32 x, x, {piece}; add.u32 y, $3, {row}; xor.b32 x, x, y;\n"
            "shl.b32 x, x, 4; and.b32 y, $2, 3; mad.lo.u32 x, y, 4, x;\n"
            "mad.lo.u32 x, $3, 128, x; shr.u32 z, $1, 1;\n"
            f"mad.lo.u32 $0, z, {tile}, x; }}"
        )
        return emit(text, [self.warp, self.column_of_lane, self.row_of_lane])


def divide(
    warpgroup: Any, computing: int, compute: Callable[[Any], None], copy: Any
) -> None:
    """Lets the first warpgroups compute and the last one copy, until all are done.

    Args:
        warpgroup: The index of this one.
        computing: How many compute.
        compute: What each of them does, given its index.
        copy: What the last one does.
    """
    computes = warpgroup < computing
    pallas_gpu.when(computes)(lambda: compute(warpgroup))
    pallas_gpu.when(jnp.logical_not(computes))(copy)
    meet()


def address(memory: Any) -> Any:
    """Returns the address of shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def load(base: Any, offset: int, size: int = 4) -> Any:
    """Returns 4 bytes of shared memory, or 2, or 1."""
    kind = {4: "b32", 2: "u16", 1: "u8"}[size]
    return emit(f"ld.shared.{kind} $0, [$1+{offset}];", [base], effects=True)


def pointer(memory: Any) -> Any:
    """Returns the address of global memory."""
    wide = ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(wide, mgpu.utils.memref_ptr(memory))


def number(array: Any, register: int, index: int) -> Any:
    """A number of a register of a product."""
    value = array.registers.flat[register]
    return vector.extract(value, [], [index])
