"""What the kernel of few rows does in instructions of its own.

Places of threads: tensor cores give a thread two rows, 8 apart, of each 64 x 8 part of
a product. The matrix's columns are spread over these rows so that a thread has all the
columns of a word: it reads a word once, and stores neighbouring sums together::

    lane 4 q + t of warp w      columns  c (8 w + q) + 0, 1, ... c - 1.
    Rows of the matrix          8 i + 2 t + 0 and 1.
    64 rows of tensor cores     the j-th take columns 2 j and 2 j + 1 of these.

A transposed matrix has two rows of a column in a word, and columns are in order::

    lane 4 q + t of warp w      columns  64 j + 16 w + q + 0 and 8.

In shared memory of the matrix, pieces of 16 bytes are exchanged. In rows of 128 bytes,
piece p of row r lies at p xor (r mod 8); in rows of 64 bytes at p xor (r / 2 mod 4). So
a warp's words lie in different banks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from rewriter.kernels.quantized_dot.few_rows import registers
from rewriter.kernels.quantized_dot.few_rows.config import CHUNK, Tiles
from rewriter.kernels.quantized_dot.few_rows.registers import constant, emit, f32, i32
from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from rewriter.kernels.quantized_dot.few_rows.kernel import Use


def meet() -> None:
    """Waits until all threads of all blocks that share columns are here."""

    @plgpu.inline_mgpu()
    def run(context: Any) -> None:
        del context
        text = "barrier.cluster.arrive; barrier.cluster.wait;"
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)

    run()


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
        joined: Shared memory [z, columns] each.
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
        step = _Transposed if use.transposed else _Step
        return step(use, right, joined, groups).added(sums, left)

    return run(list(sums), right, list(left), list(joined))


class _Step:
    """The instructions of one step, for one thread; the matrix is [k, n]."""

    def __init__(self, use: Use, right: Any, joined: Any, groups: Sequence[int]):
        self.use = use
        config = use.config
        bits = 4 if "int4" in use.stored else 8
        self.right = address(right)
        self.thread = _Thread()
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
            start = (key[1] * self.use.config.block_n + column) * size
            first = emit("mad.lo.u32 $0, $1, $2, $3;", [
                self.first, constant(size), address(self.joined[array])
            ])  # fmt: skip
            each = 4 if count > 1 else size
            loaded = lambda i: load(first, start + 4 * i, each)
            self.known[key] = registers.factors(self.use.steps, dtype, loaded, count)
        return self.known[key]

    def added(self, sums: Sequence[Any], left: Sequence[Any]) -> list[Any]:
        """Sums plus the products of the step."""
        sums = list(sums)
        for chunk, rows in enumerate(left):
            turned = mgpu.memref_transpose(rows, (1, 0, 3, 2))
            operands = self.operands(chunk)
            before = [mgpu.WGMMAAccumulator.from_registers(x) for x in sums]
            after = [
                mgpu.wgmma(x, operand, turned, swizzle=pallas_gpu.SWIZZLE)
                for x, operand in zip(before, operands, strict=True)
            ]
            void = ir.Type.parse("!llvm.void")
            text = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
            llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)
            sums = list(fragments.optimization_barrier(*(x.value for x in after)))
        return sums

    def operands(self, chunk: int) -> list[Any]:
        """The matrix's numbers of `CHUNK` rows, for each 64 rows of tensor cores."""
        made = [np.empty((CHUNK // 8, 2), object) for _ in range(self.count)]
        for part in range(CHUNK // 8):
            row = chunk * CHUNK + 8 * part
            for i, half, pair, column, count in self.pairs(row):
                joined = [
                    self.values(a, row, column - column % count, count)[column % count]
                    for a in range(len(self.joined))
                ]
                made[i][part, half] = registers.widened(pair, self.use.steps, joined)
        return [self.fragment(x) for x in made]

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
                pair = registers.numbers(self.use.stored, dtype, *words, at)
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


class _Transposed(_Step):
    """The same for a matrix [n, k]: a thread reads two numbers of a column at once."""

    def begin(self) -> None:
        """Finds the thread's places."""
        self.row = self.use.config.depth * self.bits // 8
        self.first = self.thread.own_column()
        self.pieces: dict[int, Any] = {}

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


class _Thread:
    """Where a thread lies in its warpgroup."""

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
            size: Bytes of a row: 128 or 64.
        """
        key = "and.b32 key, row, 7;" if size == 128 else (
            "shr.u32 key, row, 1; and.b32 key, key, 3;"
        )  # fmt: skip
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
            size: Bytes of a column: 128 or 64.
            bits: Those of a number.
        """
        key = "and.b32 x, $1, 7;" if size == 128 else (
            "shr.u32 x, $1, 1; and.b32 x, x, 3;"
        )  # fmt: skip
        text = (
            f"{{ .reg .b32 x, y; {key} xor.b32 x, x, {piece}; shl.b32 x, x, 4;\n"
            f"mad.lo.u32 x, $1, {size}, x; mad.lo.u32 $0, $2, {bits // 4}, x; }}"
        )
        return emit(text, [column, self.row_of_lane])


def address(memory: Any) -> Any:
    """Returns the address of shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def load(base: Any, offset: int, size: int = 4) -> Any:
    """Returns 4 bytes of shared memory, or 2, or 1."""
    kind = {4: "b32", 2: "u16", 1: "u8"}[size]
    return emit(f"ld.shared.{kind} $0, [$1+{offset}];", [base], effects=True)


# ------------------------------------------------------------------------ the results
def store_sums(sums: Sequence[Any], partial: Any, use: Use) -> None:
    """Stores a warpgroup's sums.

    Args:
        sums: For each 64 rows of tensor cores, float32 [64, rows].
        partial: Shared memory float32 [rows, columns], of rows of `Tiles.block_n`.
        use: How.
    """
    layout = pallas_gpu.ACCUMULATOR

    @plgpu.inline_mgpu(arg_types=([layout] * len(sums), plgpu.RefType()))
    def run(context: Any, sums: Any, partial: Any) -> None:
        del context
        thread = _Thread()
        wide = use.config.width(use.stored)
        each = 1 if use.transposed else wide // 32
        first = thread.own_column() if use.transposed else thread.column(each)
        row = emit("shl.b32 $0, $1, 1;", [thread.row_of_lane])
        size = 4 * use.config.block_n
        text = "{ .reg .b32 x; mad.lo.u32 x, $1, 4, $3; " + (
            f"mad.lo.u32 $0, $2, {size}, x; }}"
        )
        base = emit(text, [first, row, address(partial)])
        for j in range(sums[0].shape[1] // 8):
            for e in (0, 1):
                offset = (8 * j + e) * size
                entries = [_entry(x, 2 * j + half, e) for x in sums for half in (0, 1)]
                if use.transposed:
                    for i, entry in enumerate(entries):
                        _store(base, offset + 256 * (i // 2) + 32 * (i % 2), [entry])
                    continue
                for i in range(0, len(entries), 4):
                    tile, at = divmod(i, each)
                    place = offset + 4 * (tile * wide + at)
                    _store(base, place, entries[i : i + 4])

    run(list(sums), partial)


def _entry(array: Any, register: int, entry: int) -> Any:
    """A number of a register of a product."""
    value = array.registers.flat[register]
    return vector.extract(value, [], [entry])


def _store(base: Any, offset: int, values: Sequence[Any]) -> None:
    void = ir.Type.parse("!llvm.void")
    text = f"st.shared.f32 [$0+{offset}], $1;"
    if len(values) == 4:
        text = f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
    letters = "r" + ",f" * len(values) + ",~{memory}"
    llvm.inline_asm(void, [base, *values], text, letters, has_side_effects=True)


def add_up(
    partial: Any,
    out: Any,
    behind: Sequence[Any],
    config: Tiles,
    steps: Sequence[tuple[str, Any]],
) -> None:
    """Adds up all warpgroups' sums of all blocks that share columns, and stores them.

    Args:
        partial: Shared memory float32 [warpgroups, rows, block_n], of every block.
        out: Global memory [m, block_n].
        behind: Global memory float32 [block_n] each.
        config: The tiles.
        steps: What is joined to a sum, see `registers.Steps`.
    """
    m, dtype = out.shape[0], jnp.dtype(out.dtype).name
    warpgroups, rows, wide = partial.shape
    plain = [plgpu.RefType() for _ in behind]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plain))
    def run(context: Any, partial: Any, out: Any, behind: Any) -> None:
        del context
        stride = ir.MemRefType(out.type).get_strides_and_offset()[0][0]
        thread = emit("mov.u32 $0, %tid.x;", [], effects=True)
        rank = emit("mov.u32 $0, %cluster_ctarank;", [], effects=True)
        threads = 128 * (config.computing + 1)
        every = rows * wide // 4
        quads = -(-every // config.splits)
        bases = [
            emit(f"mapa.shared::cluster.u32 $0, $1, {r};", [address(partial)])
            for r in range(config.splits)
        ]
        for turn in range(-(-quads // threads)):
            text = "{ .reg .b32 x; add.u32 x, $1, " + (
                f"{turn * threads}; min.u32 x, x, {quads - 1};"
                f" mad.lo.u32 x, $2, {quads}, x; min.u32 $0, x, {every - 1}; }}"
            )
            place = emit(text, [thread, rank])
            row = emit(f"div.u32 $0, $1, {wide // 4};", [place])
            quad = emit(f"rem.u32 $0, $1, {wide // 4};", [place])
            sums: list[Any] = []
            for base in bases:
                first = emit("mad.lo.u32 $0, $1, 16, $2;", [place, base])
                for w in range(warpgroups):
                    more = _load_four(first, 16 * w * rows * (wide // 4))
                    sums = more if not sums else [
                        emit("add.rn.f32 $0, $1, $2;", pair, f32())
                        for pair in zip(sums, more, strict=True)
                    ]  # fmt: skip
            joined = [_four_of(x, quad) for x in behind]
            sums = _joined(sums, steps, joined)
            last = turn == -(-quads // threads) - 1
            limit = quads - turn * threads if last else threads
            _store_row(out, dtype, stride, row, quad, sums, thread, limit, m)

    run(partial, out, list(behind))


def _joined(
    sums: list[Any], steps: Sequence[tuple[str, Any]], joined: Sequence[Any]
) -> list[Any]:
    """Four sums after some steps."""
    for sign, what in steps:
        if sign == "round":
            pairs = sums[:2], sums[2:]
            sums = [x for p in pairs for x in registers.in_float32(list(p), sign, what)]
            continue
        others = joined[what] if isinstance(what, int) else [what] * 4
        sums = [
            registers.in_float32([x], sign, other)[0]
            for x, other in zip(sums, others, strict=True)
        ]
    return sums


def _load_four(base: Any, offset: int) -> list[Any]:
    """Four floats of shared memory, of this block or another one."""
    kind = llvm.StructType.get_literal([f32()] * 4)
    text = f"ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    made = llvm.inline_asm(
        kind, [base], text, "=f,=f,=f,=f,r,~{memory}", has_side_effects=True
    )
    return [llvm.extractvalue(f32(), made, [i]) for i in range(4)]


def _pointer(memory: Any) -> Any:
    wide = ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(wide, mgpu.utils.memref_ptr(memory))


def _four_of(memory: Any, quad: Any) -> list[Any]:
    """Four floats of a row in global memory."""
    kind = llvm.StructType.get_literal([f32()] * 4)
    text = (
        "{ .reg .b64 x; mad.wide.u32 x, $5, 16, $4;\n"
        "ld.global.v4.f32 {$0, $1, $2, $3}, [x]; }"
    )
    made = llvm.inline_asm(
        kind, [_pointer(memory), quad], text, "=&f,=&f,=&f,=&f,l,r",
        has_side_effects=True,
    )  # fmt: skip
    return [llvm.extractvalue(f32(), made, [i]) for i in range(4)]


def _store_row(
    out: Any, dtype: str, stride: int, row: Any, quad: Any, sums: list[Any],
    thread: Any, limit: int, m: int,
) -> None:  # fmt: skip
    """Stores four sums, if the thread has some of its own and the row exists."""
    size = jnp.dtype(dtype).itemsize
    head = (
        "{ .reg .pred some; .reg .b64 x;\n"
        f"setp.lt.u32 some, $0, {limit}; setp.lt.and.u32 some, $1, {m}, some;\n"
        f"mad.wide.u32 x, $1, {stride * size}, $3; mad.wide.u32 x, $2, {4 * size}, x;\n"
    )
    if dtype == "float32":
        text = head + "@some st.global.v4.f32 [x], {$4, $5, $6, $7}; }"
        values, letters = sums, "f,f,f,f"
    else:
        text = head + "@some st.global.v2.b32 [x], {$4, $5}; }"
        pairs = sums[:2], sums[2:]
        values, letters = [registers.packed(dtype, *p) for p in pairs], "r,r"
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(
        void, [thread, row, quad, _pointer(out), *values], text,
        f"r,r,r,l,{letters},~{{memory}}", has_side_effects=True,
    )  # fmt: skip
