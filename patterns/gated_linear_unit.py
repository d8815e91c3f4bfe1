"""Gated linear unit: act(x w_gate + b) * (x w_up + c), weights apart or packed.

Formula    out[..., f] = act(Σ_k x[..., k] w_gate[k, f] + b[f])
                         (Σ_k x[..., k] w_up[k, f] + c[f])
Looks like a product of two values computed from contractions of one x, one of
           them through an activation.
Must hold  the form is the activation's applied to one contraction, times the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rewriter.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT, sigmoid, tanh
from rewriter.finder import Finder
from rewriter.graph import Node
from rewriter.match import ReaderPattern
from rewriter.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.reading import (
    Operand,
    Reading,
    Refused,
    flat_indices,
    operand,
    split_digits,
)
from rewriter.sieve import Step

NAME = "gated_linear_unit"
ANCHORS = frozenset(
    {"logistic", "tanh", "erf", "erfc", "max", "exp", "exp2", "select_n", "clamp"}
)
POWERS = frozenset({"integer_pow", "square", "pow"})
LINEAR = LAYOUT_PRIMITIVES | TRANSPARENT | POWERS | frozenset({
    "convert_element_type", "add", "sub", "mul", "div", "neg", "min", "max", "clamp",
    "select_n",
})  # fmt: skip


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the products below an activation."""
    g = find.graph
    if not np.issubdtype(g.dtype(anchor.outs[0]), np.floating) and (
        str(g.dtype(anchor.outs[0])) not in ("bfloat16", "float16")
    ):
        return
    operands = [i for i in anchor.ins if i not in g.constants]
    dots = [n for i in operands for n in _linear(find, i)]
    if not dots or len(dots) > 3:
        return
    miss: Refused | None = None
    sources = set().union(*(_inputs(find, n) for n in dots))
    products = _products(find, anchor)
    if any(find.done(NAME, product.outs[0]) for product, _ in products):
        return
    for product, _ in products:
        if not any(
            _inputs(find, n) & sources for i in product.ins for n in _linear(find, i)
        ):
            continue
        if find.barren(NAME, anchor):
            return
        for act_side in (0, 1):
            act, up = product.ins[act_side], product.ins[1 - act_side]
            if not (act == anchor.outs[0] or find.regions.depends(act, anchor.outs[0])):
                continue
            try:
                yield read(find, anchor, product, act, up, dots)
                return
            except Refused as refusal:
                if miss is None or refusal.score > miss.score:
                    miss = refusal.with_traceback(None)
            except OverBudget as error:
                miss = miss or Refused("budget", str(error), score=0.2)
    if miss is not None:
        find.missed(NAME, anchor, miss)


def _linear(find: Finder, value: int) -> list[Node]:
    """Contractions above a value through casts, layout, biases and bounds only."""
    key = ("linear", value)
    if key not in find.cache:
        find.cache[key] = _contractions(find, value)
    return find.cache[key]


def _contractions(find: Finder, value: int) -> list[Node]:
    g, found = find.graph, {}
    seen, queue = {value}, [value]
    while queue and len(seen) < 24:
        node = g.node_of(queue.pop(0))
        if node is None:
            continue
        if node.prim == "dot_general" and node.params["dimension_numbers"][0][0]:
            found[id(node)] = node
        elif node.prim in LINEAR:
            for i in node.ins:
                if i not in seen and i not in g.constants:
                    seen.add(i)
                    queue.append(i)
    return list(found.values())


def _inputs(find: Finder, dot: Node) -> set[int]:
    """A contraction's operands under casts, layout and scales."""
    return {find.unscaled(i) for i in dot.ins}


def _products(find: Finder, anchor: Node) -> list[tuple[Node, int]]:
    """Products below the activation, the forward's before those of gradients."""
    g, seen, queue, out = find.graph, {anchor.outs[0]}, [anchor.outs[0]], []
    while queue and len(seen) < 40:
        for node in g.users(queue.pop(0)):
            if node.prim == "mul" and node.ins[0] != node.ins[1]:
                out.append((node, 0))
            if find.local(node) and node.prim not in ("reduce_sum", "reduce_max"):
                for result in node.outs:
                    if result not in seen:
                        seen.add(result)
                        queue.append(result)
    return sorted(out, key=lambda found: found[0].outs)[:8]


def read(
    find: Finder, anchor: Node, product: Node, act: int, up: int, dots: list[Node]
) -> Reading:
    """The reading of one product.

    Raises:
        Refused: If the form is not that of a gated linear unit.
        OverBudget: If the form grows too large.
    """
    alg = find.algebra
    others = _linear(find, up)
    if not others:
        raise Refused(
            "up", "the other factor is not a contraction of the same value", score=0.2
        )
    sources = set().union(*(_inputs(find, n) for n in dots))
    again = find.regions.above(act, frozenset({"dot_general"}))
    again = [n for n in again if _inputs(find, n) & sources]
    inside = frozenset(n.outs[0] for n in (*dots, *others, *again))
    value = product.outs[0]
    ev = find.evaluator(value, inside=inside)
    args = ev.indices(value)
    form, args = split_digits(alg, ev.poly(value, args), args)
    up_poly = ev.poly(up, ev.aligned(up, args))
    act_poly = ev.poly(act, ev.aligned(act, args))
    sums = set(_sums(alg, up_poly))
    if len(sums) > 2 or sums <= set(_sums(alg, act_poly)):
        raise Refused(
            "up", "the other factor is not a contraction of the same value", score=0.2
        )
    times, up_poly = _outer(alg, up_poly)
    more, act_poly = _outer(alg, act_poly)
    if more is not None:
        times = more if times is None else alg.mul(times, more)
    u, u_bias, u_clip, shift = _branch(alg, up_poly, "up")
    gates = [a for a in _sums(alg, act_poly) if a != u]
    if not gates:
        raise Refused("gate", "the activation is not of another contraction", score=0.2)
    if len(gates) > 1:
        raise Refused("gate", "the activation is of several contractions", score=0.3)
    gate = gates[0]
    shared = _names(alg, gate) & _names(alg, u)
    x, w_gate, k = _factors(alg, gate, args, shared)
    x_up, w_up, k_up = _factors(alg, u, args, shared)
    to = dict(zip(k_up, k, strict=True)) if len(k) == len(k_up) else {}
    if alg.subst_mono(x_up, to) != x:
        raise Refused(
            "x", "gate and up are contractions of different values", score=0.4
        )
    w_up = alg.subst_mono(w_up, to)
    bias, clip = _gate_details(alg, act_poly, gate)
    g = _gate_form(alg, gate, bias, clip)
    name, beta = _activation(alg, act_poly, gate, g)
    return _assembled(
        find,
        ev,
        value,
        args,
        form,
        x,
        k,
        (w_gate, bias, clip),
        (w_up, u_bias, u_clip),
        name,
        beta,
        shift,
        times,
    )


def _assembled(find, ev, value, args, form, x, k, gate, up, name, beta, shift, times):
    alg = find.algebra
    out = [i for a in args for i in flat_indices(a)]
    (w_gate, b_gate, clip_gate), (w_up, b_up, clip_up) = gate, up
    f = tuple(
        i
        for i in out
        if i in alg.term_ids(TRUE, w_gate) or i in alg.term_ids(TRUE, w_up)
    )
    x_ids = alg.term_ids(TRUE, x) - set(k)
    if x_ids & set(f):
        raise Refused(
            "batch",
            "the weights differ along an axis of x: one matrix per expert or head",
            score=0.45,
        )
    for w in (w_gate, w_up):
        if set(f) - alg.term_ids(TRUE, w):
            raise Refused("outer", "gate and up have different columns", score=0.4)
    if _per_expert(find, w_gate, k):
        raise Refused(
            "batch", "one matrix per expert, of which a router takes some", score=0.45
        )
    rest = tuple((i,) for i in out if i not in f)
    if not f or x_ids - set(out):
        raise Refused("axes", "an axis of x is not one of the result", score=0.3)
    operands: dict[str, Operand] = {
        "x": operand({(TRUE, x): 1.0}, *rest, k),
        "w_gate": operand({(TRUE, w_gate): 1.0}, k, f),
        "w_up": operand({(TRUE, w_up): 1.0}, k, f),
    }
    for key, bias in (("b_gate", b_gate), ("b_up", b_up)):
        if bias:
            if alg.ids(bias) - set(f):
                raise Refused("bias", "a bias varies along an axis of x", score=0.4)
            operands[key] = operand(bias, f)
    params: dict[str, Any] = {
        "activation": name,
        "out_dtype": str(find.graph.dtype(value)),
    }
    for key, item, plain in (
        ("beta", beta, 1.0),
        ("clip_gate", clip_gate, (None, None)),
        ("clip_up", clip_up, (None, None)),
        ("up_shift", shift, 0.0),
    ):
        if item != plain:
            params[key] = item
    return Reading(
        NAME,
        alg,
        ev.place,
        value,
        args,
        form,
        (*rest, f),
        operands,
        params,
        notes=tuple(sorted(ev.notes)),
        times=times,
    )


def _per_expert(find: Finder, w: Any, k: Any) -> bool:
    """Whether columns stand before and behind the contracted axis: [e, d, f]."""
    alg = find.algebra
    for atom, _ in w:
        if alg.kind(atom) == "leaf":
            args = [alg.index_ids(a) for a in alg.defs[atom][2]]
            at = [n for n, ids in enumerate(args) if ids & set(k)]
            free = [n for n, ids in enumerate(args) if ids - set(k)]
            if at and free and free[0] < at[0] and free[-1] > at[-1]:
                return True
    return False


# ------------------------------------------------------------------ parsing
def _outer(alg: Algebra, p: Poly) -> tuple[Poly | None, Poly]:
    """(factor, rest) of a branch that is multiplied by an array, such as a mask."""
    terms = list(p)
    flag = terms[0][0] if len({f for f, _ in terms}) == 1 else TRUE
    common = {a: e for a, e in terms[0][1] if alg.kind(a) == "leaf"}
    for _, mono in terms[1:]:
        powers = dict(mono)
        common = {a: e for a, e in common.items() if powers.get(a) == e}
    if flag == TRUE and not common:
        return None, p
    rest = {}
    for (f, mono), c in p.items():
        inner = tuple(x for x in mono if x[0] not in common)
        rest[f if flag == TRUE else TRUE, inner] = c
    if not _sums(alg, rest):
        return None, p  # nothing but a bias would be left
    return {(flag, alg.monomial(common.items())): 1.0}, rest


def _sums(alg: Algebra, p: Poly) -> list[int]:
    """Contractions in a form, at any depth, each once."""
    out: dict[int, None] = {}
    seen: set[int] = set()

    def visit(atom: int) -> None:
        if atom in seen:
            return
        seen.add(atom)
        if alg.kind(atom) == "sum":
            out.setdefault(atom)
            return
        for inner in alg.children(atom):
            visit(inner)

    for flag, mono in p:
        for a in (*(a for a, _ in mono), *alg.bools[flag][0]):
            visit(a)
    return list(out)


def _branch(alg: Algebra, p: Poly, what: str):
    """(contraction, bias, clip bounds, shift) of the branch without activation."""
    clip, shift = (None, None), 0.0
    relus = [a for _, m in p for a, _ in m if alg.kind(a) == "relu"]
    if relus:
        clip, inner, shift = _clipped(alg, p)
        p = inner
    sums = [(t, c) for t, c in p.items() if any(alg.kind(a) == "sum" for a, _ in t[1])]
    if (
        len(sums) != 1
        or sums[0][1] != 1
        or len(sums[0][0][1]) != 1
        or (sums[0][0][0] != TRUE or sums[0][0][1][0][1] != 1)
    ):
        raise Refused(
            "up",
            f"the {what} branch is not one contraction",
            score=0.35,
            difference=alg.show(p),
        )
    bias = {t: c for t, c in p.items() if t != sums[0][0]}
    if not relus:
        c, rest = alg.split_constant(bias)
        if c and not rest:
            shift, bias = c, {}
    return sums[0][0][1][0][0], bias, clip, shift


def _clipped(alg: Algebra, p: Poly):
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
            raise Refused("clip", "a clipped branch of a form not known", score=0.4)
        return (-low, -low - c), inner, shift + low
    below, others = _relu_term(alg, rest, 1)
    if below is None or others:
        raise Refused("clip", "a clipped branch of a form not known", score=0.4)
    low, inner = alg.split_constant(below)
    above, others = _relu_term(alg, inner, -1)
    if above is None:
        return (-low, None), inner, shift + low
    c, _ = alg.split_constant(above)
    return (-low, -c), others, shift + low


def _relu_term(alg: Algebra, p: Poly, sign: int) -> tuple[Poly | None, Poly]:
    """(body, the rest) of a term sign * relu(body), or (None, p)."""
    for (flag, mono), c in p.items():
        plain = flag == TRUE and len(mono) == 1 and mono[0][1] == 1
        if plain and alg.kind(mono[0][0]) == "relu" and c * sign > 0:
            body = alg.scale(alg.thaw(alg.defs[mono[0][0]][1]), abs(c))
            return body, {t: v for t, v in p.items() if t != (flag, mono)}
    return None, p


def _names(alg: Algebra, atom: int) -> set[Any]:
    return {alg.defs[a][1] for a in alg.leaves(atom)}


def _factors(alg: Algebra, atom: int, args: Any, shared: set[Any]):
    """(x, w, contracted indices): factors that follow the rows, and the others."""
    k, flag, mono = alg.open_sum(atom)
    leaves = [f for f in mono if alg.kind(f[0]) == "leaf"]
    if flag != TRUE or len(leaves) != len(mono) or len(mono) != 2:
        raise Refused("factors", "a contraction of more than two values", score=0.3)
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
    return (mono[1 - w],), (mono[w],), tuple(sorted(k))


def _gate_details(alg: Algebra, act: Poly, gate: int):
    """(bias, clip bounds) of the gate branch."""
    both = _clipped_gate(alg, act, gate)
    if both is not None:
        return both
    for atom in _every(alg, act):
        if alg.kind(atom) == "relu":
            body = alg.thaw(alg.defs[atom][1])
            c, rest = alg.split_constant(body)
            if c and _has(rest, gate):  # relu(g + b - h): capped at h
                bias = {t: v for t, v in rest.items() if t != (TRUE, ((gate, 1),))}
                return bias, (None, -c)
    bias: Poly = {}
    exps = [
        a
        for a in _every(alg, act)
        if alg.kind(a) == "exp" and not alg.leaves(gate) & alg.leaves(a)
    ]
    for a in exps:
        bias = alg.add(bias, {(TRUE, alg.defs[a][1]): 1.0})
    for atom in _every(alg, act):
        if alg.kind(atom) in ("fn", "relu"):
            for part in alg.defs[atom][1:]:
                if isinstance(part, tuple):
                    p = alg.thaw(part)
                    if _has(p, gate) and len(p) > 1:
                        c = p[TRUE, ((gate, 1),)]
                        rest = {
                            t: v / c for t, v in p.items() if t != (TRUE, ((gate, 1),))
                        }
                        return rest, (None, None)
    return _linear_bias(alg, act, gate, bias), (None, None)


def _clipped_gate(alg: Algebra, act: Poly, gate: int):
    """(bias, clip bounds) of a gate min(max(g + b, lo), hi); None if it is not that.

    Its form is lo + relu(g + b - lo) - relu(relu(g + b - lo) + lo - hi).
    """
    relus = [a for a in _every(alg, act) if alg.kind(a) == "relu"]
    bodies = {a: alg.split_constant(alg.thaw(alg.defs[a][1])) for a in relus}
    for c, outer in bodies.values():
        (inner, *more) = [a for a in relus if (TRUE, ((a, 1),)) in outer] or [None]
        if inner is None or more or len(outer) != 1 or not _has(bodies[inner][1], gate):
            continue
        k = outer[TRUE, ((inner, 1),)]
        below, body = bodies[inner]
        bias = {t: x for t, x in body.items() if t != (TRUE, ((gate, 1),))}
        if k == 1 and body[TRUE, ((gate, 1),)] == 1:
            return bias, (-below, -below - c)
    return None


def _gate_form(alg: Algebra, gate: int, bias: Poly, clip: Any) -> Poly:
    """What the activation is of."""
    low, high = clip
    g = alg.add(alg.of_atom(gate), bias)
    if low is not None:
        bound = alg.const(low)
        g = alg.add(bound, alg.relu(alg.add(g, bound, -1.0)))
    if high is not None:
        g = alg.add(g, alg.relu(alg.add(g, alg.const(high), -1.0)), -1.0)
    return g


def _linear_bias(alg, act, gate, bias):
    """The bias of an activation whose exponent holds powers of the sum (tanh gelu)."""
    linear = {
        t: c
        for t, c in bias.items()
        if len(t[1]) == 1 and t[1][0][1] == 1 and alg.kind(t[1][0][0]) == "leaf"
    }
    return linear


def _has(p: Poly, gate: int) -> bool:
    return (TRUE, ((gate, 1),)) in p


def _every(alg: Algebra, p: Poly) -> list[int]:
    out: dict[int, None] = {}

    def visit(atom: int) -> None:
        if atom in out:
            return
        out.setdefault(atom)
        if alg.kind(atom) != "sum":
            for inner in alg.children(atom):
                visit(inner)

    for flag, mono in p:
        for a in (*(a for a, _ in mono), *alg.bools[flag][0]):
            visit(a)
    return list(out)


def _activation(alg: Algebra, act: Poly, gate: int, g: Poly) -> tuple[str, float]:
    """The activation whose form is that of the gate branch."""

    def gelu_tanh() -> Poly:
        cube = alg.scale(alg.mul(g, alg.mul(g, g)), 0.044715)
        inner = alg.scale(alg.add(g, cube), (2 / np.pi) ** 0.5)
        return alg.scale(alg.mul(g, alg.add(alg.const(1), tanh(alg, inner))), 0.5)

    def gelu_erf() -> Poly:
        inner = alg.odd("erf", alg.scale(g, 0.5**0.5))
        return alg.scale(alg.mul(g, alg.add(alg.const(1), inner)), 0.5)

    candidates = {
        "silu": lambda: alg.mul(g, sigmoid(alg, g)),
        "sigmoid": lambda: sigmoid(alg, g),
        "gelu_tanh": gelu_tanh,
        "gelu_erf": gelu_erf,
        "relu": lambda: alg.relu(g),
        "relu2": lambda: alg.power(alg.relu(g), 2),
        "tanh": lambda: tanh(alg, g),
        "gelu_quick": lambda: alg.mul(g, sigmoid(alg, alg.scale(g, 1.702))),
    }
    for name, form in candidates.items():
        try:
            if not alg.add(act, form(), -1.0):
                return name, 1.0
        except OverBudget:
            continue
    for beta in _betas(alg, act, gate):
        swish = alg.mul(g, sigmoid(alg, alg.scale(g, beta)))
        if not alg.add(act, swish, -1.0):
            return "swish", beta
    raise Refused(
        "activation",
        "the activation is none of those known",
        score=0.5,
        difference=alg.show(act),
    )


def _betas(alg: Algebra, act: Poly, gate: int) -> list[float]:
    out = []
    for atom in _every(alg, act):
        if alg.kind(atom) == "pow":
            for (_, mono), _ in alg.defs[atom][1]:
                out += [abs(float(e)) for a, e in mono if alg.kind(a) == "exp"]
    return list(dict.fromkeys(out))


STEPS = (
    Step(frozenset({"dot_general"}), through=LINEAR),
    Step(ANCHORS),
    Step(frozenset({"mul"}), joins=LINEAR - POWERS),
)
PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS)
