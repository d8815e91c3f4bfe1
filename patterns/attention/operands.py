"""Writes a softmax's factors as the op's arrays and numbers, except its masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.algebra.canonicalize import kind_of, log_may_be_infinite
from rewriter.algebra.normal_form import TRUE, Monomial, Poly
from rewriter.find.reading import Operand, Refused, operand
from rewriter.patterns.attention.axes import Axes
from rewriter.patterns.attention.near_misses import refuse_weights_twice
from rewriter.patterns.attention.softmax import Softmax

LOUD = 1e6
"""Numbers from here on leave few digits of what is added to them."""


@dataclass(frozen=True)
class Operands:
    """The op's arrays and numbers.

    Attributes:
        arrays: Name to operand.
        params: The scale and the soft cap.
        dropped: What the weights are multiplied by after the softmax.
        notes: What floats will see.
    """

    arrays: Mapping[str, Operand]
    params: Mapping[str, Any]
    dropped: Monomial
    notes: frozenset[str]


@dataclass(frozen=True)
class _Factors:
    """Factors beside the scores, by what they depend on."""

    rows: Monomial = ()
    keys: Monomial = ()
    scalar: Monomial = ()


def read_operands(softmax: Softmax, axes: Axes) -> Operands:
    """Returns queries, keys, values and what is added or multiplied.

    Raises:
        Refused: If a factor or an addend has an axis that the op lacks.
    """
    parts, lead = softmax.parts, softmax.qk[0]
    factors = _scale_of_scores(softmax, axes)
    inner = {*axes.b, *axes.k, *axes.s}
    scales = tuple(
        f for f in parts.rest if set(axes.s) <= softmax.alg.free(f[0]) <= inner
    )
    dropped = tuple(f for f in parts.rest if f not in scales)
    arrays = {
        **_queries_and_keys(softmax, axes, factors),
        "v": _values(softmax, axes, scales, 1.0 if dropped else parts.factor),
    }
    if factors.scalar:
        scalar = softmax.alg.monomial(factors.scalar)
        arrays["scale_factor"] = operand({(TRUE, scalar): 1.0})
    for name, found in (
        _bias(softmax, axes),
        ("sinks", _sinks(softmax, axes)),
        ("dropout", _dropout(softmax, axes, dropped)),
    ):
        if found is not None:
            arrays[name] = found
    params = {"scale": lead.c, **({"softcap": lead.softcap} if lead.softcap else {})}
    notes = {"the dropout mask is an operand"} if "dropout" in arrays else ()
    return Operands(arrays, params, dropped, frozenset(notes))


# ------------------------------------------------------ queries, keys, values
def _scale_of_scores(softmax: Softmax, axes: Axes) -> _Factors:
    """What the contraction of queries and keys is multiplied by.

    Raises:
        Refused: If it is a number for each score.
    """
    alg, qk = softmax.alg, softmax.qk
    if len(qk) > 1:
        if any(x.extra for x in qk):
            raise Refused(
                "scores", "the scores add two products of different scales", score=0.6
            )
        return _Factors()
    of_queries = set(axes.t) | (set(axes.n) - set(axes.k))
    rows, keys, scalar = [], [], []
    for f in qk[0].extra:
        ids = alg.free(f[0])
        if not ids:
            scalar.append(f)
        elif not ids & set(axes.s):
            rows.append(f)
        elif not ids & of_queries:
            keys.append(f)
        else:
            raise Refused(
                "scores",
                "the scores are multiplied by a factor that depends on the position",
                difference=alg.show_atom(f[0]),
                score=0.6,
            )
    return _Factors(tuple(rows), tuple(keys), tuple(scalar))


def _queries_and_keys(
    softmax: Softmax, axes: Axes, factors: _Factors
) -> dict[str, Operand]:
    """Queries and keys; several contractions lie behind each other in their width."""
    alg, qk = softmax.alg, softmax.qk
    q_dtype, k_dtype = (
        max(dtypes, key=lambda d: d.itemsize)
        for dtypes in (
            (_dtype(softmax, (*x.q, *factors.rows)) for x in qk),
            (_dtype(softmax, (*x.k, *factors.keys)) for x in qk),
        )
    )
    q = tuple(
        (
            alg.scale(
                {(TRUE, alg.monomial((*x.q, *factors.rows))): 1.0},
                alg.number(x.c / qk[0].c),
            ),
            (axes.b, axes.t, axes.n, x.d),
        )
        for x in qk
    )
    k = tuple(
        (
            {(TRUE, alg.monomial((*x.k, *factors.keys))): 1.0},
            (axes.b, axes.s, axes.k, x.d),
        )
        for x in qk
    )
    return {"q": Operand(q, dtype=q_dtype), "k": Operand(k, dtype=k_dtype)}


def _values(softmax: Softmax, axes: Axes, scales: Monomial, factor: float) -> Operand:
    """Values, times scales of their own and a number."""
    factors = [*((a, 1) for a in softmax.parts.v), *scales]
    v = {(TRUE, softmax.alg.monomial(factors)): factor}
    dtype = _dtype(softmax, factors)
    return operand(v, axes.b, axes.s, axes.k, axes.e, dtype=dtype)


def _dtype(softmax: Softmax, factors: Iterable[tuple[int, Any]]) -> Any:
    """The dtype of a product, so that kernels read the narrowest values.

    Numbers of 8 bits alone are cast to the result's dtype, which holds them.
    """
    graph = softmax.find.graph
    leaves = (a for a, _ in factors if softmax.alg.kind(a) == "leaf")
    names = [graph.dtype(v) for v in softmax.values_of(leaves)]
    wide = [d for d in names if d.itemsize > 1] or [graph.dtype(softmax.value)]
    floats = [d for d in wide if kind_of(d) == "f"]
    return max(floats or wide, key=lambda d: d.itemsize)


# ------------------------------------------------- what is added or multiplied
def _bias(softmax: Softmax, axes: Axes) -> tuple[str, Operand | None]:
    """What is added to the scores: slopes of a line along the keys, or an array."""
    alg, bias = softmax.alg, softmax.bias
    slopes = _slopes(softmax, axes)
    if slopes is not None:
        return "alibi", operand(slopes, axes.n)
    if not bias:
        return "bias", None
    if any(log_may_be_infinite(alg, a) for _, mono in bias for a, _ in mono):
        raise Refused("bias", "the bias may be infinite", score=0.6)
    ids = [i for axis in axes.of_scores for i in axis]
    if alg.ids(bias) - set(ids):
        raise Refused("bias", "the bias has an axis that the scores lack", score=0.6)
    _refuse_large_in_rows(softmax)
    own = softmax.find.own_form(softmax.ev, bias, ids)
    return "bias", operand(own, *axes.of_scores, full=False)


def _slopes(softmax: Softmax, axes: Axes) -> Poly | None:
    """The slopes of a bias slope(head) * s, else None."""
    alg = softmax.alg
    if not softmax.bias or len(axes.s) != 1:
        return None
    s = alg.atom("iota", axes.s[0])
    out: Poly = {}
    for (flag, mono), c in softmax.bias.items():
        rest = tuple(f for f in mono if f[0] != s)
        if (s, 1) not in mono or alg.term_ids(flag, rest) - set(axes.n):
            return None
        out[flag, rest] = c
    return out


def _refuse_large_in_rows(softmax: Softmax) -> None:
    """Refuses large biases where what a row of nothing else gives may differ.

    A logarithm of the weights' sum is rounded away beside large fills: weights
    exp(s - logsumexp(s)) are then 1 for each key, and not 1 of n. A row of nothing but
    -inf has weights that are NaN: an extra term of the sum does not make them zero, and
    a choice behind the softmax may.
    """
    find, parts, bias = softmax.find, softmax.parts, softmax.bias
    loud = max(abs(c) for c in bias.values())
    values = softmax.values_of(softmax.alg.poly_leaves(bias))
    loud = max([loud, *map(find.largest_number, values)])
    if loud < LOUD:
        return
    nodes = map(find.graph.node_of, find.below(softmax.scores, softmax.value))
    if any(n is not None and n.prim in ("log", "log1p") for n in nodes):
        raise Refused(
            "rows",
            "a row of large fills rounds the logarithm of its weights' sum away",
            score=0.7,
        )
    if math.isinf(loud) and (parts.sink or parts.drop_flag != TRUE):
        raise Refused(
            "rows",
            "an infinite bias may hide a whole row, whose weights are then NaN",
            score=0.7,
        )


def _sinks(softmax: Softmax, axes: Axes) -> Operand | None:
    """The logarithm of what is added to the sum of weights, a number per head."""
    alg, sink = softmax.alg, softmax.parts.sink
    if not sink:
        return None
    if alg.ids(sink) - set(axes.n):
        text = "what is added to the sum of weights differs from row to row, as an "
        text += "epsilon does where the row's maximum is subtracted"
        raise Refused("sink", text, score=0.6, difference=alg.show(sink))
    leaves = softmax.values_of(alg.poly_leaves(sink))
    if not all(softmax.ev.is_side(value) for value in leaves):
        raise Refused("sink", "the extra term depends on the scores", score=0.6)
    return operand(alg.log(sink), axes.n)


def _dropout(softmax: Softmax, axes: Axes, dropped: Monomial) -> Operand | None:
    """What the weights are multiplied by after the softmax.

    Raises:
        Refused: If it is a function of the scores.
    """
    parts = softmax.parts
    if not dropped and parts.drop_flag == TRUE:
        return None
    refuse_weights_twice(softmax.alg, dropped)
    factor = parts.factor if dropped else 1.0
    drop = {(parts.drop_flag, softmax.alg.monomial(dropped)): factor}
    ids = [i for axis in axes.of_scores for i in axis]
    own = softmax.find.own_form(softmax.ev, drop, ids)
    return operand(own, *axes.of_scores, full=False)
