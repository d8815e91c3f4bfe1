"""Reads the precision that a program keeps in its weights and in its result.

A result that is at once rounded to 16 bits is that of the rounding: kernels then write
16 bits. A result of 32 bits has the digits that the product of weights and v keeps. A
rounding to 8 bits is a step of the program behind the result.
"""

from __future__ import annotations

import numpy as np

from rewriter.algebra.canonicalize import TRANSPARENT, kind_of
from rewriter.find.finder import Finder
from rewriter.patterns.attention.softmax import Softmax
from rewriter.program.graph import Node

PRECISIONS = ("default", "high", "highest")
"""Of products of float32, by their digits."""

CAST = "convert_element_type"
MOVES = TRANSPARENT | {"transpose", "reshape", "squeeze", "expand_dims"}
"""What may lie between a result and its cast."""

NARROW = 2
"""Bytes of floats that have no more digits than what tensor cores multiply."""


def rounded(find: Finder, value: int) -> int:
    """Returns what a result is once it is rounded to 16 bits; itself if it is not.

    All uses of the result must be uses of its rounding.
    """
    graph, after = find.graph, value
    if not _is_wide(graph.dtype(value)):
        return value
    while True:
        users = graph.users(after)
        if len(users) != 1 or len(users[0].outs) != 1 or after in find.regions.returned:
            return value
        (after,), prim = users[0].outs, users[0].prim
        if prim == CAST:
            dtype = graph.dtype(after)
            narrow = kind_of(dtype) == "f" and dtype.itemsize == NARROW
            return after if narrow else value
        if prim not in MOVES:
            return value


def read_weights(softmax: Softmax) -> str | None:
    """Returns the precision of float32 weights times v, where the result shows it.

    None if the program rounds its weights to v's 16 bits, or its result. None too if v
    has 32 bits: then no kernel rounds it.
    """
    graph, v = softmax.find.graph, softmax.values_of(softmax.parts.v)
    if not _is_wide(graph.dtype(softmax.value)):
        return None
    if any(_is_wide(graph.dtype(x)) for x in v if kind_of(graph.dtype(x)) == "f"):
        return None
    asked = [
        _precision(node)
        for node, side in softmax.products
        if _is_wide(graph.dtype(node.ins[side]))
    ]
    return max(asked, key=PRECISIONS.index, default=None)


def _is_wide(dtype: np.dtype) -> bool:
    return dtype.itemsize > NARROW


def _precision(node: Node) -> str:
    """The precision of a product; the highest if it is named by an algorithm."""
    asked = node.params.get("precision")
    first = asked[0] if isinstance(asked, tuple) else asked
    name = "default" if first is None else getattr(first, "name", str(first)).lower()
    return name if name in PRECISIONS else PRECISIONS[-1]
