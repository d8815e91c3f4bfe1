"""Proposes readings of a product, each operand of which may be the stored numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rewriter.algebra.normal_form import OverBudget
from rewriter.find.finder import Finder
from rewriter.find.reading import Reading, Refused, unproved
from rewriter.patterns.quantized.steps import rounded_here, stored_above
from rewriter.program.graph import Node

Readings = Callable[[Finder, Node, int, int], Iterator[Reading]]
"""The readings of a product, of (the search, the product, an operand's position, the
stored numbers above that operand). It may raise `Refused`."""


def of_each_side(
    find: Finder, product: Node, name: str, readings: Readings
) -> Iterator[Reading]:
    """Yields readings with stored numbers above one operand, for each that has some.

    What is not rounded here is the matrix, if only one operand is: it comes first.
    Where a reading is refused, a near miss is noted.

    Args:
        find: The search.
        product: The product.
        name: The pattern.
        readings: The readings of one operand.
    """
    above = {side: stored_above(find, product.ins[side]) for side in (1, 0)}
    given = {k: v for k, v in above.items() if v is not None}
    rounded = lambda one: rounded_here(find, one[1], product)
    for side, stored in sorted(given.items(), key=rounded):
        try:
            yield from readings(find, product, side, stored)
        except Refused as refusal:
            find.missed(name, product, refusal)
        except OverBudget as error:
            find.missed(name, product, unproved(error, 0.5))


def those_that_read(attempts: Iterable[Callable[[], Reading]]) -> Iterator[Reading]:
    """Yields the readings of attempts, in their order.

    Raises:
        Refused: As the first attempt that was, after the others.
    """
    refused: Refused | None = None
    for attempt in attempts:
        try:
            yield attempt()
        except Refused as refusal:
            refused = refused or refusal
    if refused is not None:
        raise refused
