"""One branch of a gated linear unit: a contraction, scaled, with bias and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rewriter.algebra.normal_form import TRUE, Algebra, Monomial, Poly
from rewriter.find.reading import Refused, flat_indices
from rewriter.ops.activations import Bounds
from rewriter.patterns.gated_linear_unit.forms import (
    contractions,
    every,
    linear_parts,
)

OPEN: Bounds = (None, None)


@dataclass(frozen=True)
class Branch:
    """A branch: clip(contraction · scales + bias) + shift, times a number.

    Attributes:
        term: The contraction and the arrays that it is multiplied by.
        bias: What is added to that.
        clip: Lower and upper bound, None for none.
        shift: A number added after the bounds.
        factor: A number that multiplies all of it.
        scale: A number that multiplies contraction and bias.
    """

    term: Monomial
    bias: Poly
    clip: Bounds = OPEN
    shift: float = 0.0
    factor: float = 1.0
    scale: float = 1.0

    def form(self, alg: Algebra) -> Poly:
        """The branch before shift and factor."""
        low, high = self.clip
        g = alg.scale(alg.add({(TRUE, self.term): 1.0}, self.bias), self.scale)
        if low is not None:
            bound = alg.const(low)
            g = alg.add(bound, alg.relu(alg.add(g, bound, -1.0)))
        if high is not None:
            g = alg.add(g, alg.relu(alg.add(g, alg.const(high), -1.0)), -1.0)
        return g


@dataclass(frozen=True)
class Factors:
    """The two sides of a contraction.

    Attributes:
        x: The factors of the rows.
        w: The factors of the columns.
        k: The contracted indices.
    """

    x: Monomial
    w: Monomial
    k: tuple[int, ...]


def term_of(alg: Algebra, p: Poly, contraction: int) -> tuple[Any, float] | None:
    """(key, coefficient) of the term that is a contraction times arrays, or None."""
    found = [
        (key, c)
        for key, c in p.items()
        if key[0] == TRUE
        and (contraction, 1) in key[1]
        and all(e == 1 and alg.kind(a) in ("leaf", "sum") for a, e in key[1])
        and sum(alg.kind(a) == "sum" for a, _ in key[1]) == 1
    ]
    return min(found, key=lambda t: len(t[0][1]), default=None)


def argument(alg: Algebra, p: Poly, contraction: int) -> tuple[Monomial, Poly]:
    """(term, bias) of the argument of a function of a contraction.

    Raises:
        Refused: If the contraction is not a term of any sum.
    """
    for part in linear_parts(alg, p):
        found = term_of(alg, part, contraction)
        if found is not None:
            key, c = found
            # Powers of the sum, as in a tanh gelu, were multiplied out.
            rest = {
                t: v / c
                for t, v in part.items()
                if t != key and t[1] and _is_array(alg, t[1])
            }
            return key[1], rest
    text = "the activation is not applied to a matrix product"
    raise Refused("gate", text, score=0.3)


def _is_array(alg: Algebra, mono: Monomial) -> bool:
    return len(mono) == 1 and mono[0][1] == 1 and alg.kind(mono[0][0]) == "leaf"


# ------------------------------------------------------- with an activation
def gates(alg: Algebra, act: Poly, contraction: int) -> list[Branch]:
    """Possible arguments of the activation, likely first."""
    term, bias = argument(alg, act, contraction)
    found = [Branch(term, bias)]
    relus = [a for a in every(alg, act) if alg.kind(a) == "relu"]
    bodies = {a: alg.split_constant(alg.thaw(alg.defs[a][1])) for a in relus}
    for c, body in bodies.values():
        if c and body.get((TRUE, term)) == 1:  # relu(g + b - h): capped at h
            rest = {t: v for t, v in body.items() if t != (TRUE, term)}
            found.append(Branch(term, rest, (None, -c)))
    for c, outer in bodies.values():
        (inner, *more) = [a for a in relus if (TRUE, ((a, 1),)) in outer] or [None]
        if inner is None or more or len(outer) != 1:
            continue
        # lo + relu(g + b - lo) - relu(relu(g + b - lo) + lo - hi)
        below, body = bodies[inner]
        if outer[TRUE, ((inner, 1),)] == 1 and body.get((TRUE, term)) == 1:
            rest = {t: v for t, v in body.items() if t != (TRUE, term)}
            found.append(Branch(term, rest, (-below, -below - c)))
    number = act.get((TRUE, term), 1.0)
    for scale in (number, 2 * number):  # half of it, as in a gelu
        if scale not in (0.0, 1.0):
            found.append(Branch(term, bias, scale=scale))
    return found


# ---------------------------------------------------- without an activation
def plain(alg: Algebra, p: Poly) -> Branch:
    """The branch without activation.

    Raises:
        Refused: If the form is another one.
    """
    clip, shift = OPEN, 0.0
    if any(alg.kind(a) == "relu" for _, m in p for a, _ in m):
        clip, p, shift = _clipped(alg, p)
    found = [term_of(alg, p, a) for a in contractions(alg, p)]
    if any(alg.kind(a) == "log" for _, mono in p for a, _ in mono):
        text = "a logarithm is taken of the up branch, or of sums of it"
        raise Refused("up", text, score=0.1)
    if len(found) != 1 or found[0] is None or (clip != OPEN and found[0][1] != 1):
        raise Refused(
            "up",
            "the up branch is not one matrix product",
            score=0.35,
            difference=alg.show(p),
        )
    key, factor = found[0]
    bias = {t: c / factor for t, c in p.items() if t != key}
    if clip == OPEN:
        c, rest = alg.split_constant(bias)
        if c and not rest:
            shift, bias = c, {}
    return Branch(key[1], bias, clip, shift, factor)


def _clipped(alg: Algebra, p: Poly) -> tuple[Bounds, Poly, float]:
    """((lo, hi), inner, shift) of clip(inner, lo, hi) + shift.

    min(a, h) is a - relu(a - h), max(b, l) is l + relu(b - l); the constants
    inside say what the bounds are.
    """
    shift, rest = alg.split_constant(p)
    above, others = _relu_term(alg, rest, -1)
    if above is not None:  # min(...) outside
        below, more = _relu_term(alg, others, 1)
        c, inner = alg.split_constant(above)
        if below is None:
            return (None, -c), inner, shift
        low, inner = alg.split_constant(below)
        if more:
            text = "a branch is clipped in a way that is not known"
            raise Refused("clip", text, score=0.4)
        return (-low, -low - c), inner, shift + low
    below, others = _relu_term(alg, rest, 1)
    if below is None or others:
        text = "a branch is clipped in a way that is not known"
        raise Refused("clip", text, score=0.4)
    low, inner = alg.split_constant(below)
    above, others = _relu_term(alg, inner, -1)
    if above is None:
        return (-low, None), inner, shift + low
    c, _ = alg.split_constant(above)
    return (-low, -c), others, shift + low


def _relu_term(alg: Algebra, p: Poly, sign: int) -> tuple[Poly | None, Poly]:
    """(body, the rest) of a term sign * relu(body), or (None, p)."""
    for (flag, mono), c in p.items():
        is_relu = flag == TRUE and len(mono) == 1 and mono[0][1] == 1
        if is_relu and alg.kind(mono[0][0]) == "relu" and c * sign > 0:
            body = alg.scale(alg.thaw(alg.defs[mono[0][0]][1]), abs(c))
            return body, {t: v for t, v in p.items() if t != (flag, mono)}
    return None, p


# ------------------------------------------------------------------ factors
def factors(alg: Algebra, term: Monomial, args: Any, shared: set[Any]) -> Factors:
    """Rows and columns of a contraction; further factors belong to either.

    Args:
        alg: Where the form is.
        term: The contraction and the arrays it is multiplied by.
        args: The result's index arguments.
        shared: Names that both branches read.

    Raises:
        Refused: If more than two values are contracted.
    """
    (atom,) = (a for a, _ in term if alg.kind(a) == "sum")
    k, flag, mono = alg.open_sum(atom)
    leaves = [f for f in mono if alg.kind(f[0]) == "leaf"]
    if flag != TRUE or len(leaves) != len(mono) or len(mono) != 2:
        raise Refused("factors", "a product of more than two arrays", score=0.3)
    last = [i for a in args for i in flat_indices(a)]
    ranks = [
        max((last.index(i) for i in alg.free(a) if i in last), default=-1)
        for a, _ in mono
    ]
    free = [len(alg.free(a) & set(last)) for a, _ in mono]
    w = 0 if (ranks[0], -free[0]) > (ranks[1], -free[1]) else 1
    common = [alg.defs[a][1] in shared for a, _ in mono]
    if common[0] != common[1]:  # x is what both contractions read
        w = 1 if common[0] else 0
    scales = [f for f in term if f[0] != atom]
    columns = alg.free(mono[w][0]) - set(k)
    with_w = [f for f in scales if alg.free(f[0]) <= columns]
    if len(with_w) < len(scales):
        raise Refused("factors", "a matrix product is scaled row by row", score=0.4)
    return Factors((mono[1 - w],), alg.monomial((mono[w], *with_w)), tuple(sorted(k)))


def names(alg: Algebra, term: Monomial) -> set[Any]:
    """Names of the leaves in a term."""
    return {alg.defs[leaf][1] for a, _ in term for leaf in alg.leaves(a)}
