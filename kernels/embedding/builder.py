"""Both kernels of a way to add up rows: the sums, and lookups with that gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rewriter.kernels.embedding import forms, limits, lookup
from rewriter.kernels.embedding.estimate import estimate
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Kernel, Speed, always_the_same
from rewriter.support.verdict import Verdict, all_of

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

Pays = Callable[["Spec", str], Verdict]
"""As `Speed.profitable`."""


def by_id(
    name: str,
    add: Callable[[Array, Array, Array | None, int], Array],
    profitable: Pays,
    deterministic: Callable[[Any], Verdict] = always_the_same,
) -> tuple[Kernel, Kernel]:
    """Returns the kernels for ids that are an operand.

    Args:
        name: The kernels' name.
        add: ``add(rows, ids, table, size)`` gives a table [size, d]: the one given, or
            zeros, with rows [m, d] added to those that ids [m] name. Ids are int32;
            those of no row are `size`.
        profitable: Whether sums are likely to beat XLA's.
        deterministic: Whether they have the same bits in every run.
    """
    adds = functools.partial(_added_by_id, add)
    return _both(name, adds, limits.ids_given, profitable, deterministic)


def by_position(
    name: str, add: Callable[..., Array], profitable: Pays
) -> tuple[Kernel, Kernel]:
    """Returns the kernels for ids that are proved to count up.

    Args:
        name: The kernels' name.
        add: ``add(*, rows, table=None, size, start, period)`` gives the sums, as
            `reference` does. What `outside` says concerns no row.
        profitable: Whether sums are likely to beat XLA's.
    """
    adds = functools.partial(_added_by_position, add)
    return _both(name, adds, limits.counted_only, profitable, always_the_same)


def _both(
    name: str,
    adds: Callable[..., Array],
    takes: Callable[[Spec], Verdict],
    profitable: Pays,
    deterministic: Callable[[Any], Verdict],
) -> tuple[Kernel, Kernel]:
    """The kernels of both ops. Operands and parameters of `adds` are as in `reference`.

    `takes` says of which ids it adds up the rows.
    """

    def supports(spec: Spec) -> Verdict:
        return all_of(limits.rows_to_add(spec), takes(spec))

    sums = XLA.kernel(
        "embedding", functools.partial(_forward, adds), forms.backward, supports,
        Speed(profitable, estimate=estimate),
        name=name, saves=None, deterministic=deterministic,
    )  # fmt: skip
    return sums, lookup.with_sums(sums, takes)


def _forward(
    adds: Callable[..., Array], /, *, residuals: bool = False, **given: Any
) -> Any:
    """The sums and, with `residuals`, that nothing is saved."""
    out = adds(**given)
    return (out, ()) if residuals else out


def _added_by_id(
    add: Callable[[Array, Array, Array | None, int], Array],
    /,
    *,
    rows: Array,
    ids: Array,
    table: Array | None = None,
    size: int,
    outside: str = "drop",
    start: int = 0,
    period: int = 0,
    across: int = 0,
) -> Array:
    """The sums, by a function of one table that has those of all leading axes."""
    del start, period, across
    *lead, _, d = rows.shape
    flat, of_row, total = forms.flattened(rows, ids, size, outside)
    table = None if table is None else table.reshape(total, d)
    return add(flat, of_row, table, total).reshape(*lead, size, d)


def _added_by_position(
    add: Callable[..., Array], /, *, outside: str = "drop", across: int = 0,
    **given: Any,
) -> Array:  # fmt: skip
    """The sums; every position is a row of the table."""
    del outside, across
    return add(**given)
