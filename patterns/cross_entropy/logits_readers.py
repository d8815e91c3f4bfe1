"""Finds readers of a loss's logits besides the loss, which keep them in memory."""

from __future__ import annotations

from collections.abc import Iterable

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.find.finder import Finder

ORDERS = frozenset({"argmax", "argmin", "top_k", "approx_top_k", "sort"})
"""Primitives that ask which logits are large, for an accuracy or a sample."""

SAME = (
    LAYOUT_PRIMITIVES
    | TRANSPARENT
    | {"convert_element_type", "add", "sub", "mul", "div", "neg", "tanh"}
)
"""Primitives whose results are the logits in another form."""


def reader_of(find: Finder, products: Iterable[int]) -> str:
    """What reads the logits that some products are, in words; or ``""``."""
    g = find.graph
    outputs = g.results
    seen, queue = set(products), list(products)
    while queue and len(seen) < 60:
        value = queue.pop(0)
        if value in outputs:
            return "the program returns them"
        for node in g.users(value):
            if node.prim in ORDERS:
                where = find.where(node)
                return f"{node.prim} reads them" + (f" ({where})" if where else "")
            if node.prim not in SAME or g.shape(node.outs[0]) == ():
                continue
            if sum(i in seen for i in node.ins) == len(node.ins) or _is_whole(
                g, node, value
            ):
                new = [v for v in node.outs if v not in seen]
                seen.update(new)
                queue += new
    return ""


def _is_whole(g, node, value: int) -> bool:
    """Whether a result has as many numbers as the logits."""
    sizes = [1, 1]
    for k, v in enumerate((value, node.outs[0])):
        for n in g.shape(v):
            sizes[k] *= n
    return sizes[0] == sizes[1] or node.prim == "slice"
