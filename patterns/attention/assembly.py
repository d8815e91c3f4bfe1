"""From a softmax to the op: axes, masks, operands, and rows without keys."""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.find.reading import Operand, Reading, Refused
from rewriter.patterns.attention.axes import name_axes
from rewriter.patterns.attention.chosen_weights import are_chosen
from rewriter.patterns.attention.masks import read_masks
from rewriter.patterns.attention.operands import read_operands
from rewriter.patterns.attention.precision import read_weights
from rewriter.patterns.attention.rows import read_rows
from rewriter.patterns.attention.softmax import Softmax
from rewriter.patterns.attention.unshifted import read_unshifted

NAME = "attention"
FLAGS = ("fill_passes", "open_bias")
"""Parameters that say more of the score of hidden keys."""

ADDED = frozenset(
    {
        "mask", "bias", "dropout", "kv_lengths", "prefix", "offset", "kv_positions",
        "first_position", "last_position",
    }
)  # fmt: skip
"""Operands that hide scores, or are added to them or multiplied by weights."""


def assembled(softmax: Softmax) -> Reading:
    """Returns the reading of a softmax as the op.

    Raises:
        Refused: If the op computes something else.
    """
    axes = name_axes(softmax)
    masks = read_masks(softmax, axes)
    inputs = read_operands(softmax, axes)
    operands = {**masks.operands, **inputs.arrays}
    _require_other_than_scores(softmax, operands)
    rows = read_rows(softmax, axes, masks, inputs)
    unshifted = read_unshifted(softmax)
    give = rows.give
    if give is None and not softmax.parts.sink and are_chosen(softmax):
        give = "zero"  # no row is empty, but some may be NaN
    empty = {} if give is None else {"empty_rows": give}
    if rows.fill is not None:
        empty |= {"fill": rows.fill} | {n: True for n in FLAGS if getattr(rows, n)}
    floats = {} if unshifted is None else {"unshifted": unshifted}
    weights = read_weights(softmax)
    digits = {} if weights is None else {"weights": weights}
    kept = {"rows whose exponentials overflow are NaN, as written"} if floats else set()
    plain = {"empty_rows": "nan", "fill": None, **dict.fromkeys(FLAGS, False)}
    check = {name: plain[name] for name in empty} | dict.fromkeys(floats)
    dtype = str(softmax.find.graph.dtype(softmax.value))
    form = softmax.form
    if softmax.parts.zero_rows:  # the check is made on rows that have a key
        ((_, mono), c) = next(iter(form.items()))
        form = {(softmax.parts.row_mask, mono): c}
    return Reading(
        NAME,
        softmax.alg,
        softmax.ev.place,
        softmax.value,
        softmax.args,
        form,
        (axes.b, axes.t, axes.n, axes.e),
        operands,
        {
            **masks.params,
            **inputs.params,
            **empty,
            **floats,
            **digits,
            "out_dtype": dtype,
        },
        check_params=check,
        check_options={"soft_fills": softmax.ev.soft_fills},
        notes=tuple(sorted({*softmax.ev.notes, *inputs.notes, *rows.notes, *kept})),
        joined=softmax.joined,
        evaluator=softmax.ev,
    )


def _require_other_than_scores(
    softmax: Softmax, operands: Mapping[str, Operand]
) -> None:
    """Refuses masks and biases that are computed from the scores themselves."""
    for name in sorted(ADDED & operands.keys()):
        used = operands[name]
        for value in softmax.values_of(used.leaves(softmax.alg)):
            if softmax.find.regions.descends(value, softmax.scores):
                what = "choice of weights to drop" if name == "dropout" else name
                text = f"the {what} is computed from the scores"
                raise Refused("scores", text, score=0.6)
