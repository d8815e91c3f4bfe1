"""Reads a group norm: which axes are groups, channels of a group, and positions.

Looks like a norm of several parts of axes whose scale and bias are for each channel::

        x       b    h    w    (g c)         the mean and variance are of h, w and c
        scale                  (g c)         so g are groups, and h and w positions

           An instance norm has one channel in each group, and a norm of all channels
           one group. Positions may stand in front of the channels or behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import TRUE, Index, Poly
from rewriter.find.finder import Finder
from rewriter.find.reading import (
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
)
from rewriter.patterns.norms.affine import is_parameter, require_outside, terms
from rewriter.patterns.norms.form import Form, form_of
from rewriter.patterns.norms.normalized_value import Source
from rewriter.patterns.norms.reading import Applied, reading_of
from rewriter.patterns.norms.results import is_scaled_later

Group = tuple[int, ...]


@dataclass(frozen=True)
class Axes:
    """The axes of a group norm, as groups of indices.

    Attributes:
        lead: Axes of samples, one each.
        before: Positions in front of the channels.
        groups: The groups.
        channels: The channels of a group.
        behind: Positions behind the channels.
    """

    lead: tuple[Group, ...]
    before: Group
    groups: Group
    channels: Group
    behind: Group

    def of_rows(self) -> tuple[Group, ...]:
        """The axes of x and of the result."""
        return *self.lead, self.before, self.groups, self.channels, self.behind


def read_group(
    find: Finder, ev: Any, op: str, value: int, source: Source, outside: bool = False
) -> Reading:
    """The reading of one candidate result.

    With ``outside``, a scale and bias of each sample are applied to the op's result.

    Raises:
        Refused: If the form is not a group norm's.
        OverBudget: If the form grows too large.
    """
    alg, args = find.algebra, ev.indices(value)
    poly, args = split_digits(alg, ev.poly(value, args), args)
    form = form_of(alg, poly, op, source.x)
    scale, bias = terms(alg, form)
    _require_always(alg, form, scale, bias)
    later = Applied()
    if outside:
        require_outside(alg, form, scale, bias)
        later, scale, bias = Applied(scale, bias or None), alg.const(1), {}
    axes = _axes(find, form, args, scale, bias, value)
    find.require_proved(ev)
    x = alg.of_atom(alg.atom("leaf", form.x, form.at))
    operands = {"x": operand(x, *axes.of_rows())}
    given = axes.groups, axes.channels
    number = alg.as_constant(scale)
    if number is None or abs(number - 1) > 1e-6:
        operands["scale"] = operand(scale, *given)
    if bias:
        operands["bias"] = operand(bias, *given)
    rows = axes.of_rows()
    return reading_of(
        find, ev, op, value, args, form, source, rows, operands, later,
        may_be_inside=True,
    )  # fmt: skip


def _require_always(alg: Any, form: Form, scale: Poly, bias: Poly) -> None:
    """Refuses conditions, and a scale or bias that is made of x."""
    if any(flag != TRUE for p in (scale, bias) for flag, _ in p):
        raise Refused("masked", "a condition selects the result", score=0.3)
    leaves = {a for p in (scale, bias) for a in alg.poly_leaves(p)}
    if any(alg.defs[a][1] == form.x for a in leaves):
        raise Refused("scale", "the result is multiplied by x", score=0.2)


def _axes(
    find: Finder,
    form: Form,
    args: tuple[Index, ...],
    scale: Poly,
    bias: Poly,
    value: int,
) -> Axes:
    """Sorts the indices of x.

    Raises:
        Refused: If it is a layer norm or a batch norm, or its groups are not together.
    """
    alg, d = find.algebra, set(form.normalised)
    order = [i for a in form.at for i in flat_indices(a)]
    varies = set(alg.ids(scale) | alg.ids(bias))
    own = [i for i in order if i in varies]
    if varies != set(own):
        raise Refused("scale", SEVERAL, score=0.35)
    if not varies:
        _require_no_layer_norm(find, form, args, value)
        first = min(order.index(i) for i in d)
        own = [i for i in order[first:] if i not in d]
    _require_together(order, own, d)
    given = [p for p in (scale, bias) if alg.ids(p)]
    if not set(own) & d and not all(is_parameter(find, p) for p in given):
        raise Refused("scale", "one number of the scale for each row", score=0.2)
    axes = _sorted(order, own, d)
    if not axes.before and not axes.behind and not _cuts_axes(form, args):
        raise Refused("kind", "a layer norm", score=0.2)
    if _is_of_samples(form, axes):
        raise Refused(
            "group",
            "one scale for each channel, and one mean of all samples: a batch norm, "
            "or weight standardisation",
            score=0.6,
        )
    return axes


SEVERAL = "the scale varies from sample to sample, or along several axes"


def _sorted(order: list[int], own: list[int], d: set[int]) -> Axes:
    """The axes of x, if `own` are those of groups and channels, and d is normalised."""
    first = order.index(own[0]) if own else len(order)
    positions = [k for k, i in enumerate(order) if i in d and i not in own]
    return Axes(
        lead=tuple((i,) for i in order if i not in d and i not in own),
        before=tuple(order[k] for k in positions if k < first),
        groups=tuple(i for i in own if i not in d),
        channels=tuple(i for i in own if i in d),
        behind=tuple(order[k] for k in positions if k > first),
    )


def _is_of_samples(form: Form, axes: Axes) -> bool:
    """Whether the statistics are over all of the first axis, which then is of samples.

    An axis of size 1 in front is one of a single sample.
    """
    return not (axes.lead or axes.channels) and form.at[0] is not None


def _require_together(order: list[int], own: list[int], d: set[int]) -> None:
    """Refuses groups and channels that do not follow each other in this order."""
    start = order.index(own[0]) if own else 0
    if order[start : start + len(own)] != own:
        raise Refused("scale", SEVERAL, score=0.35)
    normalised = [i in d for i in own]
    if normalised != sorted(normalised):
        if d | set(own) == set(order):  # no axis of samples: a skip behind a batch norm
            raise Refused("scale", SEVERAL, score=0.35)
        text = "the channels of a group do not follow each other: interleaved groups"
        raise Refused("group", text, score=0.6)


def _cuts_axes(form: Form, args: tuple[Index, ...]) -> bool:
    """Whether a part of an axis is normalised, as channels of a group are."""
    d = set(form.normalised)
    axes = [set(flat_indices(a)) for a in (*form.at, *args)]
    return any(axis & d and axis - d for axis in axes)


def _require_no_layer_norm(
    find: Finder, form: Form, args: tuple[Index, ...], value: int
) -> None:
    """Refuses whole axes that are normalised, without any sign of groups.

    Such signs are axes that are kept behind those, and another scale that follows.
    """
    last = form.axes == list(range(form.axes[0], len(form.at)))
    several = len(form.axes) > 1 and is_scaled_later(find, value)
    if last and not several and not _cuts_axes(form, args):
        raise Refused("kind", "a layer norm", score=0.2)
