"""Exponentials of a log-sum-exp, and the maximum that is subtracted in them.

``log(sum(exp(y)))`` is infinite in floats where a logit's exponential is, or where all
of them vanish. A kernel subtracts the maximum, and would give a number there.

Where the maximum itself is infinite, ``y - max`` is NaN, and so is the log-sum-exp.
Some programs do not subtract such a maximum, as `jax.nn.logsumexp` does not. There it
is infinite. What a program does is computed with its own equations of the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Refused
from rewriter.patterns.cross_entropy.form import Loss
from rewriter.patterns.guarded_maxima import a_guard_enters_a_maximum
from rewriter.patterns.hidden_keys import hides_keys
from rewriter.patterns.shifts import (
    Row,
    distinct,
    is_reached,
    shifted_by_maximum,
    vanishes,
)
from rewriter.program.graph import Node
from rewriter.program.numeric import NUMERIC
from rewriter.program.walk import equations_above
from rewriter.support.assumptions import FINITE

EXPONENTIALS = frozenset({"exp", "exp2"})
BOUNDED = 80.0
"""Numbers up to here have exponentials far from the ends of float32."""

LOGS = frozenset({"log"})
MOST = 100
"""Values above an exponential that are read."""

BOOLEAN = frozenset({"and", "or", "not"})
SAME = (
    LAYOUT_PRIMITIVES
    | TRANSPARENT
    | {"convert_element_type", "reduce_precision", "stop_gradient"}
)
"""Primitives that keep each number, but for rounding."""

OTHER = "exponentials are taken without the maximum of their row, and may overflow"
VANISH = (
    "the maximum that is subtracted is not that of the classes that are summed, and "
    "exponentials may vanish"
)
ADVICE = f"use jax.nn.logsumexp; or, if nothing overflows, assume=({FINITE!r},)"


def require_shifted(
    find: Finder, ev: RegionEvaluator, anchor: Node, loss: Loss
) -> None:
    """Refuses exponentials that may overflow in the program, or all vanish.

    Args:
        find: The search.
        ev: What made the form of the loss.
        anchor: The logarithm.
        loss: What was read around it.

    Raises:
        Refused: If the maximum of each row is not subtracted, and nothing bounds
            logits.
    """
    if FINITE in find.assumed or 0 < loss.soft_cap <= BOUNDED / 2:
        return
    ev.outer = frozenset(loss.rows)
    bounded = 0 < loss.soft_cap <= BOUNDED
    row, bases, among = Row(ev), [], []
    for node in find.regions.above(anchor.ins[0], EXPONENTIALS):
        forms = [p for (v, _, _), p in ev.memo.items() if v == node.ins[0]]
        found = [shifted_by_maximum(row, p) for p in distinct(row, forms)]
        if all(found) and found:
            bases += [x.base for x in found]
            among += [m for x in found for m in x.among]
        elif not vanishes(ev, node) and not (bounded and not any(found)):
            raise _refused(OTHER)
        if bases and hides_keys(ev, node.outs[0]):
            raise _refused(VANISH)
    if not all(is_reached(row, m, bases) for m in among):
        raise _refused(VANISH)
    guards = find.regions.above(anchor.ins[0], frozenset({"select_n"}))
    if not bounded and a_guard_enters_a_maximum(ev, guards):
        raise _refused(VANISH)


def _refused(text: str) -> Refused:
    return Refused("rows", text, score=0.8, suggestion=ADVICE)


def _maxima(find: Finder, node: Node) -> list[Node]:
    """Maxima above an exponential, through what is rounded off and left constant."""
    goes_on = lambda maker: maker.prim != "reduce_max" and find.local(maker)
    above = equations_above(find.graph, node.ins, goes_on, most=60)
    return [maker for maker in above if maker.prim == "reduce_max"]


def nan_at(find: Finder, anchor: Node, values: Iterable[int]) -> str:
    """At which infinite maxima of a row the log-sum-exp is NaN: as the op's `nan_at`.

    Args:
        find: The search.
        anchor: The logarithm.
        values: The loss, and what it is picked or summed of. Other logarithms above
            these count, too: a sum is NaN if one of its terms is.

    Raises:
        Refused: If that is not known.
    """
    found: set[float] = set()
    logs = [n for v in values for n in find.regions.above(v, LOGS)]
    for log in (anchor, *logs):
        for node in find.regions.above(log.ins[0], EXPONENTIALS):
            for top in _maxima(find, node):
                found |= {
                    m for m in (-math.inf, math.inf) if _is_nan(find, node, top, m)
                }
    return {0: "none", 1: f"{max(found, default=0):+}", 2: "both"}[len(found)]


def _is_nan(find: Finder, node: Node, top: Node, number: float) -> bool:
    """Whether an exponential is NaN for the largest logit, if that is some number.

    Args:
        find: The search.
        node: The exponential.
        top: The maximum.
        number: What it is.
    """
    known = {top.outs[0]: number, top.ins[0]: number}
    with np.errstate(all="ignore"):
        return bool(np.isnan(_at(find, node.ins[0], known, number)))


def _at(find: Finder, value: int, known: dict[int, float], number: float) -> float:
    """What a value is; `number` for other arrays, and NaN for unknown booleans.

    Raises:
        Refused: If a primitive is not known.
    """
    if value in known:
        return known[value]
    g = find.graph
    constant, node = find.number(value), g.node_of(value)
    if constant is not None:
        return constant
    looks_through = node is not None and (find.local(node) or node.prim in SAME)
    if not looks_through or len(known) > MOST:
        return math.nan if g.dtype(value) == bool else number
    known[value] = number  # counts, and is replaced below
    ins = [_at(find, i, known, number) for i in node.ins]
    if node.prim in SAME:
        each = len(ins) == len(node.outs)
        found = ins[node.outs.index(value) if each else 0]
    elif node.prim == "select_n":
        found = _chosen(ins[0], ins[1:], number)
    elif node.prim in BOOLEAN and np.isnan(ins).any():
        found = math.nan
    elif node.prim in NUMERIC:
        found = NUMERIC[node.prim](*ins, node.params)
    else:
        text = f"it is not known what {node.prim} gives for an infinite maximum"
        raise Refused("rows", text, score=0.8)
    known[value] = found
    return found


def _chosen(which: float, cases: list[float], number: float) -> float:
    """The case of a choice; the logit itself if it is not known which."""
    if not np.isnan(which):
        return cases[int(which)]
    return number if number in cases else cases[0]
