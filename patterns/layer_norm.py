"""Layer norm and RMS norm: x over the root of its mean square, in any spelling.

Formula    layer: (x - mean x) / sqrt(var x + eps) * scale + bias
           rms:   x / sqrt(mean x² + eps) * scale
Looks like a root of a sum of squares, and products with x below it. Any way of
           writing the variance has the form Σx² - (Σx)² / N.
Must hold  one axis is normalised (or several, with a scale over all of them),
           scale and bias vary along the normalised axes only, and there is an
           epsilon inside the root: without one it is an L2 norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from rewriter.canonicalize import is_local
from rewriter.finder import Finder
from rewriter.graph import Node
from rewriter.match import ReaderPattern
from rewriter.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.reading import Operand, Reading, Refused, operand

ANCHORS = frozenset({"rsqrt", "sqrt", "pow"})
REDUCE = frozenset({"reduce_sum", "dot_general"})
HALF = Fraction(-1, 2)
SQUARES = frozenset({"square", "integer_pow", "pow", "abs"})
THROUGH = frozenset({
    "convert_element_type", "copy", "name", "broadcast_in_dim", "reshape", "squeeze",
    "sharding_constraint", "optimization_barrier", "stop_gradient",
})  # fmt: skip
DOWN = frozenset({
    "mul", "div", "sub", "add", "neg", "convert_element_type", "broadcast_in_dim",
    "reshape", "transpose", "squeeze", "expand_dims", "copy", "name", "integer_pow",
    "sharding_constraint", "dot_general", "max", "pow", "square",
    "optimization_barrier", "select_n", "sqrt",
})  # fmt: skip


def propose_layer_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings as a layer norm of the regions below a root."""
    yield from _propose(find, anchor, "layer_norm")


def propose_rms_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings as an RMS norm of the regions below a root."""
    yield from _propose(find, anchor, "rms_norm")


def _propose(find: Finder, anchor: Node, op: str) -> Iterator[Reading]:
    if anchor.prim == "pow":
        e = find.graph.scalar(anchor.ins[1])
        if e is None or abs(abs(e) - 0.5) > 1e-6:
            return
    key = ("norm", anchor.outs[0])
    if key not in find.cache:
        found = _source(find, anchor)
        place = find.regions.place(anchor.scope)
        results = [
            v
            for v in (_results(find, anchor, found[0]) if found else ())
            if find.regions.place(find.graph.node_of(v).scope) is place
        ]
        find.cache[key] = found, results
    found, results = find.cache[key]
    if found is None or find.barren(op, anchor):
        return
    x, inside = found
    if not results or any(find.done(op, v) for v in results):
        return
    sides = frozenset((v, k) for v in inside for k in (0, 1))
    ev = find.evaluator(results[-1], inside=inside, full_sides=sides, names={x: x})
    readings: list[Reading] = []
    first: Refused | None = None
    group: Refused | None = None
    for value, outside in [
        *((v, False) for v in results),
        *((v, True) for v in results),
    ]:
        if outside and readings:
            break
        try:
            readings.append(read(find, ev, op, value, x, outside))
        except Refused as refusal:
            refusal = refusal.with_traceback(None)
            group = refusal if refusal.code == "group" else group
            first = first or refusal
        except OverBudget as error:
            first = first or Refused("budget", str(error), score=0.3)
    if group is not None and not any("scale" in r.operands for r in readings):
        find.missed(op, anchor, group)
        return
    if readings and readings[-1].params.get("bare_l2"):
        find.missed(
            op,
            anchor,
            Refused(
                "l2",
                "an L2 norm: the sum of squares is not divided by their number",
                score=0.5,
            ),
        )
        return
    yield from reversed(_useful(find, readings))  # the largest covers those inside it
    if not readings and first is not None:
        find.missed(op, anchor, first)


def _useful(find: Finder, readings: list[Reading]) -> list[Reading]:
    """Without multiples of a result that is read elsewhere too, as by a gelu."""
    shared = [r for r in readings if len(find.graph.users(r.value)) > 1]
    return [
        r
        for r in readings
        if not any(
            r is not inner
            and r.operands.keys() == inner.operands.keys()
            and find.regions.depends(r.value, inner.value)
            for inner in shared
        )
    ]


# ------------------------------------------------------------------ walks
def _source(find: Finder, anchor: Node) -> tuple[int, frozenset[int]] | None:
    """The normalised value, and contractions that only sum squares of it."""
    g = find.graph
    usable = find.regions.usable(find.regions.place(anchor.scope))
    reduces = find.regions.above(anchor.ins[0], REDUCE)
    xs: dict[int, None] = {}
    inside: set[int] = set()
    for node in reduces:
        if node.prim == "reduce_sum":
            xs.setdefault(_unsquared(find, node.ins[0], usable))
            continue
        contracted = bool(node.params["dimension_numbers"][0][0])
        number = [find.number(i) for i in node.ins]
        known = any(n is not None for n in number)
        a, b = (_unsquared(find, i, usable, square=known) for i in node.ins)
        if a == b or any(n is not None for n in number):
            xs.setdefault(b if number[0] is not None else a)
            inside.add(node.outs[0])
        elif not contracted:
            inside.add(node.outs[0])
    candidates = [x for x in xs if x is not None]
    if not candidates or len(candidates) > 3:
        return None
    if len(candidates) > 1:  # keep the value that the others are computed from
        roots = [
            x
            for x in candidates
            if all(y == x or find.regions.depends(y, x) for y in candidates)
        ]
        if len(roots) != 1:
            return None
        candidates = roots
    x = candidates[0]
    if x in g.constants or not g.shape(x):
        return None
    return _narrowest(find, x), frozenset(inside)


def _unsquared(
    find: Finder, value: int, usable: Callable[[int], bool], square: bool = True
) -> int | None:
    """The value whose square (or centred square) a sum runs over."""
    for _ in range(12):
        below = _unsquared_once(find, value, usable, square)
        if below == value or not usable(below):
            return value
        value = below
    return value


def _unsquared_once(find: Finder, value: int, usable: Any, square: bool) -> int:
    node = find.graph.node_of(value)
    if node is None:
        return value
    first = node.ins[0] if node.ins else value
    if square and (
        node.prim in SQUARES or (node.prim == "mul" and node.ins[0] == node.ins[1])
    ):
        return first
    if node.prim == "mul" and any(find.number(i) is not None for i in node.ins):
        return node.ins[1 if find.number(first) is not None else 0]
    if node.prim == "div" and find.number(node.ins[1]) is not None:
        return first
    if node.prim == "mul" and square:
        a, b = (_unsquared(find, i, usable, False) for i in node.ins)
        return a if a == b else value
    if node.prim in THROUGH and node.prim != "reshape":
        return first
    if node.prim == "transpose" and square:  # of the squares; x keeps its layout
        inner = find.graph.node_of(first)
        if inner is not None and inner.prim in SQUARES | {"mul"}:
            return first
    if node.prim in ("sub", "add") and _is_mean_of(find, node.ins[1], first):
        return first
    return value


def _is_mean_of(find: Finder, mean: int, value: int) -> bool:
    """Whether a value is a reduction of another."""
    for node in find.regions.above(mean, REDUCE):
        inner = _narrowest(find, _skip(find, node.ins[0]))
        if _narrowest(find, _skip(find, value)) == inner:
            return True
        if node.prim == "dot_general" and _narrowest(find, _skip(find, value)) in (
            _narrowest(find, _skip(find, i)) for i in node.ins
        ):
            return True
    return False


def _skip(find: Finder, value: int) -> int:
    node = find.graph.node_of(value)
    while node is not None and (
        node.prim in ("convert_element_type", "copy", "name", "neg", "transpose")
        or (node.prim in ("mul", "div") and find.number(node.ins[1]) is not None)
    ):
        value = node.ins[0]
        node = find.graph.node_of(value)
    return value


def _narrowest(find: Finder, value: int) -> int:
    """The value under lossless casts."""
    return find.uncast(value)


def _results(find: Finder, anchor: Node, x: int) -> list[int]:
    """Values below the root with the size of x, in program order."""
    g = find.graph
    size = math.prod(g.shape(x))
    out = []
    seen, queue = {anchor.outs[0]}, [anchor.outs[0]]
    while queue and len(seen) < 60:
        for node in g.users(queue.pop(0)):
            if node.prim not in DOWN or not is_local(node):
                continue
            for result in node.outs:
                if result in seen:
                    continue
                seen.add(result)
                queue.append(result)
                if math.prod(g.shape(result)) == size and node.prim not in (
                    "broadcast_in_dim",
                    "reshape",
                    "transpose",
                    "squeeze",
                    "expand_dims",
                    "copy",
                    "name",
                    "sharding_constraint",
                    "sqrt",
                ):
                    out.append(result)
    return sorted(out)[:14]


# ------------------------------------------------------------------ reading
def read(
    find: Finder, ev: Any, op: str, value: int, x: int, outside: bool = False
) -> Reading:
    """The reading of one candidate result.

    With ``outside``, a scale and bias that vary along other axes too, as under
    `jax.vmap`, are applied to the op's result.

    Raises:
        Refused: If the form is not that of the op.
        OverBudget: If the form grows too large.
    """
    alg = find.algebra
    args = ev.indices(value)
    form = ev.poly(value, args)
    base = _root(alg, form, x)
    squares, mean, constant, extra = _base(alg, base, x)
    if (mean is None) == (op == "layer_norm"):
        raise Refused("kind", f"this is not a {op}", score=0.2)
    axes, at = _feature_axes(alg, form, base, squares, x)
    d = tuple(at[k] for k in axes)
    n = math.prod(alg.sizes[i] for i in d)
    alpha = squares[1]
    scale, bias = _affine(alg, form, base, x, at, d, n, alpha, outside)
    lengths = (abs(c) * math.sqrt(n) for c in scale.values())
    if not constant and not extra and any(abs(x - 1) < 1e-3 for x in lengths):
        raise Refused("eps", "no epsilon inside the root: an L2 norm", score=0.4)
    times: Poly | None = None
    plus: Poly | None = None
    if outside:
        times, plus, scale, bias = scale, bias or None, alg.const(1), {}
    rest = tuple((i,) for a in at if a is not None and (i := _plain(a)) not in d)
    groups = (*rest, d)
    operands: dict[str, Operand] = {
        "x": operand(alg.of_atom(alg.atom("leaf", x, at)), *groups)
    }
    params: dict[str, Any] = {"out_dtype": str(find.graph.dtype(value))}
    c = alg.as_constant(scale)
    if (
        op == "rms_norm"
        and c is not None
        and abs(c * math.sqrt(n) - 1) < 1e-3
        and n > 1
    ):
        params["bare_l2"] = True  # refused by the caller
    if c is None or abs(c - 1) > 1e-6:
        operands["scale"] = operand(scale, d)
    if bias and op == "rms_norm":
        raise Refused("bias", "an RMS norm has no bias", score=0.3)
    if bias:
        operands["bias"] = operand(bias, d)
    if len(axes) > 1 and c is None and set(d) - alg.ids(scale):
        raise Refused(
            "group", "the scale varies along some of the normalised axes only: "
            "a group norm", score=0.6,
        )  # fmt: skip
    if len(axes) > 1 and c is not None:
        raise Refused(
            "unscaled",
            "several axes are normalised without a scale over them: "
            "a group, instance or batch norm",
            score=0.6,
        )
    params["eps"] = constant / (alpha * n)
    if extra:
        operands["epsilon"] = operand(alg.scale(extra, 1 / (alpha * n)))
    return Reading(
        op,
        alg,
        ev.place,
        value,
        args,
        form,
        groups,
        operands,
        params,
        notes=tuple(sorted(ev.notes)),
        times=times,
        plus=plus,
    )


def _plain(a: Any) -> Any:
    if isinstance(a, int):
        return a
    raise Refused("axes", "an axis of x is a digit of another", score=0.4)


def _root(alg: Algebra, form: Poly, x: int) -> int:
    """The atom under the root that divides the result."""
    for kind in ("pow", "sum"):  # without epsilon the root may be over one sum
        for _, mono in form:
            for a, e in mono:
                if e == HALF and alg.kind(a) == kind:
                    return a
    raise Refused("root", "the result is not divided by a root", score=0.25)


def _base(alg: Algebra, base: int, x: int):
    """((sum of squares, its factor), mean term or None, constant, other terms)."""
    squares = mean = None
    constant, extra = 0.0, {}
    whole = alg.kind(base) == "sum"
    under = alg.of_atom(base) if whole else alg.thaw(alg.defs[base][1])
    for (flag, mono), c in under.items():
        if flag != TRUE:
            raise Refused("masked", "the statistics are masked", score=0.4)
        if not mono:
            constant = c
        elif len(mono) == 1 and alg.kind(mono[0][0]) == "sum" and mono[0][1] == 1:
            squares = (mono[0][0], c)
        elif len(mono) == 1 and alg.kind(mono[0][0]) == "sum" and mono[0][1] == 2:
            mean = (mono[0][0], c)
        elif not alg.term_ids(flag, mono):
            extra[flag, mono] = c
        else:
            raise Refused(
                "root",
                "something else is added under the root",
                score=0.4,
                difference=alg.show_atom(base),
            )
    if squares is None:
        raise Refused("root", "there is no sum of squares under the root", score=0.25)
    _, _, _, body = alg.defs[squares[0]]
    leaves = [(a, e) for a, e in body if alg.kind(a) == "leaf"]
    if squares[1] <= 0 or constant < 0:
        raise Refused("root", "a negative term under the root", score=0.3)
    if (
        len(body) != 1
        or not leaves
        or leaves[0][1] != 2
        or alg.defs[leaves[0][0]][1] != x
    ):
        raise Refused("root", "the sum under the root is not one of squares", score=0.3)
    return squares, mean, constant, extra


def _feature_axes(alg: Algebra, form: Poly, base: int, squares: Any, x: int):
    """Positions of the normalised axes of x, and x's arguments in the result."""
    _, bound, _, body = alg.defs[squares[0]]
    inner = alg.defs[body[0][0]][2]
    axes = [k for k, a in enumerate(inner) if alg.index_ids(a) & set(bound)]
    for _, mono in form:
        for a, e in mono:
            if alg.kind(a) == "leaf" and alg.defs[a][1] == x and e == 1:
                at = alg.defs[a][2]
                outer = all(at[k] == inner[k] for k in range(len(at)) if k not in axes)
                if outer and all(isinstance(at[k], int) for k in axes):
                    return axes, at
    raise Refused(
        "axes", "x does not appear in the result as under the root", score=0.4
    )


def _affine(alg, form, base, x, at, d, n, alpha, outside):
    """Scale and bias, read off the terms with and without the root."""
    scale: Poly = {}
    bias: Poly = {}
    leaf = alg.atom("leaf", x, at)
    factor = 1 / (math.sqrt(n) * math.sqrt(alpha))
    for (flag, mono), c in form.items():
        powers = dict(mono)
        if powers.get(base) != HALF:
            bias[flag, mono] = c
        elif powers.get(leaf) == 1:
            rest = tuple(f for f in mono if f[0] not in (base, leaf))
            scale = alg.add(scale, {(flag, rest): c * factor})
    for name, p in (("scale", scale), ("bias", bias)) if not outside else ():
        _along(alg, name, p, set(d))
    if outside and (len(scale) != 1 or len(bias) > 1 or not alg.ids(scale) & set(d)):
        raise Refused("scale", "the scale varies along other axes too", score=0.4)
    return scale, bias


def _along(alg: Algebra, name: str, p: Poly, d: set[int]) -> None:
    """Checks that scale or bias varies along the normalised axes only."""
    ids = alg.ids(p)
    joined = any(
        alg.index_ids(a) & d and alg.index_ids(a) - d
        for atom in alg.poly_leaves(p)
        for a in alg.defs[atom][2]
    )
    of_digits = not ids - d and any(
        isinstance(a, tuple) and a[0] in ("div", "mod")
        for atom in alg.poly_leaves(p)
        for a in alg.defs[atom][2]
    )
    if (
        joined
        or of_digits
        or (ids and not ids & d and name == "scale" and _is_parameter(alg, p))
    ):
        raise Refused(
            "group",
            f"the {name} does not vary with the normalised axis: a "
            "group, instance or batch norm",
            score=0.6,
        )
    if ids - d:
        raise Refused(name, f"the {name} varies along other axes too", score=0.4)


def _is_parameter(alg: Algebra, p: Poly) -> bool:
    """A single leaf with one varying axis, such as a scale per channel."""
    leaves = alg.poly_leaves(p)
    return len(leaves) == 1 and all(
        sum(a is not None for a in alg.defs[x][2]) == 1 for x in leaves
    )


PATTERN = ReaderPattern("layer_norm", ANCHORS, propose_layer_norm)
