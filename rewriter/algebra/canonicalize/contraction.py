"""Rules of sums, contractions and ragged dots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriter.algebra.canonicalize.evaluator import Evaluator, rule
from rewriter.algebra.canonicalize.primitives import FULL, OPAQUE_LEVEL, STRUCTURAL
from rewriter.algebra.normal_form import Index, Poly
from rewriter.program.graph import Node


@rule("reduce_sum")
def _reduce_sum(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    source = node.ins[0]
    at, bound = ev.before_reduction(node, args)
    return ev.summed(lambda to: ev.poly(source, ev.cut(at, to), mode), bound)


@rule("dot_general")
def _dot_general(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    left, right, bound = dot_arguments(ev, node, args)
    inner = (
        FULL if ev.expand_all or (mode == FULL and node.outs[0] in ev.inside) else mode
    )

    def side(k: int, at: tuple[Index, ...]) -> Poly:
        return ev.poly(node.ins[k], at, ev.operand_mode(node, k, inner))

    return ev.summed(
        lambda to: ev.alg.mul(side(0, ev.cut(left, to)), side(1, ev.cut(right, to))),
        bound,
    )


def dot_arguments(ev: Evaluator, node: Node, args):
    """Arguments of both operands of a contraction, and its bound indices."""
    (lc, rc), (lb, rb) = [
        [[int(x) for x in side] for side in pair]
        for pair in node.params["dimension_numbers"]
    ]
    ls, rs = ev.g.shape(node.ins[0]), ev.g.shape(node.ins[1])
    left: list[Index] = [None] * len(ls)
    right: list[Index] = [None] * len(rs)
    rest = list(args)
    for x, y in zip(lb, rb, strict=True):
        left[x] = right[y] = rest.pop(0)
    spare = ev.alg.spare_indices([ls[x] for x in lc], args)
    for x, y, index in zip(lc, rc, spare, strict=True):
        left[x] = right[y] = index
    bound = [i for i in spare if i is not None]
    for x in range(len(ls)):
        if x not in lb and x not in lc:
            left[x] = rest.pop(0)
    for y in range(len(rs)):
        if y not in rb and y not in rc:
            right[y] = rest.pop(0)
    return tuple(left), tuple(right), bound


@rule(*sorted(STRUCTURAL))
def _structural(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    """An opaque function of whole operands: equal for equal operands and params.

    Its precision is no part of the function of real numbers.

    The axes of operands are identified by their roles. So their order in an operand is
    layout, and not part of the function.
    """
    numbers, *axes = ragged_axes(node, [len(ev.g.shape(i)) for i in node.ins])
    slots: dict[str, int] = {}
    operands = []
    for k, (source, roles) in enumerate(zip(node.ins, axes, strict=True)):
        at = tuple(
            None
            if n == 1
            else ev.alg.bound_index(OPAQUE_LEVEL, slots.setdefault(role, len(slots)), n)
            for role, n in zip(roles, ev.g.shape(source), strict=True)
        )
        side = ev.operand_mode(node, k, mode)
        operands.append(ev.alg.freeze(ev.poly(source, at, side)))
    params = tuple(
        (name, _plain_param(value)) for name, value in sorted(node.params.items())
        if name not in (
            "preferred_element_type", "out_sharding", "precision",
            "ragged_dot_dimension_numbers",
        )
    )  # fmt: skip
    name = ("call", node.prim, numbers, params, tuple(operands))
    return ev.alg.of_atom(ev.alg.atom("leaf", name, args))


def ragged_axes(node: Node, ranks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The roles of a ragged dot's axes: (ragged and group axes, lhs, rhs, sizes...).

    Batch axes are ``b0 b1 ...``, contracted ones ``k0 ...``, the other axes of lhs
    ``m0 ...``, of rhs ``n0 ...``, and groups ``g0 ...``. The result's axes are the
    groups (if the ragged axis is contracted), b, m and n in this order.
    """
    d = node.params["ragged_dot_dimension_numbers"]
    (lc, rc), (lb, rb) = d.dot_dimension_numbers
    groups = tuple(d.rhs_group_dimensions)

    def roles(rank: int, batch, contracted, rest: str) -> tuple[str, ...]:
        names = {int(a): f"b{i}" for i, a in enumerate(batch)}
        names |= {int(a): f"k{i}" for i, a in enumerate(contracted)}
        if rest == "n":
            names |= {int(a): f"g{i}" for i, a in enumerate(groups)}
        others = (a for a in range(rank) if a not in names)
        names |= {a: f"{rest}{i}" for i, a in enumerate(others)}
        return tuple(names[a] for a in range(rank))

    left = roles(ranks[0], lb, lc, "m")
    right = roles(ranks[1], rb, rc, "n")
    ragged = tuple(left[int(a)] for a in d.lhs_ragged_dimensions)
    sizes = tuple(tuple(f"s{i}" for i in range(rank)) for rank in ranks[2:])
    return ragged, left, right, *sizes


def _plain_param(value: Any) -> Any:
    """A parameter as text, the same for equal spellings."""
    if isinstance(value, tuple) and len(set(map(str, value))) == 1:
        value = value[0]
    return None if str(value) in ("None", "DEFAULT") else str(value)
