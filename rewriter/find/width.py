"""How wide a region computes: in float64 of narrower operands, or as its op does.

An op computes in float32, or in the dtype of its operands if that is wider. A program
may widen operands to float64 first. Then its sums keep more digits, and squares that
overflow in float32 do not. So it is where some operands are float64, but none of those
that an op goes by: attention computes in the dtype of q, k and v, whatever a bias has.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.find.reading import Reading, Refused
from rewriter.find.reference import reference_program
from rewriter.ops.kernel import Spec
from rewriter.ops.op import Op
from rewriter.program.graph import Graph

WIDEST = np.dtype("float64")

MOVED = LAYOUT_PRIMITIVES | TRANSPARENT | {
    "convert_element_type", "concatenate", "stop_gradient",
}  # fmt: skip
"""Primitives that compute nothing."""


def require_width(
    graph: Graph, op: Op, reading: Reading, spec: Spec, values: Set[int]
) -> None:
    """Refuses a region that computes in float64 what its op computes in float32.

    Args:
        graph: The program.
        op: The op.
        reading: The region.
        spec: The shapes and dtypes of the op there.
        values: The values of the region.

    Raises:
        Refused: If a float of the region is wider than all operands, and more than a
            single number. What a comparison reads does not count.
    """
    dtypes = {np.dtype(spec.dtype(name)) for name in spec.operands}
    floats = {d for d in dtypes if jnp.issubdtype(d, jnp.floating)}
    if floats == {WIDEST}:
        return
    seen, queue = {reading.value}, [reading.value]
    while queue:
        value = queue.pop()
        if graph.dtype(value) == WIDEST and graph.shape(value) != ():
            if WIDEST in floats and _is_wide_throughout(op, spec):
                return
            text = f"the program computes in float64, and {reading.op} in float32"
            advice = "cast to float32, or make the operands float64"
            raise Refused("dtype", text, score=0.9, suggestion=advice)
        node = graph.node_of(value)
        ins = node.ins if node is not None else ()
        new = {i for i in ins if i in values and i not in seen}
        floats = [i for i in new if jnp.issubdtype(graph.dtype(i), jnp.floating)]
        seen.update(floats)
        queue += floats


def _is_wide_throughout(op: Op, spec: Spec) -> bool:
    """Whether an op computes in float64 alone, of the dtypes that its operands have."""
    operands = {
        name: jax.ShapeDtypeStruct(spec.shape(name), spec.dtype(name))
        for name in spec.operands
    }
    program = reference_program(op, operands, dict(spec.params))
    return program is not None and all(
        np.dtype(v.aval.dtype) == WIDEST or v.aval.shape == ()
        for v in _computed(program.jaxpr)
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
    )


def _computed(jaxpr: Any) -> Iterator[Any]:
    """Results of equations that compute something, also inside of calls."""
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        for one in inner:
            yield from _computed(getattr(one, "jaxpr", one))
        if not inner and eqn.primitive.name not in MOVED:
            yield from eqn.outvars
