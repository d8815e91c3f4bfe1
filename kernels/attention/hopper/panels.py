"""Arrays of any length in shared memory: panels of columns that are copied by rows.

A copy of tiles of 8 rows wants arrays of a multiple of 8 rows. Other arrays are copied
by rows, which may end anywhere. Their columns then lie in panels, one after the other,
each as wide as a tile: there, tiles of 8 rows and of 1 row lie in memory alike. So
memory has two views, one for products and one for copies.

Functions here take memory in either form: [rows, columns] in tiles, or panels
[panels, rows, columns of a panel].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rewriter.kernels.attention.hopper import pallas
from rewriter.kernels.shared import pallas_gpu
from rewriter.kernels.shared.halves import Halves, pairs

if TYPE_CHECKING:
    from jax import Array


def panels(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
    """Returns shared memory in two views: that of products, and that of copies.

    Args:
        shape: [..., rows, columns]; the views have a further axis before rows.
        dtype: A 16-bit float, or float32.
        width: Bytes of a row of a panel: 128, 64 or 32.
    """
    *before, rows, wide = shape
    each = pallas_gpu.columns(dtype, width)
    shape = (*before, wide // each, rows, each)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=pallas_gpu.transforms(dtype, 8, width)),
        plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(width),)),
    )


def copies(wide: int, width: int, by_rows: bool, halves: bool = False) -> int:
    """Returns the copies of an array of 16 bits: one for each panel.

    Args:
        wide: Columns of the array.
        width: Bytes of a row of a panel.
        by_rows: Whether it lies in panels.
        halves: Whether it is float32, in two arrays of 16 bits.

    Example:
        >>> copies(192, 128, True), copies(192, 128, False)
        (3, 1)
    """
    return (2 * wide // width if by_rows else 1) * (1 + halves)


def with_rows(
    memory: dict[str, Any],
    names: Mapping[str, str],
    two: bool,
    halves: Collection[str] = (),
) -> dict[str, Any]:
    """Returns memory with both views of some arrays by name.

    Args:
        memory: References by name.
        names: Names of some of them, and for each the name of the view that is copied
            from and to.
        two: Whether they are of `panels`, and not of `tiles`, whose only view is both.
        halves: Names of those that hold float32 in two parts, along the first axis.
    """
    made = dict(memory)
    for name, rows in names.items():
        if rows in memory:  # as a kernel's halves are given it
            continue
        views = tuple(memory[name]) if two else (memory[name],)
        if name in halves:
            views = tuple(Halves(view.at[0], view.at[1]) for view in views)
        made[name], made[rows] = views[0], views[-1]
    return made


def add_scores(total: Any, left: Any, right: Any) -> None:
    """Starts ``total += left @ right.T``, in a product for each panel.

    Args:
        total: An accumulator [64, n].
        left: Memory of [64, h], or of its halves.
        right: Memory of [n, h], or of its halves.
    """
    for one, other in pairs(left, right):
        if len(other.shape) == 2:
            plgpu.wgmma(total, one, other.transpose((1, 0)))
            continue
        for i in range(other.shape[0]):
            plgpu.wgmma(total, one.at[i], other.at[i].transpose((1, 0)))


class Total:
    """A sum of products with memory in panels, as `plgpu.ACC` is one with tiles.

    It is a value in registers, and begins with zeros. Reading it waits for products.
    """

    def __init__(self, shape: tuple[int, int]):
        self.value: Any = None
        self.shape = shape
        self.begins = True

    def __setitem__(self, index: Any, value: Array) -> None:
        del index
        self.value, self.begins = value, True

    def __getitem__(self, index: Any) -> Array:
        del index
        plgpu.wgmma_wait(0)
        self.value = lax.optimization_barrier(self.value)
        return self.value

    def add(self, left: Any, right: Any, turned: bool) -> None:
        """Starts a product."""
        before = pallas.zeros(self.shape) if self.value is None else self.value
        self.value = pallas_gpu.add_product_of_panels(
            before, left, right, turned, self.begins
        )
        self.begins = False


def run_scoped(
    body: Callable[..., Any],
    scores: Sequence[tuple[int, int]],
    totals: Sequence[tuple[int, int]],
    by_rows: bool,
) -> Any:
    """Returns what a function returns, given accumulators.

    Args:
        body: Takes an accumulator for each shape, [64 a, columns].
        scores: Shapes of those for `add_scores`.
        totals: Shapes of those for `add_rows`.
        by_rows: Whether memory is in panels.
    """
    last = [Total(x) for x in totals] if by_rows else []
    shapes = scores if by_rows else (*scores, *totals)
    if not shapes:
        return body(*last)
    kinds = [plgpu.ACC(x, jnp.float32) for x in shapes]
    return pl.run_scoped(lambda *first: body(*first, *last), *kinds)


def add_rows(total: Any, left: Any, right: Any, turned: bool = False) -> None:
    """Starts ``total += left @ right``.

    Args:
        total: One of the accumulators of `run_scoped`, [m, n].
        left: [m, k] of 16 bits, in registers or in tiles, or its halves.
        right: Memory of [k, n], or of its halves.
        turned: Whether `left` is [k, m], in tiles.
    """
    for one, other in pairs(left, right):
        if isinstance(total, Total):
            total.add(one, other, turned)
        else:
            plgpu.wgmma(total, one.transpose((1, 0)) if turned else one, other)


def put(place: Any, value: Array) -> None:
    """Writes [rows, columns] from registers into memory."""
    if len(place.shape) == 2:
        place[...] = value
        return
    count, _, each = place.shape
    for i in range(count):
        part = value if count == 1 else value[:, i * each : (i + 1) * each]
        place.at[i][...] = part


def parts(array: Any, at: tuple[Any, ...], place: Any) -> Iterator[tuple[Any, Any]]:
    """Yields parts of an array, and memory for each: what one copy moves.

    Columns beyond those of the array are copied as zeros, and not written.

    Args:
        array: Global memory [..., columns].
        at: Where the rows are, of all axes but the last; and of the last if memory
            holds only some of the columns.
        place: Memory of [rows, columns] in the view of copies, or of its halves. The
            array then has both along its first axis, which `at` leaves out.
    """
    if isinstance(place, Halves):
        for i, half in enumerate((place.high, place.low)):
            yield from parts(array, (i, *at), half)
        return
    if len(place.shape) == 2:
        yield array.at[at], place
        return
    (count, _, each), axes = place.shape, len(array.shape)
    first = at[-1].start if len(at) == axes else 0
    for i in range(count):
        start, end = first + i * each, array.shape[-1]
        if (start, end) == (0, each):
            yield array.at[at[: axes - 1]], place.at[i]
            continue
        # Pallas refuses a part that is known to reach over the edge.
        start = start if start + each <= end else pallas.opaque(start)[0]
        yield array.at[(*at[: axes - 1], pl.ds(start, each))], place.at[i]
