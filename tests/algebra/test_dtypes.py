"""Casts between integers of few bits, and others."""

from __future__ import annotations

import jax
import pytest

from rewriter.algebra.canonicalize import Evaluator
from rewriter.algebra.normal_form import Algebra
from rewriter.program.graph import Graph

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("old", "new", "keeps"),
    [
        ("int4", "int8", True), ("int4", "bfloat16", True), ("uint4", "int8", True),
        ("int32", "int4", False), ("int8", "uint4", False), ("int8", "int4", False),
    ],
)  # fmt: skip
def test_integers_of_four_bits_are_integers(old: str, new: str, keeps: bool) -> None:
    """A cast to them may wrap around: it is then a value of its own."""
    given = jax.ShapeDtypeStruct((4, 4), old)
    graph = Graph(jax.make_jaxpr(lambda x: x.astype(new))(given))
    ev = Evaluator(graph, Algebra())
    (out,) = graph.results
    (source,) = graph.node_of(out).ins
    at = ev.indices(out)
    assert (ev.poly(out, at) == ev.poly(source, at)) == keeps
