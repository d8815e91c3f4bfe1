"""Applies a function to normal forms, and returns the form of its result.

So a pattern recognises a formula by the same code that computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rewriter import _jax
from rewriter.algebra.canonicalize import FULL, Evaluator
from rewriter.algebra.normal_form import Algebra, Poly
from rewriter.program.graph import Graph


def applied(alg: Algebra, function: Callable[..., jax.Array], *operands: Poly) -> Poly:
    """Returns the form of a function of numbers, applied to forms.

    Args:
        alg: Where the forms are.
        function: A function of float scalars to a float scalar; it is traced once.
        *operands: Its arguments, as forms.

    Raises:
        OverBudget: If the form grows too large.
    """
    graph = _traced(function, len(operands))
    ev = Evaluator(graph, alg, expand_all=True)
    ev.private = True
    top = graph.top
    for variable, form in zip(top.jaxpr.invars, operands, strict=True):
        ev.memo[top.env[variable], (), FULL] = form
    (out,) = top.jaxpr.outvars
    return ev.poly(graph.read(top, out), ())


@functools.lru_cache(maxsize=256)
def _traced(function: Callable[..., jax.Array], count: int) -> Graph:
    numbers = [jax.ShapeDtypeStruct((), jnp.float32)] * count
    return Graph(_jax.trace_flat(function, numbers))
