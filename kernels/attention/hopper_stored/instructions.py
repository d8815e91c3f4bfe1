"""PTX instructions for attention to stored keys and values.

Scores are transposed: a row for each key and a column for each query. Lane
``4 q + t`` of warp w has two rows, ``16 w + q`` and the one 8 behind it. Its columns
are pairs: ``8 j + 2 t`` and the one behind it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.quantized_dot.few_rows import registers
from rewriter.kernels.quantized_dot.few_rows.registers import emit, f32
from rewriter.kernels.quantized_dot.few_rows.threads import (
    Thread,
    address,
    load,
    number,
    pointer,
)
from rewriter.kernels.quantized_dot.few_rows.totals import (
    Four,
    Fours,
    in_block,
    load_four,
    store_four,
)
from rewriter.kernels.shared import pallas_gpu

TILE = pallas_gpu.ACCUMULATOR


def over_keys(x: Any, scratch: Any, verb: str) -> Any:
    """Returns the maximum or sum over all rows, in every row.

    Args:
        x: float32 [64, columns].
        scratch: Shared memory float32 [4, columns], not the one of the last call.
        verb: "max" or "add".
    """
    shape = x.shape

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE),
    )
    def run(context: Any, x: Any, scratch: Any) -> Any:
        del context
        name = "max.NaN.f32" if verb == "max" else "add.rn.f32"
        both = functools.partial(_float32, name)
        thread, base = Thread(), address(scratch)
        mine = emit("mad.lo.u32 $0, $1, 8, $2;", [thread.row_of_lane, base])
        text = f"mad.lo.u32 $0, $1, {4 * shape[1]}, $2;"
        place = emit(text, [thread.warp, mine])
        registers_, count = x.registers, shape[1] // 8
        for j in range(count):
            for e in (0, 1):
                value = both(number(x, 2 * j, e), number(x, 2 * j + 1, e))
                for distance in (4, 8, 16):
                    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
                    value = both(value, emit(text, [value], f32(), effects=True))
                text = (
                    "{ .reg .pred first; setp.eq.u32 first, $0, 0;"
                    f" @first st.shared.f32 [$1+{32 * j + 4 * e}], $2; }}"
                )
                _do(text, [thread.column_of_lane, place, value], "r,r,f,~{memory}")
        mgpu.warpgroup_barrier()
        made = registers_.copy()
        flat = made.reshape(-1)
        for j in range(count):
            sums = []
            for e in (0, 1):
                total = None
                for warp in range(4):
                    offset = 4 * shape[1] * warp + 32 * j + 4 * e
                    text = f"ld.shared.f32 $0, [$1+{offset}];"
                    value = emit(text, [mine], f32(), effects=True)
                    total = value if total is None else both(total, value)
                sums.append(total)
            flat[2 * j] = flat[2 * j + 1] = registers.pair(sums)
        return mgpu.FragmentedArray(
            _registers=flat.reshape(made.shape), _layout=x.layout, _is_signed=None
        )

    return run(x, scratch)


def times_rows(x: Any, lines: Any, head: Any, heads: int, part: int) -> Any:
    """Returns rows times a factor of each.

    Args:
        x: float32 [64, columns].
        lines: Shared memory [lines, numbers]: the factors of all heads of a row lie
            beside each other, and rows behind each other.
        head: The head.
        heads: How many there are.
        part: The rows are those from 64 times it on.
    """
    size = jnp.dtype(lines.dtype).itemsize
    dtype = jnp.dtype(lines.dtype).name

    @plgpu.inline_mgpu(
        arg_types=(TILE, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
    )
    def run(context: Any, x: Any, first: Any) -> Any:
        del context
        text = f"mad.lo.u32 $0, $1, {heads * size}, $2;"
        place = emit(text, [Thread().own_column(), address(first)])
        made = x.registers.copy()
        flat = made.reshape(-1)
        for half in (0, 1):
            word = load(place, (64 * part + 8 * half) * heads * size, size)
            factor = (
                emit("mov.b32 $0, $1;", [word], f32())
                if dtype == "float32"
                else registers.floats(dtype, word)[0]
            )
            for j in range(x.shape[1] // 8):
                at = 2 * j + half
                flat[at] = registers.pair(
                    _float32("mul.rn.f32", number(x, at, e), factor) for e in (0, 1)
                )
        return mgpu.FragmentedArray(
            _registers=flat.reshape(made.shape), _layout=x.layout, _is_signed=None
        )

    return run(x, lines.at[0, pl.ds(head, 1)])


def store_weights(x: Any, place: Any) -> None:
    """Stores weights, rounded and transposed, where tensor cores read them.

    They may do so after a `plgpu.commit_smem`.

    Args:
        x: float32 [64, queries].
        place: Shared memory [queries, 64], 16 bits, `pallas_gpu.tiles`.
    """
    kind = plgpu.RefType(pallas_gpu.transforms(place.dtype))
    short = registers.SHORT[jnp.dtype(place.dtype).name]

    @plgpu.inline_mgpu(arg_types=(TILE, kind))
    def run(context: Any, x: Any, place: Any) -> None:
        del context
        thread, base = Thread(), address(place)
        for e in (0, 1):
            for half in (0, 1):
                text = (
                    "{ .reg .b32 row, piece;\n"
                    f"shl.b32 row, $3, 1; add.u32 row, row, {e};\n"
                    f"shl.b32 piece, $1, 1; add.u32 piece, piece, {half};\n"
                    "xor.b32 piece, piece, row; shl.b32 piece, piece, 4;\n"
                    "mad.lo.u32 piece, row, 128, piece;\n"
                    "mad.lo.u32 piece, $2, 2, piece; add.u32 $0, piece, $4; }"
                )
                given = [thread.warp, thread.column_of_lane, thread.row_of_lane, base]
                first = emit(text, given)
                for j in range(x.shape[1] // 8):
                    value = number(x, 2 * j + half, e)
                    text = (
                        f"{{ .reg .b16 x; cvt.rn.{short}.f32 x, $1;"
                        f" st.shared.b16 [$0+{1024 * j}], x; }}"
                    )
                    _do(text, [first, value], "r,f,~{memory}")

    run(x, place)


def store_queries(source: Any, place: Any, first: int, word: int) -> None:
    """Stores 64 columns of queries where tensor cores read them.

    Columns are in the order of `few_rows.kernel.alternating`: of ``4 word`` of them,
    those that are ``word / 2`` apart follow each other. Rows that there are not are 0.

    Args:
        source: Global memory [rows, columns], 16 bits.
        place: Shared memory [queries, 64], 16 bits, `pallas_gpu.tiles`.
        first: The first of the columns.
        word: The numbers of a word of keys.
    """
    rows, wide = source.shape
    queries, step = place.shape[0], word // 2
    kind = plgpu.RefType(pallas_gpu.transforms(place.dtype))
    half = [f"h{j}" for j in range(8)]
    loads = " ".join(
        f"mov.b16 {x}, 0; @some ld.global.nc.b16 {x}, [g+{2 * (first + step * j)}];"
        for j, x in enumerate(half)
    )
    words = " ".join(
        f"mov.b32 w{i}, {{{half[2 * i]}, {half[2 * i + 1]}}};" for i in range(4)
    )
    text = (
        "{ .reg .pred some, mine; .reg .b32 row, piece, x, y; .reg .b64 g;\n"
        ".reg .b16 h<8>; .reg .b32 w<4>;\n"
        "shr.u32 row, $0, 3; and.b32 piece, $0, 7;\n"
        f"setp.lt.u32 some, row, {rows}; setp.lt.u32 mine, row, {queries};\n"
        f"div.u32 x, piece, {step}; mul.lo.u32 x, x, {8 * step};\n"
        f"rem.u32 y, piece, {step}; add.u32 x, x, y;\n"
        f"mad.wide.u32 g, row, {2 * wide}, $1; mad.wide.u32 g, x, 2, g;\n"
        f"{loads}\n{words}\n"
        "and.b32 y, row, 7; xor.b32 y, y, piece; shl.b32 y, y, 4;\n"
        "mad.lo.u32 y, row, 128, y; add.u32 y, y, $2;\n"
        "@mine st.shared.v4.b32 [y], {w0, w1, w2, w3}; }"
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), kind))
    def run(context: Any, source: Any, place: Any) -> None:
        del context
        thread = emit("mov.u32 $0, %tid.x;", [], effects=True)
        for turn in range(0, 8 * queries, 128):
            own = emit(f"{{ and.b32 $0, $1, 127; add.u32 $0, $0, {turn}; }}", [thread])
            given = [own, pointer(source), address(place)]
            _do(text, given, "r,l,r,~{memory}")

    run(source, place)


def meet_warpgroup() -> None:
    """Waits until all threads of a warpgroup are here."""

    @plgpu.inline_mgpu()
    def run(context: Any) -> None:
        del context
        mgpu.warpgroup_barrier()

    run()


def store_columns(x: Any, place: Any) -> None:
    """Stores the first row.

    Args:
        x: float32 [64, columns].
        place: Shared memory float32 [columns].
    """

    @plgpu.inline_mgpu(arg_types=(TILE, plgpu.RefType()))
    def run(context: Any, x: Any, place: Any) -> None:
        del context
        thread = Thread()
        mine = emit("mad.lo.u32 $0, $1, 8, $2;", [thread.row_of_lane, address(place)])
        text = "or.b32 $0, $1, $2;"
        other = emit(text, [thread.warp, thread.column_of_lane])
        for j in range(x.shape[1] // 8):
            for e in (0, 1):
                text = (
                    "{ .reg .pred first; setp.eq.u32 first, $0, 0;"
                    f" @first st.shared.f32 [$1+{32 * j + 4 * e}], $2; }}"
                )
                _do(text, [other, mine, number(x, 2 * j, e)], "r,r,f,~{memory}")

    run(x, place)


def combine(
    partial: Any, stats: Any, out: Any, lse: Any, splits: int, zero: bool
) -> None:
    """Adds up results of all warpgroups of all blocks of a cluster, and stores them.

    Args:
        partial: Shared memory float32 [warpgroups, queries, columns], of every block.
        stats: Shared memory float32 [warpgroups, 2, queries]: maxima in units of
            log(2), and sums of weights.
        out: Global memory [rows, columns], rows at most the queries.
        lse: None, or global memory float32 [rows], for base-2 logarithms of the sums of
            exponentials.
        splits: Blocks of a cluster.
        zero: Whether queries without keys are 0, and not NaN.
    """
    rows, dtype = out.shape[0], jnp.dtype(out.dtype).name
    shape = warpgroups, _, wide = partial.shape
    plain = plgpu.RefType()
    more = [] if lse is None else [lse]

    @plgpu.inline_mgpu(arg_types=(plain, plain, plain, [plain] * len(more)))
    def run(context: Any, partial: Any, stats: Any, out: Any, more: Any) -> None:
        del context
        stride = ir.MemRefType(out.type).get_strides_and_offset()[0][0]
        walk = Fours.of(rows, wide, warpgroups + 1, splits)
        bases = [
            [in_block(address(x), rank) for x in (partial, stats)]
            for rank in range(splits)
        ]
        for four in walk.turns():
            parts = _parts(bases, four, shape)
            highest, total, made = _combined(parts)
            if zero:
                text = (
                    "{ .reg .pred none; setp.eq.f32 none, $2, 0fFF800000;"
                    " selp.f32 $0, 0f00000000, $1, none; }"
                )
                made = [emit(text, [x, highest], f32()) for x in made]
            store_four(out, dtype, stride, four, made, rows)
            for target in more:
                _store_logarithm(target, four, total, highest)

    run(partial, stats, out, more)


@dataclass(frozen=True)
class _Part:
    """One warpgroup's part of a query's result.

    Attributes:
        highest: Its maximum, in units of log(2).
        total: Its sum of weights.
        place: The address of its block's partial results for some columns.
        offset: Bytes from there to its own.
    """

    highest: Any
    total: Any
    place: Any
    offset: int


def _parts(
    bases: list[list[Any]], four: Four, shape: tuple[int, int, int]
) -> list[_Part]:
    """Reads what all warpgroups of all blocks found for four columns of a row.

    Args:
        bases: For each block the addresses of its partial results and of its stats.
        four: The columns.
        shape: That of a block's partial results.
    """
    found = []
    warpgroups, queries, wide = shape
    for base, own in bases:
        at = emit("mad.lo.u32 $0, $1, 4, $2;", [four.row, own])
        first = emit("mad.lo.u32 $0, $1, 16, $2;", [four.place, base])
        for w in range(warpgroups):
            highest, total = (
                emit(
                    f"ld.shared::cluster.f32 $0, [$1+{4 * queries * i}];",
                    [at], f32(), effects=True,
                )
                for i in (2 * w, 2 * w + 1)
            )  # fmt: skip
            found.append(_Part(highest, total, first, 4 * w * queries * wide))
    return found


def _combined(parts: list[_Part]) -> tuple[Any, Any, list[Any]]:
    """Returns the maximum and the sum of all parts, and four columns of the result."""
    highest = parts[0].highest
    for part in parts[1:]:
        highest = _float32("max.NaN.f32", highest, part.highest)
    total, sums = None, None
    for part in parts:
        fade = emit(
            "{ .reg .f32 x; sub.rn.f32 x, $1, $2; ex2.approx.ftz.f32 $0, x; }",
            [part.highest, highest], f32(),
        )  # fmt: skip
        own = _float32("mul.rn.f32", part.total, fade)
        loaded = load_four(part.place, part.offset)
        columns = [_float32("mul.rn.f32", x, fade) for x in loaded]
        total = own if total is None else _float32("add.rn.f32", total, own)
        sums = columns if sums is None else [
            _float32("add.rn.f32", a, b) for a, b in zip(sums, columns, strict=True)
        ]  # fmt: skip
    return highest, total, [_float32("div.rn.f32", x, total) for x in sums or ()]


def _store_logarithm(target: Any, four: Four, total: Any, highest: Any) -> None:
    """Stores a row's base-2 logarithm of the sum, by the thread of its first column."""
    text = (
        "{ .reg .pred first, none; .reg .f32 x; .reg .b64 a;\n"
        "setp.eq.u32 first, $1, 0; lg2.approx.f32 x, $2;"
        " add.rn.f32 x, x, $3; mad.wide.u32 a, $0, 4, $4;\n"
        "setp.eq.f32 none, $3, 0fFF800000; selp.f32 x, $3, x, none;\n"
        "@first st.global.f32 [a], x; }"
    )
    given = [four.row, four.column, total, highest, pointer(target)]
    _do(text, given, "r,r,f,f,l,~{memory}")


def _float32(name: str, a: Any, b: Any) -> Any:
    """The result of an instruction of two numbers."""
    return emit(f"{name} $0, $1, $2;", [a, b], f32())


def _do(text: str, given: list[Any], letters: str) -> None:
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, given, text, letters, has_side_effects=True)
