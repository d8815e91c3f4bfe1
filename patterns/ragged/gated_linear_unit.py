"""Gated linear unit of experts: two ragged dots of the same rows, and their product.

Formula    out[m, f] = act(Σ_k x[m, k] w_gate[group(m), k, f])
                       (Σ_k x[m, k] w_up[group(m), k, f])
Looks like a product below ragged dots of one x by one set of groups, or below both
           halves of one, where one of them goes through an activation.
Must hold  the form is the activation's applied to one ragged dot, times the other.
           Stored matrices are as `rewriter.patterns.stored` says, in both branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Reading, Refused, operand, unproved
from rewriter.patterns.gated_linear_unit.activation import activated
from rewriter.patterns.gated_linear_unit.branches import Branch
from rewriter.patterns.gated_linear_unit.forms import every
from rewriter.patterns.gated_linear_unit.products import products
from rewriter.patterns.gated_linear_unit.slopes import Side, with_slopes
from rewriter.patterns.ragged.dense_experts import RAGGED
from rewriter.patterns.ragged.dot import (
    ROWS_BY_MATRICES,
    expanding,
    matrices_of,
    memory_order,
    roles,
)
from rewriter.patterns.stored import stored_above
from rewriter.program.graph import Node

NAME = "ragged_gated_linear_unit"
OF_STORED = "quantized_ragged_gated_linear_unit"


@dataclass(frozen=True)
class Unit:
    """A product that may be a gated linear unit.

    Attributes:
        value: The product, or its rounded copy.
        act: The factor that goes through the activation.
        up: The other one.
        gate_dot: The ragged dot above `act`.
        up_dot: The ragged dot above `up`, perhaps the same.
    """

    value: int
    act: int
    up: int
    gate_dot: Node
    up_dot: Node


def units(find: Finder, anchor: Node, name: str) -> Iterator[Unit]:
    """Products below a ragged dot, down to the first that is a known match of an op."""
    for product in products(find, anchor):
        value = _rounded(find, product.outs[0])
        if find.done(name, value):
            return
        for act, up in (product.ins, product.ins[::-1]):
            dots = [find.regions.above(value, RAGGED) for value in (act, up)]
            if [len(found) for found in dots] != [1, 1] or [anchor] not in dots:
                continue
            (gate_dot,), (up_dot,) = dots
            yield Unit(value, act, up, gate_dot, up_dot)


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the products below a ragged dot."""
    yield from _proposed(find, anchor, NAME, read)


def _proposed(
    find: Finder, anchor: Node, name: str, read: Callable[[Finder, Unit], Reading]
) -> Iterator[Reading]:
    """The first reading of a unit that is not refused; near misses of those before."""
    for unit in units(find, anchor, name):
        try:
            yield read(find, unit)
            return
        except Refused as refusal:
            find.missed(name, anchor, refusal)
        except OverBudget as error:
            find.missed(name, anchor, unproved(error, 0.2))


def _rounded(find: Finder, value: int) -> int:
    """The narrower copy of a value, if nothing else reads the value."""
    g, users = find.graph, find.graph.users(value)
    if len(users) != 1 or users[0].prim != "convert_element_type":
        return value
    (rounded,) = users[0].outs
    narrower = g.dtype(rounded).itemsize < g.dtype(value).itemsize
    floats = jnp.issubdtype(g.dtype(rounded), jnp.floating)
    return rounded if narrower and floats else value


def read(find: Finder, unit: Unit) -> Reading:
    """The reading of a product of two values.

    Raises:
        Refused: If the form is not that of a gated linear unit of ragged dots.
        OverBudget: If the form grows too large.
    """
    g, alg, value = find.graph, find.algebra, unit.value
    gate_dot, up_dot = unit.gate_dot, unit.up_dot
    x, w, sizes = _operands(find, gate_dot)
    also = _operands(find, up_dot)
    if (x, sizes) != (also[0], also[2]):
        raise Refused("x", "gate and up have different rows or groups", score=0.3)
    if g.shape(value)[0] != g.shape(x)[0]:
        raise Refused("rows", "some rows of the ragged dots are left out", score=0.3)
    leaves = dict.fromkeys((x, w, also[1], sizes))
    ev = find.evaluator(
        value,
        inside=frozenset({gate_dot.outs[0], up_dot.outs[0]}),
        names={leaf: leaf for leaf in leaves},
    )
    args = ev.indices(value)
    form = ev.poly(value, args)
    act_form, up_form = (
        ev.poly(side, ev.aligned(side, args)) for side in (unit.act, unit.up)
    )
    branches = _branches(alg, act_form, up_form)
    found = activated(alg, act_form, [Branch(((branches.gate, 1),), {})])
    params: dict[str, Any] = {
        "activation": found.name, "out_dtype": str(g.dtype(value)),
    }  # fmt: skip
    if found.beta != 1.0:
        params["beta"] = found.beta
    operands = {"x": x, "w": w, "w_up": also[1], "group_sizes": sizes}
    if gate_dot is up_dot:
        del operands["w_up"]
        params["halves"] = _halves(find, ev, gate_dot, args, branches)
    factor = found.factor * branches.factor
    made = Reading(
        NAME,
        alg,
        ev.place,
        value,
        args,
        form,
        tuple(() if i is None else (i,) for i in args),
        {name: _program_array(ev, alg, leaf) for name, leaf in operands.items()},
        params,
        notes=tuple(sorted(ev.notes)),
        times=None if factor == 1.0 else alg.const(factor),
    )
    roots = frozenset({gate_dot.outs[0], up_dot.outs[0]})
    read = frozenset({"x", "w"})
    gate = Side(unit.act, found.gate, read, found.name, found.beta)
    return with_slopes(find, ev, roots, {"slopes": gate}, made)


def _operands(find: Finder, dot: Node) -> tuple[int, int, int]:
    """(rows, matrices, group sizes) of a ragged dot.

    Raises:
        Refused: If it is another kind of ragged dot.
    """
    if len(dot.ins) != 3 or dot.params.get("group_offset") is not None:
        raise Refused("offset", "the groups begin at a group_offset", score=0.2)
    if roles(find, dot) != ROWS_BY_MATRICES:
        raise Refused("dimensions", "no ragged dot of rows by matrices", score=0.2)
    x, w, sizes = dot.ins
    matrices = ROWS_BY_MATRICES[2]
    if memory_order(find, w, matrices) != matrices:  # a ragged dot takes them unchanged
        raise Refused("stored", "the matrices are stored transposed", score=0.2)
    return x, w, sizes


@dataclass(frozen=True)
class _Branches:
    """Both ragged dots as atoms, and the number that multiplies the plain one."""

    gate: int
    up: int
    factor: float


def _branches(alg: Algebra, act: Poly, up: Poly) -> _Branches:
    """The ragged dot in each factor.

    Raises:
        Refused: If there are other ragged dots, or one is in both factors.
    """
    own = _scaled_ragged_dot(alg, up)
    if own is None:
        raise Refused("up", "the other factor is more than a ragged dot", score=0.3)
    gates = [atom for atom in every(alg, act) if _ragged(alg, atom)]
    if (
        _scaled_ragged_dot(alg, act) is not None
        or len(gates) != 1
        or gates[0] == own[0]
    ):
        text = "the activation is not applied to another ragged dot"
        raise Refused("gate", text, score=0.2)
    return _Branches(gates[0], *own)


def _scaled_ragged_dot(alg: Algebra, p: Poly) -> tuple[int, float] | None:
    """(ragged dot, number) of a form that is just their product."""
    for (flag, mono), factor in p.items() if len(p) == 1 else ():
        if flag == TRUE and len(mono) == 1 and mono[0][1] == 1:
            atom = mono[0][0]
            return (atom, factor) if _ragged(alg, atom) else None
    return None


def _ragged(alg: Algebra, atom: int) -> bool:
    """Whether an atom is an expanded ragged dot."""
    name = alg.defs[atom][1]
    return alg.kind(atom) == "leaf" and isinstance(name, tuple) and name[1] in RAGGED


def _halves(
    find: Finder, ev: RegionEvaluator, dot: Node, args: Any, branches: _Branches
) -> str:
    """Finds which half of a ragged dot's columns each branch has.

    Raises:
        Refused: If they are not halves.
    """
    alg, value = find.algebra, dot.outs[0]
    columns = find.graph.shape(value)[1]
    rows, column = args
    halves = []
    for first in (0, columns // 2):
        form = ev.poly(value, (rows, alg.affine(column, 1, first)))
        halves.append(next((atom for _, ((atom, _),) in form), None))
    if columns % 2 == 0 and halves == [branches.gate, branches.up]:
        return "gate_up"
    if columns % 2 == 0 and halves == [branches.up, branches.gate]:
        return "up_gate"
    raise Refused(
        "halves", "gate and up are not the halves of one ragged dot", score=0.3
    )


def _program_array(ev: RegionEvaluator, alg: Algebra, leaf: int) -> Any:
    """The program's own array as an operand."""
    at = ev.indices(leaf)
    groups = tuple(() if i is None else (i,) for i in at)
    return operand(alg.of_atom(alg.atom("leaf", leaf, at)), *groups)


# ----------------------------------------------------------------- stored matrices
def propose_stored(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the products below a ragged dot of 8-bit matrices."""
    if stored_above(find, anchor.ins[1]) is not None:
        yield from _proposed(find, anchor, OF_STORED, read_stored)


def read_stored(find: Finder, unit: Unit) -> Reading:
    """The reading of a unit with stored matrices.

    Raises:
        Refused: If it is no unit, or its matrices are not stored numbers with scales.
        OverBudget: If the form grows too large.
    """
    plain = read(find, unit)
    numbers: dict[Node, int] = {}
    for dot in (unit.gate_dot, unit.up_dot):
        array = stored_above(find, dot.ins[1])
        if array is None:
            raise Refused("dtype", "only one branch has 8-bit matrices", score=0.3)
        numbers[dot] = array
    x, _, sizes = unit.gate_dot.ins
    ev = expanding(find, unit.value, numbers, x, sizes)
    args = ev.indices(unit.value)
    form = ev.poly(unit.value, args)
    operands = {n: o for n, o in plain.operands.items() if n in ("x", "group_sizes")}
    for name, dot in zip(("w", "w_up"), numbers, strict=False):
        found = matrices_of(find, ev, dot, numbers[dot])
        if found.order != "forward":
            raise Refused("stored", "the matrices are stored transposed", score=0.2)
        operands[name] = found.numbers
        if found.scale is not None:
            operands[f"{name}_scale"] = found.scale
    return dataclasses.replace(
        plain, op=OF_STORED, place=ev.place, args=args, form=form,
        out_groups=tuple(() if i is None else (i,) for i in args),
        operands=operands, notes=tuple(sorted(ev.notes)),
    )  # fmt: skip


PATTERN = ReaderPattern(NAME, RAGGED, propose, needs=frozenset({"mul"}))
STORED = ReaderPattern(
    OF_STORED, RAGGED, propose_stored, needs=frozenset({"mul"}), looks_above=True
)
