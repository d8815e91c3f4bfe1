"""Finds the value that a root normalises: its squares are summed under the root.

Looks like a value that everything under the root is computed from alone, and whose
           squares, perhaps centred, the form under the root sums. Its spelling
           does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, is_local
from rewriter.algebra.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.find.finder import Finder
from rewriter.find.reading import Refused
from rewriter.program.graph import Node
from rewriter.program.walk import values_below

REDUCE = frozenset({"reduce_sum", "dot_general"})
CANDIDATES = 8
NOT_RESULTS = LAYOUT_PRIMITIVES | TRANSPARENT | {"sqrt"}
DOWN = NOT_RESULTS | {
    "mul", "div", "sub", "add", "neg", "convert_element_type", "integer_pow",
    "dot_general", "max", "pow", "square", "select_n",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A value that a root may normalise.

    Attributes:
        x: The value.
        inside: Results of contractions that only sum over it.
        centred: Whether its mean is subtracted under the root.
        of_squares: Whether the squares that are summed are its own.
    """

    x: int
    inside: frozenset[int]
    centred: bool
    of_squares: bool = False


def sources(find: Finder, anchor: Node) -> tuple[list[Source], Refused | None]:
    """Values whose squares are summed under a root, nearest first, and a near miss."""
    tops = find.regions.above(anchor.ins[0], REDUCE)
    inside = frozenset(n.outs[0] for n in tops if n.prim == "dot_general")

    def through(node: Node) -> bool:
        return is_local(node) or (
            node.prim == "dot_general"
            and any(find.number(i) is not None for i in node.ins)
        )

    out: list[Source] = []
    miss: Refused | None = None
    usable = find.regions.usable(find.regions.place(anchor.scope))
    start = [i for n in tops for i in n.ins]
    for x, contractions in find.regions.dominators(start, through, CANDIDATES):
        if not find.graph.shape(x) or not usable(x):
            break
        x, within = find.uncast(x), inside | contractions
        if any(s.x == x for s in out):
            continue
        try:
            out.append(Source(x, within, *_is_centred(find, anchor, x, within, tops)))
        except Refused as refusal:
            if miss is None or refusal.score >= miss.score:
                miss = refusal.with_traceback(None)
        except OverBudget:
            continue
    return out, None if out else miss


def masked(find: Finder, anchor: Node) -> Refused | None:
    """The refusal of a root of a sum in which a mask leaves out some numbers."""
    tops = find.regions.above(anchor.ins[0], frozenset({"reduce_sum"}))
    if not any(_is_of_some(find, node) for node in tops):
        return None
    text = "a mask leaves some positions out of the statistics: no op here takes it"
    return Refused("masked", text, score=0.5)


def _is_of_some(find: Finder, node: Node) -> bool:
    """Whether a sum is of squares over positions, and a mask leaves out some."""
    axes, rank = node.params["axes"], len(find.graph.shape(node.ins[0]))
    if tuple(axes) == (rank - 1,):
        return False
    maker = find.graph.node_of(find.uncast(node.ins[0]))
    if maker is None:
        return False
    if maker.prim == "select_n":
        zeros = [find.number(v) == 0 for v in maker.ins[1:]]
        kept = [v for v, zero in zip(maker.ins[1:], zeros, strict=True) if not zero]
        return any(zeros) and any(_is_square(find, v) for v in kept)
    return maker.prim == "mul" and any(
        _is_square(find, a) and _is_repeated(find, b)
        for a, b in (maker.ins, maker.ins[::-1])
    )


def _is_square(find: Finder, value: int) -> bool:
    """Whether a value is a square of a difference, or of what is perhaps one."""
    node = find.graph.node_of(find.uncast(value))
    if node is None:
        return False
    whole = node.prim == "integer_pow" and node.params["y"] == 2
    return (
        whole
        or node.prim == "square"
        or (node.prim == "mul" and node.ins[0] == node.ins[1])
    )


def _is_repeated(find: Finder, value: int) -> bool:
    """Whether a value is an array repeated along an axis, as a mask of positions is."""
    node = find.graph.node_of(find.unscaled(value))
    return node is not None and node.prim == "broadcast_in_dim"


def _is_centred(
    find: Finder, anchor: Node, x: int, inside: frozenset[int], sums: Sequence[Node]
) -> tuple[bool, bool]:
    """Whether the mean is subtracted, and whether squares of the value are summed."""
    sides = frozenset((v, k) for v in inside for k in (0, 1))
    ev = find.evaluator(
        anchor.outs[0], inside=inside, full_sides=sides, names={x: x}, roots=(x,)
    )
    under = _denominator(
        find.algebra, ev.poly(anchor.ins[0], ev.indices(anchor.ins[0]))
    )
    _, mean, _, _ = statistics(find.algebra, under, x)
    if mean is None:
        return False, False
    return True, any(_sums_squares(find.algebra, ev, node, x) for node in sums)


def _sums_squares(alg: Algebra, ev: Any, node: Node, x: int) -> bool:
    """Whether a sum is one of a value times itself, and perhaps times a number."""
    operands = node.ins if node.prim == "dot_general" else node.ins[:1]
    power = 0
    for form in (ev.poly(v, ev.indices(v)) for v in operands):
        if len(form) != 1:
            return False
        ((_, mono),) = form
        if any(alg.kind(a) != "leaf" or alg.defs[a][1] != x for a, _ in mono):
            return False
        power += sum(e for _, e in mono)
    return power == 2


def _denominator(alg: Algebra, p: Poly) -> Poly:
    """The denominator of a form that is one over another."""
    if len(p) == 1:
        ((_, mono),) = p
        if len(mono) == 1 and mono[0][1] == -1:
            atom = mono[0][0]
            if alg.kind(atom) == "pow":
                return alg.thaw(alg.defs[atom][1])
            return alg.of_atom(atom)
    return p


def statistics(alg: Algebra, under: Poly, x: int):
    """((sum of squares, its factor), mean term or None, constant, other terms).

    Raises:
        Refused: If a form is not a sum of squares of x, perhaps centred.
    """
    none = Refused("root", "there is no sum of squares under the root", score=0.25)
    if bounded := _bounded(alg, under):
        raise bounded
    if not any(alg.kind(a) == "sum" and e == 1 for _, m in under for a, e in m):
        raise none
    squares = mean = None
    constant, extra = 0.0, {}
    for (flag, mono), c in under.items():
        if flag != TRUE:
            raise Refused("masked", "the statistics are masked", score=0.4)
        if not mono:
            constant = c
        elif len(mono) == 1 and alg.kind(mono[0][0]) == "sum" and mono[0][1] == 1:
            squares = (mono[0][0], c)
        elif len(mono) == 1 and alg.kind(mono[0][0]) == "sum" and mono[0][1] == 2:
            mean = (mono[0][0], c)
        elif not alg.term_ids(flag, mono):
            extra[flag, mono] = c
        else:
            raise Refused(
                "root",
                "something else is added under the root",
                score=0.4,
                difference=alg.show(under),
            )
    if squares is None:
        raise none
    _, _, _, body = alg.defs[squares[0]]
    leaves = [(a, e) for a, e in body if alg.kind(a) == "leaf"]
    if squares[1] <= 0 or constant < 0:
        raise Refused("root", "a term under the root is negative", score=0.3)
    if (
        len(body) != 1
        or not leaves
        or leaves[0][1] != 2
        or alg.defs[leaves[0][0]][1] != x
    ):
        raise Refused("root", "the sum under the root is not one of squares", score=0.2)
    return squares, mean, constant, extra


BOUNDED = {"rms_norm": "bounded_square", "layer_norm": "bounded_variance"}
"""The code of a refusal by `_bounded`, by op."""


def _bounded(alg: Algebra, under: Poly) -> Refused | None:
    """The refusal of a root of max(mean of squares, number)."""
    for (_, mono), c in under.items():
        for atom in (a for a, _ in mono if alg.kind(a) == "relu"):
            inner = alg.thaw(alg.defs[atom][1])
            if not any(_is_mean_square(alg, m, c * d) for (_, m), d in inner.items()):
                continue
            centred = any(e == 2 for _, m in inner for _, e in m)
            what = "variance" if centred else "mean square"
            return Refused(
                BOUNDED["layer_norm" if centred else "rms_norm"],
                f"the {what}, or a number if that is larger, is under the root, and "
                "not their sum: another function",
                score=0.5,
                suggestion=f"sqrt({what} + eps) is found, sqrt(max({what}, eps)) not",
            )
    return None


def _is_mean_square(alg: Algebra, mono: Any, c: float) -> bool:
    """Whether a term is a mean of squares, perhaps negative."""
    if len(mono) != 1 or mono[0][1] != 1 or alg.kind(mono[0][0]) != "sum":
        return False
    _, ids, _, body = alg.defs[mono[0][0]]
    count = math.prod(alg.sizes[i] for i in ids)
    if not isinstance(count, int):
        return False  # a symbolic width
    return [e for _, e in body] == [2] and abs(abs(c) * count - 1) < 1e-3


def results_below(find: Finder, anchor: Node, x: int) -> list[int]:
    """Values below the root with the size of x, in program order."""
    g = find.graph
    size = math.prod(g.shape(x))
    place = find.regions.place(anchor.scope)
    goes_on = lambda node: node.prim in DOWN and is_local(node)
    near = sorted(
        value
        for value in values_below(g, anchor.outs[:1], goes_on, 60)
        if math.prod(g.shape(value)) == size
        and g.node_of(value).prim not in NOT_RESULTS
    )[:14]
    return [v for v in near if find.regions.place(g.node_of(v).scope) is place]
