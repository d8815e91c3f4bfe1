"""Exponentials of a log-sum-exp, and the maximum that is subtracted in them.

``log(sum(exp(y)))`` is infinite in floats where a logit's exponential is, or where all
of them vanish. A kernel subtracts the maximum, and would give a number there.
"""

from __future__ import annotations

from rewriter.find.finder import Finder
from rewriter.find.reading import Refused
from rewriter.patterns.cross_entropy.form import Loss
from rewriter.program.graph import Node
from rewriter.support.assumptions import FINITE

EXPONENTIALS = frozenset({"exp", "exp2"})
BOUNDED = 80.0
"""Numbers up to here have exponentials far from the ends of float32."""

ADVICE = f"use jax.nn.logsumexp; or, if nothing overflows, assume=({FINITE!r},)"


def require_shifted(find: Finder, anchor: Node, loss: Loss) -> None:
    """Refuses exponentials that may overflow in the program.

    Args:
        find: The search.
        anchor: The logarithm.
        loss: What was read around it.

    Raises:
        Refused: If no maximum over each row is subtracted, and nothing bounds logits.
    """
    if FINITE in find.assumed or 0 < loss.soft_cap <= BOUNDED:
        return
    rows = [n for n in find.graph.shape(anchor.outs[0]) if n != 1]
    for node in find.regions.above(anchor.ins[0], EXPONENTIALS):
        if not any(_is_of_rows(find, m, rows) for m in _maxima(find, node)):
            raise Refused(
                "rows",
                "exponentials are taken without the maximum of their row, and may "
                "overflow",
                score=0.8,
                suggestion=ADVICE,
            )


def _maxima(find: Finder, node: Node) -> list[Node]:
    """Maxima above an exponential, through what is rounded off and left constant."""
    found, seen, queue = [], set(node.ins), list(node.ins)
    while queue and len(seen) < 60:
        maker = find.graph.node_of(queue.pop(0))
        if maker is None:
            continue
        if maker.prim == "reduce_max":
            found.append(maker)
        elif find.local(maker):
            new = [i for i in maker.ins if i not in seen]
            seen.update(new)
            queue += new
    return found


def _is_of_rows(find: Finder, node: Node, rows: list[int]) -> bool:
    return [n for n in find.graph.shape(node.outs[0]) if n != 1] == rows
