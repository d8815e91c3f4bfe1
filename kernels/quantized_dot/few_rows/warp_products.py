"""Products by tensor cores of single warps, with all operands in registers.

A warp waits for no other one, and for no product before it widens more numbers. So
instructions of many steps overlap. It reads rows from shared memory in any order, and
those of a matrix's words need no order of their own. Per product, tensor cores take 16
of the summed axis of 16 columns and 8 rows. With many rows those of warpgroups are
faster, which read rows from shared memory themselves.

Sources: PTX ISA, `mma.sync.m16n8k16` and `ldmatrix`. Threads have the same numbers of
the matrix and of the sums as in `wgmma`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.quantized_dot.few_rows import registers
from rewriter.kernels.quantized_dot.few_rows.config import CHUNK
from rewriter.kernels.quantized_dot.few_rows.registers import emit, f32, i32
from rewriter.kernels.quantized_dot.few_rows.threads import Thread, address, number

if TYPE_CHECKING:
    from rewriter.kernels.quantized_dot.few_rows.instructions import Step
    from rewriter.kernels.quantized_dot.few_rows.kernel import Use

DEPTH = 16
"""What tensor cores of a warp take of the summed axis at once."""

ROWS = 8
"""The rows that they take at once."""

LINE = 128
"""Bytes of a row of a chunk in shared memory."""


def added(sums: Sequence[Any], left: Sequence[Any], step: Step) -> list[Any]:
    """Returns sums plus the products of a step.

    Args:
        sums: For each 64 columns of the matrix, float32 [64, rows].
        left: For each `CHUNK` of the summed axis, shared memory [rows, CHUNK].
        step: Gives the matrix's numbers.
    """
    count = sums[0].shape[1] // ROWS
    fours = [[_four(x, j) for j in range(count)] for x in sums]
    rows = RowsOfWords(step.use, step.bits) if step.use.alternating else Rows()
    for chunk, memory in enumerate(left):
        own = rows.of(memory, count)
        for at in range(CHUNK // DEPTH):
            made = step.numbers(chunk * CHUNK + DEPTH * at, DEPTH)
            for i, piece in enumerate(made):
                for j in range(count):
                    fours[i][j] = multiplied(
                        step.use.steps.dtype, list(piece.flat), own[j][at], fours[i][j]
                    )
    return [_sums(x, four) for x, four in zip(sums, fours, strict=True)]


def multiplied(
    dtype: str, matrix: Sequence[Any], rows: Sequence[Any], sums: Sequence[Any]
) -> list[Any]:
    """Returns four sums of a thread plus the products of 16 columns and 8 rows.

    Args:
        dtype: That of the numbers.
        matrix: Four registers of two numbers each.
        rows: Two such registers.
        sums: Four float32.
    """
    kind = llvm.StructType.get_literal([f32()] * 4)
    short = registers.SHORT[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    letters = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    made = llvm.inline_asm(
        kind, [*matrix, *rows, *sums], text, letters, has_side_effects=False
    )
    return [llvm.extractvalue(f32(), made, [i]) for i in range(4)]


def _four(sums: Any, tile: int) -> list[Any]:
    """The thread's sums of a tile of 8 rows."""
    return [number(sums, 2 * tile + half, e) for half in (0, 1) for e in (0, 1)]


def _sums(before: Any, fours: Sequence[Sequence[Any]]) -> Any:
    """The sums of all tiles as an array, like the one before."""
    flat = before.registers.flatten()
    for j, four in enumerate(fours):
        flat[2 * j] = registers.pair(four[:2])
        flat[2 * j + 1] = registers.pair(four[2:])
    return mgpu.FragmentedArray(
        _registers=flat.reshape(before.registers.shape), _layout=before.layout,
        _is_signed=None,
    )  # fmt: skip


class Rows:
    """The thread's numbers of rows, of the columns in order."""

    def __init__(self) -> None:
        self.thread = Thread()

    def place(self) -> Any:
        """The byte of the thread's row in a chunk, in its first piece of 16 bytes."""
        lane = emit("mad.lo.u32 $0, $1, 4, $2;", [
            self.thread.column_of_lane, self.thread.row_of_lane
        ])  # fmt: skip
        text = (
            "{ .reg .b32 row, piece;\n"
            "and.b32 row, $1, 7; shr.u32 piece, $1, 3; xor.b32 piece, piece, row;\n"
            f"shl.b32 piece, piece, 4; mad.lo.u32 $0, row, {LINE}, piece; }}"
        )
        return emit(text, [lane])

    def of(self, memory: Any, count: int) -> list[list[Any]]:
        """For each tile of rows, and each product of a chunk, two registers."""
        first = emit("add.u32 $0, $1, $2;", [address(memory), self.place()])
        behind = emit("xor.b32 $0, $1, 64;", [first])
        tiles = []
        for tile in range(count):
            parts = [
                _four_matrices(base, ROWS * LINE * tile) for base in (first, behind)
            ]
            flat = [x for part in parts for x in part]
            tiles.append([flat[i : i + 2] for i in range(0, len(flat), 2)])
        return tiles


class RowsOfWords(Rows):
    """The same where a thread has words of the matrix.

    A word has numbers of the summed axis that follow each other. A product takes one
    of its first half, and the one half a word behind it. See `kernel.alternating`.
    """

    def __init__(self, use: Use, bits: int):
        super().__init__()
        self.each = 32 // bits
        numbers = range(self.each)
        self.number_at = sorted(numbers, key=use.place_of)

    def place(self) -> Any:
        """The byte of the thread's numbers of its row, for its first word."""
        size = 2 * self.each
        text = (
            "{ .reg .b32 x, y;\n"
            f"mul.lo.u32 x, $2, {size}; shl.b32 y, $1, 4; xor.b32 x, x, y;\n"
            f"mad.lo.u32 $0, $1, {LINE}, x; }}"
        )
        return emit(text, [self.thread.column_of_lane, self.thread.row_of_lane])

    def of(self, memory: Any, count: int) -> list[list[Any]]:
        """For each tile of rows, and each product of a chunk, two registers."""
        first = emit("add.u32 $0, $1, $2;", [address(memory), self.place()])
        size = 4 * 2 * self.each  # bytes of four threads
        bases = [first]
        for at in range(size, LINE, size):
            bases.append(emit(f"xor.b32 $0, $1, {at};", [first]))
        return [self._of_tile(bases, ROWS * LINE * tile) for tile in range(count)]

    def _of_tile(self, bases: Sequence[Any], offset: int) -> list[list[Any]]:
        half = self.each // 2
        made: list[Any] = []
        for base in bases:
            words = _words(base, offset, half)
            for p in range(half):
                low, high = self.number_at[p], self.number_at[p + half]
                order = ("54", "76")[high % 2] + ("10", "32")[low % 2]
                pair = [words[low // 2], words[high // 2]]
                made.append(emit(f"prmt.b32 $0, $1, $2, 0x{order};", pair))
        return [made[i : i + 2] for i in range(0, len(made), 2)]


def _words(base: Any, offset: int, count: int) -> list[Any]:
    """Two or four registers of shared memory."""
    kind = llvm.StructType.get_literal([i32()] * count)
    names = ", ".join(f"${i}" for i in range(count))
    text = f"ld.shared.v{count}.b32 {{{names}}}, [${count}+{offset}];"
    letters = ",".join(["=r"] * count) + ",r"
    made = llvm.inline_asm(kind, [base], text, letters, has_side_effects=True)
    return [llvm.extractvalue(i32(), made, [i]) for i in range(count)]


def _four_matrices(base: Any, offset: int) -> list[Any]:
    """Four registers, of four pieces of 8 columns of 8 rows."""
    kind = llvm.StructType.get_literal([i32()] * 4)
    text = (
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    )
    letters = "=r,=r,=r,=r,r"
    made = llvm.inline_asm(kind, [base], text, letters, has_side_effects=True)
    return [llvm.extractvalue(i32(), made, [i]) for i in range(4)]
