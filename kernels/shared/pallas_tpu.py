"""Wrappers of Pallas Mosaic TPU that hide differences between versions of jax.

One function per need, one comment per difference between versions (0.10.2, 0.11.2,
0.12).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

if TYPE_CHECKING:
    from jax import Array

LANES = 128
"""Columns of a register; the last axis of a block is a multiple of it."""

SCOPED_VMEM = 16 << 20
"""Bytes of VMEM that a kernel has on every generation by default."""

TAKES_HIGH = jax.__version_info__ >= (0, 11)
"""Whether products of three passes lower: older versions take all six instead."""

VMEM = pltpu.VMEM
SMEM = pltpu.SMEM


def sublanes(dtype: Any) -> int:
    """Returns the rows of a register: 8 of 32 bits, 16 of 16 bits, 32 of 8 bits."""
    return 32 // jnp.dtype(dtype).itemsize


@dataclass(frozen=True)
class Grid:
    """The steps of a kernel.

    Attributes:
        sizes: Steps along each axis, the last one fastest. A size may be a traced
            scalar.
        parallel: The number of leading axes that may be split over the cores of a chip:
            along these, no block of a result or scratch is visited again.
    """

    sizes: tuple[Any, ...]
    parallel: int


def call(
    body: Callable[..., None],
    name: str,
    grid: Grid,
    inputs: Sequence[pl.BlockSpec],
    outputs: Sequence[pl.BlockSpec],
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any] = (),
    prefetched: int = 0,
    vmem: int = 0,
    aliases: dict[int, int] | None = None,
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `body` at every step of a grid on a TPU.

    Args:
        body: Takes references to prefetched scalars, inputs, outputs and scratch.
        name: The name of the kernel in profiles.
        grid: The steps.
        inputs: The block of each input at a step.
        outputs: The block of each output.
        out: Shapes and dtypes of the outputs.
        scratch: Memory that is kept from step to step, `VMEM` or `SMEM`.
        prefetched: The number of leading arrays that are int32 scalars. The functions
            of blocks also get them, as references after the indices.
        vmem: Bytes of VMEM that blocks (twice), scratch and values need; more than
            `SCOPED_VMEM` is requested.
        aliases: Outputs that overwrite inputs: from the input's number, counting
            prefetched ones, to the output's number.
    """
    semantics = ("parallel",) * grid.parallel
    semantics += ("arbitrary",) * (len(grid.sizes) - grid.parallel)
    return pl.pallas_call(
        body,
        name=name,
        out_shape=tuple(out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=prefetched,
            grid=grid.sizes,
            in_specs=list(inputs),
            out_specs=tuple(outputs),
            scratch_shapes=list(scratch),
        ),
        input_output_aliases=aliases or {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics,
            vmem_limit_bytes=vmem if vmem > SCOPED_VMEM else None,
        ),
    )


def shaped(shape: Sequence[int], dtype: Any, like: Array) -> jax.ShapeDtypeStruct:
    """Returns an output's type; it varies over the same mesh axes as `like`.

    Inside `jax.shard_map` with ``check_vma=True`` JAX requires them.
    """
    axes = jax.typeof(like).manual_axis_type
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=axes)


def in_steps(size: int, step: int, add: Callable[[Any], None]) -> None:
    """Calls ``add(slice)`` for all of `size` columns, `step` of them at a time.

    The last slice is smaller if `step` does not divide `size`.
    """

    def turn(i: Any, _: Any) -> None:
        add(pl.ds(pl.multiple_of(i * step, step), step))

    lax.fori_loop(0, size // step, turn, None)
    if size % step:
        add(pl.ds(size - size % step, size % step))


def dot(
    a: Array,
    b: Array,
    axes: tuple[int, int] = (1, 0),
    precision: str | None = None,
) -> Array:
    """Returns the product of two matrices as float32.

    16-bit operands are multiplied exactly and summed in float32. The compiler refuses a
    precision from ``jax.default_matmul_precision`` for them, so each product states its
    own.

    Args:
        a: [rows, k], or [k, rows].
        b: [k, columns], or [columns, k].
        axes: Which axes are summed.
        precision: The source's precision for float32 operands: "highest", "high", or
            None, which rounds both to bfloat16. If one operand is float32, the other is
            widened to it.
    """
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    of = lax.Precision.DEFAULT
    if a.dtype == jnp.float32 and precision is not None:
        of = lax.Precision(precision)
        if of is lax.Precision.HIGH and not TAKES_HIGH:
            of = lax.Precision.HIGHEST
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, of, jnp.float32)


def masked(x: Array, axis: int, low: Any, high: Any) -> Array:
    """Returns a block with zeros outside a range of an axis.

    Values beyond an array's edge are undefined, and must not be summed.
    """
    at = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    inside = (at >= low) & (at < high)
    # Through float32: v5e and before have no 16-bit arithmetic.
    return jnp.where(inside, x.astype(jnp.float32), 0).astype(x.dtype)
