"""Ragged dot: rows in groups, a matrix per group; one primitive, three forms.

Formula    out[m, n] = Σ_k lhs[m, k] rhs[group(m), k, n], or its two gradients
Looks like JAX's own primitive; only its dimension numbers vary. Its matrices may be
           stored in 8 bits, and dequantised in the program.
Must hold  there are no batch axes and no group offset. Stored matrices are as
           `rewriter.patterns.stored` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize import LAYOUT, ragged_axes
from rewriter.algebra.normal_form import OverBudget
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
    unproved,
)
from rewriter.patterns import stored as stored_matrices
from rewriter.patterns.ragged.dense_experts import CHOICES, RAGGED, near_miss
from rewriter.patterns.stored import StoredMatrices, stored_above
from rewriter.program.graph import Node

NAME = "ragged_dot"
OF_STORED = "quantized_ragged_dot"
ANCHORS = RAGGED | CHOICES


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a ragged dot, or a near miss for a choice among experts."""
    value = anchor.outs[0]
    if anchor.prim in CHOICES:
        miss = near_miss(find, anchor)
        if miss is not None:
            find.missed(NAME, anchor, miss)
        return
    if find.done(NAME, value):
        return
    try:
        yield read(find, anchor)
    except Refused as refusal:
        find.missed(NAME, anchor, refusal)


def read(find: Finder, node: Node) -> Reading:
    """The reading of a ragged dot.

    Raises:
        Refused: If it has axes that the op does not have.
    """
    g, alg, value = find.graph, find.algebra, node.outs[0]
    if len(node.ins) != 3 or node.params.get("group_offset") is not None:
        raise Refused("offset", "the groups begin at a group_offset", score=0.9)
    contracting, left, right = roles(find, node)
    _require_countable(find, node, left.index("k0" if contracting else "m0"))
    ev = find.evaluator(value, inside=frozenset({value}))
    args = ev.indices(value)
    form = ev.poly(value, args)
    lhs_axes = ("m0", "k0")
    if contracting:
        mode, rhs_axes = "contracting", ("k0", "n0")
        lhs_axes = ("k0", "m0")
    elif memory_order(find, node.ins[1], right) == ("g0", "n0", "k0"):
        mode, rhs_axes = "transposed", ("g0", "n0", "k0")
    else:
        mode, rhs_axes = "forward", ("g0", "k0", "n0")
    operands = {}
    for name, source, have, want in (
        ("lhs", node.ins[0], left, lhs_axes),
        ("rhs", node.ins[1], right, rhs_axes),
        ("group_sizes", node.ins[2], ("s0",), ("s0",)),
    ):
        at = ev.indices(source)
        poly, at = split_digits(alg, ev.poly(source, at, LAYOUT), at)
        groups = [flat_indices(at[have.index(w)]) for w in want]
        operands[name] = operand(poly, *groups, dtype=g.dtype(source))
    params: dict[str, Any] = {"out_dtype": str(g.dtype(value))}
    if mode != "forward":
        params["mode"] = mode
    groups = tuple(() if i is None else (i,) for i in args)
    return Reading(NAME, alg, ev.place, value, args, form, groups, operands, params)


def _require_countable(find: Finder, node: Node, axis: int) -> None:
    """Refuses sizes whose dtype is too small for the numbers of all rows."""
    rows = find.graph.shape(node.ins[0])[axis]
    dtype = find.graph.dtype(node.ins[2])
    if isinstance(rows, int) and rows > jnp.iinfo(dtype).max:
        text = f"group sizes are {dtype}, which cannot count {rows} rows"
        raise Refused("sizes", text, score=0.9, suggestion="use int32 for them")


ROWS_BY_MATRICES = False, ("m0", "k0"), ("g0", "k0", "n0")
"""The `roles` in `jax.lax.ragged_dot`."""


def roles(find: Finder, node: Node) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """(whether the ragged axis is contracted, roles of lhs's axes, roles of rhs's).

    Raises:
        Refused: If it has axes that the op does not have.
    """
    ranks = [len(find.graph.shape(i)) for i in node.ins]
    ragged, left, right, sizes = ragged_axes(node, ranks)
    form = ragged, tuple(sorted(left)), tuple(sorted(right)), sizes
    forms = {
        (("m0",), ("k0", "m0"), ("g0", "k0", "n0"), ("s0",)): False,
        (("k0",), ("k0", "m0"), ("k0", "n0"), ("s0",)): True,
    }
    if form not in forms:
        raise Refused(
            "dimensions",
            "a ragged dot with batch axes or several axes of one role",
            difference=str(node.params["ragged_dot_dimension_numbers"]),
            score=0.9,
        )
    return forms[form], left, right


def memory_order(find: Finder, value: int, roles: tuple[str, ...]) -> tuple[str, ...]:
    """The roles in the axis order of the array below layouts."""
    node = find.graph.node_of(value)
    while node is not None and node.prim in ("transpose", "copy"):
        if node.prim == "transpose":
            moved = dict(zip(node.params["permutation"], roles, strict=True))
            roles = tuple(moved[a] for a in range(len(roles)))
        node = find.graph.node_of(node.ins[0])
    return roles


# ----------------------------------------------------------------- stored matrices
def propose_stored(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a ragged dot with 8-bit numbers above its matrices, if any."""
    numbers = stored_above(find, anchor.ins[1])
    if numbers is None or find.done(OF_STORED, anchor.outs[0]):
        return
    try:
        yield read_stored(find, anchor, numbers)
    except Refused as refusal:
        find.missed(OF_STORED, anchor, refusal)
    except OverBudget as error:
        find.missed(OF_STORED, anchor, unproved(error, 0.5))


def read_stored(find: Finder, dot: Node, numbers: int) -> Reading:
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
    ev = expanding(find, value, {dot: numbers})
    args = ev.indices(value)
    form = ev.poly(value, args)
    found = matrices_of(find, ev, dot, numbers)
    operands = {**plain.operands, "rhs": found.numbers}
    if found.scale is not None:
        operands["rhs_scale"] = found.scale
    params = {name: x for name, x in plain.params.items() if name != "mode"}
    if found.order != "forward":
        params["mode"] = found.order
    return dataclasses.replace(
        plain, op=OF_STORED, place=ev.place, args=args, form=form,
        out_groups=tuple(() if i is None else (i,) for i in args),
        operands=operands, params=params, notes=tuple(sorted(ev.notes)),
    )  # fmt: skip


def expanding(
    find: Finder, value: int, numbers: Mapping[Node, int], *leaves: int
) -> RegionEvaluator:
    """An evaluator that expands the matrices of ragged dots.

    Args:
        find: The search.
        value: The result to replace.
        numbers: The array of 8-bit numbers of each ragged dot.
        *leaves: Further values to keep as leaves.
    """
    dots = [dot.outs[0] for dot in numbers]
    return find.evaluator(
        value,
        inside=frozenset(dots),
        names={leaf: leaf for leaf in (*numbers.values(), *leaves)},
        full_sides=frozenset((dot, 1) for dot in dots),
    )


def matrices_of(
    find: Finder, ev: RegionEvaluator, dot: Node, numbers: int
) -> StoredMatrices:
    """The stored matrices of a ragged dot; their order is the op's mode.

    Raises:
        Refused: If they are not the stored numbers times a scale for each column.
    """
    _, _, right = roles(find, dot)
    at = ev.indices(dot.ins[1])
    g, k, n = (at[right.index(role)] for role in ("g0", "k0", "n0"))
    orders = {"forward": (g, k, n), "transposed": (g, n, k)}
    return stored_matrices.read(find, ev, dot.ins[1], at, numbers, k, (g, n), orders)


PATTERN = ReaderPattern(NAME, ANCHORS, propose)
STORED = ReaderPattern(OF_STORED, RAGGED, propose_stored, looks_above=True)
