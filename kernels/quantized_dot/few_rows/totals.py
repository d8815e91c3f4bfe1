"""Sums of tensor cores: stored by each warpgroup, and added up over blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.quantized_dot.few_rows import registers
from rewriter.kernels.quantized_dot.few_rows.config import Tiles
from rewriter.kernels.quantized_dot.few_rows.registers import emit, f32
from rewriter.kernels.quantized_dot.few_rows.threads import (
    Thread,
    address,
    number,
    pointer,
)
from rewriter.kernels.shared import pallas_gpu

if TYPE_CHECKING:
    from rewriter.kernels.quantized_dot.few_rows.kernel import Use


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
        thread = Thread()
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
                entries = [number(x, 2 * j + half, e) for x in sums for half in (0, 1)]
                if use.transposed:
                    for i, entry in enumerate(entries):
                        _store(base, offset + 256 * (i // 2) + 32 * (i % 2), [entry])
                    continue
                once = min(each, 4)
                for i in range(0, len(entries), once):
                    tile, at = divmod(i, each)
                    place = offset + 4 * (tile * wide + at)
                    _store(base, place, entries[i : i + once])

    run(list(sums), partial)


def _store(base: Any, offset: int, values: Sequence[Any]) -> None:
    void = ir.Type.parse("!llvm.void")
    text = f"st.shared.f32 [$0+{offset}], $1;"
    if len(values) > 1:
        names = ", ".join(f"${i + 1}" for i in range(len(values)))
        text = f"st.shared.v{len(values)}.f32 [$0+{offset}], {{{names}}};"
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
        walk = Fours.of(rows, wide, config.computing + 1, config.splits)
        bases = [in_block(address(partial), r) for r in range(config.splits)]
        for four in walk.turns():
            sums = _of_all(bases, four.place, warpgroups, rows * wide)
            joined = [_four_of(x, four.column) for x in behind]
            sums = _joined(sums, steps, joined)
            store_four(out, dtype, stride, four, sums, m)

    run(partial, out, list(behind))


def _of_all(
    bases: Sequence[Any], place: Any, warpgroups: int, size: int, offset: int = 0
) -> list[Any]:
    """Four sums of all warpgroups of all blocks.

    Args:
        bases: The addresses of the blocks' sums.
        place: The number of the four columns there.
        warpgroups: How many have sums.
        size: The sums of a warpgroup.
        offset: Bytes that are added to the place.
    """
    sums: list[Any] = []
    for base in bases:
        first = emit("mad.lo.u32 $0, $1, 16, $2;", [place, base])
        for w in range(warpgroups):
            more = load_four(first, 4 * w * size + offset)
            sums = more if not sums else [
                emit("add.rn.f32 $0, $1, $2;", pair, f32())
                for pair in zip(sums, more, strict=True)
            ]  # fmt: skip
    return sums


def join_branches(
    partial: Any,
    out: Any,
    behind: Sequence[Sequence[Any]],
    config: Tiles,
    steps: Sequence[tuple[str, Any]],
    activation: tuple[str, float],
) -> None:
    """Adds up sums as `add_up` does, and stores ``act(gate) · up``.

    Args:
        partial: Shared memory float32 [warpgroups, rows, block_n], of every block. The
            first half of the columns are the gate's.
        out: Global memory [m, block_n / 2].
        behind: For each branch, global memory float32 [block_n / 2] each.
        config: The tiles.
        steps: What is joined to the sums of a branch, see `registers.Steps`.
        activation: Its name, of `BY_LOGISTIC` or ``"relu"`` or ``"identity"``, and
            the number of ``"swish"``.
    """
    m, dtype = out.shape[0], jnp.dtype(out.dtype).name
    warpgroups, rows, wide = partial.shape
    half = wide // 2
    plain = [[plgpu.RefType() for _ in own] for own in behind]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plain))
    def run(context: Any, partial: Any, out: Any, behind: Any) -> None:
        del context
        stride = ir.MemRefType(out.type).get_strides_and_offset()[0][0]
        walk = Fours.of(rows, half, config.computing + 1, config.splits)
        bases = [in_block(address(partial), r) for r in range(config.splits)]
        for four in walk.turns():
            text = f"mad.lo.u32 $0, $1, {wide // 4}, $2;"
            place = emit(text, [four.row, four.column])
            both = []
            for branch, own in enumerate(behind):
                offset = 4 * half * branch
                sums = _of_all(bases, place, warpgroups, rows * wide, offset)
                joined = [_four_of(x, four.column) for x in own]
                both.append(_joined(sums, steps, joined))
            made = [
                emit(
                    "mul.rn.f32 $0, $1, $2;", [activated(gate, *activation), up], f32()
                )
                for gate, up in zip(*both, strict=True)
            ]
            store_four(out, dtype, stride, four, made, m)

    run(partial, out, [list(own) for own in behind])


BY_LOGISTIC = {"silu": 1.0, "gelu_quick": 1.702, "swish": 1.0, "gelu_tanh": 1.0}
"""Activations ``y · logistic(c z)``, and c; z is y, or of ``gelu_tanh`` the argument of
the hyperbolic tangent twice."""


def activated(y: Any, name: str, beta: float) -> Any:
    """Returns the activation of a float32.

    Args:
        y: The number.
        name: One of `BY_LOGISTIC`, ``"relu"`` or ``"identity"``.
        beta: The factor inside of ``"swish"``.
    """
    if name == "identity":
        return y
    if name == "relu":
        return emit("max.NaN.f32 $0, $1, 0f00000000;", [y], f32())
    z, factor = y, BY_LOGISTIC[name] * (beta if name == "swish" else 1.0)
    if name == "gelu_tanh":
        text = (
            "{ .reg .f32 x; mul.rn.f32 x, $1, $1; fma.rn.f32 x, x, $2, $3;"
            " mul.rn.f32 $0, x, $1; }"
        )
        root = 2 * math.sqrt(2 / math.pi)
        numbers = [mgpu.utils.c(x, f32()) for x in (0.044715 * root, root)]
        z = emit(text, [y, *numbers], f32())
    text = (
        "{ .reg .f32 x; mul.rn.f32 x, $2, $3; ex2.approx.ftz.f32 x, x;"
        " add.rn.f32 x, x, 0f3F800000; div.rn.f32 $0, $1, x; }"
    )
    power = mgpu.utils.c(-factor * math.log2(math.e), f32())
    return emit(text, [y, z, power], f32())


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


def load_four(base: Any, offset: int) -> list[Any]:
    """Four floats of shared memory, of this block or another one."""
    kind = llvm.StructType.get_literal([f32()] * 4)
    text = f"ld.shared::cluster.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    made = llvm.inline_asm(
        kind, [base], text, "=f,=f,=f,=f,r,~{memory}", has_side_effects=True
    )
    return [llvm.extractvalue(f32(), made, [i]) for i in range(4)]


def _four_of(memory: Any, quad: Any) -> list[Any]:
    """Four floats of a row in global memory."""
    kind = llvm.StructType.get_literal([f32()] * 4)
    text = (
        "{ .reg .b64 x; mad.wide.u32 x, $5, 16, $4;\n"
        "ld.global.v4.f32 {$0, $1, $2, $3}, [x]; }"
    )
    made = llvm.inline_asm(
        kind, [pointer(memory), quad], text, "=&f,=&f,=&f,=&f,l,r",
        has_side_effects=True,
    )  # fmt: skip
    return [llvm.extractvalue(f32(), made, [i]) for i in range(4)]


@dataclass(frozen=True)
class Four:
    """Four neighbouring columns of a row.

    Attributes:
        place: Its number, counted through all rows.
        row: Its row.
        column: Its number in the row.
        thread: The thread that has it.
        limit: How many threads have some of their own; the others repeat the last.
    """

    place: Any
    row: Any
    column: Any
    thread: Any
    limit: int


@dataclass(frozen=True)
class Fours:
    """All fours of a result, spread over the threads of all blocks of a cluster.

    Attributes:
        rows: Rows of the result.
        wide: Its columns.
        warpgroups: Those of a block.
        splits: Blocks of a cluster.
        thread: The number of a thread in its block.
        rank: The number of its block in the cluster.
    """

    rows: int
    wide: int
    warpgroups: int
    splits: int
    thread: Any
    rank: Any

    @classmethod
    def of(cls, rows: int, wide: int, warpgroups: int, splits: int) -> Fours:
        """Reads the thread's numbers."""
        thread = emit("mov.u32 $0, %tid.x;", [], effects=True)
        rank = emit("mov.u32 $0, %cluster_ctarank;", [], effects=True)
        return cls(rows, wide, warpgroups, splits, thread, rank)

    def turns(self) -> Iterator[Four]:
        """Yields the four that a thread has in each turn."""
        threads, every = 128 * self.warpgroups, self.rows * self.wide // 4
        count = -(-every // self.splits)
        for first in range(0, count, threads):
            text = "{ .reg .b32 x; add.u32 x, $1, " + (
                f"{first}; min.u32 x, x, {count - 1};"
                f" mad.lo.u32 x, $2, {count}, x; min.u32 $0, x, {every - 1}; }}"
            )
            place = emit(text, [self.thread, self.rank])
            row = emit(f"div.u32 $0, $1, {self.wide // 4};", [place])
            column = emit(f"rem.u32 $0, $1, {self.wide // 4};", [place])
            limit = min(threads, count - first)
            yield Four(place, row, column, self.thread, limit)


def in_block(place: Any, rank: int) -> Any:
    """Returns the address of the same place in a block of the cluster."""
    return emit(f"mapa.shared::cluster.u32 $0, $1, {rank};", [place])


def store_four(
    out: Any, dtype: str, stride: int, four: Four, sums: list[Any], m: int
) -> None:
    """Stores four sums, if the thread has some of its own and the row exists."""
    size = jnp.dtype(dtype).itemsize
    head = (
        "{ .reg .pred some; .reg .b64 x;\n"
        f"setp.lt.u32 some, $0, {four.limit}; setp.lt.and.u32 some, $1, {m}, some;\n"
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
        void, [four.thread, four.row, four.column, pointer(out), *values], text,
        f"r,r,r,l,{letters},~{{memory}}", has_side_effects=True,
    )  # fmt: skip
