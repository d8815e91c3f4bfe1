"""Attention: softmax(scale q kᵀ + bias, masked) v, in any layout and spelling.

Formula    out[b,t,n,e] = Σ_s p v[b,s,k,e]
           p = [keep] exp(x) / (Σ_s [keep] exp(x) + sink)
           x = softcap(scale Σ_h q[b,t,n,h] k[b,s,k,h]) + bias
Looks like an exponential between two contractions: one above it gives the
           scores, one below it weighs the values.
Must hold  the form splits into those factors, each mask is a predicate of
           positions or an array, and no other factor is left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from rewriter.finder import Finder
from rewriter.graph import Node
from rewriter.match import ReaderPattern
from rewriter.normal_form import FALSE, TRUE, Algebra, OverBudget, Poly
from rewriter.reading import (
    Group,
    Operand,
    Reading,
    Refused,
    flag_operand,
    flat_indices,
    operand,
    split_digits,
)

NAME = "attention"
ANCHORS = frozenset({"exp", "exp2"})
NEEDS = frozenset({"dot_general"})
DOT = frozenset({"dot_general"})
MODERATE = 1e3  # smaller fills leave masked keys a weight that scores can reach
AFTER = frozenset({
    "div", "mul", "select_n", "transpose", "reshape", "squeeze", "broadcast_in_dim",
    "expand_dims", "convert_element_type", "name", "copy", "sharding_constraint",
})  # fmt: skip


@dataclass
class _Parts:
    """The pieces of a softmax-weighted sum."""

    s: Group = ()
    keep: int = TRUE
    exps: list[tuple[tuple, Any]] = field(default_factory=list)
    v: list[int] = field(default_factory=list)
    rest: list[tuple[int, Any]] = field(default_factory=list)
    drop_flag: int = TRUE
    factor: float = 1.0
    sink: Poly = field(default_factory=dict)
    zero_rows: bool = False
    row_mask: int = TRUE


@dataclass
class _Scores:
    """One contraction of queries with keys."""

    c: float
    extra: list[tuple[int, Any]]
    d: Group
    q: list[tuple[int, Any]]
    k: list[tuple[int, Any]]
    softcap: float | None = None


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions around an exponential."""
    scores = [
        n
        for n in find.regions.above(anchor.ins[0], DOT)
        if n.params["dimension_numbers"][0][0]
    ]
    if not scores or find.barren(NAME, anchor):
        return
    below = [
        (n, side)
        for n, side in find.regions.below(anchor.outs[0], DOT)
        if n.params["dimension_numbers"][0][0]
    ]
    sums = {n.outs[0] for n, k in below if find.number(n.ins[1 - k]) is not None}
    for pv, side in below:
        if pv in scores or pv.outs[0] in sums or find.done(NAME, pv.outs[0]):
            continue
        before = len(find.found)
        yield from _around(find, anchor, scores, pv, side, sums)
        if len(find.found) > before:
            return  # weights that several products read are one attention


def _around(find, anchor, scores, pv, side, sums) -> Iterator[Reading]:
    choices = [scores] if len(scores) == 1 else [scores, *([s] for s in scores)]
    if len(scores) > 3:
        choices = [[s] for s in scores]
    miss: Refused | None = None
    for chosen in choices:
        value = pv.outs[0]
        later = [
            v
            for v in find.regions.chain(value, AFTER, 10)
            if find.graph.node_of(v).prim in ("div", "mul", "select_n")
        ]
        for k, candidate in enumerate([value, *later]):
            for how in ("full", "soft", "whole"):
                try:
                    yield read(find, candidate, chosen, pv, side, how, sums)
                except Refused as refusal:
                    if miss is None or refusal.score > miss.score:
                        miss = refusal.with_traceback(None)
                    if refusal.code not in ("rows", "terms", "weights", "unequal"):
                        break
                except (OverBudget, RecursionError) as error:
                    miss = miss or Refused("budget", str(error), score=0.3)
                if find.done(NAME, candidate):
                    return
            if (
                k == 0
                and miss is not None
                and miss.code not in ("denominator", "budget")
            ):
                break
    if miss is not None and miss.score > 0.2:
        find.missed(NAME, anchor, miss)


def read(
    find: Finder,
    value: int,
    scores: list[Node],
    pv: Node,
    side: int,
    how: str,
    sums: Set[int] = frozenset(),
) -> Reading:
    """The reading of one candidate result.

    Args:
        find: The search.
        value: The candidate.
        scores: Contractions of queries with keys.
        pv: The contraction of weights with values.
        side: Which operand of it the weights are.
        how: ``"full"``; ``"soft"`` keeps finite fills that are added as a bias;
            ``"whole"`` takes a bias as it is, however it was computed.
        sums: Contractions of the weights with ones.

    Raises:
        Refused: If the form is not that of attention.
        OverBudget: If the form grows too large.
    """

    def from_scores(v: int) -> bool:
        return any(find.regions.depends(v, n.outs[0], 120) for n in scores)

    ev = find.evaluator(
        value,
        inside=frozenset([*(n.outs[0] for n in scores), pv.outs[0], *sums]),
        full_sides=frozenset(
            [(pv.outs[0], side), *((n, k) for n in sums for k in (0, 1))]
        ),
        soft_fills=how == "soft",
        in_pieces=from_scores,
        whole_sides=from_scores if how == "whole" else None,
        filled_rows=True,
    )
    alg = find.algebra
    args = ev.indices(value)
    form = ev.poly(value, args)
    whole = args
    form, args = split_digits(alg, form, args)
    ev.outer = frozenset().union(*map(alg.index_ids, (*whole, *args)))
    values = find.layout_leaves(ev, pv.ins[1 - side])
    parts = _softmax_parts(alg, form, values)
    left = find.layout_leaves(ev, *(n.ins[0] for n in scores))
    right = find.layout_leaves(ev, *(n.ins[1] for n in scores))
    qk, bias = _exponents(alg, parts, left | right)
    of_scores = frozenset(n.outs[0] for n in scores)
    return _Assembly(
        find, ev, value, args, form, parts, qk, bias, pv, of_scores
    ).reading()


# ------------------------------------------------------------------ parsing
def _softmax_parts(alg: Algebra, form: Poly, values: set[Any]) -> _Parts:
    if len(form) != 1:
        raise Refused(
            "terms",
            f"the result is a sum of {len(form)} terms",
            score=0.3,
            difference=alg.show(form),
        )
    ((flag, mono), c) = next(iter(form.items()))
    below = [a for a, e in mono if e == -1 and alg.kind(a) in ("sum", "pow")]
    above = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    if not below:
        raise Refused("denominator", "no sum of weights divides the result", score=0.3)
    for den, num in itertools.product(below, above):
        parts = _pair(alg, den, num, values)
        if parts is not None:
            left = [f for f in mono if f[0] not in (den, num)]
            if left:
                raise Refused(
                    "factor",
                    "the result is multiplied by something else",
                    difference=alg.show({(TRUE, tuple(left)): 1.0}),
                    score=0.5,
                )
            parts.factor *= c
            return _rows(alg, flag, parts)
    raise Refused(
        "weights",
        "the weights differ between numerator and denominator",
        difference=alg.show(form),
        score=0.4,
    )


def _rows(alg: Algebra, flag: int, parts: _Parts) -> _Parts:
    """Reads masks of whole rows, and factors that are zero where no key is left."""
    for part in _factors(alg, flag) if flag != TRUE else ():
        kinds = {alg.kind(a) for a in alg.bools[part][0]}
        if kinds == {"any"}:
            some = alg.any_over(parts.keep, parts.s)
            if not alg.implies(some, part):
                raise Refused(
                    "factor",
                    "the result is masked",
                    score=0.5,
                    difference=alg.show_bool(flag),
                )
            parts.zero_rows = True
        else:
            parts.row_mask = alg.both(parts.row_mask, part)
    return parts


def _pair(alg: Algebra, den: int, num: int, values: set[Any]) -> _Parts | None:
    sink: Poly = {}
    if alg.kind(den) == "pow":
        base = alg.thaw(alg.defs[den][1])
        sums = [
            (t, c)
            for t, c in base.items()
            if t[0] == TRUE
            and len(t[1]) == 1
            and t[1][0][1] == 1
            and alg.kind(t[1][0][0]) == "sum"
        ]
        if len(sums) != 1:
            return None
        (term, c), factor = sums[0], sums[0][1]
        sink = alg.scale({t: x for t, x in base.items() if t != term}, 1 / c)
        den = term[1][0][0]
    else:
        factor = 1.0
    s, top_flag, top = alg.open_sum(num)
    low_s, low_flag, low = alg.open_sum(den)
    if sorted(alg.sizes[i] for i in s) != sorted(alg.sizes[i] for i in low_s):
        return None
    for order in itertools.islice(itertools.permutations(s), 6):
        to = dict(zip(low_s, order, strict=True))
        if any(alg.sizes[a] != alg.sizes[b] for a, b in to.items()):
            continue
        mono = dict(alg.subst_mono(low, to))
        flag = alg.subst_bool(low_flag, to)
        rest = alg.monomial((*top, *((a, -e) for a, e in mono.items())))
        if any(e != 1 for _, e in rest) or not alg.implies(top_flag, flag):
            continue
        parts = _Parts(tuple(s), flag, list(mono.items()), factor=1 / factor, sink=sink)
        for a, e in rest:
            if alg.kind(a) == "leaf" and alg.defs[a][1] in values:
                parts.v.append(a)
            else:
                parts.rest.append((a, e))
        if top_flag != flag:
            extra = [a for a in alg.bools[top_flag][0] if a not in alg.bools[flag][0]]
            parts.drop_flag = alg.project(top_flag, extra)
            if not alg.poly_leaves(alg.of_bool(parts.drop_flag)):
                raise Refused(
                    "weights",
                    "the sum of the weights runs over other keys "
                    "than the sum of the values",
                    score=0.5,
                )
            if alg.both(flag, parts.drop_flag) != top_flag:
                continue
        if parts.v:
            return parts
    return None


def _exponents(
    alg: Algebra, parts: _Parts, operands: set[Any]
) -> tuple[list[_Scores], Poly]:
    qk: list[_Scores] = []
    bias: Poly = {}
    for atom, c in parts.exps:
        if alg.kind(atom) != "exp":
            raise Refused(
                "weights",
                "the weights are multiplied by another factor",
                difference=alg.show_atom(atom),
                score=0.5,
            )
        mono = alg.defs[atom][1]
        found = _scores(alg, mono, float(c), operands, parts.s)
        if found is not None:
            qk.append(found)
        elif {alg.defs[a][1] for a in alg.leaves(atom)} & operands:
            raise Refused(
                "scores",
                "the scores go through something that this op lacks",
                difference=alg.show_atom(atom),
                score=0.6,
            )
        else:
            bias = alg.add(bias, {(TRUE, mono): float(c)})
    if not qk:
        raise Refused(
            "scores",
            "the exponent holds no contraction of two values",
            difference=alg.show(bias),
            score=0.25,
        )
    if len(qk) > 1 and any(x.softcap for x in qk):
        raise Refused("softcap", "a soft cap over part of the scores", score=0.6)
    return qk, bias


def _scores(alg, mono, c, operands, s) -> _Scores | None:
    if len(mono) == 1 and mono[0][1] == -1 and alg.kind(mono[0][0]) == "pow":
        return _capped(alg, mono[0][0], c, operands, s)
    for atom, e in mono:
        if e != 1 or alg.kind(atom) != "sum":
            continue
        d, flag, body = alg.open_sum(atom)
        leaves = [a for a, _ in body if alg.kind(a) == "leaf"]
        if flag != TRUE or not any(alg.defs[a][1] in operands for a in leaves):
            continue
        k = [f for f in body if alg.free(f[0]) & set(s)]
        q = [f for f in body if not alg.free(f[0]) & set(s)]
        if not k or not q:
            continue
        extra = [f for f in mono if f[0] != atom]
        return _Scores(c, extra, tuple(d), q, k)
    return None


def _capped(alg, atom, c, operands, s) -> _Scores | None:
    """Cap tanh(x / cap) is -2 cap / (1 + exp(2 x / cap)) up to a constant."""
    base = alg.thaw(alg.defs[atom][1])
    constant, rest = alg.split_constant(base)
    if constant != 1 or len(rest) != 1:
        return None
    ((flag, mono), k) = next(iter(rest.items()))
    if k != 1 or flag != TRUE or len(mono) != 1 or alg.kind(mono[0][0]) != "exp":
        return None
    inner = _scores(alg, alg.defs[mono[0][0]][1], float(mono[0][1]), operands, s)
    if inner is None or inner.softcap:
        return None
    cap = -c / 2
    if cap < 0:
        inner.c, cap = -inner.c, -cap
    return _Scores(inner.c * cap / 2, inner.extra, inner.d, inner.q, inner.k, cap)


# ------------------------------------------------------------------ assembling
class _Assembly:
    """Names the axes, classifies the masks and writes the operands."""

    def __init__(self, find, ev, value, args, form, parts, qk, bias, pv, scores):
        self.find, self.ev, self.alg = find, ev, find.algebra
        self.value, self.args, self.form = value, args, form
        self.parts, self.qk, self.bias, self.pv = parts, qk, bias, pv
        self.scores = scores
        self.operands: dict[str, Operand] = {}
        self.params: dict[str, Any] = {}
        self.general = TRUE
        self.bounds: list[tuple[str, int, Poly]] = []

    def ids(self, factors) -> set[int]:
        """Free indices of factors."""
        return set().union(*(self.alg.free(a) for a, _ in factors))

    def reading(self) -> Reading:
        """The finished reading."""
        self._axes()
        self._masks()
        self._inputs()
        self._additions()
        self._fills()
        self._empty_rows()
        self._own_scores()
        dtype = self.find.graph.dtype(self.value)
        self.params["out_dtype"] = str(dtype)
        check = {"empty_rows": "nan"} if "empty_rows" in self.params else {}
        form = self.form
        if self.parts.zero_rows:  # the check is made on rows that have a key
            ((_, mono), c) = next(iter(form.items()))
            form = {(self.parts.row_mask, mono): c}
        return Reading(
            NAME,
            self.alg,
            self.ev.place,
            self.value,
            self.args,
            form,
            (self.b, self.t, self.n, self.e),
            self.operands,
            self.params,
            check_params=check,
            check_options={"soft_fills": self.ev.soft_fills},
            notes=tuple(sorted(self.ev.notes)),
        )

    def _own_scores(self) -> None:
        """Refuses masks and biases that are computed from the scores themselves."""
        for name in ("mask", "bias", "dropout", "kv_lengths", "prefix", "offset"):
            used = self.operands.get(name)
            leaves: set[int] = set()
            for poly, _ in used.parts if used else ():
                leaves |= self.alg.poly_leaves(poly)
            if used is not None and used.flag is not None:
                leaves |= self.alg.poly_leaves(self.alg.of_bool(used.flag))
            for leaf in leaves:
                if self.find.regions.descends(self.alg.defs[leaf][1], self.scores):
                    raise Refused(
                        "scores", f"the {name} is computed from the scores", score=0.6
                    )

    # -------------------------------------------------------------- axes
    def _axes(self) -> None:
        alg, s = self.alg, set(self.parts.s)
        out = [i for a in self.args for i in flat_indices(a)]
        q, k = set(), set()
        for x in self.qk:
            q |= self.ids(x.q) - set(x.d)
            k |= self.ids(x.k) - set(x.d) - s
        v = set().union(*(alg.free(a) for a in self.parts.v)) - s
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
        e = v - q - k
        rows = q - k - v
        shared = [i for i in out if i not in e and i not in rows]
        if set(shared) - (q | k | v):
            raise Refused("axes", "the result has an axis of no operand", score=0.5)
        self.e = tuple(i for i in out if i in e)
        mask_ids, length_ids, position_ids = self._mask_axes(rows)
        rows_in_order = [i for i in out if i in rows]
        self.t = self._query_axis(rows_in_order, mask_ids, position_ids)
        groups = tuple(i for i in rows_in_order if i not in self.t)
        lead = [i for i in shared if i in length_ids] or shared[:1]
        self.b = tuple(i for i in shared if i in lead)
        self.k = tuple(i for i in shared if i not in lead)
        self.n = self.k + groups
        self.s = self.parts.s

    def _mask_axes(self, rows: set[int]):
        alg = self.alg
        mask_ids: set[int] = set()
        length_ids: set[int] = set()
        position_ids: set[int] = set()
        for a in alg.bools[self.parts.keep][0]:
            ids = alg.free(a)
            mask_ids |= ids
            if alg.kind(a) in ("ge", "eq"):
                if ids & set(self.parts.s):
                    length_ids |= ids - rows
                for inner in alg.children(a):
                    if alg.kind(inner) == "iota":
                        position_ids |= alg.free(inner)
        for _, mono in self.bias:
            mask_ids |= alg.term_ids(TRUE, mono)
        return mask_ids, length_ids, position_ids

    def _query_axis(self, rows, mask_ids, position_ids) -> Group:
        if len(rows) <= 1:
            return tuple(rows)
        for ids in (position_ids, mask_ids):
            hits = [i for i in rows if i in ids]
            if len(hits) == 1:
                return tuple(hits)
            if hits:
                rows = hits
        return (max(rows, key=lambda i: self.alg.sizes[i]),)

    # -------------------------------------------------------------- masks
    def _masks(self) -> None:
        alg = self.alg
        self.right: list[tuple[int, Poly]] = []
        self.left: list[tuple[int, Poly]] = []
        self.lengths: list[tuple[int, Poly]] = []
        self.segments: tuple[Poly, Poly] | None = None
        self.prefix: Poly | None = None
        rest = alg.both(self.parts.keep, self.parts.row_mask)
        if rest == FALSE:
            raise Refused("mask", "every key is masked", score=0.5)
        for part in _factors(alg, rest):
            if not self._structured(part) and not self._prefixed(part):
                self.general = alg.both(self.general, part)
        self._window()

    def _structured(self, part: int) -> bool:
        support, table = self.alg.bools[part]
        if len(support) != 1:
            return False
        return self._bound(support[0], table == 0b10) or self._segment(
            support[0], table == 0b10
        )

    def _bound(self, atom: int, true: bool) -> bool:
        """Reads a comparison of the key's position with the query's or a length."""
        found = self._linear(atom, true)
        if found is None:
            return False
        alpha, beta, c, other = found
        if set(self.alg.ids(other)) - set(self.b):
            return False
        if beta == -1 and alpha == 1:  # s <= t + c + other
            self.right.append((c, other))
        elif beta == 1 and alpha == -1:  # s >= t - c - other
            self.left.append((c, self.alg.scale(other, -1.0)))
        elif beta == -1 and alpha == 0:  # s < c + 1 + other
            self.lengths.append((c + 1, other))
        elif beta == 1 and alpha == 0 and not self.t and other:
            self.left.append((c, self.alg.scale(other, -1.0)))
        else:
            return False
        return True

    def _linear(self, atom: int, true: bool):
        """(query coefficient, key coefficient, constant, rest) of a comparison."""
        alg = self.alg
        d = alg.defs[atom]
        if d[0] != "ge" or not d[2]:
            return None
        p = alg.thaw(d[1])
        if not true:
            p = alg.add(alg.scale(p, -1.0), alg.const(-1))
        if len(self.t) > 1 or len(self.s) != 1:
            return None
        t = alg.atom("iota", self.t[0]) if self.t else -1
        s = alg.atom("iota", self.s[0])
        alpha = beta = c = 0.0
        other: Poly = {}
        for (flag, mono), x in p.items():
            if flag == TRUE and mono == ((t, 1),):
                alpha = x
            elif flag == TRUE and mono == ((s, 1),):
                beta = x
            elif flag == TRUE and not mono:
                c = x
            else:
                other[flag, mono] = x
        ids = alg.ids(other)
        if ids & set(self.s) or ids & set(self.t) or abs(beta) != 1:
            return None
        if not all(float(x).is_integer() for x in (alpha, c, *other.values())):
            return None
        return int(alpha), int(beta), int(c), other

    def _segment(self, atom: int, true: bool) -> bool:
        """Reads an equality of a number of the query and one of the key."""
        alg = self.alg
        d = alg.defs[atom]
        if d[0] != "eq" or not true or not d[2] or self.segments is not None:
            return False
        p = alg.thaw(d[1])
        mine: Poly = {}
        theirs: Poly = {}
        for (flag, mono), c in p.items():
            ids = alg.term_ids(flag, mono)
            if ids & set(self.s):
                theirs[flag, mono] = -c
            else:
                mine[flag, mono] = c
        q_ids, k_ids = alg.ids(mine), alg.ids(theirs)
        if not theirs or not mine:
            return False
        if q_ids - set(self.b) - set(self.t) or k_ids - set(self.b) - set(self.s):
            return False
        self.segments = (mine, theirs)
        return True

    def _prefixed(self, part: int) -> bool:
        """Reads (s <= t + c) or (s < prefix)."""
        alg = self.alg
        support, _table = alg.bools[part]
        if len(support) != 2 or self.prefix is not None:
            return False
        readings = []
        for _k, atom in enumerate(support):
            for true in (True, False):
                lit = alg.literal(atom) if true else alg.negate(alg.literal(atom))
                if alg.implies(lit, part):
                    readings.append((atom, true))
        if len(readings) != 2:
            return False
        union = FALSE
        for atom, true in readings:
            lit = alg.literal(atom)
            union = alg.either(union, lit if true else alg.negate(lit))
        if union != part:
            return False
        linear = [self._linear(a, true) for a, true in readings]
        if any(x is None for x in linear):
            return False
        causal = [x for x in linear if x[:2] == (1, -1) and not x[3]]
        prefix = [x for x in linear if x[:2] == (0, -1)]
        if len(causal) != 1 or len(prefix) != 1 or self.right or self.left:
            return False
        if alg.ids(prefix[0][3]) - set(self.b):
            return False
        self.right.append((causal[0][2], {}))
        self.prefix = alg.add(prefix[0][3], alg.const(prefix[0][2] + 1))
        return True

    def _window(self) -> None:
        """Joins the bounds into a window, a shift and lengths."""
        alg = self.alg
        offsets = [alg.freeze(o) for _, o in (*self.right, *self.left)]
        distinct = dict.fromkeys(o for o in offsets)
        if len(distinct) > 1:
            raise Refused("mask", "two windows with different offsets", score=0.6)
        offset = alg.thaw(next(iter(distinct), ()))
        right = min((c for c, _ in self.right), default=None)
        left = min((c for c, _ in self.left), default=None)
        shift = right if right is not None and (left is None or right < 0) else 0
        if right is not None or left is not None:
            width = None if left is None else left + shift
            self.params["window"] = (width, None if right is None else right - shift)
            if shift:
                self.params["shift"] = shift
        if offset:
            self.operands["offset"] = operand(offset, self.b, full=False, dtype="int32")
        lengths = self.lengths
        if len(lengths) > 1:
            static = [c for c, o in lengths if not o]
            moving = {alg.freeze(o): c for c, o in lengths if o}
            if len(moving) > 1 or (static and moving):
                raise Refused("mask", "two different key lengths", score=0.6)
            lengths = [(min(static), {})] if static else lengths[:1]
        for c, other in lengths:
            length = alg.add(other, alg.const(c))
            self.operands["kv_lengths"] = operand(
                length, self.b, full=False, dtype="int32"
            )
        if self.segments is not None:
            mine, theirs = self.segments
            self.operands["q_segments"] = Operand(
                ((mine, (self.b, self.t)),), dtype="int32"
            )
            self.operands["kv_segments"] = Operand(
                ((theirs, (self.b, self.s)),), dtype="int32"
            )
        if self.prefix is not None:
            self.operands["prefix"] = operand(
                self.prefix, self.b, full=False, dtype="int32"
            )
        if self.general != TRUE:
            self.operands["mask"] = flag_operand(
                self.general, self.b, self.n, self.t, self.s
            )

    # -------------------------------------------------------------- inputs
    def _inputs(self) -> None:
        alg = self.alg
        lead = self.qk[0]
        rows: list[tuple[int, Any]] = []
        keys: list[tuple[int, Any]] = []
        scalar: list[tuple[int, Any]] = []
        if len(self.qk) == 1:
            for f in lead.extra:
                ids = alg.free(f[0])
                if not ids:
                    scalar.append(f)
                elif not ids & set(self.s):
                    rows.append(f)
                elif not ids & (set(self.t) | (set(self.n) - set(self.k))):
                    keys.append(f)
                else:
                    raise Refused(
                        "scores",
                        "scores are multiplied by a position factor",
                        difference=alg.show_atom(f[0]),
                        score=0.6,
                    )
        elif any(x.extra for x in self.qk):
            raise Refused(
                "scores", "two contractions with scales of their own", score=0.6
            )
        q_dtype, k_dtype, v_dtype = self._dtypes()
        self.operands["q"] = Operand(
            tuple(
                (
                    alg.scale(
                        {(TRUE, alg.monomial((*x.q, *rows))): 1.0},
                        alg.number(x.c / lead.c),
                    ),
                    (self.b, self.t, self.n, x.d),
                )
                for x in self.qk
            ),
            dtype=q_dtype,
        )
        self.operands["k"] = Operand(
            tuple(
                (
                    {(TRUE, alg.monomial((*x.k, *keys))): 1.0},
                    (self.b, self.s, self.k, x.d),
                )
                for x in self.qk
            ),
            dtype=k_dtype,
        )
        factor = 1.0 if self.parts.rest else self.parts.factor
        v = {(TRUE, alg.monomial((a, 1) for a in self.parts.v)): factor}
        self.operands["v"] = operand(v, self.b, self.s, self.k, self.e, dtype=v_dtype)
        self.params["scale"] = lead.c
        if lead.softcap:
            self.params["softcap"] = lead.softcap
        if scalar:
            self.operands["scale_factor"] = operand({(TRUE, alg.monomial(scalar)): 1.0})

    def _dtypes(self):
        """Dtypes of the leaves, so that kernels read the narrowest values."""

        def of(factors):
            names = [
                self.find.graph.dtype(self.alg.defs[a][1])
                for a, _ in factors
                if self.alg.kind(a) == "leaf"
            ]
            return max(names, key=lambda d: d.itemsize)

        q = max((of(x.q) for x in self.qk), key=lambda d: d.itemsize)
        k = max((of(x.k) for x in self.qk), key=lambda d: d.itemsize)
        v = of([(a, 1) for a in self.parts.v])
        return q, k, v

    # -------------------------------------------------------------- additions
    def _additions(self) -> None:
        alg, parts = self.alg, self.parts
        heads = set(self.n)
        slopes = self._slopes(heads)
        if slopes is not None:
            self.operands["alibi"] = operand(slopes, self.n)
        elif self.bias:
            allowed = {*self.b, *self.n, *self.t, *self.s}
            if alg.ids(self.bias) - allowed:
                raise Refused("bias", "the bias has an axis of its own", score=0.6)
            self.operands["bias"] = operand(
                self.bias, self.b, self.n, self.t, self.s, full=False
            )
        if parts.sink:
            if alg.ids(parts.sink) - heads:
                raise Refused(
                    "sink",
                    "the extra term of the denominator depends on more than the head",
                    score=0.6,
                    difference=alg.show(parts.sink),
                )
            self.operands["sinks"] = operand(alg.log(parts.sink), self.n)
        if parts.rest or parts.drop_flag != TRUE:
            drop = {(parts.drop_flag, alg.monomial(parts.rest)): parts.factor}
            if not parts.rest:
                drop = {(parts.drop_flag, ()): 1.0}
            self.operands["dropout"] = operand(
                drop, self.b, self.n, self.t, self.s, full=False
            )
            self.ev.notes.add("the dropout mask is an operand")

    def _slopes(self, heads: set[int]) -> Poly | None:
        """The slopes of a bias slope(head) * s, else None."""
        alg = self.alg
        if not self.bias or len(self.s) != 1:
            return None
        s = alg.atom("iota", self.s[0])
        out: Poly = {}
        for (flag, mono), c in self.bias.items():
            rest = tuple(f for f in mono if f[0] != s)
            if (s, 1) not in mono or alg.term_ids(flag, rest) - heads:
                return None
            out[flag, rest] = c
        return out

    # -------------------------------------------------------------- rows
    def _empty_rows(self) -> None:
        kept = self.alg.both(self.parts.keep, self.parts.row_mask)
        if kept == TRUE or self.parts.sink or self._never_empty():
            return
        behaviour = (
            "zero"
            if self.parts.zero_rows
            else self.find.empty_rows(
                self.ev,
                self.scores,
                self.pv,
                self.value,
                self.alg.both(self.parts.keep, self.parts.row_mask),
            )
        )
        if behaviour == "unknown":
            if self.ev.soft_fills:
                raise Refused(
                    "rows",
                    "a row without keys gives something this op does not",
                    score=0.8,
                )
            raise Refused(
                "rows", "what a row without keys gives is not known", score=0.8
            )
        self.params["empty_rows"] = behaviour

    def _each_sees_itself(self) -> bool:
        alg, sizes = self.alg, self.alg.sizes
        if [sizes[i] for i in self.t] != [sizes[i] for i in self.s]:
            return False
        kept = alg.both(self.parts.keep, self.parts.row_mask)
        return alg.subst_bool(kept, dict(zip(self.s, self.t, strict=True))) == TRUE

    def _fills(self) -> None:
        """Refuses fills that do not dominate: scores may be as large, or the bias.

        Where all keys of a row are masked by one or the other, the program weighs
        them by which; no hard mask does.
        """
        kept = self.alg.both(self.parts.keep, self.parts.row_mask)
        fills = [abs(f) for f in self.ev.fills if math.isfinite(f)]
        if fills and min(fills) < MODERATE:
            raise Refused(
                "rows", f"a mask of {-min(fills):g} is only a bias", score=0.7
            )
        if kept == TRUE or not self.bias or not fills:
            return
        loudest = max(abs(c) for c in self.bias.values())
        for leaf in self.alg.poly_leaves(self.bias):
            loudest = max(loudest, self.find.loudest(self.alg.defs[leaf][1]))
        if min(fills) < 100 * loudest >= 1e6:
            raise Refused(
                "rows",
                "a mask and a bias add numbers of like size: which keys a row "
                "without keys weighs depends on both",
                score=0.8,
            )

    def _never_empty(self) -> bool:
        """Whether every query sees itself or the first key."""
        only = {"q", "k", "v", "bias", "alibi", "dropout", "scale_factor", "sinks"}
        sizes = self.alg.sizes
        t = math.prod(sizes[i] for i in self.t)
        s = math.prod(sizes[i] for i in self.s)
        left, right = self.params.get("window", (None, None))
        shift = self.params.get("shift", 0)
        masks = set(self.operands) - only
        if masks == {"q_segments", "kv_segments"}:
            mine, theirs = self.segments
            swap = {self.s[0]: self.t[0]} if self.t and len(self.s) == 1 else {}
            same = t == s and swap and self.alg.subst(theirs, swap) == mine
            lo = -left if left is not None else 0
            if same and lo + shift <= 0 <= shift + (right or 0):  # each sees itself
                return True
        if self._each_sees_itself():
            return True
        if masks - {"prefix"} or (left or 0) + (right or 0) < 0:
            return False
        first_sees = right is None or shift + right >= 0
        last_sees = left is None or t + shift <= s + left
        return first_sees and last_sees


def _factors(alg: Algebra, b: int) -> list[int]:
    """Conjuncts of a boolean function, as fine as they go."""
    out = []
    for a in alg.bools[b][0]:
        if a not in alg.bools[b][0]:
            continue
        mine = alg.project(b, [a])
        others = [x for x in alg.bools[b][0] if x != a]
        rest = alg.project(b, others)
        if mine != TRUE and alg.both(mine, rest) == b:
            out.append(mine)
            b = rest
    pairs = itertools.combinations(alg.bools[b][0], 2)
    for pair in list(pairs) if len(alg.bools[b][0]) > 2 else []:
        mine = alg.project(b, pair)
        others = [x for x in alg.bools[b][0] if x not in pair]
        rest = alg.project(b, others)
        if mine != TRUE and alg.both(mine, rest) == b:
            out.append(mine)
            b = rest
    if b != TRUE:
        out.append(b)
    return out


PATTERN = ReaderPattern(NAME, ANCHORS, propose, NEEDS)
