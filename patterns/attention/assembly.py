"""From the parts of a softmax to the op: axes, masks, operands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rewriter.algebra.canonicalize import kind_of, log_may_be_infinite, values_named
from rewriter.algebra.normal_form import TRUE, Poly
from rewriter.find.reading import (
    Group,
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
)
from rewriter.patterns.attention.masks import Masks
from rewriter.patterns.attention.rows import Rows

NAME = "attention"

LOUD = 1e6
"""Numbers from here on leave few digits of what is added to them."""


class Assembly(Masks, Rows):
    """Names the axes, classifies the masks and writes the operands."""

    def __init__(
        self, find, ev, value, args, form, parts, qk, bias, products, scores, over
    ):
        self.find, self.ev, self.alg = find, ev, find.algebra
        self.value, self.args, self.form = value, args, form
        self.parts, self.qk, self.bias, self.products = parts, qk, bias, products
        self.scores, self.over = scores, over
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
            joined=self.over.joined,
            evaluator=self.ev,
        )

    def _own_scores(self) -> None:
        """Refuses masks and biases that are computed from the scores themselves."""
        for name in ("mask", "bias", "dropout", "kv_lengths", "prefix", "offset"):
            used = self.operands.get(name)
            leaves = used.leaves(self.alg) if used else ()
            for value in self.values_of(leaves):
                if self.find.regions.descends(value, self.scores):
                    raise Refused(
                        "scores", f"the {name} is computed from the scores", score=0.6
                    )

    def values_of(self, leaves: Iterable[int]) -> set[int]:
        """The program's values behind leaves; joined ones are made of several."""
        out: set[int] = set()
        for leaf in leaves:
            name = self.alg.defs[leaf][1]
            joined = self.over.joined.get(name)
            for piece in joined.pieces if joined else ():
                out |= self.values_of(piece.leaves(self.alg))
            if not joined:
                out.update(values_named(name))
        return out

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
        lead = [i for i in shared if i in length_ids]
        if not lead and not (len(shared) == 1 and self._is_inner(shared[0])):
            lead = shared[:1]
        self.b = tuple(i for i in shared if i in lead)
        self.k = tuple(i for i in shared if i not in lead)
        self.n = self.k + groups
        self.s = self._digits_in_order(self.parts.s)
        alone = [i for i in shared if (i in k) != (i in v) and i in q]
        if alone and math.prod(alg.sizes[i] for i in self.t) == 1:
            raise Refused(
                "keys",
                "each query has keys or values of its own: the others would be "
                "repeated for every query",
                score=0.5,
            )

    def _digits_in_order(self, s: Group) -> Group:
        """The keys' indices, those first that move the position in a mask most."""
        alg = self.alg
        factors = dict.fromkeys(s, 0.0)
        for a in alg.bools[self.parts.keep][0] if len(s) > 1 else ():
            for (_, mono), c in alg.defs[a][1] if alg.kind(a) == "ge" else ():
                i = alg.defs[mono[0][0]][1] if len(mono) == 1 else None
                if i in factors and alg.kind(mono[0][0]) == "iota":
                    factors[i] = abs(c)
        return tuple(sorted(s, key=factors.__getitem__, reverse=True))

    def _is_inner(self, i: int) -> bool:
        """Whether an axis comes after the queries' in their array, as heads do."""
        for atom, _ in self.qk[0].q:
            if self.alg.kind(atom) == "leaf":
                ids = [self.alg.index_ids(a) for a in self.alg.defs[atom][2]]
                at = [k for k, x in enumerate(ids) if i in x]
                rows = [k for k, x in enumerate(ids) if x & set(self.t)]
                return bool(at and rows) and rows[0] < at[0]
        return False

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
        if len(rows) == 1 and self._is_group(rows[0]):
            return ()  # one query
        if len(rows) <= 1:
            return tuple(rows)
        for ids in (position_ids, mask_ids):
            hits = [i for i in rows if i in ids]
            if len(hits) == 1:
                return tuple(hits)
            if hits:
                rows = hits
        return (max(rows, key=self.alg.size_order),)

    def _is_group(self, row: int) -> bool:
        """Whether an axis is a digit of the heads that sinks are given for."""
        args = (
            self.alg.index_ids(a)
            for atom in self.alg.poly_leaves(self.parts.sink)
            for a in self.alg.defs[atom][2]
        )
        return any(row in ids and len(ids) > 1 for ids in args)

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
        q_dtype, k_dtype = self._dtypes(rows, keys)
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
        inner = {*self.b, *self.k, *self.s}
        scales = [f for f in self.parts.rest if set(self.s) <= alg.free(f[0]) <= inner]
        self.parts.rest = [f for f in self.parts.rest if f not in scales]
        factor = 1.0 if self.parts.rest else self.parts.factor
        values = alg.monomial([*((a, 1) for a in self.parts.v), *scales])
        v = {(TRUE, values): factor}
        v_dtype = self._dtype_of([*((a, 1) for a in self.parts.v), *scales])
        self.operands["v"] = operand(v, self.b, self.s, self.k, self.e, dtype=v_dtype)
        self.params["scale"] = lead.c
        if lead.softcap:
            self.params["softcap"] = lead.softcap
        if scalar:
            self.operands["scale_factor"] = operand({(TRUE, alg.monomial(scalar)): 1.0})

    def _dtypes(self, rows, keys):
        """Dtypes of queries and keys, so that kernels read the narrowest values."""
        q = (self._dtype_of([*x.q, *rows]) for x in self.qk)
        k = (self._dtype_of([*x.k, *keys]) for x in self.qk)
        return tuple(max(d, key=lambda d: d.itemsize) for d in (q, k))

    def _dtype_of(self, factors):
        leaves = (a for a, _ in factors if self.alg.kind(a) == "leaf")
        names = [self.find.graph.dtype(v) for v in self.values_of(leaves)]
        floats = [d for d in names if kind_of(d) == "f"]
        return max(floats or names, key=lambda d: d.itemsize)

    # -------------------------------------------------------------- additions
    def _additions(self) -> None:
        alg, parts = self.alg, self.parts
        heads = set(self.n)
        slopes = self._slopes(heads)
        if slopes is not None:
            self.operands["alibi"] = operand(slopes, self.n)
        elif self.bias:
            if any(
                log_may_be_infinite(alg, a) for _, mono in self.bias for a, _ in mono
            ):
                raise Refused("bias", "the bias may be infinite", score=0.6)
            allowed = {*self.b, *self.n, *self.t, *self.s}
            if alg.ids(self.bias) - allowed:
                raise Refused("bias", "the bias has an axis of its own", score=0.6)
            axes = (self.b, self.n, self.t, self.s)
            self._swallowed_in_a_logarithm()
            own = self.find.own_form(self.ev, self.bias, [i for a in axes for i in a])
            self.operands["bias"] = operand(own, *axes, full=False)
        if parts.sink:
            if alg.ids(parts.sink) - heads:
                raise Refused(
                    "sink",
                    "the extra term of the denominator depends on more than the head",
                    score=0.6,
                    difference=alg.show(parts.sink),
                )
            leaves = self.values_of(alg.poly_leaves(parts.sink))
            if not all(self.ev.is_side(value) for value in leaves):
                raise Refused("sink", "the extra term depends on the scores", score=0.6)
            self.operands["sinks"] = operand(alg.log(parts.sink), self.n)
        if parts.rest or parts.drop_flag != TRUE:
            drop = {(parts.drop_flag, alg.monomial(parts.rest)): parts.factor}
            if not parts.rest:
                drop = {(parts.drop_flag, ()): 1.0}
            axes = (self.b, self.n, self.t, self.s)
            drop = self.find.own_form(self.ev, drop, [i for a in axes for i in a])
            self.operands["dropout"] = operand(drop, *axes, full=False)
            self.ev.notes.add("the dropout mask is an operand")

    def _swallowed_in_a_logarithm(self) -> None:
        """Refuses a large bias where a logarithm of a sum of weights is added to it.

        In a row of nothing but large fills it is rounded away: exp(s - logsumexp(s))
        is then 1 for each key, and not 1 of n.
        """
        find, graph = self.find, self.find.graph
        values = self.values_of(self.alg.poly_leaves(self.bias))
        loud = max(abs(c) for c in self.bias.values())
        loud = max([loud, *map(find.loudest, values)])
        below = find.below(self.scores, self.value)
        nodes = [n for n in map(graph.node_of, below) if n is not None]
        if loud >= LOUD and any(n.prim in ("log", "log1p") for n in nodes):
            raise Refused(
                "rows",
                "a row of large fills rounds the logarithm of its weights' sum away",
                score=0.7,
            )

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
