"""Quantized dot of numbers that are looked up: a codebook of 16 floats.

Formula    as of a packed dot, with codebook[q[k, n]] in place of q[k, n]
Looks like a gather of a constant array of 16 floats, as the "normal floats" of QLoRA
           and bitsandbytes (nf4), and any other. Its indices are numbers of four bits
           that are packed.
Must hold  the codebook is known, and indices are 0 to 15. Casts of what is looked up
           are those of the codebook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize.intervals import interval, within
from rewriter.find.finder import Finder
from rewriter.find.reading import Reading, Refused, operand
from rewriter.ops.packing import packing_of
from rewriter.ops.widening import JOINS
from rewriter.program.graph import Node

SIZE = 16
LAYOUT = frozenset({"reshape", "broadcast_in_dim", "expand_dims", "squeeze"})

Packed = Callable[[Finder, Reading], Reading]


def lookups(find: Finder) -> frozenset[int]:
    """The values of a program that are looked up in codebooks, found once."""
    if "codebooks" not in find.cache:
        nodes = (n for n in find.graph.nodes if n.prim == "gather")
        found = (n.outs[0] for n in nodes if codebook_of(find, n) is not None)
        find.cache["codebooks"] = frozenset(found)
    return find.cache["codebooks"]


def codebook_of(find: Finder, node: Node) -> np.ndarray | None:
    """The codebook of a gather with an index of its own for each number, or None."""
    g, numbers = find.graph, node.params["dimension_numbers"]
    if g.shape(node.ins[0]) != (SIZE,) or len(g.shape(node.outs[0])) < 1:
        return None
    if numbers.offset_dims or tuple(node.params["slice_sizes"]) != (1,):
        return None
    return _constant(find, node.ins[0])


def _constant(find: Finder, value: int) -> np.ndarray | None:
    """The floats of a constant array, or of a cast of one."""
    g = find.graph
    if not jnp.issubdtype(g.dtype(value), jnp.floating):
        return None
    if value in g.constants:
        return np.asarray(g.constants[value])
    node = g.node_of(value)
    if node is None or node.prim not in {"convert_element_type", "copy"}:
        return None
    found = _constant(find, node.ins[0])
    return None if found is None else found.astype(g.dtype(value))


def index_of(find: Finder, node: Node) -> int:
    """The integers that a gather looks up, of the shape of its result.

    Raises:
        Refused: If they are not known to be 0 to 15, or are laid out anew.
    """
    g, value = find.graph, node.ins[1]
    shape = g.shape(node.outs[0])
    while True:
        above = g.node_of(value)
        if _may_be_skipped(find, above):
            value = above.ins[1]
        elif g.shape(value) == shape:
            break
        elif above is not None and above.prim in LAYOUT:
            value = above.ins[0]
        else:
            raise _refused("the indices of the codebook are laid out anew")
    if not within(interval(g, value), (0.0, SIZE - 1.0)):
        raise _refused("the indices of the codebook are not known to be 0 to 15")
    return value


def _may_be_skipped(find: Finder, node: Node | None) -> bool:
    """Whether an equation gives its second operand, if that is 0 to 15.

    ``where(i < 0, i + 16, i)`` counts from the end, and a `clamp` bounds.
    """
    if node is None or node.prim not in {"select_n", "clamp"}:
        return False
    if node.prim == "clamp":
        low, high = (find.number(i) for i in (node.ins[0], node.ins[2]))
        return low is not None and low <= 0 and high is not None and high >= SIZE - 1
    chosen = find.graph.node_of(node.ins[0])
    below = chosen is not None and chosen.prim == "lt" and chosen.ins[0] == node.ins[1]
    return below and find.number(chosen.ins[1]) == 0


def packed(find: Finder, reading: Reading, ways: tuple[Packed, ...]) -> Reading:
    """The reading with a codebook, and the packed numbers in place of what it gives.

    Args:
        find: The search.
        reading: A product; its matrix is what is looked up.
        ways: What may turn a matrix of numbers into a packed one.

    Raises:
        Refused: If the numbers are not packed.
        OverBudget: If a form grows too large.
    """
    alg = reading.algebra
    ((form, groups),) = reading.operands["w"].parts
    ((_, ((atom, _),)),) = form
    _, value, args = alg.defs[atom]
    node = find.graph.node_of(value)
    assert node is not None
    table = codebook_of(find, node)
    assert table is not None
    index = index_of(find, node)
    ev = find.evaluator(reading.value, names={value: value, index: index})
    numbers = operand(alg.of_atom(ev.leaf(index, args)), *groups)
    of_index = dataclasses.replace(
        reading,
        operands={**reading.operands, "w": numbers},
        params={**reading.params, "widen": ""},
    )
    made = _first(find, of_index, ways)
    if made.params["widen"] or packing_of(made.params["packing"]).sign == "signed":
        raise _refused("the indices of the codebook are moved numbers")
    table, steps = _cast(table, str(reading.params["widen"]))
    codebook = tuple(float(x) for x in table)
    return dataclasses.replace(
        made,
        params={**made.params, "widen": steps, "codebook": codebook},
        proof=reading,
    )


def _first(find: Finder, reading: Reading, ways: tuple[Packed, ...]) -> Reading:
    """What the first way gives that does not refuse."""
    refused = None
    for way in ways:
        try:
            return way(find, reading)
        except Refused as refusal:
            refused = refusal
    assert refused is not None
    raise refused


def _cast(table: np.ndarray, widen: str) -> tuple[np.ndarray, str]:
    """A codebook after the casts at the beginning of steps, and all that is left."""
    steps = widen.split()
    while steps and steps[0][0] not in JOINS:
        table = table.astype(jnp.dtype(steps.pop(0)))
    return table.astype(np.float32), " ".join([table.dtype.name, *steps])


def _refused(text: str) -> Refused:
    return Refused("codebook", text, score=0.5)
