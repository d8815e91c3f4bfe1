"""Products with stored numbers, which are widened in registers.

Places of threads are those of `threads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.quantized_dot.few_rows import registers, warp_products
from rewriter.kernels.quantized_dot.few_rows.config import CHUNK, LINE_BYTES
from rewriter.kernels.quantized_dot.few_rows.registers import constant, emit, f32
from rewriter.kernels.quantized_dot.few_rows.threads import (
    Thread,
    address,
    load,
    number,
)
from rewriter.kernels.shared import pallas_gpu
from rewriter.ops.cost import FOUR_BITS

if TYPE_CHECKING:
    from rewriter.kernels.quantized_dot.few_rows.kernel import Use


def multiply(
    sums: Sequence[Any],
    right: Any,
    left: Sequence[Any],
    joined: Sequence[Any],
    groups: Sequence[int],
    use: Use,
) -> list[Any]:
    """Returns sums plus products of one step.

    Args:
        sums: For each 64 rows of tensor cores, float32 [64, rows].
        right: Shared memory [tiles, depth, columns], as `Use.stored`.
        left: For each `CHUNK` of the summed axis, shared memory [rows, CHUNK].
        joined: Shared memory [z, columns] each. A codebook comes last.
        groups: How many numbers of the summed axis share a row of each.
        use: How.
    """
    layout = pallas_gpu.ACCUMULATOR
    kinds = [layout] * len(sums)
    swizzle = right.shape[-1] * pallas_gpu.bits(right.dtype) // 8
    of_right = plgpu.RefType(pallas_gpu.transforms(right.dtype, swizzle=swizzle))
    of_left = [plgpu.RefType(pallas_gpu.transforms(x.dtype)) for x in left]
    plain = [plgpu.RefType() for _ in joined]
    shape = sums[0].shape

    @plgpu.inline_mgpu(
        arg_types=(kinds, of_right, of_left, plain),
        return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)]
        * len(sums),
    )
    def run(context: Any, sums: Any, right: Any, left: Any, joined: Any) -> Any:
        del context
        return _step(use)(use, right, joined, groups).added(sums, left)

    return run(list(sums), right, list(left), list(joined))


def add_joined(
    sums: Sequence[Any],
    products: Sequence[Any],
    right: Any,
    joined: Sequence[Any],
    use: Use,
) -> list[Any]:
    """Returns sums plus the products of a step after the steps of `Use.inside`.

    Args:
        sums: For each 64 rows of tensor cores, float32 [64, rows].
        products: The same.
        right: Shared memory of the matrix, as in `multiply`.
        joined: Shared memory [1, columns] each.
        use: How.
    """
    layout = pallas_gpu.ACCUMULATOR
    kinds, plain = [layout] * len(sums), [plgpu.RefType() for _ in joined]
    swizzle = right.shape[-1] * pallas_gpu.bits(right.dtype) // 8
    of_right = plgpu.RefType(pallas_gpu.transforms(right.dtype, swizzle=swizzle))
    inside, shape = use.inside, sums[0].shape
    assert inside is not None

    @plgpu.inline_mgpu(
        arg_types=(kinds, kinds, of_right, plain),
        return_type=[plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)]
        * len(sums),
    )
    def run(context: Any, sums: Any, made: Any, right: Any, joined: Any) -> Any:
        del context
        step = _step(use)(replace(use, steps=inside), right, joined, [1 << 30])
        flat = [x.registers.flatten() for x in sums]
        for i, half, column, count in step.places():
            other = [
                step.values(a, 0, column - column % count, count)[column % count]
                for a in range(len(joined))
            ]
            for j in range(shape[1] // 8):
                at = 2 * j + half
                both = [number(made[i], at, e) for e in (0, 1)]
                for sign, what in inside.steps:
                    value = other[what] if isinstance(what, int) else what
                    both = registers.in_float32(both, sign, value)
                flat[i][at] = registers.pair(
                    emit("add.rn.f32 $0, $1, $2;", [number(sums[i], at, e), v], f32())
                    for e, v in enumerate(both)
                )
        return [
            mgpu.FragmentedArray(
                _registers=new.reshape(x.registers.shape), _layout=x.layout,
                _is_signed=None,
            )
            for x, new in zip(sums, flat, strict=True)
        ]  # fmt: skip

    return run(list(sums), list(products), right, list(joined))


def _waited(sums: Sequence[Any]) -> list[Any]:
    """Sums whose products are done."""
    void = ir.Type.parse("!llvm.void")
    text = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)
    held = fragments.optimization_barrier(*(x.value for x in sums))
    return [held] if len(sums) == 1 else list(held)


def _step(use: Use) -> type[Step]:
    """The class that reads a use's matrix."""
    if use.packed == "first":
        return _Words
    if use.alternating:
        return _Alternating
    return _Transposed if use.transposed else _ByRows if use.by_rows else Step


class Step:
    """The instructions of one step, for one thread; the matrix is [k, n]."""

    def __init__(self, use: Use, right: Any, joined: Any, groups: Sequence[int]):
        self.use = use
        config = use.config
        bits = 4 if use.stored in FOUR_BITS else 8
        self.right = address(right)
        self.thread = Thread()
        self.joined, self.groups = joined, groups
        self.known: dict[tuple[int, int, int], list[Any]] = {}
        self.wide = config.width(use.stored, use.transposed)
        self.count = config.columns // 64
        self.bits, self.tiles = bits, config.columns // self.wide
        self.begin()

    def begin(self) -> None:
        """Finds the thread's places."""
        self.row = self.wide * self.bits // 8
        self.columns = self.wide // 32
        self.first = self.thread.column(self.columns)
        self.rows = [
            emit("add.u32 $0, $1, $2;", [
                self.right, self.thread.swizzled(odd, self.row)
            ])
            for odd in (0, 1)
        ]  # fmt: skip

    def word(self, tile: int, row: int, odd: int) -> Any:
        """The numbers of a thread's columns in one of its rows."""
        offset = (tile * self.use.config.depth + row) * self.row
        return load(self.rows[odd], offset, self.row // 32)

    def values(self, array: int, row: int, column: int, count: int) -> list[Any]:
        """The values of an array for some columns, by `registers.factors`.

        Args:
            array: Its index.
            row: The row of the step.
            column: The first column behind the thread's first one.
            count: The number of columns.
        """
        key = array, row // self.groups[array], column
        if key not in self.known:
            dtype = self.use.steps.dtypes[array]
            size = jnp.dtype(dtype).itemsize
            down, along = self.use.config.block_n * size, size
            if self.use.turned:
                down, along = size, LINE_BYTES
            start = key[1] * down + column * along
            first = emit("mad.lo.u32 $0, $1, $2, $3;", [
                self.first, constant(along), address(self.joined[array])
            ])  # fmt: skip
            each = 4 if count > 1 else size
            loaded = lambda i: load(first, start + 4 * i, each)
            self.known[key] = registers.factors(self.use.steps, dtype, loaded, count)
        return self.known[key]

    def added(self, sums: Sequence[Any], left: Sequence[Any]) -> list[Any]:
        """Sums plus the products of the step."""
        if self.use.config.by_warps:
            return warp_products.added(sums, left, self)
        sums = list(sums)
        for chunk, rows in enumerate(left):
            turned = mgpu.memref_transpose(rows, (1, 0, 3, 2))
            operands = self.operands(chunk)
            before = [mgpu.WGMMAAccumulator.from_registers(x) for x in sums]
            after = [
                mgpu.wgmma(x, operand, turned, swizzle=pallas_gpu.SWIZZLE)
                for x, operand in zip(before, operands, strict=True)
            ]
            # Widening all chunks before one wait took 71 instead of 62 µs on an H200.
            sums = _waited(after)
        return sums

    def operands(self, chunk: int) -> list[Any]:
        """Numbers of `CHUNK` rows as operands, for each 64 rows of tensor cores."""
        return [self.fragment(x) for x in self.numbers(chunk * CHUNK, CHUNK)]

    def numbers(self, first: int, depth: int) -> list[Any]:
        """Registers of numbers of some rows, for each 64 rows of tensor cores.

        Args:
            first: The first row.
            depth: How many.

        Returns:
            Arrays [depth / 8, 2]: a register for either of the thread's two columns.
        """
        made = [np.empty((depth // 8, 2), object) for _ in range(self.count)]
        for part in range(depth // 8):
            row = first + 8 * part
            for i, half, pair, column, count in self.pairs(row):
                joined = [
                    self.values(a, row, column - column % count, count)[column % count]
                    for a in range(len(self.use.steps.dtypes))
                ]
                made[i][part, half] = registers.widened(pair, self.use.steps, joined)
        return made

    def places(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields the thread's columns: as `pairs` does, without numbers."""
        each = self.columns // 2
        for tile in range(self.tiles):
            for at in range(self.columns):
                column = tile * self.wide + at
                yield tile * each + at // 2, at % 2, column, self.columns

    def pairs(self, row: int) -> Iterator[tuple[int, int, Any, int, int]]:
        """Yields the pairs of numbers of 8 rows.

        Each comes with its place in an operand: the index of the 64 rows of tensor
        cores, and 1 for the second of the thread's two rows there. Its column follows,
        counted from the thread's first one, and how many columns are read together.
        """
        each = self.columns // 2
        dtype = self.use.steps.dtype
        for tile in range(self.tiles):
            words = [self.word(tile, row, odd) for odd in (0, 1)]
            for at in range(self.columns):
                place = self.use.place_of(at)
                pair = registers.numbers(self.use.stored, dtype, *words, place)
                column = tile * self.wide + at
                yield tile * each + at // 2, at % 2, pair, column, self.columns

    def fragment(self, made: Any) -> Any:
        """Registers as an operand [64, CHUNK] of tensor cores."""
        dtype = mgpu.utils.dtype_to_ir_type(jnp.dtype(self.use.steps.dtype))
        kind = ir.VectorType.get((2,), dtype)
        shape = fragments.WGMMA_LAYOUT.registers_shape((64, CHUNK))
        flat = np.empty(made.size, object)
        for i, x in enumerate(made.flat):
            flat[i] = mgpu.utils.bitcast(x, kind)
        return mgpu.FragmentedArray(
            _registers=flat.reshape(shape), _layout=fragments.WGMMA_LAYOUT,
            _is_signed=None,
        )  # fmt: skip


class _Transposed(Step):
    """The same for a matrix [n, k]: a thread reads two numbers of a column at once."""

    def begin(self) -> None:
        """Finds the thread's places."""
        self.row = self.use.config.depth * self.bits // 8
        self.first = self.thread.own_column()
        self.pieces: dict[int, Any] = {}
        self.words: dict[tuple[int, int], Any] = {}

    def places(self) -> Iterator[tuple[int, int, int, int]]:
        """Yields the thread's columns."""
        for i in range(self.count):
            for half in (0, 1):
                yield i, half, 64 * i + 8 * half, 1

    def word(self, column: int, row: int) -> Any:
        """The numbers of a column in two of the thread's rows."""
        byte = row * self.bits // 8
        piece, within = divmod(byte, 16)
        if piece not in self.pieces:
            place = self.thread.piece(self.first, piece, self.row, self.bits)
            self.pieces[piece] = emit("add.u32 $0, $1, $2;", [self.right, place])
        offset = column * self.row + within
        return load(self.pieces[piece], offset, self.bits // 4)

    def pairs(self, row: int) -> Iterator[tuple[int, int, Any, int, int]]:
        """Yields the pairs of numbers of 8 rows."""
        dtype = self.use.steps.dtype
        for i in range(self.count):
            for half in (0, 1):
                column = 64 * i + 8 * half
                word = self.word(column, row)
                pair = registers.neighbours(self.use.stored, dtype, word)
                yield i, half, pair, column, 1


class _Alternating(_Transposed):
    """The same where a thread reads a word of a column at once."""

    looked: Any = None

    def word(self, column: int, row: int) -> Any:
        """The thread's word of a column, of the 16 bytes that have a row."""
        piece = row * self.bits // 128
        if piece not in self.pieces:
            place = self.thread.piece(self.first, piece, self.row, 16)
            self.pieces[piece] = emit("add.u32 $0, $1, $2;", [self.right, place])
        key = column, piece
        if key not in self.words:
            self.words[key] = load(self.pieces[piece], column * self.row)
        return self.words[key]

    def pairs(self, row: int) -> Iterator[tuple[int, int, Any, int, int]]:
        """Yields the pairs of numbers of 8 rows."""
        stored, dtype = self.use.stored, self.use.steps.dtype
        first = row % (128 // self.bits) // 8
        table = self.table() if self.use.codebook else None
        for i in range(self.count):
            for half in (0, 1):
                column = 64 * i + 8 * half
                word = self.word(column, row)
                if table is None:
                    pair = registers.alternate(stored, dtype, word, first)
                else:
                    both = first, first + 4
                    pair = [registers.looked_up(table, word, at) for at in both]
                yield i, half, pair, column, 1

    def table(self) -> Any:
        """A number of the codebook of 16 in each lane."""
        if self.looked is None:
            text = "{ .reg .b32 x; mov.u32 x, %laneid; and.b32 x, x, 15;" + (
                " mad.lo.u32 x, x, 4, $1; ld.shared.b32 $0, [x]; }"
            )
            self.looked = emit(text, [address(self.joined[-1])], effects=True)
        return self.looked


class _Words(_Alternating):
    """The same for words [k / 8, n] of numbers of the first axis.

    A thread has the t-th word of 4, of the columns of a transposed matrix.
    """

    def begin(self) -> None:
        """Finds the thread's places: for both halves, and for odd and even rows."""
        self.first = self.thread.own_column()
        self.words: dict[tuple[int, int], Any] = {}
        self.tile = self.use.config.depth // 8 * 128
        self.bases = {
            (half, odd): emit(
                "add.u32 $0, $1, $2;",
                [self.right, self.thread.word_of_line(self.tile, 2 * half, 4 * odd)],
            )
            for half in (0, 1)
            for odd in (0, 1)
        }

    def word(self, column: int, row: int) -> Any:
        """The thread's word of a column, of the 32 numbers that have a row."""
        four = row // 32
        key = column, four
        if key not in self.words:
            base = self.bases[column // 8 % 2, four % 2]
            offset = column // 32 * self.tile + 512 * four
            self.words[key] = load(base, offset)
        return self.words[key]


class _ByRows(Step):
    """The same where arrays of the steps have a value for each summed row."""

    def values(self, array: int, row: int, column: int, count: int) -> list[Any]:
        """The values of an array for the thread's two rows, once for each column."""
        key = array, row, 0
        if key not in self.known:
            steps = self.use.steps
            dtype = steps.dtypes[array]
            size = jnp.dtype(dtype).itemsize
            first = emit("mad.lo.u32 $0, $1, $2, $3;", [
                self.thread.row_of_lane, constant(2 * size), address(self.joined[array])
            ])  # fmt: skip
            if dtype == "float32":
                words = [load(first, row * size + 4 * i) for i in (0, 1)]
                pair = tuple(emit("mov.b32 $0, $1;", [x], f32()) for x in words)
            else:
                word = load(first, row * size)
                pair = word if steps.narrow else registers.floats(dtype, word)
            self.known[key] = [pair]
        return self.known[key] * count
