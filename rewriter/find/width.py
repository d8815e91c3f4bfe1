"""How wide a region computes: in float64 of narrower operands, or as its op does.

An op computes in float32, or in the dtype of its operands if that is wider. A program
may widen operands to float64 first. Then its sums keep more digits, and squares that
overflow in float32 do not.
"""

from __future__ import annotations

from collections.abc import Set

import jax.numpy as jnp
import numpy as np

from rewriter.find.reading import Reading, Refused
from rewriter.ops.kernel import Spec
from rewriter.program.graph import Graph

WIDEST = np.dtype("float64")


def require_width(graph: Graph, reading: Reading, spec: Spec, values: Set[int]) -> None:
    """Refuses a region that computes in float64 what its op computes in float32.

    Args:
        graph: The program.
        reading: The region.
        spec: The shapes and dtypes of the op there.
        values: The values of the region.

    Raises:
        Refused: If a float of the region is wider than all operands, and more than a
            single number. What a comparison reads does not count.
    """
    if any(np.dtype(spec.dtype(name)) == WIDEST for name in spec.operands):
        return
    seen, queue = {reading.value}, [reading.value]
    while queue:
        value = queue.pop()
        if graph.dtype(value) == WIDEST and graph.shape(value) != ():
            text = f"the program computes in float64, and {reading.op} in float32"
            advice = "cast to float32, or make the operands float64"
            raise Refused("dtype", text, score=0.9, suggestion=advice)
        node = graph.node_of(value)
        ins = node.ins if node is not None else ()
        new = {i for i in ins if i in values and i not in seen}
        floats = [i for i in new if jnp.issubdtype(graph.dtype(i), jnp.floating)]
        seen.update(floats)
        queue += floats
