"""Wrappers of Pallas Mosaic GPU that only attention needs.

One function per need, one comment per difference between versions.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rewriter.kernels.shared import work_stealing
from rewriter.kernels.shared.pallas_gpu import PROGRAM as PROGRAM
from rewriter.kernels.shared.pallas_gpu import WARPGROUP as WARPGROUP
from rewriter.kernels.shared.pallas_gpu import barriers as barriers
from rewriter.kernels.shared.pallas_gpu import kernel as kernel
from rewriter.kernels.shared.pallas_gpu import loaded as loaded
from rewriter.kernels.shared.pallas_gpu import store_rows as store_rows
from rewriter.kernels.shared.pallas_gpu import transforms
from rewriter.kernels.shared.pallas_gpu import when as when

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.order import Order

LOG2E = math.log2(math.e)

TILE = plgpu.Layout.WGMMA
"""The layout of an array of 64 rows in a warpgroup's registers."""

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""The layout of a value for each of 64 rows."""


def swizzle(*sizes: int) -> int:
    """Returns the widest swizzle, in bytes, whose 16-bit elements divide the sizes.

    Raises:
        ValueError: If a size is not a multiple of 16.

    Example:
        >>> swizzle(128), swizzle(96), swizzle(128, 80)
        (128, 64, 32)
    """
    for width in (128, 64, 32):
        if all(size % (width // 2) == 0 for size in sizes):
            return width
    raise ValueError(f"{sizes} are not multiples of 16")


def tiles(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
    """Returns shared memory for arrays that tensor cores read, `width` bytes swizzled.

    Args:
        shape: [..., rows, columns].
        dtype: A 16-bit float, or float32 for what tensor cores do not read.
        width: 128, 64 or 32.
    """
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, 8, width))


def table_tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for [..., 64, columns] that are copied in or out.

    Args:
        shape: The shape; 32 divides the columns, or 16 those of float32.
        dtype: int8, a 16-bit float or float32.
    """
    size = jnp.dtype(dtype).itemsize
    width = next(x for x in (128, 64, 32) if shape[-1] * size % x == 0)
    tiling = plgpu.TilingTransform((8, width // size))
    transforms = (tiling, plgpu.SwizzleTransform(width))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def lines(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory for numbers of rows or of columns, 32 of them or more."""
    return plgpu.SMEM(shape, dtype)


def zeros(shape: tuple[int, ...], value: float = 0.0) -> Array:
    """Returns float32 [64, n] or [64] of one value, in registers."""
    layout = TILE if len(shape) == 2 else ROWS
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def tanh(x: Array) -> Array:
    """Returns the hyperbolic tangent, as exact for small x as for large ones."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2E)))


COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""The layout of a value for each column of an array of 64 rows."""


def read(reference: Any, layout: Any) -> Array:
    """Returns [n] of global memory in registers: for rows or for columns."""
    return loaded(reference, layout, optimized=False)


def across(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns [n] repeated in every row: [64, n]."""
    return lax.broadcast_in_dim(x, shape, [1])


def along(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns [64] repeated in every column: [64, n]."""
    return lax.broadcast_in_dim(x, shape, [0])


def opaque(*numbers: Any) -> tuple[Any, ...]:
    """Returns integers that LLVM cannot recognise as loop-invariant.

    For a fixed place in shared memory, LLVM would compute all descriptors of products
    before the loop, in two registers for 16 columns. For heads of 256 ptxas then
    spilled a hundred (12.9).
    """
    return tuple(lax.optimization_barrier(jnp.int32(x)) for x in numbers)


def rows(value: Any) -> Array:
    """Returns int32 [64] of one value, in registers."""
    return plgpu.layout_cast(jnp.full((64,), value, jnp.int32), ROWS)


def row_positions(count: int) -> Array:
    """Returns int32 [64]: the index of each row."""
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=ROWS)


def sloped(scores: Array, first: Array, slope: Array) -> Array:
    """Returns scores plus ``first + slope * column``.

    Eight columns at a time, each from the eight before: products with all columns would
    take a quarter as many registers as the scores.

    Args:
        scores: float32 [64, n].
        first: float32 [64].
        slope: float32 [64].
    """

    @plgpu.inline_mgpu(
        arg_types=(TILE, ROWS, ROWS),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=TILE),
    )
    def emit(context: Any, scores: Any, first: Any, slope: Any) -> Any:
        del context
        now, slope = (
            x.broadcast_in_dim((64, 8), (0,), scores.layout) for x in (first, slope)
        )
        number = ir.IntegerType.get_signless(32)
        column = mgpu.FragmentedArray.broadcasted_iota(
            number, (64, 8), 1, scores.layout, is_signed=True
        )
        now = now + slope * column.astype(ir.F32Type.get())
        ahead = slope * 8.0
        parts = []
        for start in range(0, scores.shape[1], 8):
            parts.append((scores[:, start : start + 8] + now).registers)
            now = now + ahead
        return mgpu.FragmentedArray(
            _registers=np.concatenate(parts, axis=1),
            _layout=scores.layout,
            _is_signed=None,
        )

    return emit(scores, first, slope)


def hide(
    scores: Array,
    first: Array | None,
    last: Array | None,
    fill: Array | None = None,
    end: Array | None = None,
    passes: bool = False,
) -> Array:
    """Returns scores with -inf outside of the columns from `first` to `last`.

    Eight columns at a time: indices of all columns would take half as many registers as
    the scores, and compilers keep them.

    Args:
        scores: float32 [64, n].
        first: int32 [64], None for 0.
        last: int32 [64], None for no end; one of both is given.
        fill: float32 [64] instead of -inf, for columns up to `end`.
        end: int32 [64]; None for no end.
        passes: Whether smaller scores stay where the fill would be.
    """
    given = [x for x in (first, last, fill, end) if x is not None]

    @plgpu.inline_mgpu(
        arg_types=(TILE, *([ROWS] * len(given))),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, jnp.float32, layout=TILE),
    )
    def emit(context: Any, scores: Any, *given: Any) -> Any:
        del context
        wide = [x.broadcast_in_dim((64, 8), (0,), scores.layout) for x in given]
        low = None if first is None else wide.pop(0)
        high = None if last is None else wide.pop(0)
        filling = wide
        integer = ir.IntegerType.get_signless(32)
        column = mgpu.FragmentedArray.broadcasted_iota(
            integer, (64, 8), 1, scores.layout, is_signed=True
        )
        nothing = mgpu.FragmentedArray.splat(
            mgpu.c(float("-inf"), ir.F32Type.get()), (64, 8), scores.layout
        )
        parts = []
        for start in range(0, scores.shape[1], 8):
            keep = None if high is None else column <= high - start
            if low is not None:
                after = column >= low - start
                keep = after if keep is None else keep & after
            other = nothing
            if filling:
                number = filling[0]
                if passes:
                    number = _least(scores[:, start : start + 8], number)
                other = number
                if len(filling) > 1:
                    other = (column <= filling[1] - start).select(number, nothing)
            parts.append(keep.select(scores[:, start : start + 8], other).registers)
        return mgpu.FragmentedArray(
            _registers=np.concatenate(parts, axis=1),
            _layout=scores.layout,
            _is_signed=None,
        )

    return emit(scores, *given)


def by_eights(x: Array) -> Array:
    """Returns the sums of every eighth column, [64, 8], of float32 [64, n]."""

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.float32, layout=TILE),
    )
    def emit(context: Any, x: Any) -> Any:
        del context
        parts = [x[:, i : i + 8] for i in range(0, x.shape[1], 8)]
        # Two sums that do not wait for each other.
        even, odd = (functools.reduce(operator.add, parts[i::2]) for i in range(2))
        return even + odd

    return emit(x)


def widened(x: Array) -> Array:
    """Returns bfloat16 [64, n] as float32, by one instruction a number.

    LLVM takes 1.6: it first cuts out what is already the upper half of a float32.
    """

    @plgpu.inline_mgpu(
        arg_types=(TILE,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
    )
    def emit(context: Any, x: Any) -> Any:
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        half, upper = mgpu.c(16, i32), mgpu.c(-(1 << 16), i32)
        made = np.empty_like(x.registers)
        for i, both in np.ndenumerate(x.registers):
            bits = llvm.bitcast(i32, both)
            out = llvm.mlir_undef(pair)
            for at, word in enumerate(
                (llvm.shl(bits, half, 0), llvm.and_(bits, upper))
            ):
                number = llvm.bitcast(f32, word)
                out = llvm.insertelement(out, number, mgpu.c(at, i32))
            made[i] = out
        return mgpu.FragmentedArray(_registers=made, _layout=x.layout, _is_signed=None)

    return emit(x)


def _least(x: Any, y: Any) -> Any:
    """Returns the smaller of two fragments, register by register."""
    made = np.empty_like(x.registers)
    for i, register in np.ndenumerate(x.registers):
        made[i] = arith.minnumf(register, y.registers[i])
    return mgpu.FragmentedArray(_registers=made, _layout=x.layout, _is_signed=None)


def least(x: Array, y: Array) -> Array:
    """Returns the smaller of two float32 [64, n]; the other of one that is NaN."""

    @plgpu.inline_mgpu(
        arg_types=(TILE, TILE),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=TILE),
    )
    def emit(context: Any, x: Any, y: Any) -> Any:
        del context
        return _least(x, y)

    return emit(x, y)


def hold(x: Array) -> None:
    """Keeps ptxas from moving a later wait before x, float32 [64, 8], is known.

    Threads would sleep if x were negative, which no sum of weights is.
    """

    @plgpu.inline_mgpu(arg_types=(TILE,))
    def emit(context: Any, x: Any) -> None:
        del context
        pairs = x.registers.ravel()
        numbers = [
            llvm.extractelement(pair, mgpu.c(i, ir.IntegerType.get_signless(32)))
            for pair in pairs for i in range(2)
        ]  # fmt: skip
        tests = "setp.lt.f32 p, $0, 0f00000000; " + " ".join(
            f"setp.lt.or.f32 p, ${i}, 0f00000000, p;" for i in range(1, len(numbers))
        )
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            numbers,
            f"{{ .reg .pred p; {tests} @p nanosleep.u32 1; }}",
            ",".join("f" * len(numbers)),
            has_side_effects=True,
        )

    emit(x)


FIRST_NAMED = 8
"""The first of PTX's 16 named barriers that is used here; Mosaic takes low ones."""


def _named_barrier(command: str, after: int, warpgroups: int) -> None:
    """Emits ``bar.<command>`` on the barrier of this warpgroup, or of one after it."""
    text = (
        "{ .reg .u32 w; mov.u32 w, %tid.x; shr.u32 w, w, 7; "
        f"add.u32 w, w, {after}; rem.u32 w, w, {warpgroups}; "
        f"add.u32 w, w, {FIRST_NAMED}; bar.{command} w, 256; }}"
    )

    @plgpu.inline_mgpu()
    def emit(context: Any) -> None:
        del context
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], text, "~{memory}", has_side_effects=True)

    emit()


def wait_for_turn(warpgroups: int) -> None:
    """Waits until the warpgroup before this one has passed the turn on."""
    _named_barrier("sync", 0, warpgroups)


def pass_turn(warpgroups: int) -> None:
    """Lets the next warpgroup have its turn."""
    _named_barrier("arrive", 1, warpgroups)


def assigned_tiles(order: Order) -> dict[str, Any]:
    """Returns the arrays in global memory that `over_tiles` reads, by name."""
    if order.claimed:
        return {"claims": work_stealing.counter()}
    return {} if order.table is None else {"table": jnp.asarray(order.table)}


def over_tiles(
    order: Order,
    given: dict[str, Any],
    memory: dict[str, Any],
    body: Callable[[Any, Any], Any],
    copies: bool = False,
) -> None:
    """Runs ``steps = body(index, steps, turn)`` for the tiles that this block takes.

    Args:
        order: The tiles.
        given: References to the arrays that `assigned_tiles` returned.
        memory: Holds `work_stealing.scratch` if tiles are claimed.
        body: Takes an index of the order, the number of steps so far, and that of
            tiles.
        copies: Whether this is the warpgroup that copies.
    """
    program, steps, table = lax.axis_index(PROGRAM), jnp.int32(0), given.get("table")
    if order.claimed:
        line = work_stealing.Claims(memory, given["claims"], order.blocks, order.tiles)
        line.over(lambda i, steps, index, _: body(index, steps, i), steps, copies)
    elif order.programs == 0:
        body(program, steps, 0)
    elif table is None:
        turn = lambda i, steps: body(i * order.blocks + program, steps, i)
        lax.fori_loop(0, order.count(program), turn, steps)
    else:
        count, first = scalar(table, program, 0), scalar(table, program, 1)

        def listed(i: Any, carry: Any) -> Any:
            index, steps = carry
            after = scalar(table, program, i + 2)  # read while this one is computed
            return after, body(index, steps, i)

        lax.fori_loop(0, count, listed, (first, steps))


def scalar(reference: Any, *index: Any) -> Array:
    """Returns one number of an array in global memory."""
    return reference[index]
