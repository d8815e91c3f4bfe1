"""Applies a function of scores to a tile of products in a warpgroup's registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rewriter.kernels.attention.hopper.pallas import ROWS, TILE
from rewriter.kernels.shared import elementwise_gpu
from rewriter.kernels.shared.register_tiles import moved

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.functions import Function

AT_ONCE = 8
"""Columns that the function is applied to at a time."""


@dataclass(frozen=True)
class Read:
    """What a function reads beside the products.

    Attributes:
        arrays: For each of its arrays the numbers for this tile, [64, n], float32 for
            floats, and int32 for others.
        tables: For each lookup a reference to all numbers of its table, float32 or
            int32, one after the other.
        uniform: For each array whether all its numbers in this tile are the same.
        starts: For each lookup the index of the first number of its table there, int32
            [64], the same for all rows.
    """

    arrays: Sequence[Array]
    uniform: Sequence[bool]
    tables: Sequence[Any]
    starts: Sequence[Array]


def applied(
    function: Function,
    products: Array,
    rows: Array,
    column: Array,
    read: Read,
    *,
    most: int | None,
    turned: bool,
    slope: bool,
) -> tuple[Array, ...]:
    """Returns the function's values, and its derivatives by the products on request.

    Args:
        function: The function.
        products: float32 [64, n].
        rows: int32 [64], the number of each row.
        column: int32 [64], the number of the first column, the same for all rows.
        read: What else the function reads.
        most: No row and no column has a larger number, if that is known.
        turned: Whether rows are keys and columns are queries.
        slope: Whether to return derivatives.
    """
    of = dict(function.dtypes)
    dtypes = [of[name] for name in function.arrays]
    program = function.value_and_slope if slope else function.value
    shape = plgpu.ShapeDtypeStruct(products.shape, jnp.float32, layout=TILE)
    arrays, starts = list(read.arrays), list(read.starts)
    tables = list(read.tables)

    @plgpu.inline_mgpu(
        arg_types=(
            TILE, ROWS, ROWS, [TILE] * len(arrays), [ROWS] * len(starts),
            [plgpu.RefType()] * len(tables),
        ),
        return_type=[shape] * (1 + slope),
    )  # fmt: skip
    def emit(
        context: Any, products: Any, rows: Any, column: Any, arrays: Any, starts: Any,
        tables: Any,
    ) -> list[Any]:  # fmt: skip
        del context
        number = ir.IntegerType.get_signless(32)
        size, layout = (64, AT_ONCE), products.layout
        inner = mgpu.FragmentedArray.broadcasted_iota(
            number, size, 1, layout, is_signed=True
        )
        wide = lambda x: x.broadcast_in_dim(size, (0,), layout)
        rows, first = wide(rows), wide(column) + inner
        starts, addresses = [wide(x) for x in starts], [_address(x) for x in tables]
        parts: list[list[Any]] = [[] for _ in range(1 + slope)]
        positions = None if most is None else (0, most)
        ranges = [None, positions, positions]
        same = {3 + i for i, yes in enumerate(read.uniform) if yes}
        for start in range(0, products.shape[1], AT_ONCE):
            cut = slice(start, start + AT_ONCE)
            columns = moved(first, start)
            at = (columns, rows) if turned else (rows, columns)
            given = [products[:, cut], *at]
            for x, dtype in zip(arrays, dtypes, strict=True):
                given.append(elementwise_gpu.as_dtype(x[:, cut], dtype))
            for look, address, begin in zip(
                function.lookups, addresses, starts, strict=True
            ):
                place, index = elementwise_gpu.evaluate(
                    look.place, given, ranges, same
                )
                found = elementwise_gpu.looked_up(
                    address, begin + place, of[look.table]
                )
                given += elementwise_gpu.evaluate(look.found, [found, index])
            made = elementwise_gpu.evaluate(program, given, ranges, same)
            for part, x in zip(parts, made, strict=True):
                part.append(x.registers)
        return [
            mgpu.FragmentedArray(
                _registers=np.concatenate(part, axis=1), _layout=layout, _is_signed=None
            )
            for part in parts
        ]

    return tuple(emit(products, rows, column, arrays, starts, tables))


def _address(memory: Any) -> Any:
    """The address of global memory, as a number."""
    wide = ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(wide, mgpu.utils.memref_ptr(memory))
