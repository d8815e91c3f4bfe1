"""Stored matrices: numbers of few bits that a program widens before it multiplies.

Formula    matrix[g, k, n] = numbers[g, k, n] scale[g, n]
Looks like an array of 8 bits above an operand of a product: casts, and products.
Must hold  the matrices are the stored numbers, all of them, times what does not vary
           along the summed axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import Algebra, Index, OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import (
    Operand,
    Refused,
    flat_indices,
    operand,
    split_digits,
)
from rewriter.ops.stored import EIGHT_BITS
from rewriter.ops.widening import JOINS
from rewriter.patterns.quantized.steps import stored_above as few_above
from rewriter.patterns.quantized.steps import widening
from rewriter.program.walk import values_above

REACH = 40
"""The most values above the matrices to examine."""


def stored_above(find: Finder, matrices: int) -> int | None:
    """The array of 8-bit numbers that matrices are made of, or None."""
    g = find.graph
    for value in values_above(g, [matrices], find.local, most=REACH):
        if str(g.dtype(value)) in EIGHT_BITS:
            return _under_layout(find, value)
    return None


def _under_layout(find: Finder, value: int) -> int:
    """The array below a value's transposes and reshapes."""
    node = find.graph.node_of(value)
    while node is not None and node.prim in ("transpose", "reshape", "copy"):
        value = node.ins[0]
        node = find.graph.node_of(value)
    return value


@dataclass(frozen=True)
class StoredMatrices:
    """Stored matrices, as operands.

    Attributes:
        numbers: The whole array of 8-bit numbers.
        scale: A factor for each column of each matrix, or None.
        order: The name of the order of axes in which the array lies.
    """

    numbers: Operand
    scale: Operand | None
    order: str


def read(
    find: Finder,
    ev: RegionEvaluator,
    matrices: int,
    at: tuple[Index, ...],
    stored: int,
    summed: Index,
    columns: tuple[Index, ...],
    orders: Mapping[str, tuple[Index, ...]],
) -> StoredMatrices:
    """The stored matrices of a product.

    Args:
        find: The search.
        ev: An evaluator that expands the matrices, down to the stored array.
        matrices: The product's operand.
        at: Its indices.
        stored: The array of 8-bit numbers.
        summed: The index that is summed over.
        columns: The other indices.
        orders: The orders of indices in which the array may lie, by name.

    Raises:
        Refused: If they are not the stored numbers times a scale for each column.
    """
    alg = find.algebra
    numbers, scale = _factors(alg, ev.poly(matrices, at), stored)
    if alg.ids(scale) & alg.index_ids(summed):
        text = "the scale of the 8-bit matrices varies along the axis that is summed"
        raise Refused("scale", text, score=0.6)
    dtype = _require_one_rounding(find, matrices)
    of_columns = None
    if scale != alg.const(1):
        of_columns = operand(scale, *map(flat_indices, columns), dtype=dtype)
    for name, axes in orders.items():
        array = _all_numbers(find, numbers, stored, axes)
        if array is not None:
            return StoredMatrices(array, of_columns, name)
    text = "the 8-bit matrices are a part of an array, or lie in another order"
    raise Refused("stored", text, score=0.6)


def _require_one_rounding(find: Finder, matrices: int) -> Any:
    """The dtype of the scale that a program multiplies stored numbers by, or None.

    Kernels multiply in float32, and round to the matrices' dtype. So a program must do,
    in float32 or in that dtype, which are the same for numbers of 8 bits.

    Raises:
        Refused: If it rounds in another way.
    """
    above = widening(find, matrices, few_above(find, matrices) or matrices)
    wide = str(find.graph.dtype(matrices))
    held, joined = "", False
    for step in above.text.split():
        if step[0] == "*" and not joined and held in ("float32", wide):
            joined = True
        elif step[0] in JOINS or (joined and step != wide):
            text = f"the 8-bit matrices are rounded otherwise: {above.text}"
            raise Refused("widen", text, score=0.6)
        else:
            held = step
    if joined and held != wide:
        raise Refused("widen", "the 8-bit matrices are not rounded", score=0.6)
    return next((find.graph.dtype(j.value) for j in above.joined), None)


def _factors(alg: Algebra, matrices: Poly, stored: int) -> tuple[Poly, Poly]:
    """(stored numbers, factor) of a form of matrices.

    Raises:
        Refused: If it is not such a product.
    """
    for (flag, mono), factor in matrices.items() if len(matrices) == 1 else ():
        own = [a for a, e in mono if e == 1 and alg.kind(a) == "leaf"]
        own = [a for a in own if alg.defs[a][1] == stored]
        if len(own) == 1:
            rest = tuple(x for x in mono if x[0] != own[0])
            return alg.of_atom(own[0]), {(flag, rest): factor}
    text = "the 8-bit matrices are not only multiplied by a scale"
    raise Refused("dequantised", text, score=0.6)


def _all_numbers(
    find: Finder, numbers: Poly, stored: int, axes: tuple[Index, ...]
) -> Operand | None:
    """All stored numbers, if their memory order is that of some axes."""
    alg, shape = find.algebra, find.graph.shape(stored)
    split, at = split_digits(alg, numbers, axes)
    ((_, ((atom, _),)),) = split
    try:
        groups = [flat_indices(a) for a in at]
        have = [i for a in alg.defs[atom][2] for i in flat_indices(a)]
    except OverBudget:
        return None
    want = [i for group in groups for i in group]
    every = math.prod(alg.sizes[i] for i in want) == math.prod(shape)
    return operand(split, *groups) if have == want and every else None
