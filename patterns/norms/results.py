"""What happens to the result of a norm, and to its input before it."""

from __future__ import annotations

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.find.finder import Finder

MOVED = LAYOUT_PRIMITIVES | TRANSPARENT | {"convert_element_type"}


def is_scaled_later(find: Finder, value: int) -> bool:
    """Whether a result is multiplied by an array, such as its own scale."""
    same = [value, *find.regions.chain(value, lambda n: n.prim in MOVED)]
    factors = [
        i for v in same for n in find.graph.users(v) if n.prim == "mul" for i in n.ins
    ]
    return any(i not in same and find.number(i) is None for i in factors)


def under_layout(find: Finder, value: int) -> int:
    """The value that another one is made of by layout and lossless casts alone."""
    while True:
        value = find.uncast(value)
        node = find.graph.node_of(value)
        if node is None or node.prim not in LAYOUT_PRIMITIVES or len(node.ins) != 1:
            return value
        value = node.ins[0]
