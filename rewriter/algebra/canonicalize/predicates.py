"""Rules of booleans: comparisons and connectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from rewriter.algebra.canonicalize.dtypes import kind_of, takes_integers
from rewriter.algebra.canonicalize.evaluator import FLAGS, Evaluator, rule
from rewriter.algebra.canonicalize.exact_values import is_position
from rewriter.algebra.canonicalize.infinities import (
    is_row_maximum,
    may_be_infinite,
    where_infinite,
)
from rewriter.algebra.canonicalize.primitives import FULL
from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, OverBudget, Poly
from rewriter.algebra.normal_form.forms import SNAP
from rewriter.program.graph import Node
from rewriter.support.assumptions import FINITE, VARIED

APART = 4 * SNAP
"""How far apart two numbers are, relatively, if one may stand for those close to it."""


# ------------------------------------------------------------------ predicates
def _compare(ev: Evaluator, node: Node, args, mode: str) -> int:
    if ev.g.dtype(node.ins[0]) == bool:
        return _compare_booleans(ev, node, args, mode)
    name, alg = node.prim, ev.alg
    a, b = ev.operands(node, args, mode)
    side = ev.is_side(node.outs[0])
    if _all_choices(a) and _all_choices(b):
        if side and _may_be_equal(alg, a, b):
            return _as_computed(ev, node, args)
        return _compare_choices(alg, name, a, b)
    if kind_of(ev.g.dtype(node.ins[0])) == "i":
        return _compare_whole(alg, name, a, b)
    if side:
        return _compare_positions(ev, node, args, a, b)
    return _compare_core(ev, node, args, a, b)


def _as_computed(ev: Evaluator, node: Node, args) -> int:
    """A comparison that stays as the program computes it."""
    return ev.alg.literal(ev.leaf(node.outs[0], args))


def _compare_booleans(ev: Evaluator, node: Node, args, mode: str) -> int:
    alg = ev.alg
    a, b = (ev.flag(i, ev.aligned(i, args), mode) for i in node.ins)
    same = alg.either(alg.both(a, b), alg.both(alg.negate(a), alg.negate(b)))
    if node.prim in ("eq", "ne"):
        return same if node.prim == "eq" else alg.negate(same)
    raise OverBudget("booleans are compared by < or >")


def _compare_whole(alg: Algebra, name: str, a: Poly, b: Poly) -> int:
    """Compares whole numbers."""
    d = _unsigned(alg, alg.add(a, b, -1.0))
    if name in ("le", "lt"):
        d = alg.scale(d, -1.0)
    if name in ("ge", "le"):
        return alg.compare("ge", d, True)
    if name in ("gt", "lt"):
        return alg.compare("ge", alg.add(d, alg.const(-1)), True)
    same = alg.compare("eq", d, True)
    return same if name == "eq" else alg.negate(same)


def _compare_positions(ev: Evaluator, node: Node, args, a: Poly, b: Poly) -> int:
    """Compares floats that do not depend on what the op computes.

    Both are exact integers, or one is and the other is a number. Other comparisons stay
    as the program computes them.
    """
    alg, name = ev.alg, node.prim
    for k, p in enumerate((a, b)):
        number = ev.number(node.ins[1 - k])
        if is_position(alg, p) and number is not None:
            return _compare_with(alg, name if k == 0 else _TURNED[name], p, number)
    if is_position(alg, a) and is_position(alg, b):
        return _compare_whole(alg, name, a, b)
    return _as_computed(ev, node, args)


def _compare_with(alg: Algebra, name: str, p: Poly, number: float) -> int:
    """Compares whole numbers with any number, without rounding it."""
    if math.isinf(number):
        return TRUE if _TESTS[name](0.0, number) else FALSE
    if not number.is_integer() and name in ("eq", "ne"):
        return FALSE if name == "eq" else TRUE
    up = name in ("ge", "lt")  # x >= 2.5 is x >= 3, and x > 2.5 is x > 2
    bound = math.ceil(number) if up else math.floor(number)
    return _compare_whole(alg, name, p, alg.const(float(bound)))


def _compare_core(ev: Evaluator, node: Node, args, a: Poly, b: Poly) -> int:
    """Compares floats that the op computes: by the laws of real numbers."""
    name, alg = node.prim, ev.alg
    for k, (p, q) in enumerate(((a, b), (b, a))):
        edge = alg.as_constant(q)
        if name in ("eq", "ne") and edge is not None and math.isinf(edge):
            p, edges = _unsigned_test(ev, node.ins[k], args, p, edge)
            if may_be_infinite(ev, p):
                return _as_computed(ev, node, args)
            if edge > 0 and not is_row_maximum(ev, p):
                # A score of -inf has no weight, with the test and without.
                ev.assume(FINITE, "values assumed finite")
            masked = where_infinite(alg, p, edges)
            return masked if name == "eq" else alg.negate(masked)
    if any(math.isinf(c) for p in (a, b) for c in p.values()):
        return _as_computed(ev, node, args)
    if ev.filled_rows and (
        (not b and _is_total(alg, a)) or (not a and _is_total(alg, b))
    ):
        return TRUE if _TESTS[name](float(bool(a)), float(bool(b))) else FALSE
    d = _unsigned(alg, alg.add(a, b, -1.0))
    if not d and any(mono for _, mono in a) and not is_row_maximum(ev, a):
        ev.assume(FINITE, "values assumed to be no NaN")  # x == x is a test for it
    sign = 1.0 if alg.is_variance(d) else -1.0 if alg.is_variance(_minus(alg, d)) else 0
    if sign:
        if name not in (("ge", "lt") if sign > 0 else ("le", "gt")):
            ev.assume(VARIED, "rows assumed not to be constant")
        return TRUE if _TESTS[name](sign, 0.0) else FALSE
    if takes_integers(alg, d):
        return _compare_whole(alg, name, a, b)
    if name in ("le", "lt"):
        d = alg.scale(d, -1.0)
    if name in ("ge", "le"):
        return alg.compare("ge", d, False)
    if name in ("gt", "lt"):
        return alg.negate(alg.compare("ge", alg.scale(d, -1.0), False))
    same = alg.compare("eq", d, False)
    return same if name == "eq" else alg.negate(same)


def _unsigned_test(
    ev: Evaluator, value: int, args, p: Poly, edge: float
) -> tuple[Poly, tuple[float, ...]]:
    """A form and the infinities that it is tested for: |x| = inf is a test of x."""
    node = ev.g.node_of(value)
    if node is None or node.prim != "abs" or edge < 0:
        return p, (edge,)
    (inner,) = ev.operands(node, ev.aligned(value, args), FULL)
    return inner, (edge, -edge)


def _minus(alg: Algebra, p: Poly) -> Poly:
    return alg.scale(p, -1.0)


def _unsigned(alg: Algebra, d: Poly) -> Poly:
    """A form without positive factors, which do not change its sign."""
    if len(d) == 1:
        (((flag, mono), c),) = d.items()
        if flag == TRUE and len(mono) == 1 and mono[0][1] == 1:
            definition = alg.defs[mono[0][0]]
            if definition[:2] == ("fn", "sign"):
                return alg.scale(alg.thaw(definition[2]), c)
    return d


def _is_total(alg: Algebra, p: Poly) -> bool:
    """Whether a form is a sum of exponentials, up to positive factors."""
    if len(p) != 1:
        return False
    (((flag, mono), c),) = p.items()
    return flag == TRUE and c > 0 and all(_is_weight(alg, a) for a, _ in mono)


def _is_weight(alg: Algebra, atom: int) -> bool:
    if alg.kind(atom) == "sum":
        terms = alg.defs[atom][3]  # none if it counts where a condition holds
        return bool(terms) and all(_is_weight(alg, a) for a, _ in terms)
    return alg.kind(atom) == "exp"


def _all_choices(p: Poly) -> bool:
    return all(not m for _, m in p)


def _compare_choices(alg: Algebra, name: str, a: Poly, b: Poly) -> int:
    """Compares two values that each take a few constants, infinities included."""
    test = _TESTS[name]
    out = FALSE
    for fa, ca in _cases(alg, a):
        for fb, cb in _cases(alg, b):
            both = alg.both(fa, fb)
            if both != FALSE and test(ca, cb):
                out = alg.either(out, both)
    return out


def _may_be_equal(alg: Algebra, a: Poly, b: Poly) -> bool:
    """Whether a number that stands for several is too close to one of the other side.

    Where sides are farther apart than such numbers are, a comparison holds for all.
    """
    if alg.blurred.isdisjoint((*a.values(), *b.values())):
        return False
    pairs = itertools.product((*a.values(), 0.0), (*b.values(), 0.0))
    return any(
        not alg.blurred.isdisjoint(pair)
        and not abs(pair[0] - pair[1]) > APART * max(map(abs, pair))
        for pair in pairs
    )


def _cases(alg: Algebra, p: Poly) -> list[tuple[int, float]]:
    out, covered = [], FALSE
    for (flag, _), c in p.items():
        out.append((flag, c))
        covered = alg.either(covered, flag)
    rest = alg.negate(covered)
    return [*out, (rest, 0.0)] if rest != FALSE else out


_TESTS: dict[str, Callable[[float, float], bool]] = {
    "ge": lambda a, b: a >= b, "gt": lambda a, b: a > b, "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}  # fmt: skip
_TURNED = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt", "eq": "eq", "ne": "ne"}
"""Comparisons with exchanged sides."""
for _name in _TESTS:
    FLAGS[_name] = _compare


def _flag_operands(ev: Evaluator, node: Node, args, mode: str) -> list[int]:
    return [ev.flag(i, ev.aligned(i, args), mode) for i in node.ins]


@rule("and", table=FLAGS)
def _and(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.both(*_flag_operands(ev, node, args, mode))


@rule("mul", table=FLAGS)
def _mul(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.both(*_flag_operands(ev, node, args, mode))


@rule("or", "add", "max", table=FLAGS)
def _or(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.either(*_flag_operands(ev, node, args, mode))


@rule("min", table=FLAGS)
def _min(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.both(*_flag_operands(ev, node, args, mode))


@rule("xor", table=FLAGS)
def _xor(ev: Evaluator, node: Node, args, mode: str) -> int:
    a, b = _flag_operands(ev, node, args, mode)
    alg = ev.alg
    return alg.either(alg.both(a, alg.negate(b)), alg.both(b, alg.negate(a)))


@rule("not", table=FLAGS)
def _not(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.negate(_flag_operands(ev, node, args, mode)[0])


@rule("is_finite", table=FLAGS)
def _is_finite(ev: Evaluator, node: Node, args, mode: str) -> int:
    (p,) = ev.operands(node, args, mode)
    side = ev.is_side(node.outs[0])
    if (side and not _all_choices(p)) or may_be_infinite(ev, p):
        return _as_computed(ev, node, args)
    if not side and not is_row_maximum(ev, p):
        ev.assume(FINITE, "values assumed finite")
    return ev.alg.negate(where_infinite(ev.alg, p, (math.inf, -math.inf)))


@rule("select_n", table=FLAGS)
def _select_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    flags = _flag_operands(ev, node, args, mode)
    if len(flags) != 3:
        return ev.alg.literal(ev.leaf(node.outs[0], args))
    p, no_, yes = flags
    alg = ev.alg
    return alg.either(alg.both(p, yes), alg.both(alg.negate(p), no_))


@rule("convert_element_type", table=FLAGS)
def _to_bool(ev: Evaluator, node: Node, args, mode: str) -> int:
    if ev.g.dtype(node.ins[0]) == bool:
        return ev.flag(node.ins[0], args, mode)
    p = ev.poly(node.ins[0], args, mode)
    if _all_choices(p):
        return _compare_choices(ev.alg, "ne", p, {})
    if kind_of(ev.g.dtype(node.ins[0])) == "i" or is_position(ev.alg, p):
        return ev.alg.negate(ev.alg.compare("eq", p, True))
    if ev.is_side(node.outs[0]):
        return _as_computed(ev, node, args)
    return ev.alg.negate(ev.alg.compare("eq", p, False))


@rule("stop_gradient", table=FLAGS)
def _stop_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.flag(node.ins[0], args, mode)


@rule("reduce_or", "reduce_and", table=FLAGS)
def _reduce_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    at, bound = ev.before_reduction(node, args)
    flag = ev.flag(node.ins[0], at, mode)
    if node.prim == "reduce_or":
        some = ev.alg.any_over(flag, bound)
        return TRUE if _holds(ev, some) else some
    return ev.alg.negate(ev.alg.any_over(ev.alg.negate(flag), bound))


def _holds(ev: Evaluator, flag: int) -> bool:
    """Whether a flag is known to hold, up to names of indices."""
    support, table = ev.alg.bools[flag]
    if len(support) != 1 or table != 0b10:
        return False
    return any(_is_renamed(ev.alg, known, support[0]) for known in ev.holding)


def _is_renamed(alg: Algebra, known: int, atom: int) -> bool:
    """Whether two atoms are equal up to names of indices."""
    names, others = sorted(alg.free(known)), sorted(alg.free(atom))
    if len(names) != len(others) or len(names) > 4:
        return False
    return any(
        all(alg.sizes[i] == alg.sizes[j] for i, j in zip(names, order, strict=True))
        and alg.subst_literal(known, dict(zip(names, order, strict=True)))
        == alg.literal(atom)
        for order in itertools.permutations(others)
    )


@rule("pad", table=FLAGS)
def _pad_flag(ev: Evaluator, node: Node, args, mode: str) -> int:
    return ev.alg.literal(ev.leaf(node.outs[0], args))


# ------------------------------------------------------------------ helpers
