"""Rows without keys, and fills that do not dominate."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from rewriter.algebra.canonicalize import kind_of
from rewriter.algebra.normal_form import TRUE
from rewriter.find.reading import Refused
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.bias_gradients import require_gradients_alike
from rewriter.patterns.attention.empty_rows import EmptyRow, empty_row
from rewriter.patterns.attention.hidden_scores import (
    MODERATE,
    NEAR,
    HiddenScores,
    hidden_scores,
)
from rewriter.patterns.attention.infinite_biases import finiteness_of
from rewriter.patterns.attention.masks import Masks
from rewriter.patterns.attention.operands import Operands
from rewriter.patterns.attention.row_values import SWALLOWS
from rewriter.patterns.attention.rows_with_keys import is_never_empty
from rewriter.patterns.attention.softmax import Softmax
from rewriter.patterns.attention.unshifted import read_unshifted
from rewriter.support.assumptions import FINITE

_WORDS = {"unknown": "what is not known here"}
AVERAGED = frozenset({"mean", "mean_passing"})
WEIGHED = frozenset({
    "where a bias of -inf hides all other keys of a row, masked ones are weighed, as "
    f"written; assume=({FINITE!r},) leaves that out"
})  # fmt: skip
CHANGED = frozenset({"rows without keys give something else than before"})


@dataclass(frozen=True)
class Rows:
    """The result of a row that sees no key.

    Attributes:
        give: ``"zero"``, ``"mean"``, ``"nan"`` or the like; ``None`` if there is no
            such row, or the op gives the same anyway.
        notes: What floats will see.
        fill: The score of hidden keys, if others of a row may be as low.
        fill_passes: Whether it is added to their scores, which have a gradient then.
        open_bias: Whether a bias may be as low, by its numbers.
    """

    give: str | None
    notes: Set[str] = frozenset()
    fill: float | None = None
    fill_passes: bool = False
    open_bias: bool = False


def read_rows(softmax: Softmax, axes: Axes, masks: Masks, operands: Operands) -> Rows:
    """Returns what a row gives that sees no key.

    Raises:
        Refused: If that cannot be told, or the op cannot give the same.
    """
    notes, may_be_infinite = _require_dominant_fills(softmax, axes)
    rows = _read_rows(softmax, axes, masks, operands, notes)
    return replace(rows, **_weighing(softmax, operands, rows, may_be_infinite))


def _weighing(
    softmax: Softmax, operands: Operands, rows: Rows, may_be_infinite: bool
) -> dict[str, Any]:
    """The score of hidden keys, where scores that a row sees may be as low.

    Raises:
        Refused: If scores may well be so, and no number is that score.
    """
    fills = [f for f in softmax.ev.fills if math.isfinite(f)]
    told = rows.notes & CHANGED or FINITE in softmax.find.assumed
    if not fills or softmax.seen_keys == TRUE or told:
        return {}
    read, near = hidden_scores(softmax), max(fills) > NEAR
    hidden = _if_alike(read, rows)
    found: dict[str, Any] = {}
    if may_be_infinite:
        found = _weighing_for_biases(softmax, operands, rows)
    elif hidden is not None and (near or softmax.function is None):
        found = {"fill": hidden.fill, "fill_passes": hidden.added}
    known = hidden is not None and found.get("fill") in (hidden.fill, None)
    if near and not (known and found) and not _vanish(softmax, read):
        raise Refused(
            "rows",
            f"scores may be as low as a mask's fill of {max(fills):g}, and what hidden "
            "keys weigh then is not known",
            score=0.8,
            suggestion="hide keys in one way, by one jnp.where, or by a lower number; "
            f"if scores are above it, assume=({FINITE!r},)",
        )
    if not found and not _vanish(softmax, read):
        text = f"scores assumed to be above a mask's fill of {max(fills):.4g}"
        return {"notes": rows.notes | {text}}
    return found


def _if_alike(hidden: HiddenScores | None, rows: Rows) -> HiddenScores | None:
    """What hidden keys score, if rows without keys fit that."""
    if hidden is None or rows.give is None:
        return hidden
    alike = {"mean": not hidden.added, "mean_passing": hidden.added}
    return hidden if alike.get(rows.give, False) else None


def _vanish(softmax: Softmax, hidden: HiddenScores | None) -> bool:
    """Whether exponentials of hidden keys are 0, whatever scores are seen."""
    chosen = hidden is not None and not hidden.added
    return chosen and read_unshifted(softmax) is not None


def _weighing_for_biases(
    softmax: Softmax, operands: Operands, rows: Rows
) -> dict[str, Any]:
    """The fill of rows whose visible scores are all -inf, and what such rows pass.

    Raises:
        Refused: If that cannot be told, or the op cannot give the same.
    """
    alg, parts = softmax.alg, softmax.parts
    if parts.sink:
        return {}
    kept = alg.both(softmax.seen_keys, parts.dropped_rows)
    # Numbers of a bias that are as large as the fill are not for this reading.
    added = softmax.values_of(alg.poly_leaves(softmax.bias))
    moderate = replace(softmax, scores=softmax.scores | added)
    ask = lambda live=softmax.scores: _empty_row(moderate, kept, operands, live)
    row = ask()
    hidden = parts.zero_rows or parts.row_mask != TRUE
    if row.gives in ("nan", "zero") and not hidden:
        return {}  # so it is without keys
    require_gradients_alike(softmax, row, ask)
    give = "mean_passing" if row.adds else row.gives
    alike = give in AVERAGED and rows.give in (give, None)
    if hidden or row.score is None or not math.isfinite(row.score) or not alike:
        raise _infinite("it is an argument")
    fill = SWALLOWS if row.adds and _is_rounded(softmax) else abs(row.score)
    passes = give == "mean_passing"
    notes = rows.notes | WEIGHED
    return {"fill": -fill, "fill_passes": passes, "open_bias": True, "notes": notes}


def _is_rounded(softmax: Softmax) -> bool:
    """Whether something between scores and result has fewer digits than float32.

    There a fill may absorb scores that it does not absorb in float32.
    """
    dtypes = map(
        softmax.find.graph.dtype, softmax.find.below(softmax.scores, softmax.value)
    )
    return any(kind_of(x) == "f" and x.itemsize < 4 for x in dtypes)


def _read_rows(
    softmax: Softmax, axes: Axes, masks: Masks, operands: Operands, notes: Set[str]
) -> Rows:
    """What a row without keys gives, as `read_rows`."""
    if softmax.parts.dropped_rows != TRUE:
        return _beside_dropped_rows(softmax, operands, notes)
    some = softmax.parts.keep if softmax.some is None else softmax.some
    kept = softmax.alg.both(some, softmax.parts.row_mask)
    if kept == TRUE and _may_lose_rows(softmax, axes):
        return Rows("nan_passing", notes)
    if kept == TRUE or is_never_empty(softmax, axes, masks):
        return Rows(None, notes)
    row = _empty_row(softmax, kept, operands)
    if not softmax.parts.sink:
        require_gradients_alike(
            softmax, row, lambda live: _empty_row(softmax, kept, operands, live)
        )
    give = "zero" if softmax.parts.zero_rows else row.gives
    if row.breaks_gradients and give == "zero" and not softmax.parts.sink:
        return Rows("zero_nan_passing", notes)
    if row.breaks_gradients and give != "nan_passing":
        raise Refused(
            # Of what is known, no other reading of its fills changes it.
            "empty_rows" if give == "unknown" else "gradient",
            f"a row without keys gives {_WORDS.get(give, give)}, and NaN in gradients "
            "of its queries",
            score=0.8,
        )
    if row.halves_gradients and give in ("mean_passing", "unknown"):
        raise Refused(
            "gradient",
            "a row without keys passes half of a gradient to its scores, since a "
            "maximum takes two equal numbers there",
            score=0.8,
            suggestion="choose between scores and a fill by jnp.where",
        )
    if softmax.parts.sink:  # zero, as far as is known
        if give in ("zero", "unknown"):
            return Rows(None, notes)
        raise Refused(
            "rows", f"with an extra term a row without keys is {give}", score=0.8
        )
    if give != "unknown":
        return Rows(give, notes)
    if _may_change(softmax):
        return Rows("zero", notes | CHANGED)
    if softmax.ev.soft_fills:
        raise Refused(
            "rows", "a row without keys gives a value that this op cannot", score=0.8
        )
    raise Refused(
        "empty_rows",
        "what a row without keys gives is not known",
        score=0.8,
        suggestion="hide keys in one way, by one jnp.where; if such rows may give "
        "anything, numerics='fast'",
    )


def _beside_dropped_rows(softmax: Softmax, operands: Operands, notes: Set[str]) -> Rows:
    """What other rows without keys give, where weights of whole rows are dropped.

    A row that is dropped must be zero in every case, and any other row without keys
    the mean of the values: the form knows neither.

    Raises:
        Refused: If that is not so.
    """
    alg, parts = softmax.alg, softmax.parts
    some = parts.keep if softmax.some is None else softmax.some
    kept = alg.both(some, parts.dropped_rows)
    ask = lambda live=None: _empty_row(softmax, kept, operands, live)
    row = ask()
    if row.gives != "mean" or row.breaks_gradients or row.halves_gradients:
        text = "rows are set to zero, and other rows without keys are not their mean"
        raise Refused("rows", text, score=0.1)
    require_gradients_alike(softmax, row, ask)
    return Rows("mean", notes)


def _may_lose_rows(softmax: Softmax, axes: Axes) -> bool:
    """Whether numbers are added to whole rows: -inf makes such a row NaN.

    So it makes gradients of its query, and of all keys. With sinks the row is zero.
    """
    bias, alg = softmax.bias, softmax.alg
    return bool(alg.poly_leaves(bias)) and not (
        softmax.parts.sink or alg.ids(bias) & set(axes.s)
    )


def _empty_row(
    softmax: Softmax,
    kept: int,
    operands: Operands,
    live: frozenset[int] | None = None,
) -> EmptyRow:
    alg, parts = softmax.alg, softmax.parts
    atoms = set().union(*(alg.leaves(a) for a, _ in operands.dropped))
    if parts.dropped_rows == TRUE:
        atoms |= alg.poly_leaves(alg.of_bool(parts.drop_flag))
    dropped = frozenset(softmax.values_of(atoms)), parts.factor
    where = softmax.scores, softmax.products, softmax.value
    return empty_row(softmax.ev, kept, *where, dropped, live, parts.dropped_rows)


def _may_change(softmax: Softmax) -> bool:
    """Whether rows without keys may change, and nothing exact is left to try."""
    return softmax.find.fast and softmax.ev.whole_sides is not None


def _infinite(why: str) -> Refused:
    """Says that a bias may be infinite beside a finite fill."""
    return Refused(
        "empty_rows",
        f"a bias may hold -inf, since {why}: with that and a mask's finite fill the "
        "program weighs the masked keys",
        score=0.8,
        suggestion=f"if the bias is finite, assume=({FINITE!r},)",
    )


def _require_dominant_fills(softmax: Softmax, axes: Axes) -> tuple[Set[str], bool]:
    """Refuses fills that do not dominate: scores may be as large, or the bias.

    Where all keys of a row are masked by one or the other, the program weighs
    them by which; no hard mask does.

    Returns:
        What floats will see, and whether the program's arguments say if a bias is -inf.
    """
    bias = softmax.bias
    fills = [abs(f) for f in softmax.ev.fills if math.isfinite(f)]
    if fills and min(fills) < MODERATE:
        text = f"a mask that adds {-min(fills):g} is only a bias: it may not hide keys"
        raise Refused("rows", text, score=0.7)
    none = not bias and softmax.function is None
    if softmax.seen_keys == TRUE or none or not fills:
        return frozenset(), False
    known = finiteness_of(softmax, axes)
    if known.why_not and not _may_change(softmax):
        raise _infinite(known.why_not)
    if known.why_not:
        return CHANGED, False
    largest_number = max((abs(c) for c in bias.values()), default=0)
    for value in softmax.values_of(softmax.alg.poly_leaves(bias)):
        largest_number = max(largest_number, softmax.find.largest_number(value))
    if not min(fills) < 100 * largest_number >= 1e6:
        return frozenset(), known.is_open
    if _may_change(softmax):
        return CHANGED, False
    raise Refused(
        "empty_rows",
        "a mask and a bias add numbers of like size: which keys a row "
        "without keys weighs depends on both",
        score=0.8,
    )
