"""Gated linear unit: act(x w_gate + b) * (x w_up + c), weights apart or packed.

Formula    out[..., f] = act(Σ_k x[..., k] w_gate[k, f] + b[f] + r[..., f])
                         (Σ_k x[..., k] w_up[k, f] + c[f] + s[..., f])
Looks like a product of two values that are computed from contractions of one x. One
           of them goes through an activation.
Must hold  the form is the activation's applied to one contraction, times the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, is_local
from rewriter.algebra.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
    unproved,
)
from rewriter.find.sieve import Step
from rewriter.patterns.gated_linear_unit.activation import Activated, activated
from rewriter.patterns.gated_linear_unit.branches import (
    OPEN,
    Branch,
    Factors,
    factors,
    gates,
    names,
    plain,
)
from rewriter.patterns.gated_linear_unit.forms import (
    common_factor,
    contractions,
    every,
)
from rewriter.patterns.gated_linear_unit.products import products
from rewriter.patterns.gated_linear_unit.slopes import Side, with_slopes
from rewriter.program.graph import Node
from rewriter.program.lines import is_of_gradient
from rewriter.program.walk import equations_above
from rewriter.support.assumptions import FINITE

NAME = "gated_linear_unit"
ANCHORS = frozenset({
    "logistic", "tanh", "erf", "erfc", "max", "exp", "exp2", "select_n", "clamp",
    "logaddexp", "gt", "ge", "lt", "le",
})  # fmt: skip
POWERS = frozenset({"integer_pow", "square", "pow"})
LINEAR = LAYOUT_PRIMITIVES | TRANSPARENT | POWERS | frozenset({
    "convert_element_type", "add", "sub", "mul", "div", "neg", "min", "max", "clamp",
    "select_n",
})  # fmt: skip

GATE = frozenset({"x", "w_gate", "b_gate", "rows_gate"})
UP = frozenset({"x", "w_up", "b_up", "rows_up"})
"""The operands that each branch depends on."""

MOST = 3
"""Contractions that a branch is the sum of, such as one and a low-rank adapter's."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """The reading of a product below an activation as a gated linear unit, if any.

    A unit with further factors comes after one without: the products of a unit's
    gradients have the cotangent as a factor.
    """
    g = find.graph
    if not jnp.issubdtype(g.dtype(anchor.ins[-1]), jnp.floating):
        return
    operands = [i for i in anchor.ins if i not in g.constants]
    dots = [n for i in operands for n in linear(find, i)]
    if not dots or len(dots) > MOST:
        return
    sources = set().union(*(_inputs(find, n) for n in dots))
    below = products(find, anchor)
    if any(find.done(NAME, product.outs[0]) for product in below):
        return
    miss: Refused | None = None
    multiplied: Reading | None = None
    for product in below:
        if not any(
            _inputs(find, n) & sources for i in product.ins for n in linear(find, i)
        ):
            continue
        if find.known_empty(NAME, anchor):
            return
        found = _of_product(find, anchor, product, dots)
        if isinstance(found, Refused):
            if is_of_gradient(product):
                continue  # a product with a cotangent
            miss = found if miss is None or found.score > miss.score else miss
        elif found is not None and found.times is None:
            yield found
            return
        else:
            multiplied = multiplied or found
    if multiplied is not None:
        yield multiplied
    elif miss is not None:
        find.missed(NAME, anchor, miss)


def _of_product(
    find: Finder, anchor: Node, product: Node, dots: list[Node]
) -> Reading | Refused | None:
    """The reading of one product, or the refusal of the nearest attempt."""
    miss: Refused | None = None
    for act_side in (0, 1):
        act, up = product.ins[act_side], product.ins[1 - act_side]
        if not (act == anchor.outs[0] or find.regions.depends(act, anchor.outs[0])):
            continue
        try:
            return read(find, anchor, product, act, up, dots)
        except Refused as refusal:
            if miss is None or refusal.score > miss.score:
                miss = refusal.with_traceback(None)
        except OverBudget as error:
            miss = miss or unproved(error, 0.2)
    return miss


def linear(find: Finder, value: int) -> list[Node]:
    """Contractions above a value, through casts, layout, biases and bounds only."""
    key = ("linear", value)
    if key not in find.cache:
        find.cache[key] = _contractions(find, value)
    return find.cache[key]


def _contractions(find: Finder, value: int) -> list[Node]:
    above = equations_above(find.graph, [value], LINEAR, most=24)
    found = (n for n in above if n.prim == "dot_general" and not is_local(n))
    return list({id(node): node for node in found}.values())


def _inputs(find: Finder, dot: Node) -> set[int]:
    """A contraction's operands below casts, layout and scales."""
    return {find.unscaled(i) for i in dot.ins}


def read(
    find: Finder, anchor: Node, product: Node, act: int, up: int, dots: list[Node]
) -> Reading:
    """The reading of one product.

    Raises:
        Refused: If the form is not that of a gated linear unit.
        OverBudget: If the form grows too large.
    """
    alg = find.algebra
    others = linear(find, up)
    if not others:
        raise Refused(
            "up", "the other factor is not a matrix product of the same x", score=0.2
        )
    if len(others) > MOST:
        raise Refused("up", "the up branch is not one matrix product", score=0.2)
    value = product.outs[0]
    inside = _inside(find, act, dots, others)
    if len(inside) == 1 and not _holds_both(find, *inside, value):
        raise Refused(
            "up", "the other factor is not a matrix product of the same x", score=0.2
        )
    ev = find.evaluator(value, inside=inside, roots=inside)
    args = ev.indices(value)
    form, args = split_digits(alg, ev.poly(value, args), args)
    up_form = ev.poly(up, ev.aligned(up, args))
    act_form = ev.poly(act, ev.aligned(act, args))
    sums = set(contractions(alg, up_form))
    if len(sums) > 2 or sums <= set(contractions(alg, act_form)):
        raise Refused(
            "up", "the other factor is not a matrix product of the same x", score=0.2
        )
    if sums and _goes_through(alg, up_form, sums):
        text = "both branches go through a function: a unit has one activation"
        raise Refused("up", text, score=0.45)
    times, up_form = common_factor(alg, up_form)
    up_branch = plain(alg, up_form)
    gate_sums = [a for a in contractions(alg, act_form) if (a, 1) not in up_branch.term]
    if not gate_sums:
        text = "the activation is not applied to another matrix product"
        raise Refused("gate", text, score=0.2)
    if len(gate_sums) > 1:
        text = "the activation is applied to several matrix products"
        raise Refused("gate", text, score=0.25)
    found, more = _activated(find, act_form, gate_sums[0])
    number = alg.const(found.factor * up_branch.factor)
    outer = [p for p in (times, more, number) if p not in (None, alg.const(1.0))]
    if any(_has_choices(alg, p) for p in outer) and _selects(find, inside, act, up):
        ev.assume(FINITE, "values that a branch does not choose are assumed finite")
    made = _Assembly(find, ev, value, args, form, found, up_branch).reading(outer)
    sides = {
        "slopes": Side(act, found.gate, GATE, found.name, found.beta),
        "slopes_up": Side(up, up_branch, UP),
    }
    return with_slopes(find, ev, inside, sides, made)


def _inside(
    find: Finder, act: int, dots: list[Node], others: list[Node]
) -> frozenset[int]:
    """Contractions of the same value in both branches.

    Other contractions, such as a low-rank adapter's, are plain addends.
    """
    sources = set().union(*(_inputs(find, n) for n in dots))
    again = find.regions.above(act, frozenset({"dot_general"}))
    again = [n for n in again if _inputs(find, n) & sources]
    theirs = set().union(*(_inputs(find, n) for n in others))
    mine = [n for n in (*dots, *again) if _inputs(find, n) & theirs]
    others = [n for n in others if _inputs(find, n) & sources]
    return frozenset(n.outs[0] for n in (*mine, *others))


def _holds_both(find: Finder, contraction: int, value: int) -> bool:
    """Whether one contraction may give both branches, each a part of its result."""
    whole, part = (math.prod(find.graph.shape(v)) for v in (contraction, value))
    return whole > part


def _activated(find: Finder, act: Poly, contraction: int):
    """(the activation, a factor beside it) of a form."""
    alg = find.algebra
    branches = gates(alg, act, contraction)
    keep = frozenset(a for a, _ in branches[0].term)
    more, act = common_factor(alg, act, keep)
    return activated(alg, act, branches), more


def _has_choices(alg: Algebra, p: Poly) -> bool:
    """Whether a factor is 0 or not, as a boolean says."""
    return any(
        flag != TRUE or any(alg.kind(a) == "ind" for a, _ in mono) for flag, mono in p
    )


def _selects(find: Finder, inside: frozenset[int], act: int, up: int) -> bool:
    """Whether a branch chooses between its values and others.

    A choice hides NaN and infinities, and a factor of 0 does not.
    """
    for value in {act, up} - inside:
        between = find.below(inside, value) - inside
        nodes = equations_above(find.graph, {value}, lambda _: True, between)
        if any(node.prim == "select_n" for node in nodes):
            return True
    return False


class _Assembly:
    """Names the axes and writes the operands."""

    def __init__(self, find, ev, value, args, form, found: Activated, up: Branch):
        self.find, self.ev, self.alg = find, ev, find.algebra
        self.value, self.args, self.form = value, args, form
        self.found, self.gate, self.up = found, found.gate, up
        self.out = [i for a in args for i in flat_indices(a)]

    def reading(self, outer: list[Poly]) -> Reading:
        """The reading of a unit with some further factors."""
        alg = self.alg
        gate, up = self._factors()
        columns = alg.term_ids(TRUE, gate.w) | alg.term_ids(TRUE, up.w)
        f = tuple(i for i in self.out if i in columns)
        rest = tuple((i,) for i in self.out if i not in f)
        self._check_axes(gate, up, f)
        self.find.require_proved(self.ev)
        operands = {
            "x": operand({(TRUE, gate.x): 1.0}, *rest, gate.k),
            "w_gate": self._weights(gate, f, self.gate.scale),
            "w_up": self._weights(up, f, self.up.scale),
        }
        for name, branch in (("gate", self.gate), ("up", self.up)):
            bias = alg.scale(branch.bias, branch.scale)
            operands |= self._added(name, bias, rest, f)
        times = outer[0] if outer else None
        for p in outer[1:]:
            times = alg.mul(times, p)
        return Reading(
            NAME,
            alg,
            self.ev.place,
            self.value,
            self.args,
            self.form,
            (*rest, f),
            operands,
            self._params(),
            notes=tuple(sorted(self.ev.notes)),
            times=times,
        )

    def _factors(self) -> tuple[Factors, Factors]:
        """Both contractions, over the same indices."""
        alg = self.alg
        shared = names(alg, self.gate.term) & names(alg, self.up.term)
        gate = factors(alg, self.gate.term, self.args, shared)
        up = factors(alg, self.up.term, self.args, shared)
        to = dict(zip(up.k, gate.k, strict=True)) if len(up.k) == len(gate.k) else {}
        if alg.subst_mono(up.x, to) != gate.x:
            raise Refused("x", "gate and up multiply different arrays", score=0.4)
        return gate, Factors(gate.x, alg.subst_mono(up.w, to), gate.k)

    def _check_axes(self, gate: Factors, up: Factors, f: tuple[int, ...]) -> None:
        alg = self.alg
        rows = alg.term_ids(TRUE, gate.x) - set(gate.k)
        if rows & set(f):
            raise Refused(
                "batch",
                "the weights differ along an axis of x: one matrix per expert or head",
                score=0.45,
            )
        for side in (gate, up):
            if set(f) - alg.term_ids(TRUE, side.w):
                text = "each column of one branch is multiplied by all of the other"
                raise Refused("outer", text, score=0.2)
        if _per_expert(self.find, gate.w, gate.k):
            raise Refused(
                "batch",
                "one matrix per expert, and a router that takes some of them",
                score=0.45,
            )
        if not f or rows - set(self.out):
            raise Refused("axes", "an axis of x is not one of the result", score=0.3)

    def _weights(self, side: Factors, f: tuple[int, ...], scale: float) -> Operand:
        """Weights; integers and floats of 8 bits are cast to wider floats."""
        graph = self.find.graph
        dtypes = [graph.dtype(self.alg.defs[a][1]) for a, _ in side.w]
        wide = [d.itemsize > 1 and jnp.issubdtype(d, jnp.floating) for d in dtypes]
        dtype = None if any(wide) else graph.dtype(self.value)
        return operand({(TRUE, side.w): scale}, side.k, f, dtype=dtype)

    def _added(self, name: str, p: Poly, rest: Any, f: tuple[int, ...]):
        """A bias per column, and an array added to each row."""
        alg, out = self.alg, {}
        bias = {t: c for t, c in p.items() if not alg.term_ids(*t) - set(f)}
        rows = {t: c for t, c in p.items() if t not in bias}
        if alg.ids(rows) - set(self.out):
            raise Refused("bias", "an axis of a bias is not one of the result")
        if contractions(alg, rows):
            raise Refused("bias", "another matrix product is added", score=0.4)
        if bias:
            out[f"b_{name}"] = operand(bias, f)
        if rows:
            out[f"rows_{name}"] = operand(rows, *rest, f)
        return out

    def _params(self) -> dict[str, Any]:
        params: dict[str, Any] = {
            "activation": self.found.name,
            "out_dtype": str(self.find.graph.dtype(self.value)),
        }
        for key, item, usual in (
            ("beta", self.found.beta, 1.0),
            ("clip_gate", self.gate.clip, OPEN),
            ("clip_up", self.up.clip, OPEN),
            ("up_shift", self.up.shift, 0.0),
        ):
            if item != usual:
                params[key] = item
        return params


def _goes_through(alg: Any, form: Poly, sums: set[int]) -> bool:
    """Whether a branch is a function of its contraction, such as h·sigmoid(h)."""
    if any(alg.kind(a) == "relu" for a in every(alg, form)):
        return False  # it may be bounded
    direct = False
    for _, mono in form:
        here = [a for a, e in mono if e == 1 and a in sums]
        rest = {(TRUE, tuple((a, 1) for a, _ in mono if a not in sums)): 1.0}
        if set(here) & set(every(alg, rest)):
            return True
        direct |= bool(here)
    return not direct


def _per_expert(find: Finder, w: Any, k: Any) -> bool:
    """Whether columns stand on both sides of the contracted axis: [e, d, f]."""
    alg = find.algebra
    for atom, _ in w:
        if alg.kind(atom) == "leaf":
            args = [alg.index_ids(a) for a in alg.defs[atom][2]]
            at = [n for n, ids in enumerate(args) if ids & set(k)]
            free = [n for n, ids in enumerate(args) if ids - set(k)]
            if at and free and free[0] < at[0] and free[-1] > at[-1]:
                return True
    return False


STEPS = (
    Step(frozenset({"dot_general"}), through=LINEAR),
    Step(ANCHORS),
    Step(frozenset({"mul"}), joins=LINEAR - POWERS),
)
PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS)
