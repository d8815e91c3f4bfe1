"""Operands that change scores, where rows are keys and columns queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rewriter.kernels.attention.hopper.extra_operands import COLUMNS, ROWS, TABLE
from rewriter.kernels.attention.hopper.terms import Terms, whole

if TYPE_CHECKING:
    from jax import Array


def transposed(
    terms: Terms, arrays: Mapping[str, Array]
) -> tuple[Terms, dict[str, Array]]:
    """Returns the same for transposed scores: rows are keys, columns queries."""
    names = {x: y for x, y in _TURNED.items() if x in arrays}
    turned = {
        names.get(name, name): whole(x.swapaxes(2, 3), TABLE) if x.ndim == 4 else x
        for name, x in arrays.items()
    }
    parts = tuple(
        (names.get(name, name), replace(part, form=_TURNED.get(part.form, part.form)))
        for name, part in terms.parts
    )
    hiding, adding = (
        frozenset(names.get(x, x) for x in given)
        for given in (terms.hiding, terms.adding)
    )
    return replace(terms, parts=parts, hiding=hiding, adding=adding), turned


_TURNED = {
    ROWS: COLUMNS, COLUMNS: ROWS,
    "row_terms": "column_terms", "column_terms": "row_terms",
    "row_segments": "column_segments", "column_places": "row_places",
    "column_segments": "row_segments", "row_first": "column_first",
    "row_last": "column_last",
}  # fmt: skip
