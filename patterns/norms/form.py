"""A candidate for a norm's result in its normal form: its root and normalised axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rewriter.algebra.normal_form import Algebra, OverBudget, Poly
from rewriter.find.reading import Refused, flat_indices
from rewriter.patterns.norms.normalized_value import statistics

HALF = Fraction(-1, 2)

CENTRED = {"layer_norm": True, "group_norm": True, "rms_norm": False}
"""By op, whether it subtracts the mean."""

OF_NUMBERS = {"masks": False}
"""Options of proofs: gradients of a norm of n numbers have factors as n to the 1.5th
power, and no norm has a mask."""


@dataclass(frozen=True)
class Form:
    """A candidate result in its normal form, and what is under its root.

    Attributes:
        poly: The form.
        base: The atom whose root divides it.
        x: The value that is normalised.
        at: The index of each axis of x.
        axes: Positions of the axes of which all or a part is normalised.
        normalised: Their indices.
        count: How many numbers are normalised at once.
        alpha: The factor of the sum of squares.
        constant: A number that is added to it.
        extra: Other terms that are added to it.
    """

    poly: Poly
    base: int
    x: int
    at: tuple[Any, ...]
    axes: list[int]
    normalised: tuple[Any, ...]
    count: int
    alpha: float
    constant: float
    extra: Poly


def form_of(alg: Algebra, form: Poly, op: str, x: int) -> Form:
    """The root, its statistics and the normalised axes of a form.

    Args:
        alg: The algebra of the form.
        form: A candidate result. That of a group norm has split axes.
        op: The op that it may be.
        x: The value that may be normalised.

    Raises:
        Refused: If there is no root of squares of x, or it is another norm's.
    """
    base = _root(alg, form, x)
    whole = alg.kind(base) == "sum"
    under = alg.of_atom(base) if whole else alg.thaw(alg.defs[base][1])
    squares, mean, constant, extra = statistics(alg, under, x)
    if (mean is None) == CENTRED[op]:
        raise Refused("kind", f"this is not a {op}", score=0.2)
    if op == "group_norm":
        at, d = parts_of_axes(alg, form, squares[0], x)
        axes = [k for k, a in enumerate(at) if alg.index_ids(a) & set(d)]
    else:
        axes, at = _feature_axes(alg, form, base, squares, x)
        d = tuple(at[k] for k in axes)
    n = math.prod(alg.sizes[i] for i in d)
    if not isinstance(n, int):
        raise Refused("symbolic", f"a norm over a symbolic width, {n}", score=0.5)
    return Form(form, base, x, at, axes, d, n, squares[1], constant, extra)


def _root(alg: Algebra, form: Poly, x: int) -> int:
    """The atom whose root divides the result."""
    for kind in ("pow", "sum"):  # one sum, if there is no epsilon under the root
        for _, mono in form:
            for a, e in mono:
                if e == HALF and alg.kind(a) == kind:
                    return a
    if any(_is_root_and_more(alg, a) for _, mono in form for a, e in mono if e == -1):
        raise Refused(
            "eps",
            "something is added to the root, and not inside it: another function",
            score=0.5,
            suggestion="x / sqrt(mean(x²) + eps) is found, x / (sqrt(mean(x²)) + eps) "
            "is not",
        )
    raise Refused("root", "the result is not divided by a root", score=0.25)


def _is_root_and_more(alg: Algebra, atom: int) -> bool:
    """Whether an atom is a sum with a root as a term."""
    if alg.kind(atom) != "pow":
        return False
    terms = alg.thaw(alg.defs[atom][1])
    return len(terms) > 1 and any(
        len(mono) == 1
        and mono[0][1] == -HALF
        and alg.kind(mono[0][0]) in ("pow", "sum")
        for _, mono in terms
    )


def _feature_axes(alg: Algebra, form: Poly, base: int, squares: Any, x: int):
    """Positions of the normalised axes of x, and x's arguments in the result."""
    _, bound, _, body = alg.defs[squares[0]]
    inner = alg.defs[body[0][0]][2]
    axes = [k for k, a in enumerate(inner) if alg.index_ids(a) & set(bound)]
    whole = all(alg.index_ids(inner[k]) <= set(bound) for k in axes)
    for _, mono in form if whole else ():
        for a, e in mono:
            if alg.kind(a) == "leaf" and alg.defs[a][1] == x and e == 1:
                at = alg.defs[a][2]
                outer = all(at[k] == inner[k] for k in range(len(at)) if k not in axes)
                if outer and all(isinstance(at[k], int) for k in axes):
                    return axes, at
    of_all = len(axes) == len(inner)  # as optimizers take the norm of an array
    raise Refused("axes", OTHER_PART, score=0.2 if of_all else 0.4)


OTHER_PART = (
    "the root is of another array than it divides, or of another part of it, as that "
    "of a group norm"
)


def parts_of_axes(
    alg: Algebra, form: Poly, squares: int, x: int
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The index of each axis of x in a result, and the normalised ones among them.

    A group norm normalises a part of the axis of channels::

        x in the result       h   w   g   c        (g, c) is the axis of channels
        x under the root      h'  w'  g   c'       h', w' and c' are summed

    Args:
        alg: The algebra of the form.
        form: The result, with split axes.
        squares: The sum of squares under the root.
        x: The value.

    Raises:
        Refused: If the sum is over another part of x.
    """
    _, bound, _, body = alg.defs[squares]
    inner = alg.defs[body[0][0]][2]
    for _, mono in form:
        for a, e in mono:
            if alg.kind(a) == "leaf" and alg.defs[a][1] == x and e == 1:
                at = alg.defs[a][2]
                pairs = zip(at, inner, strict=True)
                parts = [_normalised(alg, *pair, bound) for pair in pairs]
                if all(p is not None for p in parts):
                    return at, tuple(i for part in parts for i in part)
    raise Refused("axes", OTHER_PART, score=0.2)


def _normalised(alg: Algebra, outer: Any, inner: Any, bound: Any) -> list[int] | None:
    """The indices of an axis over which the statistics are; None if that is not so."""
    try:
        left, right = flat_indices(outer)[::-1], flat_indices(inner)[::-1]
    except OverBudget:
        return None
    found: list[int] = []
    while left and right:
        ours, theirs = [left.pop()], [right.pop()]
        while (n := _size(alg, ours)) != (m := _size(alg, theirs)):
            more, run = (left, ours) if n < m else (right, theirs)
            if not more:
                return None
            run.append(more.pop())
        if set(theirs) <= set(bound):
            found += ours
        elif ours != theirs:
            return None
    return None if left or right else found


def _size(alg: Algebra, indices: list[int]) -> Any:
    return math.prod(alg.sizes[i] for i in indices)
