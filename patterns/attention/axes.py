"""Names the indices of a softmax after the axes of the op: batch, heads, rows, keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Set
from dataclasses import dataclass

from rewriter.algebra.normal_form import TRUE, Algebra, Monomial
from rewriter.find.reading import Group, Refused, flat_indices
from rewriter.patterns.attention.softmax import Softmax


@dataclass(frozen=True)
class Axes:
    """Indices by the op's axes.

    Attributes:
        b: The batch.
        n: The heads: those of the keys first, then the heads that share them.
        k: The keys' heads.
        t: The queries.
        s: The keys, first the indices that move the position most.
        e: The values' width.
    """

    b: Group
    n: Group
    k: Group
    t: Group
    s: Group
    e: Group

    @property
    def of_scores(self) -> tuple[Group, ...]:
        """The axes of an array with a number for each score."""
        return self.b, self.n, self.t, self.s


@dataclass(frozen=True)
class _Masked:
    """Indices that masks and biases depend on: all, of lengths, as positions."""

    any: Set[int]
    lengths: Set[int]
    positions: Set[int]


def name_axes(softmax: Softmax) -> Axes:
    """Returns the op's axes.

    Raises:
        Refused: If an operand has an axis that the op lacks.
    """
    out = [i for a in softmax.args for i in flat_indices(a)]
    q, k, v = _read(softmax, out)
    e = v - q - k
    rows = q - k - v
    shared = [i for i in out if i not in e and i not in rows]
    if set(shared) - (q | k | v):
        text = "an axis of the result belongs to none of the queries, keys and values"
        raise Refused("axes", text, score=0.5)
    masked = _masked(softmax, rows)
    in_order = [i for i in out if i in rows]
    t = _queries(softmax, in_order, masked)
    lead = [i for i in shared if i in masked.lengths]
    if not lead and not (len(shared) == 1 and _are_heads(softmax, *shared, t, masked)):
        lead = shared[:1]
    heads = tuple(i for i in shared if i not in lead)
    alone = [i for i in shared if (i in k) != (i in v) and i in q]
    if alone and any(_are_scores(softmax, x.k) for x in softmax.qk):
        text = "scores of several heads are mixed before the softmax, as those of "
        raise Refused("heads", f"{text}talking heads", score=0.5)
    if alone and math.prod(softmax.alg.sizes[i] for i in t) == 1:
        raise Refused(
            "keys",
            "each query has keys or values of its own: the others would be "
            "repeated for every query",
            score=0.5,
        )
    return Axes(
        b=tuple(i for i in shared if i in lead),
        n=heads + tuple(i for i in in_order if i not in t),
        k=heads,
        t=t,
        s=_keys(softmax),
        e=tuple(i for i in out if i in e),
    )


def _are_scores(softmax: Softmax, factors: Monomial) -> bool:
    """Whether what is taken for keys is a product of queries and keys."""
    makers = map(softmax.ev.g.node_of, softmax.values_of(a for a, _ in factors))
    return any(
        node is not None
        and node.prim == "dot_general"
        and all(node.params["dimension_numbers"][k][0] for k in (0, 1))
        for node in makers
    )


def _read(softmax: Softmax, out: list[int]) -> tuple[set[int], set[int], set[int]]:
    """Indices of the result that queries, keys and values have.

    Raises:
        Refused: If they have others, or only the values differ along the rows.
    """
    alg, s = softmax.alg, set(softmax.parts.s)
    q: set[int] = set()
    k: set[int] = set()
    for x in softmax.qk:
        q |= set().union(*(alg.free(a) for a, _ in x.q)) - set(x.d)
        k |= set().union(*(alg.free(a) for a, _ in x.k)) - set(x.d) - s
    v = set().union(*(alg.free(a) for a in softmax.parts.v)) - s
    for name, ids in (("queries", q), ("keys", k), ("values", v)):
        if ids - set(out):
            raise Refused(
                "axes", f"an axis of the {name} is not one of the result", score=0.5
            )
    if not k and v & q:
        raise Refused(
            "keys",
            "all rows share the keys and not the values, as in a router",
            score=0.4,
        )
    return q, k, v


def _masked(softmax: Softmax, rows: set[int]) -> _Masked:
    """Indices that masks and biases depend on."""
    alg, s = softmax.alg, set(softmax.parts.s)
    every: set[int] = set()
    lengths: set[int] = set()
    positions: set[int] = set()
    for a in alg.bools[softmax.parts.keep][0]:
        ids = alg.free(a)
        every |= ids
        if alg.kind(a) in ("ge", "eq"):
            if ids & s:
                lengths |= ids - rows
            for inner in alg.children(a):
                if alg.kind(inner) == "iota":
                    positions |= alg.free(inner)
    for _, mono in softmax.bias:
        every |= alg.term_ids(TRUE, mono)
    return _Masked(every, lengths, positions)


def _queries(softmax: Softmax, rows: list[int], masked: _Masked) -> Group:
    """The queries' index: the one that masks depend on, or else the longest."""
    if len(rows) == 1 and _is_group(softmax, rows[0]):
        return ()  # one query
    if len(rows) <= 1:
        return tuple(rows)
    for ids in (masked.positions, masked.any):
        hits = [i for i in rows if i in ids]
        if len(hits) == 1:
            return tuple(hits)
        if ids is masked.positions and (digits := _digits(softmax, hits)):
            return digits
        if hits:
            rows = hits
    return (max(rows, key=softmax.alg.size_order),)


def _digits(softmax: Softmax, hits: list[int]) -> Group:
    """Indices that together count the queries in a mask, as blocks of queries do."""
    alg = softmax.alg
    found: Group = ()
    for a in alg.bools[softmax.parts.keep][0]:
        if alg.kind(a) != "ge" or not alg.free(a) & set(hits):
            continue
        p = alg.thaw(alg.defs[a][1])
        factors = {i: p.get((TRUE, ((alg.atom("iota", i), 1),)), 0.0) for i in hits}
        order = tuple(sorted(hits, key=lambda i: -abs(factors[i])))
        for i, j in itertools.pairwise(order):
            if not factors[j] or factors[i] != factors[j] * alg.sizes[j]:
                return ()
        if found not in ((), order):
            return ()
        found = order
    return found


def _is_group(softmax: Softmax, row: int) -> bool:
    """Whether an axis is a digit of the heads that sinks are given for."""
    alg = softmax.alg
    args = (
        alg.index_ids(a)
        for atom in alg.poly_leaves(softmax.parts.sink)
        for a in alg.defs[atom][2]
    )
    return any(row in ids and len(ids) > 1 for ids in args)


def _are_heads(softmax: Softmax, i: int, t: Group, masked: _Masked) -> bool:
    """Whether the only axis that all operands share is that of heads.

    It comes after the positions in memory, as heads do: so arrays are read as they lie.
    Where queries are few, and heads that share keys look like queries, the keys tell.
    A mask that depends on the axis speaks for the batch.
    """
    lead, alg = softmax.qk[0], softmax.alg
    if _comes_after(alg, lead.q, i, set(t)):
        return True
    if i in masked.any:
        return False
    return _comes_after(alg, lead.k, i, set(softmax.parts.s))


def _comes_after(alg: Algebra, factors: Monomial, i: int, others: Set[int]) -> bool:
    """Whether an axis comes after others in the first array among factors."""
    for atom, _ in factors:
        if alg.kind(atom) == "leaf":
            ids = [alg.index_ids(a) for a in alg.defs[atom][2]]
            at = [k for k, x in enumerate(ids) if i in x]
            rows = [k for k, x in enumerate(ids) if x & others]
            return bool(at and rows) and rows[0] < at[0]
    return False


def _keys(softmax: Softmax) -> Group:
    """The keys' indices, those first that move the position in a mask most."""
    alg, s = softmax.alg, softmax.parts.s
    factors = dict.fromkeys(s, 0.0)
    for a in alg.bools[softmax.parts.keep][0] if len(s) > 1 else ():
        for (_, mono), c in alg.defs[a][1] if alg.kind(a) == "ge" else ():
            i = alg.defs[mono[0][0]][1] if len(mono) == 1 else None
            if i in factors and alg.kind(mono[0][0]) == "iota":
                factors[i] = abs(c)
    return tuple(sorted(s, key=factors.__getitem__, reverse=True))
