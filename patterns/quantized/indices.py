"""Indices of the arrays in a product of stored numbers, and the order they lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import Index, OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Refused, split_digits


@dataclass(frozen=True)
class Indices:
    """The indices of the arrays in a product.

    Attributes:
        rows: Those of the rows' axes that are kept.
        of_rows: The form of the rows.
        numbers: Those of the stored array.
        summed: Those that are summed over.
        joined: Those of what is joined with the matrix or the product, by its value.
        known: What stands for each index that is summed over.
        groups: Those of `summed` that count parts, each of which has a scale.
    """

    rows: tuple[Index, ...]
    of_rows: Poly
    numbers: tuple[Index, ...]
    summed: frozenset[int]
    joined: Mapping[int, tuple[Index, ...]]
    known: Mapping[Any, Index]
    groups: frozenset[int] = frozenset()


def split(
    ev: RegionEvaluator,
    args: tuple[Index, ...],
    first: int,
    indices_of: Callable[[tuple[Index, ...], Mapping[Any, Index]], Indices],
) -> tuple[tuple[Index, ...], Indices]:
    """Splits the indices of a result, and of what it is made of, into digits.

    Args:
        ev: What makes forms.
        args: The result's indices.
        first: The stored numbers.
        indices_of: Returns those of the arrays. It is given the result's, and what
            stands for each that is summed over; nothing at first.

    Returns:
        The result's indices, and those of the arrays.

    Raises:
        OverBudget: If there are too many digits.
    """
    alg = ev.alg
    known: Mapping[Any, Index] = {}
    for _ in range(6):
        at = indices_of(args, known)
        forms = [at.of_rows, alg.of_atom(ev.leaf(first, at.numbers))]
        forms += [ev.poly(v, a) for v, a in at.joined.items()]
        summed = tuple(sorted(at.summed))
        whole: Poly = {}
        for form in forms:
            whole = alg.add(whole, form)
        _, new = split_digits(alg, whole, (*args, *summed))
        if new == (*args, *summed):
            return args, at
        to = dict(zip(summed, new[len(args) :], strict=True))
        known = {k: alg.subst_index(a, to) for k, a in at.known.items()}
        args = new[: len(args)]
    raise OverBudget("reshapes split the axes into too many parts")


def order(
    find: Finder, first: int, own: list[int], summed: list[int], columns: list[int]
) -> str:
    """The order in which stored numbers lie, as the op's mode.

    Args:
        find: The search.
        first: The stored numbers.
        own: Their indices.
        summed: Those of them that are summed over.
        columns: The others.

    Raises:
        Refused: If they lie otherwise, or are a part of an array.
    """
    if own not in (summed + columns, columns + summed):
        raise Refused("stored", "the stored matrix lies in another order", score=0.6)
    size = math.prod(find.algebra.sizes[i] for i in own)
    if len(set(own)) != len(own) or size != math.prod(find.graph.shape(first)):
        raise Refused("stored", "the matrix is a part of an array", score=0.6)
    return "forward" if own == summed + columns else "transposed"
