"""Proves gradients, given a candidate for the cotangent.

Every value below the candidate that has a leaf's shape is compared, as a normal form,
with the gradients of the op's reference. Sums of such values are compared too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.canonicalize import (
    TRANSPARENT,
    Evaluator,
    NeedSplit,
    is_pick,
    kind_of,
    pieces,
)
from rewriter.algebra.canonicalize.layout import smaller
from rewriter.algebra.normal_form import Algebra, OverBudget, Poly
from rewriter.find.match import Match
from rewriter.gradients.addends import larger_sums, widest
from rewriter.gradients.backward import Backward
from rewriter.gradients.cotangents import (
    CONTRACTIONS,
    Cones,
    below,
    cancelled_reads,
    is_float,
    linear,
)
from rewriter.gradients.reference import unread, wanted_at
from rewriter.gradients.shared_operands import Shares, may_be_zero, shares
from rewriter.gradients.through_loops import after_step, carries
from rewriter.program.graph import Graph

NO_RESULTS: Mapping[int, int] = {}


def proved_gradients(
    graph: Graph,
    match: Match,
    cotangent: int,
    reference: Callable[[], Graph],
    returned: Set[int],
    factors: Set[int] | None = None,
    results: Mapping[int, int] = NO_RESULTS,
    foreign: Set[int] = frozenset(),
) -> Backward | None:
    """The gradients below one candidate for the cotangent.

    Args:
        graph: The program.
        match: The match that they belong to.
        cotangent: The candidate.
        reference: Returns the gradients of the match's reading; called only if there
            are values to compare.
        returned: What bodies return.
        factors: What the cotangent is a product of, if the proof is for that product;
            None if it is for any cotangent.
        results: The results of the reading's parameter that are given, as of
            `results_here`; empty if they are computed.
        foreign: Values through which no gradient of the match is computed.
    """
    found = _candidates(graph, match, cotangent, factors, results, foreign)
    if not found.cones and found.joined is None:
        return None
    by_value = factors is not None
    stops = found.stops - {cotangent} if by_value else found.stops
    ev = _evaluator(graph, match, stops, found.inside | match.inner)
    wanted, outs = wanted_at(
        graph, reference(), match, cotangent, ev, by_value, results
    )
    forms = _Forms(ev, wanted, outs)
    grads, zeros = _summed(forms, graph, found, returned)
    values = (*grads.values(), *itertools.chain(*zeros.values()))
    inner = frozenset().union(*(found.cones[v] for v in values))
    shared, pieces = {}, frozenset[int]()
    if found.joined is not None and len(grads) < len(outs):
        shared, pieces = _shared(forms, found.joined, cotangent, grads, returned)
        inner = inner.union(*(found.joined.own[p] for p in pieces))
        grads |= shared
    if not grads:
        return None
    return Backward(
        cotangent,
        grads,
        inner - match.inner,
        zeros,
        frozenset() if results else unread(graph, reference(), match, grads.keys()),
        tuple(sorted(pieces)),
        frozenset(shared.values()) if pieces else frozenset(),
        by_value,
    )


@dataclass(frozen=True)
class _Candidates:
    """Values that may be gradients of a match, below one candidate for its cotangent.

    Attributes:
        reached: The values below the cotangent, in program order.
        stops: Where their forms end: leaves, the cotangent, what other ops join.
        cones: Those that depend on the stops alone, and what they are computed through.
        joined: Those that hold a share of other ops; None without any.
    """

    reached: Sequence[int]
    stops: frozenset[int]
    cones: Mapping[int, frozenset[int]]
    joined: Shares | None

    @property
    def inside(self) -> frozenset[int]:
        """All values that they are computed through."""
        parts = frozenset[int]().union(*self.cones.values())
        if self.joined is None:
            return parts
        return parts.union(*self.joined.cones.values(), *self.joined.own.values())


def _candidates(
    graph: Graph,
    match: Match,
    cotangent: int,
    factors: Set[int] | None,
    results: Mapping[int, int],
    foreign: Set[int],
) -> _Candidates:
    leaves = (v for _, v in match.leaves)
    stops = frozenset(
        [*leaves, *cancelled_reads(graph, match), cotangent, *results.values()]
    ).union(factors or ())
    reached = below(graph, cotangent)
    moving = linear(graph, reached, stops)
    barred = foreign | _constants_of_others(graph, match)
    known = Cones(graph, stops, barred)
    cones = _cones(graph, match, reached, known, moving)
    pure = Cones(graph, stops) if barred else known
    joined = shares(graph, reached, moving, pure)
    if joined is not None:
        stops |= joined.foreign
    return _Candidates(reached, stops, cones, joined)


def _summed(
    forms: _Forms, graph: Graph, found: _Candidates, returned: Set[int]
) -> tuple[dict[int, int], dict[int, tuple[int, ...]]]:
    """Leaves to values that are their gradients, or the widest addend of those.

    Also gives the other addends by leaf; the rewritten program has zeros in their
    place.
    """
    grads: dict[int, int] = {}
    for value in found.cones:
        leaf = forms.leaf_of((value,), grads)
        if leaf is not None:
            grads[leaf] = value
    zeros: dict[int, tuple[int, ...]] = {}
    taken = set(grads.values())
    missing = len(grads) < len(forms.outs)
    mixed = larger_sums(graph, found.reached, found.cones, returned) if missing else ()
    for terms in mixed:
        leaf = forms.leaf_of(terms, grads) if taken.isdisjoint(terms) else None
        if leaf is not None:
            grads[leaf] = widest(graph, terms)
            zeros[leaf] = tuple(v for v in terms if v != grads[leaf])
            taken.update(terms)
    return grads, zeros


def _shared(
    forms: _Forms,
    joined: Shares,
    cotangent: int,
    grads: Mapping[int, int],
    returned: Set[int],
) -> tuple[dict[int, int], frozenset[int]]:
    """Leaves to values that are their gradients plus a share of other ops.

    Also gives the pieces of these values that the rewritten program has as zeros. Both
    are empty if it may not have zeros there.
    """
    graph, found = forms.ev.g, dict[int, int]()
    for value in joined.pieces:
        leaf = forms.leaf_beside(value, joined.foreign, cotangent, {**grads, **found})
        if leaf is not None:
            found[leaf] = value
    ends = {*grads.values(), *found.values()}
    if not may_be_zero(graph, joined, set(found.values()), ends, returned):
        return {}, frozenset()
    return found, frozenset().union(*(joined.pieces[v] for v in found.values()))


def _cones(
    graph: Graph,
    match: Match,
    reached: Sequence[int],
    cones: Cones,
    moving: Set[int],
) -> dict[int, frozenset[int]]:
    """The cones of values with a leaf's shape that depend only on the stops.

    Only of those that are linear in the cotangent, and read no array of numbers that
    the match does not read: no other is worth a form. Weights that a function closes
    over are such arrays. Behind them are the gradients of earlier layers.
    """
    shapes = {graph.shape(v) for _, v in match.leaves}
    found = {
        v: cones.of(v)
        for v in reached
        if v in moving and v not in cones.stops and graph.shape(v) in shapes
    }
    return {v: inside for v, inside in found.items() if inside is not None}


def _constants_of_others(graph: Graph, match: Match) -> frozenset[int]:
    """Constant arrays of floats that a match does not read."""
    nodes = (graph.node_of(v) for v in match.inner)
    own = {i for node in nodes if node is not None for i in node.ins}
    return frozenset(
        v
        for v in graph.constants
        if v not in own and graph.shape(v) and is_float(graph.dtype(v))
    )


class _Forms:
    """Compares forms of the program's values with forms of the expected gradients.

    Args:
        ev: Evaluates the program's values.
        wanted: Evaluates the gradients.
        outs: Leaf to its gradient.
    """

    def __init__(self, ev: Evaluator, wanted: Evaluator, outs: Mapping[int, int]):
        self.ev, self.wanted, self.outs = ev, wanted, outs
        self.indices: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def leaf_of(
        self,
        values: tuple[int, ...],
        known: Mapping[int, int],
        own: Callable[[Poly], Poly] = lambda form: form,
    ) -> int | None:
        """The leaf, not yet known, whose gradient is the sum of some values.

        Args:
            values: The values.
            known: Leaves that have gradients.
            own: Returns the terms of the sum that count.
        """
        graph = self.ev.g
        shape = graph.shape(values[0])
        at = self._arguments(shape, _digits(graph, values[0]))
        self.ev.alg.work = 0
        with contextlib.suppress(OverBudget):
            for leaf, out in self.outs.items():
                if leaf in known or graph.shape(leaf) != shape:
                    continue
                if _equal(self.ev, values, self.wanted, out, at, own) == SAME:
                    return leaf
        return None

    def leaf_beside(
        self, value: int, foreign: Set[int], cotangent: int, known: Mapping[int, int]
    ) -> int | None:
        """The leaf, not yet known, whose gradient is a value without foreign terms.

        No term may hold the cotangent and a foreign value: each of them adds its share.
        """
        alg = self.ev.alg

        def own(form: Poly) -> Poly:
            kept: Poly = {}
            for (flag, mono), c in form.items():
                leaves = {x for a, _ in mono for x in alg.leaves(a)}
                names = {alg.defs[x][1] for x in leaves}
                if names.isdisjoint(foreign):
                    kept[flag, mono] = c
                elif cotangent in names:
                    text = (
                        "a part of the gradient comes from other ops, and "
                        "is not simply added"
                    )
                    raise OverBudget(text)
            return kept

        return self.leaf_of((value,), known, own)

    def _arguments(
        self, shape: tuple[int, ...], digits: tuple[int, ...]
    ) -> tuple[Any, ...]:
        """Index arguments of a value, digit by digit where axes were joined.

        Equal digits have equal indices, so a value and its reshapes share one form.
        """
        alg = self.ev.alg
        joined = _joined(alg, shape, digits, self._indices_of(digits))
        return self._indices_of(shape) if joined is None else joined

    def _indices_of(self, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        if sizes not in self.indices:
            self.indices[sizes] = self.ev.alg.spare_indices(sizes, ())
        return self.indices[sizes]


def _digits(graph: Graph, value: int) -> tuple[int, ...]:
    """The sizes of the axes that were joined into a value's axes.

    It is a reshaped array, or one to which each step of a loop adds a block.
    """
    at, node = value, graph.node_of(value)
    while node is not None and (
        node.prim in TRANSPARENT | {"scan", "add_any", "convert_element_type"}
    ):
        at = after_step(graph, node, at) if node.prim == "scan" else node.ins[-1]
        node = graph.node_of(at)
    if node is not None and node.prim == "reshape":
        at = node.ins[0]
    if node is not None and node.prim == "dynamic_update_slice":
        pairs = zip(graph.shape(at), graph.shape(node.ins[1]), strict=True)
        return tuple(
            part
            for n, m in pairs
            for part in ((n,) if n == m or n % m else (n // m, m))
        )
    return graph.shape(at)


def _joined(
    alg: Algebra,
    shape: tuple[int, ...],
    digits: tuple[int, ...],
    indices: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Index arguments of a shape, made of digits; None if an axis was split."""
    rest, out = list(zip(digits, indices, strict=True)), []
    for size in shape:
        argument, have = None, 1
        while rest and smaller(have, size):
            n, index = rest.pop(0)
            argument, have = alg.cat(argument, index, n), have * n
        if have != size:
            return None
        out.append(argument)
    return tuple(out)


OPENED = CONTRACTIONS | {"scan", "cond", "dynamic_update_slice"}
SAME, ZERO, OTHER = "same", "zero", "other"


def _equal(
    ev: Evaluator,
    values: tuple[int, ...],
    wanted: Evaluator,
    out: int,
    at: tuple[Any, ...],
    own: Callable[[Poly], Poly],
) -> str:
    """Whether a sum has a gradient's form; compared by pieces where values are joined.

    Forms that are zero prove nothing; they are the same only beside others.
    """
    alg = ev.alg
    try:
        whole = functools.reduce(alg.add, (ev.poly(v, at) for v in values))
        form = alg.without_implied(own(whole))
        other = alg.without_implied(wanted.poly(out, at))
    except NeedSplit as need:
        found = set()
        for _, part in pieces(alg, need):
            where = tuple(alg.subst_index(a, {need.index: part}) for a in at)
            found.add(_equal(ev, values, wanted, out, where, own))
            if OTHER in found:
                return OTHER
        return SAME if SAME in found else ZERO
    if not form and not other:
        return ZERO
    return OTHER if not form or alg.difference(form, other) else SAME


def _evaluator(
    graph: Graph, match: Match, stops: frozenset[int], parts: frozenset[int]
) -> Evaluator:
    """An evaluator that expands everything down to the leaves and the cotangent."""
    dots = frozenset(
        v
        for v in parts
        if (node := graph.node_of(v)) is not None
        and (node.prim in OPENED or is_pick(node))
    )
    known, core = match.reading.evaluator, None
    taken_over = match.reading.proof is not None  # also what scores are computed with
    if known is not None and known.core is not None and not taken_over:
        # as the forward was read
        core = _computed_from(graph, stops, parts).__contains__
    make = functools.partial(
        Evaluator,
        graph,
        match.reading.algebra,
        core=core,
        at_hand=known.at_hand if core is not None else None,
        names={v: v for v in stops if kind_of(graph.dtype(v)) != "b"},
        inside=dots,
        full_sides=frozenset((v, k) for v in dots for k in (0, 1)),
        filled_rows=True,
        **match.reading.check_options,
    )
    ev = make(holding=_row_has_a_key(make(), match))
    ev.strided, ev.congruent = True, True
    return ev


def _computed_from(
    graph: Graph, stops: frozenset[int], parts: frozenset[int]
) -> frozenset[int]:
    """The float stops and what is computed from them: what the op computes.

    Other values, such as a dropout mask over its rate, are those of the machine.
    """
    found = {v for v in stops if is_float(graph.dtype(v))}
    queue = list(found)
    while queue:
        for node in graph.users(queue.pop()):
            new = parts.intersection(node.outs) - found
            if new and node.prim == "scan":
                new |= set(carries(node)) - found
            found |= new
            queue += new
    return frozenset(found)


def _row_has_a_key(ev: Evaluator, match: Match) -> frozenset[int]:
    """Atoms that are true in rows with a key, and make results zero in others.

    The match states the result of rows without keys; the proof covers other rows.
    """
    alg, op = ev.alg, match.op
    if op.has_zero_rows is None or not op.has_zero_rows(match.reading.params):
        return frozenset()
    try:
        form = ev.poly(match.value, ev.indices(match.value))
    except (NeedSplit, OverBudget):
        return frozenset()
    parts = [p for flag, _ in form for p in alg.bools[flag][0]]
    return frozenset(
        a
        for a in parts
        if alg.kind(a) == "any"
        and all(alg.implies(flag, alg.literal(a)) for flag, _ in form)
    )
