"""Requires that a bias has gradients where the scores have, in rows without keys.

Kernels pass such a row's gradient to the scores and to the bias, or to neither. A
program may choose the bias by the mask and add the fill to the scores, or the other way
round. Then only one of both has a gradient there.
"""

from __future__ import annotations

from collections.abc import Callable

from rewriter.find.reading import Refused
from rewriter.patterns.attention.empty_rows import EmptyRow
from rewriter.patterns.attention.softmax import Softmax
from rewriter.program.graph import Graph

STEPS = 400  # the most equations above a bias that are looked at


def require_gradients_alike(
    softmax: Softmax, row: EmptyRow, of: Callable[[frozenset[int]], EmptyRow]
) -> None:
    """Refuses a bias whose gradient in rows without keys is not that of the scores.

    Args:
        softmax: The region.
        row: What such a row does, and whether it passes gradients to the scores.
        of: The same for some of the program's values in place of the scores.

    Raises:
        Refused: If one of both has a gradient, or one that is NaN.
    """
    graph = softmax.find.graph
    for value in sorted(softmax.values_of(softmax.alg.poly_leaves(softmax.bias))):
        if not may_be_differentiated(graph, value):
            continue
        own = of(frozenset({value}))
        if (own.passes, own.breaks_gradients) != (row.passes, row.breaks_gradients):
            raise Refused(
                "rows",
                "a row without keys passes a gradient to the scores or to the bias, "
                "and not to both",
                score=0.8,
                suggestion="add the bias to the scores before the mask chooses",
            )


def may_be_differentiated(graph: Graph, value: int) -> bool:
    """Whether a value depends on floats that the program is given.

    Values behind integers, comparisons and `jax.lax.stop_gradient` have no gradient.
    """
    seen, stack = {value}, [value]
    while stack:
        current = stack.pop()
        node = graph.node_of(current)
        if graph.dtype(current).kind in "biu" or current in graph.constants:
            continue
        if node is None or len(seen) > STEPS:
            return True
        if node.prim != "stop_gradient":
            new = set(node.ins) - seen
            seen |= new
            stack += new
    return False
