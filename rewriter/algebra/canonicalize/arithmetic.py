"""Rules of arithmetic: one per elementwise primitive."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction

import jax.numpy as jnp
import numpy as np

from rewriter.algebra.canonicalize.constants import in_dtype
from rewriter.algebra.canonicalize.dtypes import kind_of
from rewriter.algebra.canonicalize.evaluator import RULES, Evaluator, rule
from rewriter.algebra.canonicalize.infinities import is_row_maximum, may_be_infinite
from rewriter.algebra.canonicalize.primitives import LAYOUT_PRIMITIVES
from rewriter.algebra.canonicalize.select import choose, ramp, reached
from rewriter.algebra.canonicalize.weights import at_least_one
from rewriter.algebra.normal_form import FALSE, TRUE, Algebra, Index, OverBudget, Poly
from rewriter.program.graph import Node
from rewriter.support.assumptions import FINITE

SWALLOWS = 1e30
"""A fill of this size absorbs all scores; smaller fills are only large numbers."""

FAR = 1e7
"""Bounds beyond it serve masks; scores and activations do not reach them."""


def _elementwise(name: str, f: Callable[..., Poly]) -> None:
    RULES[name] = lambda ev, node, args, mode: f(ev, *ev.operands(node, args, mode))


_elementwise("add_any", lambda ev, a, b: ev.alg.cancelled(ev.alg.add(a, b)))  # a + b
_elementwise("neg", lambda ev, a: ev.alg.scale(a, -1.0))  # -a
_elementwise("sqrt", lambda ev, a: ev.alg.power(a, Fraction(1, 2)))  # a^1/2
_elementwise("rsqrt", lambda ev, a: ev.alg.power(a, Fraction(-1, 2)))  # a^-1/2
_elementwise("log", lambda ev, a: ev.alg.log(a))
_elementwise(  # log(exp(a) + exp(b))
    "logaddexp",
    lambda ev, a, b: ev.alg.log(ev.alg.add(ev.alg.exp(a), ev.alg.exp(b))),
)
_elementwise("log1p", lambda ev, a: ev.alg.log(ev.alg.add(a, ev.alg.const(1))))
_elementwise("exp", lambda ev, a: ev.alg.exp(_fills(ev, a), ev.fills.add))
_elementwise(  # 2^a = exp(a ln 2)
    "exp2",
    lambda ev, a: ev.alg.exp(_fills(ev, ev.alg.scale(a, math.log(2))), ev.fills.add),
)
_elementwise(  # exp(-a^2)
    "exp_neg_sq",
    lambda ev, a: ev.alg.exp(ev.alg.scale(ev.alg.power(a, 2), -1.0)),
)
_elementwise(  # exp(a) - 1
    "expm1", lambda ev, a: ev.alg.add(ev.alg.exp(a), ev.alg.const(-1))
)
_elementwise("logistic", lambda ev, a: sigmoid(ev.alg, a))
_elementwise("tanh", lambda ev, a: tanh(ev.alg, a))
_elementwise(  # 1 - a^2
    "one_minus_square",
    lambda ev, a: ev.alg.add(ev.alg.const(1), ev.alg.power(a, 2), -1.0),
)


@rule("mul")
def _mul(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    """A b; a value times itself is a square, also of an absolute value."""
    a, b = ev.operands(node, args, mode)
    if node.ins[0] == node.ins[1]:
        return _refuse_large_constant_masks(ev, ev.alg.power(a, 2), 0)
    if bool(a) != bool(b) and not _is_weight(ev, a or b, node):
        ev.assume(FINITE, "0 times a value taken for 0")
    return _refuse_large_constant_masks(ev, _product(ev.alg, a, b), 0)


@rule("sub")
def _sub(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    """A - b."""
    a, b = ev.operands(node, args, mode)
    out = ev.alg.add(a, b, -1.0)
    if not out and any(mono for _, mono in a) and not ev.is_side(node.outs[0]):
        ev.assume(FINITE, "the difference of equal values taken for 0")
    return _refuse_large_constant_masks(ev, out)


@rule("add")
def _add(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    """A + b; a tiny guard added to a sum of weights is dropped, as rounding does."""
    a, b = ev.operands(node, args, mode)
    for guard, p in ((a, b), (b, a)):
        low = ev.alg.as_constant(guard) if len(guard) == 1 else None
        if low is not None and 0 < low < _half_ulp(ev, node) and at_least_one(ev, p):
            ev.notes.add(f"a sum of weights is not changed by {low:.4g}")
            return p
    return _refuse_large_constant_masks(ev, ev.alg.add(a, b))


def _is_weight(ev: Evaluator, p: Poly, node: Node) -> bool:
    """Whether a factor is a side value, or exponentials of side values, and no score.

    If these are NaN, so are the sums that contain them.
    """
    factors = [a for _, mono in p for a, _ in mono]
    exponentials = bool(factors) and all(ev.alg.kind(a) == "exp" for a in factors)
    return exponentials or ev.is_side(node.outs[0])


def _half_ulp(ev: Evaluator, node: Node) -> float:
    """A number too small to change any number of at least one, in a result's dtype."""
    dtype = ev.g.dtype(node.outs[0])
    return float(jnp.finfo(dtype).eps) / 2 if kind_of(dtype) == "f" else 0.0


def _product(alg: Algebra, a: Poly, b: Poly) -> Poly:
    """A b; [p >= 0] p is max(p, 0)."""
    for flag, p in ((a, b), (b, a)):
        (((where, mono), c), *more) = flag.items() or [((TRUE, ()), 0.0)]
        if where != TRUE and not mono and c == 1 and not more:
            sloped = ramp(alg, where, p, {})
            if sloped is not None:
                return sloped
    return alg.mul(a, b)


def _refuse_large_constant_masks(ev: Evaluator, p: Poly, terms: int = 1) -> Poly:
    """Refuses to expand a mask of numbers like (m - 1) * 1e9.

    Over the reals its constant cancels in a softmax. In floats, the rest would absorb
    the scores. So such a value is a leaf, and so is a product m * -1e9, since a sum
    with it would be such a mask. Sums of weights and numbers are no such masks.
    """
    if len(p) == 1 and (TRUE, ()) in p:
        return p
    if ev.expand_all or not ev.masks:
        return p
    if len(p) > terms and any(abs(c) >= 1e4 for c in p.values()):
        for (flag, mono), c in p.items():
            kinds = {ev.alg.kind(a) for a, _ in mono}
            least = 1e4 if "leaf" in kinds else FAR if "sum" in kinds else math.inf
            picked = ev.picked_fills and len(mono) == 1 and counts_hits(ev.alg, mono[0])
            if flag == TRUE and abs(c) >= least and "exp" not in kinds and not picked:
                raise OverBudget("a large number is added, which may be a mask")
    return p


def counts_hits(alg: Algebra, factor: tuple[int, object]) -> bool:
    """Whether a factor counts how often an index is hit: once, or not at all."""
    atom, e = factor
    return e == 1 and alg.kind(atom) == "sum" and not alg.defs[atom][3]


def _fills(ev: Evaluator, p: Poly) -> Poly:
    """With soft fills, keeps additive constants of a mask as factors of a bias.

    A constant that replaces scores by a choice is no bias.
    """
    if not ev.soft_fills:
        return p
    out: Poly = {}
    for (flag, mono), c in p.items():
        soft = flag != TRUE and abs(c) < SWALLOWS and not mono
        if soft and any(m and ev.alg.both(f, flag) != FALSE for f, m in p):
            atom = ev.alg.atom("ind", flag)
            ev.softened.add(atom)
            out = ev.alg.add(out, {(TRUE, ((atom, 1),)): c})
        else:
            out = ev.alg.add(out, {(flag, mono): c})
    return out


def _bounded(ev: Evaluator, node: Node, args, p: Poly, bound: float) -> Poly:
    """A form bounded by a number; if the bound is far away, the form itself."""
    if bound > -FAR or may_be_infinite(ev, p):
        return ev.alg.of_atom(ev.leaf(node.outs[0], args))
    if not is_row_maximum(ev, p):
        ev.assume(FINITE, f"values assumed not to reach {abs(bound):.4g}")
    return p


def _is_fill(alg: Algebra, p: Poly) -> bool:
    """Whether a form is a number so large that sums with it lose the rest."""
    c = alg.as_constant(p)
    return c is not None and 1e4 <= abs(c) < math.inf


def sigmoid(alg: Algebra, a: Poly) -> Poly:
    """1 / (1 + exp(-a))."""
    return alg.power(alg.add(alg.const(1), alg.exp(alg.scale(a, -1.0))), -1)


def tanh(alg: Algebra, a: Poly) -> Poly:
    """1 - 2 / (exp(2a) + 1)."""
    c = alg.as_constant(a)
    if c is not None:
        return alg.const(math.tanh(c))
    inner = alg.power(alg.add(alg.const(1), alg.exp(alg.scale(a, 2.0))), -1)
    return alg.add(alg.const(1), inner, -2.0)


@rule("div")
def _div(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    a, b = ev.operands(node, args, mode)
    if kind_of(ev.g.dtype(node.outs[0])) == "i":
        return _digit(ev.alg, "idiv", a, b)
    return ev.alg.mul(a, ev.alg.power(b, -1))


@rule("floor_divide", "remainder", "rem")
def _floor_divide(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    if kind_of(ev.g.dtype(node.outs[0])) != "i":
        return ev.alg.of_atom(ev.leaf(node.outs[0], args))
    return _digit(ev.alg, node.prim, *ev.operands(node, args, mode))


def _digit(alg: Algebra, name: str, a: Poly, b: Poly) -> Poly:
    """A quotient or remainder: a digit of a position; div and rem round to zero."""
    n, index = alg.as_constant(b), _index_of(alg, a)
    whole = n is not None and 0 < n < math.inf and n == int(n)
    if not whole or index is None or alg.index_range(index)[0] < 0:
        return alg.of_atom(alg.atom("fn", name, alg.freeze(a), alg.freeze(b)))
    take = alg.div if name in ("floor_divide", "idiv") else alg.mod
    return alg.iota(take(index, int(n)))


def _index_of(alg: Algebra, p: Poly) -> Index:
    """The index argument whose value a form is, or None."""
    if len(p) != 1:
        return None
    ((flag, mono), c) = next(iter(p.items()))
    if flag != TRUE or c != 1 or len(mono) != 1 or mono[0][1] != 1:
        return None
    d = alg.defs[mono[0][0]]
    return d[1] if d[0] == "iota" else None


@rule("integer_pow")
def _integer_pow(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    return _whole_power(ev, node.ins[0], args, mode, int(node.params["y"]))


@rule("square")
def _square(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    return _whole_power(ev, node.ins[0], args, mode, 2)


def _whole_power(ev: Evaluator, value: int, args, mode: str, e: int) -> Poly:
    """A power with a whole exponent."""
    node = ev.expandable(value, mode)
    if node is not None and node.prim == "div":
        n = ev.number(node.ins[1])
        if n:
            whole = _whole_power(ev, node.ins[0], args, mode, e)
            return ev.alg.scale(whole, n**-e)
    return ev.alg.power(ev.poly(value, ev.aligned(value, args), mode), e)


@rule("pow")
def _pow(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    a, b = ev.operands(node, args, mode)
    e = ev.alg.as_constant(b)
    if e is None:
        raise OverBudget("a power whose exponent is not a number")
    if math.isfinite(e) and e == int(e):
        return _whole_power(ev, node.ins[0], args, mode, int(e))
    exact = Fraction(e).limit_denominator(64)
    near = abs(float(exact) - e) <= 1e-6
    if not near or float(in_dtype(float(exact), ev.g.dtype(node.ins[1]))) != e:
        return ev.alg.power(a, e)  # no rounding of the fraction
    return ev.alg.power(a, int(exact) if exact.denominator == 1 else exact)


@rule("iota")
def _iota(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    return ev.alg.iota(args[int(node.params["dimension"])])


@rule("select_n")
def _select(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    if len(node.ins) != 3 or ev.g.dtype(node.ins[0]) != bool:
        return ev.alg.of_atom(ev.leaf(node.outs[0], args))
    if _is_positive_part(ev, node):
        p = ev.poly(node.ins[2], ev.aligned(node.ins[2], args), mode)
        _replaces_nan(ev, node, p, {})
        return ev.alg.relu(p)
    flag = ev.flag(node.ins[0], ev.aligned(node.ins[0], args), mode)
    no_at, yes_at = (ev.aligned(i, args) for i in node.ins[1:])
    if flag == FALSE:
        return ev.poly(node.ins[1], no_at, mode)
    if flag == TRUE:
        return ev.poly(node.ins[2], yes_at, mode)
    if_false = ev.poly(node.ins[1], no_at, mode)
    if_true = ev.poly(node.ins[2], yes_at, mode)
    if_false = reached(ev.alg, if_false, ev.alg.negate(flag))
    if_true = reached(ev.alg, if_true, flag)
    sloped = ramp(ev.alg, flag, if_true, if_false)
    if sloped is not None:
        _replaces_nan(ev, node, if_true, if_false)
        return sloped
    return choose(ev.alg, flag, if_true, if_false)


def _is_positive_part(ev: Evaluator, node: Node) -> bool:
    """Whether an equation is where(x > 0, x, 0)."""
    test = ev.g.node_of(node.ins[0])
    if test is None or test.prim not in ("gt", "ge") or test.ins[0] != node.ins[2]:
        return False
    return ev.number(test.ins[1]) == 0 and ev.number(node.ins[1]) == 0


def _replaces_nan(ev: Evaluator, node: Node, if_true: Poly, if_false: Poly) -> None:
    """Notes that where(x > 0, x, 0) gives 0 for NaN, as max(x, 0) does not.

    If x is a variance, all that it divides is NaN too.
    """
    holds = _of_nan(ev, node.ins[0])
    if holds is None:
        return
    at_nan, other = (if_true, if_false) if holds else (if_false, if_true)
    constant = all(not mono for _, mono in at_nan)
    core = not ev.is_side(node.outs[0]) and not ev.alg.is_variance(other)
    if constant and core:
        ev.assume(FINITE, "NaN is replaced where a number is chosen for it")


_AT_NAN = {"gt": False, "ge": False, "lt": False, "le": False, "eq": False, "ne": True}


def _of_nan(ev: Evaluator, value: int) -> bool | None:
    """What a test gives for NaN; None if unknown. Numbers are tested as they are."""
    node = ev.g.node_of(value)
    if node is None:
        return None
    if node.prim in LAYOUT_PRIMITIVES | {"convert_element_type"}:
        return _of_nan(ev, node.ins[0])
    if node.prim in ("not", "or", "and"):
        parts = [_of_nan(ev, i) for i in node.ins]
        if node.prim == "not":
            return None if parts[0] is None else not parts[0]
        decides = node.prim == "or"
        if decides in parts:
            return decides
        return None if None in parts else not decides
    if node.prim not in _AT_NAN:
        return None
    numbers = [ev.number(i) for i in node.ins]
    if None in numbers:
        return _AT_NAN[node.prim]
    return bool(getattr(operator, node.prim)(*numbers))


@rule("max", "min")
def _max_min(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    alg = ev.alg
    values = node.ins
    for this, other in ((0, 1), (1, 0)):
        n = ev.number(values[this])
        at = ev.aligned(values[other], args)
        if n is not None and math.isinf(n) and (n < 0) == (node.prim == "max"):
            return ev.poly(values[other], at, mode)
    a, b = ev.operands(node, args, mode)
    sign = 1 if node.prim == "max" else -1
    for bound, p in ((a, b), (b, a)) if sign == 1 else ():
        low = alg.as_constant(bound)
        if low is not None and 0 < low <= 1 and at_least_one(ev, p):
            ev.notes.add(f"a sum of weights is not below {low:.4g}")
            return p
    core = not ev.expand_all and not ev.is_side(node.outs[0])
    for bound, p in ((a, b), (b, a)):
        if core and _is_fill(alg, bound):
            # The difference would absorb the other operand.
            return _bounded(ev, node, args, p, sign * alg.as_constant(bound))
    if node.prim == "max":  # b + max(a - b, 0)
        return alg.add(b, alg.relu(alg.add(a, b, -1.0)))
    return alg.add(a, alg.relu(alg.add(a, b, -1.0)), -1.0)  # a - max(a - b, 0)


@rule("clamp")
def _clamp(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    lo, x, hi = ev.operands(node, args, mode)
    alg = ev.alg
    low, high = alg.as_constant(lo), alg.as_constant(hi)
    far = low is not None and high is not None and low <= -FAR and high >= FAR
    if far and not ev.expand_all and not ev.is_side(node.outs[0]):
        return _bounded(ev, node, args, x, max(low, -high))
    if ev.number(node.ins[0]) != -math.inf:
        x = alg.add(lo, alg.relu(alg.add(x, lo, -1.0)))
    if ev.number(node.ins[2]) == math.inf:
        return x
    return alg.add(x, alg.relu(alg.add(x, hi, -1.0)), -1.0)


@rule("abs")
def _abs(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    if ev.alg.positive(a):
        return a
    return ev.alg.add(ev.alg.scale(ev.alg.relu(a), 2.0), a, -1.0)


@rule("sign")
def _sign(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    c = ev.alg.as_constant(a)
    if c is not None:
        return ev.alg.const(float(np.sign(c)))
    if _index_of(ev.alg, a) is not None and ev.alg.bounds(a)[0] >= 0:
        positive = ev.alg.compare("ge", ev.alg.add(a, ev.alg.const(-1)), True)
        return ev.alg.of_bool(positive)
    return ev.alg.of_atom(ev.alg.atom("fn", "sign", ev.alg.freeze(a)))


def _odd(name: str):
    def rule(ev: Evaluator, node: Node, args, mode: str) -> Poly:
        (a,) = ev.operands(node, args, mode)
        return ev.alg.odd(name, a)

    return rule


RULES["erf"] = _odd("erf")
RULES["sin"] = _odd("sin")


@rule("erfc")
def _erfc(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    return ev.alg.add(ev.alg.const(1), ev.alg.odd("erf", a), -1.0)


@rule("cos")
def _cos(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    (a,) = ev.operands(node, args, mode)
    frozen = ev.alg.freeze(a)
    if frozen and frozen[0][1] < 0:
        frozen = ev.alg.freeze(ev.alg.scale(a, -1.0))
    return ev.alg.of_atom(ev.alg.atom("fn", "cos", frozen))


@rule("concatenate", "stack")
def _concatenate(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    source, at = ev.moved(node, node.outs[0], args)
    return ev.poly(source, at, mode)


def _every(ev: Evaluator, a: Index, n: int) -> Index | bool:
    """A / n, or False if n does not divide it at every position."""
    if a is None or (isinstance(a, tuple) and a[0] == "k"):
        number = a[1] if a else 0
        return ev.alg.affine(None, 1, number // n) if number % n == 0 else False
    if isinstance(a, tuple) and a[0] == "aff" and a[2] % n == 0:
        return ev.alg.affine(a[1], a[2] // n, a[3] // n) if a[3] % n == 0 else False
    raise ev._interleaved(a, n)


@rule("pad")
def _pad(ev: Evaluator, node: Node, args, mode: str) -> Poly:
    config = node.params["padding_config"]
    at = list(args)
    for d, (lo, hi, interior) in enumerate(config):
        size = ev.g.shape(node.ins[0])[d]
        if (lo, hi, interior) == (0, 0, 0):
            continue
        moved = ev.alg.affine(at[d], 1, -int(lo))
        if interior:
            moved = _every(ev, moved, int(interior) + 1)
            if moved is False:  # between the elements
                return ev.poly(node.ins[1], (), mode)
        first, last = ev.alg.index_range(moved)
        if last < 0 or first >= size:
            return ev.poly(node.ins[1], (), mode)
        if first < 0 or last >= size:
            raise ev._split(moved, [c for c in (0, size) if first < c <= last])
        at[d] = moved
        if size == 1:
            at[d] = None
    return ev.poly(node.ins[0], tuple(at), mode)
