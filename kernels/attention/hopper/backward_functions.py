"""A function of scores in the gradient kernels, and the weights that follow from it.

Where nothing else changes scores, a few columns become weights at a time. Values and
derivatives of a whole tile would take as many registers as two tiles of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention.hopper.backward_problem import Problem, Seen
from rewriter.kernels.attention.hopper.terms import Place

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.attention.hopper.backward_tiles import Kernel, Tile


def is_alone(p: Problem, seen: Seen) -> bool:
    """Returns whether weights follow from a function's values and positions alone.

    Args:
        p: The problem.
        seen: What rows see of a block.
    """
    plain = p.terms.function is not None and p.terms.only_reads
    return plain and not p.mask.weighs and seen is not Seen.ALIKE


def values_and_slopes(
    kernel: Kernel, tile: Tile, products: Array, j: Any, slot: Any, step: Any,
    seen: Seen,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns a function's values, and its derivatives, 0 where a key is hidden."""
    found, steep = _computed(kernel, tile, products, j, slot, step, None)
    part = seen is Seen.SOME
    return found, kernel.hidden(tile, steep, j, 0.0) if part else steep


def weights_and_passed(
    kernel: Kernel, tile: Tile, products: Array, j: Any, slot: Any, step: Any,
    seen: Seen, rows: tuple[Array, Array],
) -> tuple[Array, Array]:  # fmt: skip
    """Returns weights, and weights times derivatives; both 0 where a key is hidden.

    Args:
        kernel: The kernel, whose problem `is_alone`.
        tile: Its tile.
        products: float32 [64, block].
        j: The block.
        slot: Its stage.
        step: The number of blocks read before.
        seen: What rows see of the block.
        rows: The log-sum-exps in two terms, as wide.
    """
    found = _computed(kernel, tile, products, j, slot, step, rows)
    if seen is not Seen.SOME:
        return found
    weights, passed = (kernel.hidden(tile, x, j, 0.0) for x in found)
    return weights, passed


def _computed(
    kernel: Kernel, tile: Tile, products: Array, j: Any, slot: Any, step: Any,
    rows: tuple[Array, Array] | None,
) -> tuple[Array, Array]:  # fmt: skip
    p = kernel.p
    place = Place(
        tile.b, kernel.head(tile, step), tile.first, j * p.block, p.block, p.parts,
        slot, p.mask.most(p.rows, p.block),
    )  # fmt: skip
    first, second = p.terms.computed(
        products, place, kernel.memory, kernel.given, kernel.part, scale=p.scale,
        turned=kernel.sign < 0, slope=True, rows=rows,
    )  # fmt: skip
    return first, second
