"""Applies a function of scores to a tile of products in a warpgroup's registers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rewriter.kernels.attention.hopper.pallas import ROWS, TILE
from rewriter.kernels.shared import elementwise_gpu
from rewriter.kernels.shared.elementwise_fast import (
    LOG2E,
    exp2,
    is_small_range,
    small_to_float,
)
from rewriter.kernels.shared.elementwise_scaled import Scaled
from rewriter.kernels.shared.register_tiles import (
    filled,
    fused,
    instruction,
    mapped,
    moved,
)

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.functions import Function

AT_ONCE = 8
"""Columns that the function is applied to at a time."""


@dataclass(frozen=True)
class Read:
    """The operands of a function beside the products.

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
    scale: float,
    most: int | None,
    turned: bool,
    slope: bool,
    sums: tuple[Array, Array] | None = None,
) -> tuple[Array, ...]:
    """Returns the function's values, and its derivatives on request.

    Args:
        function: The function of scaled products, by which it is derived.
        products: float32 [64, n].
        rows: int32 [64], the number of each row.
        column: int32 [64], the number of the first column, the same for all rows.
        read: What else the function reads.
        scale: What products are multiplied with before.
        most: No row and no column has a larger number, if that is known.
        turned: Whether rows are keys and columns are queries.
        slope: Whether to return derivatives.
        sums: Two terms of the log-sum-exps, as wide, the second in binary digits.
            Then weights are returned, and weights times derivatives.
    """
    shape = plgpu.ShapeDtypeStruct(products.shape, jnp.float32, layout=TILE)
    arrays, starts = list(read.arrays), list(read.starts)
    tables = list(read.tables)

    @plgpu.inline_mgpu(
        arg_types=(
            TILE, ROWS, ROWS, [TILE] * len(arrays), [ROWS] * len(starts),
            [plgpu.RefType()] * len(tables), [TILE] * len(sums or ()),
        ),
        return_type=[shape] * (1 + slope),
    )  # fmt: skip
    def emit(
        context: Any, products: Any, rows: Any, column: Any, arrays: Any, starts: Any,
        tables: Any, sums: Any,
    ) -> list[Any]:  # fmt: skip
        del context
        inside = Read(arrays, read.uniform, tables, starts)
        program = function.value_and_slope if slope else function.value
        return _by_columns(
            function, program, products, rows, column, inside, scale, most, turned, sums
        )

    return tuple(emit(products, rows, column, arrays, starts, tables, list(sums or ())))


def _by_columns(
    function: Function, program: Any, products: Any, rows: Any, column: Any, read: Read,
    scale: float, most: int | None, turned: bool, sums: Sequence[Any],
) -> list[Any]:  # fmt: skip
    """Emits a program of a function, for some columns after the others.

    Arguments are those of `applied`. What is in registers is a fragmented array.
    """
    number = ir.IntegerType.get_signless(32)
    size, layout = (64, AT_ONCE), products.layout
    inner = mgpu.FragmentedArray.broadcasted_iota(
        number, size, 1, layout, is_signed=True
    )
    wide = lambda x: x.broadcast_in_dim(size, (0,), layout)
    rows, first = wide(rows), wide(column) + inner
    starts = [wide(x) for x in read.starts]
    tables = list(zip(map(_address, read.tables), starts, strict=True))
    dtypes = [dict(function.dtypes)[name] for name in function.arrays]
    positions = None if most is None else (0, most)
    ranges = [None, positions, positions]
    same = {3 + i for i, yes in enumerate(read.uniform) if yes}
    small = most is not None and is_small_range((0, most))
    floats = [small_to_float(x) for x in (rows, first)] if small else []
    evaluate = functools.partial(
        elementwise_gpu.factored_tiles, ranges=ranges, uniform=same, scale=scale
    )
    made = []
    for start in range(0, products.shape[1], AT_ONCE):
        cut = slice(start, start + AT_ONCE)
        columns = moved(first, start)
        at = (columns, rows) if turned else (rows, columns)
        given = [products[:, cut], *at]
        for x, dtype in zip(read.arrays, dtypes, strict=True):
            given.append(elementwise_gpu.as_dtype(x[:, cut], dtype))
        known = {}
        if small:
            places = floats[0], moved(floats[1], start)
            known = dict(zip((2, 1) if turned else (1, 2), places, strict=True))
        here = functools.partial(evaluate, floats=known)
        given = _with_lookups(function, given, tables, here)
        found = here(program, given)
        made.append(
            _weighed(*found, *(x[:, cut] for x in sums))
            if sums
            else [x.product for x in found]
        )
    registers = [[x.registers for x in parts] for parts in zip(*made, strict=True)]
    return [
        mgpu.FragmentedArray(
            _registers=np.concatenate(x, axis=1), _layout=layout, _is_signed=None
        )
        for x in registers
    ]


def _weighed(value: Scaled, slope: Scaled, lse: Any, rest: Any) -> list[Any]:
    """Returns weights, and weights times derivatives."""
    minus, factor = instruction("neg.f32"), value.factor
    if factor is None:
        away = mapped(arith.subf, value.tile, lse)
    else:
        away = fused(value.tile, factor, minus(lse))
    weights = exp2(fused(away, filled(away, LOG2E), minus(rest)))
    return [weights, mapped(arith.mulf, weights, slope.product)]


def _with_lookups(
    function: Function, given: list[Any], tables: list[Any], evaluate: Any
) -> list[Any]:
    """Returns what is given, and what each lookup finds there.

    Args:
        function: The function.
        given: Products, rows, columns and arrays.
        tables: For each lookup the address of its numbers, and where its table starts.
        evaluate: Evaluates a program of these.
    """
    given, dtypes = list(given), dict(function.dtypes)
    for look, (address, begin) in zip(function.lookups, tables, strict=True):
        place, index = (x.product for x in evaluate(look.place, given))
        found = elementwise_gpu.looked_up(address, begin + place, dtypes[look.table])
        given += elementwise_gpu.evaluate(look.found, [found, index])
    return given


def _address(memory: Any) -> Any:
    """The address of global memory, as a number."""
    wide = ir.IntegerType.get_signless(64)
    return llvm.ptrtoint(wide, mgpu.utils.memref_ptr(memory))
