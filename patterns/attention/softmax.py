"""Reads the parts of a softmax off a form: weights, total, scores, values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rewriter.algebra.canonicalize import values_named
from rewriter.algebra.normal_form import TRUE, Algebra, Index, Monomial, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.reading import Group, Joined, Refused
from rewriter.patterns.attention import near_misses
from rewriter.patterns.attention.conjuncts import conjuncts
from rewriter.program.graph import Node


@dataclass(frozen=True)
class Parts:
    """The pieces of a softmax-weighted sum.

    Attributes:
        s: Indices of the keys.
        keep: Which keys are kept.
        exps: Factors of the weights.
        v: The values' leaves.
        rest: What else the weights are multiplied by above the quotient.
        drop_flag: Which weights are left out above the quotient alone.
        factor: A number that the result is multiplied by.
        sink: What is added to the sum of weights.
        zero_rows: Whether rows without keys are set to zero.
        row_mask: A mask of whole rows.
        dropped_rows: The part of `drop_flag` that is a mask of whole rows.
    """

    s: Group
    keep: int
    exps: Monomial
    v: tuple[int, ...]
    rest: Monomial = ()
    drop_flag: int = TRUE
    factor: float = 1.0
    sink: Poly = field(default_factory=dict)
    zero_rows: bool = False
    row_mask: int = TRUE
    dropped_rows: int = TRUE


@dataclass(frozen=True)
class Scores:
    """One contraction of queries with keys.

    Attributes:
        c: The number that it is multiplied by.
        extra: Other factors beside it.
        d: The contracted indices.
        q: Factors without a key.
        k: Factors with a key.
        softcap: What its size is capped at.
        atom: The sum in the form, if there is no cap.
    """

    c: float
    extra: Monomial
    d: Group
    q: Monomial
    k: Monomial
    softcap: float | None = None
    atom: int | None = None


@dataclass(frozen=True, eq=False)
class Softmax:
    """A weighed sum of the program, taken apart: all that operands are read from.

    Attributes:
        find: The search.
        ev: What made the form.
        value: The result.
        args: The result's index arguments in the form.
        form: The result's normal form.
        parts: The form's factors, with all keys in one sum.
        qk: Contractions of queries with keys in the exponents.
        bias: What is added to them.
        scores: Results of those contractions.
        products: The contractions of weights with values, and the operand that holds
            the weights.
        joined: Arrays that the program holds in pieces.
        some: Whether a key is kept in any piece; ``None`` if there are no pieces.
        mask_as_array: Whether the mask is read as an array, not as positions.
        function: The leaf that a function of scores gives, if one is read.
    """

    find: Finder
    ev: RegionEvaluator
    value: int
    args: tuple[Index, ...]
    form: Poly
    parts: Parts
    qk: tuple[Scores, ...]
    bias: Poly
    scores: frozenset[int]
    products: Sequence[tuple[Node, int]]
    joined: Mapping[Any, Joined]
    some: int | None
    mask_as_array: bool = False
    function: int | None = None

    @property
    def alg(self) -> Algebra:
        """Where the form is."""
        return self.find.algebra

    @property
    def seen_keys(self) -> int:
        """Which keys each row sees."""
        return self.alg.both(self.parts.keep, self.parts.row_mask)

    def values_of(self, leaves: Iterable[int]) -> set[int]:
        """The program's values behind leaves; joined ones are made of several."""
        found: set[int] = set()
        for leaf in leaves:
            name = self.alg.defs[leaf][1]
            joined = self.joined.get(name)
            for piece in joined.pieces if joined else ():
                found |= self.values_of(piece.leaves(self.alg))
            if not joined:
                found.update(values_named(name))
        return found


def softmax_parts(
    alg: Algebra, form: Poly, values: Set[Any], soft: bool = False
) -> Parts:
    """The parts of a form that is one quotient of two sums over the keys.

    Args:
        alg: Where the form is.
        form: The form.
        values: Names of arrays that are weighed.
        soft: Whether fills of a mask are kept as a bias in it.

    Raises:
        Refused: If the form differs, or other factors are left.
    """
    if len(form) != 1:
        if not soft:
            _refuse_several(alg, form)
        near = sum(_is_quotient(alg, mono) for _, mono in form)
        if near and near_misses.moves_weights(alg, form):
            text = (
                "the weights of a softmax are moved along the keys before they weigh "
            )
            raise Refused(
                "terms", f"{text}values", score=0.5, difference=alg.show(form)
            )
        some = "one is" if near == 1 else f"{near} are each"
        text = f"the result is a sum of {len(form)} terms"
        raise Refused(
            "terms",
            f"{text}, and only {some} a softmax times values" if near else text,
            score=0.3 if near else 0.2,  # a loss or its gradient looks like this
            difference=alg.show(form),
        )
    ((flag, mono), c) = next(iter(form.items()))
    below = [a for a, e in mono if e == -1 and alg.kind(a) in ("sum", "pow")]
    above = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    if not below:
        raise near_misses.undivided(alg, mono)
    for den, num in itertools.product(below, above):
        parts = _pair(alg, den, num, values, flag)
        if parts is not None:
            left = [f for f in mono if f[0] not in (den, num)]
            if left:
                text = "the weights or the result are multiplied by an array that has "
                raise Refused(
                    "factor",
                    f"{text}no axis of keys",
                    difference=alg.show({(TRUE, tuple(left)): 1.0}),
                    score=0.5,
                    suggestion="multiply the result by it",
                )
            parts = dataclasses.replace(parts, factor=parts.factor * c)
            return _rows(alg, flag, parts)
    raise near_misses.other_weights(alg, mono, form)


def _refuse_several(alg: Algebra, form: Poly) -> None:
    """Refuses values weighed by a softmax plus other weights.

    Differential attention does that: its other weights are a second softmax.

    Raises:
        Refused: If a term is a weighed sum divided by its total, and all others are
            sums with some array of that one, as its values are. Also if the weights
            are divided by their sum once more.
    """
    below = {a for _, mono in form for a, e in mono if e == -1}
    if any(near_misses.divided_again(alg, a) for a in below):
        text = "the weights of a softmax are divided by a sum of them again"
        raise Refused("terms", text, difference=alg.show(form), score=0.5)
    sums = [[a for a, e in mono if e == 1 and alg.kind(a) == "sum"] for _, mono in form]
    divided = [any(e == -1 for _, e in mono) for _, mono in form]
    weighed = [{alg.defs[x][1] for x in _factors(alg, s, "leaf")} for s in sums]
    weights = [frozenset(_factors(alg, some, "exp")) for some in sums]
    apart = len(set(weights)) == len(weights)  # in a gradient they are the same
    if any(divided) and apart and set.intersection(*weighed):
        raise Refused(
            "terms",
            "the values are multiplied by a sum of a softmax and other weights",
            difference=alg.show(form),
            score=0.75,
            suggestion="multiply each of them by the values, and add up the results",
        )


def _factors(alg: Algebra, sums: Iterable[int], kind: str) -> Iterator[int]:
    """Atoms of a kind among the factors of sums."""
    for total in sums:
        yield from (a for a, _ in alg.defs[total][3] if alg.kind(a) == kind)


def _is_quotient(alg: Algebra, mono: Monomial) -> bool:
    """Whether a term is a weighed sum divided by another sum.

    Weights times their own scores are the gradient of a log-sum-exp instead.
    """
    above = [a for a, e in mono if e == 1 and alg.kind(a) == "sum"]
    below = [a for a, e in mono if e == -1 and alg.kind(a) in ("sum", "pow")]
    if len(mono) != 2 or not above or not below:
        return False
    factors = [a for a, _ in alg.defs[above[0]][3]]
    weighed = {alg.defs[a][1] for a in factors if alg.kind(a) == "leaf"}
    inside = {
        alg.defs[leaf][1]
        for a in factors
        if alg.kind(a) == "exp"
        for leaf in alg.leaves(a)
    }
    return not weighed <= inside


def _rows(alg: Algebra, flag: int, parts: Parts) -> Parts:
    """Reads masks of whole rows, and factors that are zero where no key is left."""
    zero_rows, row_mask = False, TRUE
    for part in conjuncts(alg, flag) if flag != TRUE else ():
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
            zero_rows = True
        else:
            row_mask = alg.both(row_mask, part)
    return dataclasses.replace(parts, zero_rows=zero_rows, row_mask=row_mask)


def with_rows_dropped(alg: Algebra, parts: Parts) -> Parts:
    """Takes a mask of whole rows as one of weights that are dropped.

    Then rows that it hides are zero, and other rows without keys may give something
    else.

    Raises:
        Refused: If there is no mask of whole rows.
    """
    if parts.row_mask == TRUE:
        raise Refused("rows", "no weights of whole rows are set to zero", score=0.1)
    rows = parts.row_mask
    dropped = alg.both(parts.drop_flag, rows)
    return dataclasses.replace(
        parts, drop_flag=dropped, row_mask=TRUE, dropped_rows=rows
    )


def _pair(
    alg: Algebra, den: int, num: int, values: Set[Any], rows: int
) -> Parts | None:
    """The weights and values of a quotient of two sums over the same keys."""
    low = _weights_sum(alg, den, rows)
    if low is None:
        return None
    den, factor, sink = low
    s, top_flag, top = alg.open_sum(num)
    low_s, low_flag, low_mono = alg.open_sum(den)
    for keys, to in _same_keys(alg, low_s, s):
        mono = dict(alg.subst_mono(low_mono, to))
        flag = alg.subst_bool(low_flag, to)
        rest = alg.monomial((*top, *((a, -e) for a, e in mono.items())))
        if any(e != 1 for _, e in rest) or not alg.implies(top_flag, flag):
            continue
        v = tuple(
            a for a, _ in rest if alg.kind(a) == "leaf" and alg.defs[a][1] in values
        )
        drop_flag = _dropped(alg, top_flag, flag)
        if drop_flag is not None and v:
            others = tuple(f for f in rest if f[0] not in v)
            weights = tuple(mono.items())
            return Parts(keys, flag, weights, v, others, drop_flag, 1 / factor, sink)
    return None


def _same_keys(
    alg: Algebra, low: Sequence[int], s: Sequence[int]
) -> Iterator[tuple[Group, dict[int, Index]]]:
    """What the indices of one sum may be by those of another sum over the same keys.

    Values may be on a grid whose rows and columns are the keys: then these come first.
    """
    orders = itertools.islice(itertools.permutations(s), 6)
    if Counter(alg.sizes[i] for i in s) == Counter(alg.sizes[i] for i in low):
        for order in orders:
            if [alg.sizes[i] for i in order] == [alg.sizes[i] for i in low]:
                yield tuple(s), dict(zip(low, order, strict=True))
    elif len(low) == 1 and math.prod(alg.sizes[i] for i in s) == alg.sizes[low[0]]:
        for order in orders:
            at: Index = None
            for i in order:
                at = alg.cat(at, i, alg.sizes[i])
            yield order, {low[0]: at}


def _weights_sum(alg: Algebra, den: int, rows: int) -> tuple[int, float, Poly] | None:
    """The sum of weights in a denominator, its factor, and what is added to it."""
    if alg.kind(den) != "pow":
        return den, 1.0, {}
    base = alg.thaw(alg.defs[den][1])
    sums = [
        (t, c)
        for t, c in base.items()
        if t[0] in (TRUE, rows)  # a mask of whole rows stands before both sums
        and len(t[1]) == 1
        and t[1][0][1] == 1
        and alg.kind(t[1][0][0]) == "sum"
    ]
    if len(sums) != 1:
        return None
    term, factor = sums[0]
    sink = alg.scale({t: x for t, x in base.items() if t != term}, 1 / factor)
    return term[1][0][0], factor, sink


def _dropped(alg: Algebra, top_flag: int, flag: int) -> int | None:
    """What hides a weight from the values alone; None if it cannot be told apart.

    Args:
        alg: The algebra.
        top_flag: The condition of a term of the sum of values.
        flag: That of a term of the sum of weights, which it implies.

    Raises:
        Refused: If it is known while tracing: then the sums run over other keys.
    """
    if top_flag == flag:
        return TRUE
    extra = [a for a in alg.bools[top_flag][0] if a not in alg.bools[flag][0]]
    drop_flag = alg.project(top_flag, extra)
    if not alg.poly_leaves(alg.of_bool(drop_flag)):
        raise Refused(
            "weights",
            "the sum of the weights runs over other keys than the sum of the values",
            score=0.5,
        )
    return drop_flag if alg.both(flag, drop_flag) == top_flag else None


def exponents(
    alg: Algebra, parts: Parts, operands: Set[Any]
) -> tuple[tuple[Scores, ...], Poly]:
    """(contractions of queries with keys, addends) in the exponents.

    Raises:
        Refused: If the scores go through a function that attention does not have.
    """
    qk: list[Scores] = []
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
        found = contracted(alg, mono, float(c), operands, parts.s)
        if found is not None:
            qk.append(found)
        elif {alg.defs[a][1] for a in alg.leaves(atom)} & operands:
            if _is_saturated(alg, mono):
                raise Refused(
                    "softcap",
                    "a bias or a mask is inside the soft cap, which this op puts on "
                    "the scores alone",
                    difference=alg.show_atom(atom),
                    score=0.6,
                    suggestion="add the bias and choose by the mask behind the cap",
                )
            raise near_misses.through_a_function(alg, atom)
        else:
            bias = alg.add(bias, {(TRUE, mono): float(c)})
    if not qk:
        raise Refused(
            "scores",
            "the exponent is no product of queries and keys",
            difference=alg.show(bias),
            score=0.25,
        )
    qk = _joined(alg, qk)
    if len(qk) > 1 and any(x.softcap for x in qk):
        text = "a soft cap covers only a part of the scores"
        raise Refused("softcap", text, score=0.6)
    return tuple(qk), bias


def _joined(alg: Algebra, qk: list[Scores]) -> list[Scores]:
    """Merges scores that were multiplied out by a factor that is a sum."""
    first = qk[0]
    if len(qk) < 2 or first.atom is None or any(x.atom != first.atom for x in qk):
        return qk
    factor: Poly = {}
    for x in qk:
        factor = alg.add(factor, {(TRUE, alg.monomial(x.extra)): x.c})
    if not factor:
        return qk
    extra = ((alg.atom("val", alg.freeze(factor)), 1),)
    return [Scores(1.0, extra, first.d, first.q, first.k)]


def contracted(
    alg: Algebra, mono: Monomial, c: float, operands: Set[Any], s: Group
) -> Scores | None:
    """Reads a term as a contraction of queries and keys; None if it is none."""
    if len(mono) == 1 and mono[0][1] == -1 and alg.kind(mono[0][0]) == "pow":
        return _capped(alg, mono[0][0], c, operands, s)
    for atom, e in mono:
        if e != 1 or alg.kind(atom) != "sum":
            continue
        d, flag, body = alg.open_sum(atom)
        leaves = [a for a, _ in body if alg.kind(a) == "leaf"]
        if flag != TRUE or not any(alg.defs[a][1] in operands for a in leaves):
            continue
        k = tuple(f for f in body if alg.free(f[0]) & set(s))
        q = tuple(f for f in body if not alg.free(f[0]) & set(s))
        if not k or not q:
            continue
        extra = tuple(f for f in mono if f[0] != atom)
        return Scores(c, extra, tuple(d), q, k, atom=atom)
    return None


def _is_saturated(alg: Algebra, mono: Monomial) -> bool:
    """Whether a term is 1 / (1 + ...), as soft caps and sigmoids are."""
    if len(mono) != 1 or mono[0][1] != -1 or alg.kind(mono[0][0]) != "pow":
        return False
    constant, rest = alg.split_constant(alg.thaw(alg.defs[mono[0][0]][1]))
    return constant == 1 and bool(rest)


def _capped(alg, atom, c, operands, s) -> Scores | None:
    """Cap tanh(x / cap) is -2 cap / (1 + exp(2 x / cap)) up to a constant."""
    base = alg.thaw(alg.defs[atom][1])
    constant, rest = alg.split_constant(base)
    if constant != 1 or len(rest) != 1:
        return None
    ((flag, mono), k) = next(iter(rest.items()))
    if k != 1 or flag != TRUE or len(mono) != 1 or alg.kind(mono[0][0]) != "exp":
        return None
    inner = contracted(alg, alg.defs[mono[0][0]][1], float(mono[0][1]), operands, s)
    if inner is None or inner.softcap:
        return None
    scale, cap = -inner.c if c > 0 else inner.c, abs(c) / 2
    return Scores(scale * cap / 2, inner.extra, inner.d, inner.q, inner.k, cap)
