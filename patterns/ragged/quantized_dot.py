"""Quantized ragged dot: a ragged dot whose matrices are stored in 8 bits.

Formula    out[m, n] = Σ_k lhs[m, k] rhs[group(m), k, n] scale[group(m), n]
Looks like a ragged dot of 8 bits, or below a cast of them and products.
Must hold  the matrices are the stored numbers, all of them, times what does not vary
           along k.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rewriter.algebra.normal_form import Algebra, Index, OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
)
from rewriter.patterns.ragged.dense_experts import RAGGED
from rewriter.patterns.ragged.dot import read, roles
from rewriter.program.graph import Node

NAME = "quantized_ragged_dot"
STORED = ("int8", "float8_e4m3fn", "float8_e5m2")
"""Dtypes whose numbers 16-bit floats hold exactly."""
REACH = 40
"""The most values above the matrices to examine."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a ragged dot with 8-bit numbers above its matrices, if any."""
    value = anchor.outs[0]
    stored = quantized(find, anchor)
    if stored is None or find.done(NAME, value):
        return
    try:
        yield of_stored(find, anchor, stored)
    except Refused as refusal:
        find.missed(NAME, anchor, refusal)
    except OverBudget as error:
        find.missed(NAME, anchor, Refused("budget", str(error), score=0.5))


def quantized(find: Finder, dot: Node) -> int | None:
    """The array of 8-bit numbers that a ragged dot's matrices are made of, or None."""
    g, matrices = find.graph, dot.ins[1]
    seen, queue = {matrices}, [matrices]
    while queue and len(seen) < REACH:
        value = queue.pop(0)
        if str(g.dtype(value)) in STORED:
            return _under_layout(find, value)
        node = g.node_of(value)
        for i in node.ins if node is not None and find.local(node) else ():
            if i not in seen:
                seen.add(i)
                queue.append(i)
    return None


def _under_layout(find: Finder, value: int) -> int:
    """The array below a value's transposes and reshapes."""
    node = find.graph.node_of(value)
    while node is not None and node.prim in ("transpose", "reshape", "copy"):
        value = node.ins[0]
        node = find.graph.node_of(value)
    return value


def of_stored(find: Finder, dot: Node, stored: int) -> Reading:
    """The reading of a ragged dot with stored matrices.

    Raises:
        Refused: If its matrices are not the stored numbers times a scale for each
            column.
        OverBudget: If the form grows too large.
    """
    plain = read(find, dot)
    if roles(find, dot)[0]:
        raise Refused("mode", "the rows are 8-bit, and the matrices are not", score=0.2)
    value = dot.outs[0]
    ev = evaluator(find, value, {dot: stored})
    args = ev.indices(value)
    form = ev.poly(value, args)
    found = matrices(find, ev, dot, stored)
    operands = {**plain.operands, "rhs": found.numbers}
    if found.scale is not None:
        operands["rhs_scale"] = found.scale
    params = {name: x for name, x in plain.params.items() if name != "mode"}
    if found.mode != "forward":
        params["mode"] = found.mode
    return dataclasses.replace(
        plain, op=NAME, place=ev.place, args=args, form=form,
        out_groups=tuple(() if i is None else (i,) for i in args),
        operands=operands, params=params, notes=tuple(sorted(ev.notes)),
    )  # fmt: skip


def evaluator(
    find: Finder, value: int, stored: Mapping[Node, int], *leaves: int
) -> RegionEvaluator:
    """An evaluator that expands the matrices of ragged dots.

    Args:
        find: The search.
        value: The result to replace.
        stored: The array of 8-bit numbers of each ragged dot.
        *leaves: Further values to keep as leaves.
    """
    dots = [dot.outs[0] for dot in stored]
    return find.evaluator(
        value,
        inside=frozenset(dots),
        names={leaf: leaf for leaf in (*stored.values(), *leaves)},
        full_sides=frozenset((dot, 1) for dot in dots),
    )


@dataclass(frozen=True)
class Stored:
    """The stored matrices of a ragged dot.

    Attributes:
        numbers: The whole array of 8-bit numbers.
        scale: A factor for each column of each matrix, or None.
        mode: "forward", or "transposed": the array's last axis is summed.
    """

    numbers: Operand
    scale: Operand | None
    mode: str


def matrices(find: Finder, ev: RegionEvaluator, dot: Node, stored: int) -> Stored:
    """The matrices of a ragged dot.

    Raises:
        Refused: If they are not the stored numbers times a scale for each column.
    """
    alg, (_, _, right) = find.algebra, roles(find, dot)
    at = ev.indices(dot.ins[1])
    numbers, scale = factors(alg, ev.poly(dot.ins[1], at), stored)
    g, k, n = (at[right.index(role)] for role in ("g0", "k0", "n0"))
    if alg.ids(scale) & alg.index_ids(k):
        text = "the scale of the 8-bit matrices varies along the axis that is summed"
        raise Refused("scale", text, score=0.6)
    columns = None
    if scale != alg.const(1):
        columns = operand(scale, flat_indices(g), flat_indices(n))
    for mode, axes in (("forward", (g, k, n)), ("transposed", (g, n, k))):
        array = whole(find, numbers, stored, axes)
        if array is not None:
            return Stored(array, columns, mode)
    text = "the 8-bit matrices are a part of an array, or lie in another order"
    raise Refused("stored", text, score=0.6)


def factors(alg: Algebra, matrices: Poly, stored: int) -> tuple[Poly, Poly]:
    """(stored numbers, factor) of a form of matrices.

    Raises:
        Refused: If it is not such a product.
    """
    for (flag, mono), factor in matrices.items() if len(matrices) == 1 else ():
        own = [a for a, e in mono if e == 1 and alg.kind(a) == "leaf"]
        own = [a for a in own if alg.defs[a][1] == stored]
        if len(own) == 1:
            rest = tuple(x for x in mono if x[0] != own[0])
            return alg.of_atom(own[0]), {(flag, rest): factor}
    text = "the 8-bit matrices are not only multiplied by a scale"
    raise Refused("dequantised", text, score=0.6)


def whole(
    find: Finder, numbers: Poly, stored: int, axes: tuple[Index, ...]
) -> Operand | None:
    """All stored numbers, if their memory order is that of some axes."""
    alg, shape = find.algebra, find.graph.shape(stored)
    split, at = split_digits(alg, numbers, axes)
    ((_, ((atom, _),)),) = split
    try:
        groups = [flat_indices(a) for a in at]
        have = [i for a in alg.defs[atom][2] for i in flat_indices(a)]
    except OverBudget:
        return None
    want = [i for group in groups for i in group]
    every = math.prod(alg.sizes[i] for i in want) == math.prod(shape)
    return operand(split, *groups) if have == want and every else None


PATTERN = ReaderPattern(NAME, RAGGED, propose)
