"""What the kernel of few rows does in instructions of its own.

Places of threads: tensor cores give a thread two rows, 8 apart, of each 64 x 8 part of
a product. The matrix's columns are spread over these rows so that a thread has all the
columns of a word: it reads a word once, and stores neighbouring sums together::

    warp w (of 4), lane 4 q + t:  columns  c (8 w + q) + 0, 1, ... c - 1
                                  rows of the matrix  8 i + 2 t + 0 and 1
    the j-th 64 rows of tensor cores:  columns 2 j and 2 j + 1 of these

In shared memory of the matrix, pieces of 16 bytes are exchanged. In rows of 128 bytes,
piece p of row r lies at p xor (r mod 8); in rows of 64 bytes at p xor (r / 2 mod 4). So
a warp's words lie in different banks.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    bits = pallas_gpu.bits(right.dtype)
    swizzle = use.config.width(use.stored) * bits // 8
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
        return _Step(use, right, joined, groups).added(sums, left)

    return run(list(sums), right, list(left), list(joined))


class _Step:
    """The instructions of one step, for one thread."""

    def __init__(self, use: Use, right: Any, joined: Any, groups: Sequence[int]):
        self.use = use
        self.wide = use.config.width(use.stored)
        self.columns = self.wide // 32
        bits = 4 if "int4" in use.stored else 8
        self.row = self.wide * bits // 8
        thread = _Thread()
        self.first = thread.column(self.columns)
        base = address(right)
        self.rows = [
            emit("add.u32 $0, $1, $2;", [base, thread.swizzled(odd, self.row)])
            for odd in (0, 1)
        ]
        self.joined, self.groups = joined, groups
        self.known: dict[tuple[int, int, int], list[Any]] = {}

    def word(self, tile: int, row: int, odd: int) -> Any:
        """The numbers of a thread's columns in one of its rows."""
        offset = (tile * self.use.config.depth + row) * self.row
        return load(self.rows[odd], offset, self.row // 32)

    def values(self, array: int, row: int, tile: int) -> list[Any]:
        """The values of an array for a thread's columns, by `registers.factors`."""
        key = array, row // self.groups[array], tile
        if key not in self.known:
            memory = self.joined[array]
            dtype = self.use.steps.dtypes[array]
            size = jnp.dtype(dtype).itemsize
            start = (key[1] * self.use.config.block_n + tile * self.wide) * size
            first = emit("mad.lo.u32 $0, $1, $2, $3;", [
                self.first, constant(size), address(memory)
            ])  # fmt: skip
            loaded = lambda i: load(first, start + 4 * i)
            self.known[key] = registers.factors(
                self.use.steps, dtype, loaded, self.columns
            )
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
        tiles = self.use.config.columns // self.wide
        each = self.columns // 2
        made = [np.empty((CHUNK // 8, 2), object) for _ in range(tiles * each)]
        for row in range(0, CHUNK, 8):
            for tile in range(tiles):
                place = chunk * CHUNK + row
                words = [self.word(tile, place, odd) for odd in (0, 1)]
                for at in range(self.columns):
                    made[tile * each + at // 2][row // 8, at % 2] = self.pair(
                        words, tile, place, at
                    )
        return [self.fragment(x) for x in made]

    def pair(self, words: list[Any], tile: int, row: int, at: int) -> Any:
        """Two widened numbers of a column."""
        steps = self.use.steps
        joined = [self.values(i, row, tile)[at] for i in range(len(self.joined))]
        pair = registers.numbers(self.use.stored, steps.dtype, *words, at)
        return registers.widened(pair, steps, joined)

    def fragment(self, made: Any) -> Any:
        """Registers as an operand [64, CHUNK] of tensor cores."""
        dtype = mgpu.utils.dtype_to_ir_type(jnp.dtype(self.use.steps.dtype))
        kind = ir.VectorType.get((2,), dtype)
        shape = fragments.WGMMA_LAYOUT.registers_shape((64, CHUNK))
        cast = lambda x: mgpu.utils.bitcast(x, kind)
        flat = np.array([None] * made.size, object)
        for i, x in enumerate(made.flat):
            flat[i] = cast(x)
        return mgpu.FragmentedArray(
            _registers=flat.reshape(shape), _layout=fragments.WGMMA_LAYOUT,
            _is_signed=None,
        )  # fmt: skip


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


def address(memory: Any) -> Any:
    """Returns the address of shared memory."""
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(memory))


def load(base: Any, offset: int, size: int = 4) -> Any:
    """Returns 4 bytes of shared memory, or 2."""
    if size == 4:
        return emit(f"ld.shared.b32 $0, [$1+{offset}];", [base], effects=True)
    text = f"{{ .reg .u16 x; ld.shared.u16 x, [$1+{offset}]; cvt.u32.u16 $0, x; }}"
    return emit(text, [base], effects=True)


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
        columns = wide // 32
        first = thread.column(columns)
        row = emit("shl.b32 $0, $1, 1;", [thread.row_of_lane])
        size = 4 * use.config.block_n
        text = "{ .reg .b32 x; mad.lo.u32 x, $1, 4, $3; " + (
            f"mad.lo.u32 $0, $2, {size}, x; }}"
        )
        base = emit(text, [first, row, address(partial)])
        each = columns // 2
        count = sums[0].shape[1] // 8
        for tile in range(len(sums) // each):
            for j in range(count):
                for e in (0, 1):
                    values = [
                        _entry(sums[tile * each + at // 2], 2 * j + at % 2, e)
                        for at in range(columns)
                    ]
                    offset = (8 * j + e) * size + tile * wide * 4
                    for i in range(0, columns, 4):
                        _store(base, offset + 4 * i, values[i : i + 4])

    run(list(sums), partial)


def _entry(array: Any, register: int, entry: int) -> Any:
    """A number of a register of a product."""
    value = array.registers.flat[register]
    return vector.extract(value, [], [entry])


def _store(base: Any, offset: int, values: Sequence[Any]) -> None:
    void = ir.Type.parse("!llvm.void")
    text = f"st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};"
    llvm.inline_asm(
        void, [base, *values], text, "r,f,f,f,f,~{memory}", has_side_effects=True
    )


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
