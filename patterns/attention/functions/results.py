"""The program's values that a function of scores computes, for proofs of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.find.reading import Operand, flag_operand, operand
from rewriter.ops.score import PRODUCT, Ref
from rewriter.patterns.attention.functions.builder import Builder


def score_results(reader: Builder) -> dict[Any, Operand]:
    """Returns the program's values that a function's equations compute, as operands.

    Those that depend on the products, and those that equations of these read: all that
    a derivative may read. They go by the number of their equation, or `PRODUCT`.

    Args:
        reader: What has read the function.
    """
    ev, graph = reader.ev, reader.ev.g
    nodes = [n for v in reader.core if (n := graph.node_of(v)) is not None]
    near = reader.core.union(*(n.ins for n in nodes))
    read = {ref for (value, _), ref in reader.known.items() if value in near}
    found: dict[Any, Operand] = {}
    for (value, args), ref in _sources(reader.known).items():
        if ref not in read or ev.varies(value):
            continue
        atom, axes = ev.alg.atom("leaf", value, args), reader.axes.of_scores
        name = ref.name if ref.kind == "step" else ref.kind
        if graph.dtype(value) == bool:
            found[name] = flag_operand(ev.alg.literal(atom), *axes)
        else:
            found[name] = operand(ev.alg.of_atom(atom), *axes, full=False)
    return found


def _sources(known: Mapping[Any, Ref]) -> dict[Any, Ref]:
    """What equations compute, each in the layout in which it was read first."""
    first: dict[Ref, Any] = {}
    for key, ref in known.items():
        if ref.kind in ("step", PRODUCT):
            first.setdefault(ref, key)
    return {key: ref for ref, key in first.items()}
