"""Wrappers of Pallas Mosaic GPU that hide differences between versions of jax.

One function per need, one comment per difference between versions (0.10.2, 0.11.2,
0.12).
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.ops.cost import FOUR_BITS

if TYPE_CHECKING:
    from jax import Array

WARPGROUP = "warpgroup"
"""The name of the axis along which a block's warpgroups differ."""

PROGRAM = "program"
"""The name of the axis along which blocks differ."""

SWIZZLE = 128
"""Bytes of a row of a tile in shared memory: what tensor cores read fastest."""

ACCUMULATOR = plgpu.Layout.WGMMA
"""The layout of a product of tensor cores in a warpgroup's registers."""

COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""The layout of a value for each of its columns."""

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""The layout of a value for each of its rows."""


def kernel(
    body: Callable[..., None],
    name: str,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    programs: int,
    warpgroups: int,
    cluster: int = 1,
    cluster_name: str = "cluster",
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `body` on a GPU.

    Args:
        body: Takes references to the arrays, to the results, and `scratch` by name.
        name: The name of the kernel in profiles.
        out: Shapes and dtypes of the results.
        scratch: The allocations of each block, by name.
        programs: Number of blocks, or of clusters of them.
        warpgroups: Warpgroups of a block.
        cluster: Blocks of a cluster, which read each other's shared memory.
        cluster_name: The name of the axis along which a cluster's blocks differ.
    """

    def run(*references: Any, **named: Any) -> None:
        with jax.named_scope(name):
            body(*references, **named)

    return plgpu.kernel(
        run,
        out_type=tuple(out),
        scratch_types=dict(scratch),
        grid=(programs,),
        grid_names=(PROGRAM,),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=(cluster_name,) if cluster > 1 else (),
        num_threads=warpgroups,
        thread_name=WARPGROUP,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
            # The default of 0.10; that of 0.11 and 0.12 finds layouts by itself.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Runs a function if a condition holds, which is the same in a warpgroup.

    `pl.when` converts the flag to a number. For each conversion Mosaic asks ptxas for
    its version, in a child process, which was 0.4 of the time to lower a kernel.
    """
    index = lax.select(condition, jnp.int32(1), jnp.int32(0))
    return lambda run: lax.switch(index, (lambda: None, run))


def columns(dtype: Any, swizzle: int = SWIZZLE) -> int:
    """Returns the columns of a tile in shared memory: 64 of 16 bits, 32 of 32."""
    return swizzle * 8 // bits(dtype)


def bits(dtype: Any) -> int:
    """Returns the bits of a number in memory: int4 is packed."""
    dtype = jnp.dtype(dtype)
    return 4 if dtype.name in FOUR_BITS else 8 * dtype.itemsize


def transforms(dtype: Any, rows: int = 8, swizzle: int = SWIZZLE) -> tuple[Any, ...]:
    """Returns the layout of tiles with some rows in shared memory.

    For arrays as wide as a tile, tiles of 1 row and of 8 rows have the same layout.
    """
    tiling = plgpu.TilingTransform((rows, columns(dtype, swizzle)))
    return (tiling, plgpu.SwizzleTransform(swizzle))


def tiles(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory that tensor cores read: [..., rows, columns].

    Copies to and from it begin at multiples of 8 rows. Rows of less than `SWIZZLE`
    bytes are tiles of their own width.
    """
    swizzle = min(SWIZZLE, shape[-1] * bits(dtype) // 8)
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype, swizzle=swizzle))


def tiles_and_rows(shape: tuple[int, ...], as_rows: tuple[int, ...], dtype: Any) -> Any:
    """Returns shared memory in two views: `tiles`, and one that is copied by rows.

    The second view is copied from and to any row of an array, any number of rows.

    Args:
        shape: [..., rows, columns], as many columns as a tile has.
        as_rows: The shape of the second view, of as many elements and columns.
        dtype: The elements' dtype.
    """
    by_row = plgpu.SMEM(as_rows, dtype, transforms=transforms(dtype, 1))
    return plgpu.RefUnion(tiles(shape, dtype), by_row)


def barriers(count: int, arrivals: int = 1) -> Any:
    """Returns `count` barriers, complete after so many arrivals, indexed by [i]."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def loaded(reference: Any, layout: Any, optimized: bool = True) -> Array:
    """Returns [n] of memory in registers: for rows or for columns.

    Args:
        reference: The memory.
        layout: How it lies in registers.
        optimized: Whether to refuse layouts that need many loads, as from global
            memory.
    """
    index = inspect.signature(plgpu.load).parameters.get("idx")
    if index is not None and index.default is inspect.Parameter.empty:
        return plgpu.load(reference, (), layout=layout, optimized=optimized)  # 0.10
    return plgpu.load(reference, layout=layout, optimized=optimized)  # from 0.11 on


def store_rows(reference: Any, value: Array) -> None:
    """Stores registers in global memory, whatever part of a sector each thread writes.

    JAX from 0.12 on refuses a plain assignment of layouts that write parts of 32 bytes.

    Args:
        reference: Global memory, of the value's shape and dtype.
        value: What to store, in any layout.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(reference, value, optimized=False)
    else:
        reference[...] = value


def row(reference: Any, first: Any, shape: tuple[int, int]) -> Array:
    """Returns float32 [rows, columns] that repeat some columns of one row.

    Args:
        reference: Floats [n] in global memory, n a multiple of `shape`'s columns.
        first: The first column; from n on, the last ones are taken.
        shape: [64 a, columns].
    """
    first = jnp.minimum(first, reference.shape[0] - shape[1])
    part = reference.at[pl.ds(pl.multiple_of(first, shape[1]), shape[1])]
    return _repeated(part, COLUMNS, shape, 1)


def column(reference: Any, first: Any, shape: tuple[int, int]) -> Array:
    """Returns float32 [rows, columns] that repeat some rows of one column.

    Args:
        reference: Floats [m] in global memory, m a multiple of `shape`'s rows.
        first: The first row, a multiple of them.
        shape: [64 a, columns].
    """
    part = reference.at[pl.ds(pl.multiple_of(first, shape[0]), shape[0])]
    return _repeated(part, ROWS, shape, 0)


def _repeated(part: Any, layout: Any, shape: tuple[int, int], axis: int) -> Array:
    """Values of global memory as float32, repeated along the other axis."""
    read = loaded(part, layout, optimized=False)
    read = read if read.dtype == jnp.float32 else read.astype(jnp.float32)
    return lax.broadcast_in_dim(read, shape, [axis])


def widened(
    narrow: Any,
    wide: Any,
    steps: Sequence[tuple[str, Any]] = (),
    joined: Sequence[Any] = (),
    axis: int = 1,
) -> None:
    """Writes numbers of 4 or 8 bits as numbers of 16: the same, or after some steps.

    All warps must have read the earlier content. Tensor cores may read it after a
    `plgpu.commit_smem`.

    Args:
        narrow: Shared memory [64 a, 16 b], int8, float8_e4m3fn, float8_e5m2 or int4,
            `tiles`.
        wide: Shared memory of that shape, bfloat16 or float16, `tiles`.
        steps: A sign, ``*``, ``-`` or ``+``, and what it joins in float32: a number, or
            the index of an array. ``("round", dtype)`` rounds.
        joined: The arrays, floats of 16 or 32 bits in global memory.
        axis: The axis along which they have a value for each position.
    """
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    if bits(narrow.dtype) == 4:
        layout = plgpu.Layout.WGMMA_UPCAST_4X
    x = loaded(narrow, layout)
    whole = jnp.issubdtype(x.dtype, jnp.integer)
    if not steps:
        for step in WIDENING[whole, wide.dtype == jnp.bfloat16]:
            x = x.astype(step)
    else:
        x = x.astype(jnp.bfloat16) if whole else x
        x = x.astype(jnp.float32)
    for sign, what in steps:
        if sign == "round":
            x = x.astype(what).astype(jnp.float32)
        else:
            index = isinstance(what, int)
            other = _along(joined[what], x.shape, axis, layout) if index else what
            x = JOINS[sign](x, other)
    wide[...] = x.astype(wide.dtype)


JOINS = {"*": operator.mul, "-": operator.sub, "+": operator.add}


def _along(values: Any, shape: tuple[int, ...], axis: int, layout: Any) -> Array:
    """Values repeated to a shape, in the layout of numbers that are widened."""
    read = loaded(values, layout.reduce(1 - axis), optimized=False)
    read = read if read.dtype == jnp.float32 else read.astype(jnp.float32)
    repeated = lax.broadcast_in_dim(read, shape, [axis])
    return plgpu.layout_cast(repeated, layout)


WIDENING = {
    (True, True): (),  # two instructions a number
    (True, False): (jnp.bfloat16, jnp.float32),
    (False, True): (jnp.float32,),
    (False, False): (),
}
"""The hardware's casts, by whether the source is int8 or int4, the target bfloat16."""


def claim(counter: Any, place: Any) -> None:
    """Increments a counter, and writes its old value where the warpgroup reads it.

    Every block gets a different value. A place must not be written again before all
    lanes have read it, nor in the next `claim`: two places take turns.

    Args:
        counter: Global memory, int32 [m, n]; the last of its first row is counted.
        place: Shared memory, int32 [n], whose first number is written.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def emit(context: Any, counter: Any, place: Any) -> None:
        del context
        last = ir.MemRefType(counter.type).shape[1] - 1
        counted = mgpu.utils.memref_ptr(mgpu.memref_slice(counter, (0, last)))
        i32, void = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        written = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(place))
        lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
        given = [counted, written, lane]
        llvm.inline_asm(void, given, CLAIM, "l,r,b", has_side_effects=True)
        mgpu.warpgroup_barrier()

    emit(counter, place)


CLAIM = """{
    .reg .u32 before;
    @$2 atom.relaxed.gpu.global.add.u32 before, [$0], 1;
    @$2 st.shared.u32 [$1], before;
}"""
"""By one lane."""


def zeros(shape: tuple[int, ...]) -> Array:
    """Returns float32 [64 a, columns] of zeros in registers, to add products to."""

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=ACCUMULATOR)
    )
    def emit(context: Any) -> Any:
        del context
        return mgpu.WGMMAAccumulator.zero(*shape).value

    return emit()


def add_product(total: Array, left: Any, right: Any) -> Array:
    """Returns ``total + left @ right``, with right in pieces of 64 columns.

    The sum is complete, and the shared memory free, after a `plgpu.wgmma_wait`. Until
    then it may only be added to. Afterwards it goes through a
    `jax.lax.optimization_barrier`.

    Args:
        total: float32 [64 a, 64 b], from `zeros` or this function.
        left: Shared memory [64 a, 64], 16 bits, `tiles`.
        right: Shared memory [b, 64, 64].
    """
    return _added(total, left, right, lambda left: left)


def add_product_of_rows(total: Array, left: Any, right: Any) -> Array:
    """Returns ``total + left.T @ right``, with both in pieces of 64 columns.

    Like `add_product`, except for the first operand.

    Args:
        total: float32 [64 a, 64 b], from `zeros` or this function.
        left: Shared memory [a, rows, 64], 16 bits, `tiles`.
        right: Shared memory [b, rows, 64].
    """

    def turned(left: Any) -> Any:
        every = slice(None)
        # [chunks, rows / 8, 1, 8, 64] → [chunks, rows / 8, 8, 64]
        left = mgpu.memref_slice(left, (every, every, 0))
        return mgpu.memref_transpose(left, (0, 1, 3, 2))

    return _added(total, left, right, turned)


def add_product_of_panels(
    total: Array, left: Any, right: Any, turned: bool, begins: bool
) -> Array:
    """Returns ``total + left @ right``, with right in panels as wide as its tiles.

    Like `add_product`, except for the operands.

    Args:
        total: float32 [64 a, columns], in registers.
        left: [64 a, rows] of 16 bits, in registers or in shared memory.
        right: Shared memory [panels, rows, columns of a panel].
        turned: Whether `left` is [rows, 64 a] in memory.
        begins: Whether `total` was computed otherwise than by such a product.
    """
    width = 2 * right.shape[2]
    turn = lambda left: mgpu.memref_transpose(left, (1, 0, 3, 2)) if turned else left
    return _added(total, left, right, turn, width, begins)


def _added(
    total: Array, left: Any, right: Any, turned: Callable[[Any], Any],
    width: int = SWIZZLE, begins: bool = False,
) -> Array:  # fmt: skip
    """Emits a product, with the first operand reordered to [rows, columns] of tiles."""
    given = plgpu.RefType(transforms(right.dtype, swizzle=width))
    in_memory = not isinstance(left, jax.Array)

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, given if in_memory else ACCUMULATOR, given),
        return_type=plgpu.ShapeDtypeStruct(
            total.shape, jnp.float32, layout=ACCUMULATOR
        ),
    )
    def emit(context: Any, total: Any, left: Any, right: Any) -> Any:
        del context
        every = slice(None)
        # [chunks, rows / 8, 1, 8, 64] → [rows / 8, chunks, 8, 64]
        right = mgpu.memref_slice(right, (every, every, 0))
        right = mgpu.memref_transpose(right, (1, 0, 2, 3))
        before = mgpu.WGMMAAccumulator.from_registers(total, sync=begins)
        after = mgpu.wgmma(before, turned(left), right, swizzle=width)
        text = "wgmma.commit_group.sync.aligned;"
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], text, "", has_side_effects=True)
        return after.value

    return emit(total, left, right)
