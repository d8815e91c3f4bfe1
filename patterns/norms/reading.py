"""The reading of a norm, from its form and what its axes and operands are."""

from __future__ import annotations

from typing import Any, NamedTuple

from rewriter.algebra.normal_form import Index, Poly
from rewriter.find.finder import Finder
from rewriter.find.reading import Operand, Reading, operand
from rewriter.patterns.norms.form import OF_NUMBERS, Form
from rewriter.patterns.norms.normalized_value import Source


class Applied(NamedTuple):
    """A scale and a bias that are applied to the op's result, or None."""

    times: Poly | None = None
    plus: Poly | None = None


def reading_of(
    find: Finder,
    ev: Any,
    op: str,
    value: int,
    args: tuple[Index, ...],
    form: Form,
    source: Source,
    axes: tuple[tuple[int, ...], ...],
    operands: dict[str, Operand],
    later: Applied,
    **more: Any,
) -> Reading:
    """Returns the reading, with the numbers that every norm has.

    Args:
        find: Finds it.
        ev: Evaluated the result.
        op: The op.
        value: The result.
        args: The indices of the result.
        form: Its form.
        source: The root, and what it is of.
        axes: The op's axes, as groups of indices.
        operands: The operands but for an epsilon that is an array.
        later: What is applied to the op's result.
        **more: Further fields of `Reading`.
    """
    whole = form.alpha * form.count
    params: dict[str, Any] = {
        "out_dtype": str(find.graph.dtype(value)),
        "eps": form.constant / whole,
    }
    if source.of_squares:
        params["of_squares"] = True
    if form.extra:
        extra = operand(find.algebra.scale(form.extra, 1 / whole))
        operands = {**operands, "epsilon": extra}
    return Reading(
        op,
        find.algebra,
        ev.place,
        value,
        args,
        form.poly,
        axes,
        operands,
        params | more.pop("params", {}),
        check_options=OF_NUMBERS,
        notes=tuple(sorted(ev.notes)),
        times=later.times,
        plus=later.plus,
        **more,
    )
