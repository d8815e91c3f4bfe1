"""Rows without keys, and fills that do not dominate."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from rewriter.algebra.normal_form import TRUE, Poly
from rewriter.find.reading import Refused, size
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.bias_gradients import require_gradients_alike
from rewriter.patterns.attention.empty_rows import EmptyRow, empty_row
from rewriter.patterns.attention.masks import Masks
from rewriter.patterns.attention.operands import Operands
from rewriter.patterns.attention.softmax import Softmax

MODERATE = 1e3  # smaller fills leave masked keys a weight that scores can reach
_WORDS = {"unknown": "what is not known here"}
CHANGED = frozenset({"rows without keys give something else than before"})


@dataclass(frozen=True)
class Rows:
    """The result of a row that sees no key.

    Attributes:
        give: ``"zero"``, ``"mean"``, ``"nan"`` or the like; ``None`` if there is no
            such row, or the op gives the same anyway.
        notes: What floats will see.
    """

    give: str | None
    notes: Set[str] = frozenset()


def read_rows(softmax: Softmax, axes: Axes, masks: Masks, operands: Operands) -> Rows:
    """Returns what a row gives that sees no key.

    Raises:
        Refused: If that cannot be told, or the op cannot give the same.
    """
    notes = _require_dominant_fills(softmax)
    if softmax.parts.dropped_rows != TRUE:
        return _beside_dropped_rows(softmax, operands, notes)
    some = softmax.parts.keep if softmax.some is None else softmax.some
    kept = softmax.alg.both(some, softmax.parts.row_mask)
    if kept == TRUE and _may_lose_rows(softmax, axes):
        return Rows("nan_passing", notes)
    if kept == TRUE or _is_never_empty(softmax, axes, masks):
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


def _require_dominant_fills(softmax: Softmax) -> Set[str]:
    """Refuses fills that do not dominate: scores may be as large, or the bias.

    Where all keys of a row are masked by one or the other, the program weighs
    them by which; no hard mask does.
    """
    bias = softmax.bias
    fills = [abs(f) for f in softmax.ev.fills if math.isfinite(f)]
    if fills and min(fills) < MODERATE:
        text = f"a mask that adds {-min(fills):g} is only a bias: it may not hide keys"
        raise Refused("rows", text, score=0.7)
    if softmax.seen_keys == TRUE or not bias or not fills:
        return frozenset()
    largest_number = max(abs(c) for c in bias.values())
    for value in softmax.values_of(softmax.alg.poly_leaves(bias)):
        largest_number = max(largest_number, softmax.find.largest_number(value))
    if not min(fills) < 100 * largest_number >= 1e6:
        return frozenset()
    if _may_change(softmax):
        return CHANGED
    raise Refused(
        "empty_rows",
        "a mask and a bias add numbers of like size: which keys a row "
        "without keys weighs depends on both",
        score=0.8,
    )


# ------------------------------------------------------------ never without keys
def _is_never_empty(softmax: Softmax, axes: Axes, masks: Masks) -> bool:
    """Whether every query sees itself or the first key."""
    alg = softmax.alg
    t, s = size(alg, axes.t), size(alg, axes.s)
    left, right = masks.params.get("window", (None, None))
    shift = masks.params.get("shift", 0)
    names = set(masks.operands)
    if names == {"q_segments", "kv_segments"}:
        mine, theirs = masks.segments
        swap = {axes.s[0]: axes.t[0]} if axes.t and len(axes.s) == 1 else {}
        same = t == s and swap and alg.subst(theirs, swap) == mine
        lo = -left if left is not None else 0
        if same and lo + shift <= 0 <= shift + (right or 0):  # each sees itself
            return True
    if _each_sees_itself(softmax, axes):
        return True
    if left is None and "kv_lengths" in names:
        ((length, _),) = masks.operands["kv_lengths"].parts
        names -= {"kv_lengths"} if _least(softmax, length) >= 1 else set()
    if left is None and "offset" in names and _is_positive(softmax, masks.offset):
        names -= {"offset"}  # a later query sees the first key all the more
    if names - {"prefix"} or (left or 0) + (right or 0) < 0:
        return False
    first_sees = right is None or shift + right >= 0
    last_sees = left is None or t + shift <= s + left
    return first_sees and last_sees


def _each_sees_itself(softmax: Softmax, axes: Axes) -> bool:
    alg = softmax.alg
    if [alg.sizes[i] for i in axes.t] != [alg.sizes[i] for i in axes.s]:
        return False
    to = dict(zip(axes.s, axes.t, strict=True))
    return alg.subst_bool(softmax.seen_keys, to) == TRUE


def _is_positive(softmax: Softmax, offset: Poly) -> bool:
    """Whether what the queries' positions begin at is not below zero."""
    return _least(softmax, offset) >= 0


def _least(softmax: Softmax, form: Poly) -> float:
    """A lower bound of a sum of numbers and of integers such as loop counters."""
    alg, least = softmax.alg, 0.0
    for (flag, mono), c in form.items():
        leaf = alg.defs[mono[0][0]] if len(mono) == 1 else ("",)
        if flag == TRUE and not mono:
            least += c
        elif flag == TRUE and leaf[0] == "leaf" and mono[0][1] == 1 and c > 0:
            known, _ = alg.leaf_range.get(leaf[1], (-math.inf, 0))
            own = -math.inf if leaf[2] else softmax.find.least(leaf[1])
            least += c * max(known, own)
        else:
            return -math.inf
    return least
