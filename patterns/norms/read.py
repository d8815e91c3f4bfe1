"""Layer norm and RMS norm: x over the root of its mean square, in any spelling.

Formula    layer: (x - mean x) / sqrt(var x + eps) * scale + bias
           rms:   x / sqrt(mean x² + eps) * scale
Looks like a root of a sum of squares, and products with x below it. Any way of
           writing the variance has the form Σx² - (Σx)² / N.
Must hold  one axis is normalised (or several, with a scale over all of them or none).
           Scale and bias vary along the normalised axes only. There is an epsilon
           inside the root: without one it is an L2 norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from rewriter.algebra.canonicalize import LAYOUT_PRIMITIVES, TRANSPARENT
from rewriter.algebra.normal_form import TRUE, Algebra, OverBudget, Poly
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Operand,
    Reading,
    Refused,
    leaves_of,
    operand,
    values_named,
)
from rewriter.find.sieve import Step
from rewriter.patterns.norms.normalized_value import (
    BOUNDED,
    REDUCE,
    Source,
    results_below,
    sources,
    statistics,
)
from rewriter.program.graph import Graph, Node

ANCHORS = frozenset({"rsqrt", "sqrt", "pow"})
HALF = Fraction(-1, 2)
MOVED = LAYOUT_PRIMITIVES | TRANSPARENT | {"convert_element_type"}


def propose_layer_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions below a root as a layer norm."""
    yield from _propose(find, anchor, "layer_norm")


def propose_rms_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions below a root as an RMS norm."""
    yield from _propose(find, anchor, "rms_norm")


def _propose(find: Finder, anchor: Node, op: str) -> Iterator[Reading]:
    if anchor.prim == "pow":
        e = find.graph.scalar(anchor.ins[1])
        if e is None or abs(abs(e) - 0.5) > 1e-6:
            return
    if find.known_empty(op, anchor):
        return
    key = ("norm", anchor.outs[0])
    if key not in find.cache:
        find.cache[key] = sources(find, anchor)
    found, miss = find.cache[key]
    layer = any(s.centred for s in found)
    for source in found:
        if source.centred != layer:
            continue  # the norm of a centred value is a layer norm
        if layer != (op == "layer_norm"):
            return
        readings, refusal = _readings(find, anchor, op, source)
        if readings is None:
            return
        if readings:
            yield from readings
            return
        miss = miss or refusal
    if miss is not None and miss.code not in {*BOUNDED.values()} - {BOUNDED[op]}:
        find.missed(op, anchor, miss)


def _readings(
    find: Finder, anchor: Node, op: str, source: Source
) -> tuple[list[Reading] | None, Refused | None]:
    """Readings of the results below a root, largest first; None to leave it."""
    results = results_below(find, anchor, source.x)
    if not results or any(find.done(op, v) for v in results):
        return None, None
    sides = frozenset((v, k) for v in source.inside for k in (0, 1))
    names = {source.x: source.x}
    ev = find.evaluator(
        results[-1],
        inside=source.inside,
        full_sides=sides,
        names=names,
        roots=(source.x,),
    )
    readings: list[Reading] = []
    refusals: list[Refused] = []
    for outside in (False, True):
        for value in results if not readings else ():
            try:
                readings.append(read(find, ev, op, value, source, outside))
            except Refused as refusal:
                refusals.append(refusal.with_traceback(None))
            except OverBudget as error:
                refusals.append(Refused("budget", str(error), score=0.3))
    group = next((r for r in reversed(refusals) if r.code == "group"), None)
    if group is not None and not any("scale" in r.operands for r in readings):
        return [], group
    bare = [r for r in readings if "bare_l2" in r.params]
    readings = [r for r in readings if "bare_l2" not in r.params]
    if bare:
        # With another number it is still a norm: a query may be scaled as well.
        readings = [r for r in readings if not _times_a_number(r)]
    if bare and not readings:
        text = "an L2 norm: the sum of squares is not divided by their number"
        return [], Refused("l2", text, score=0.5)
    # the largest covers those inside it
    nearest = max(refusals, key=lambda refusal: refusal.score, default=None)
    return _useful(find, readings)[::-1], nearest


def _useful(find: Finder, readings: list[Reading]) -> list[Reading]:
    """Drops multiples of a result that is read elsewhere too.

    A gelu of the result makes such multiples. So does a loss of the result alone: the
    cotangent is a multiple.
    """
    shared = [r for r in readings if len(find.graph.users(r.value)) > 1]
    return [
        r
        for r in readings
        if not any(
            r is not inner
            and _arrays(r) == _arrays(inner)
            and find.regions.depends(r.value, inner.value)
            for inner in shared
        )
        and not _is_made_of_another(find, r, readings)
    ]


def _is_made_of_another(find: Finder, reading: Reading, all_: list[Reading]) -> bool:
    """Whether a scale or bias is computed from another result of the same root.

    The gradient of one row's scale is such a case: a norm times the cotangent.
    """
    values = [r.value for r in all_ if r is not reading]
    return any(
        leaf > value and find.regions.depends(leaf, value)
        for leaf in leaves_of(reading)
        for value in values
    )


def _times_a_number(reading: Reading) -> bool:
    """Whether the scale of a reading is a number other than 1."""
    return "scale" in reading.operands and "scale" not in _arrays(reading)


def _arrays(reading: Reading) -> set[str]:
    """The operands of a reading that are arrays, not numbers."""
    return {
        name
        for name, operand in reading.operands.items()
        if any(reading.algebra.as_constant(p) is None for p, _ in operand.parts)
    }


# ------------------------------------------------------------------ reading
def read(
    find: Finder, ev: Any, op: str, value: int, source: Source, outside: bool = False
) -> Reading:
    """The reading of one candidate result.

    With ``outside``, a scale and bias that vary along other axes too, as under
    `jax.vmap`, are applied to the op's result.

    Raises:
        Refused: If the form is not the op's.
        OverBudget: If the form grows too large.
    """
    alg, x = find.algebra, source.x
    args = ev.indices(value)
    form = ev.poly(value, args)
    base = _root(alg, form, x)
    whole = alg.kind(base) == "sum"
    under = alg.of_atom(base) if whole else alg.thaw(alg.defs[base][1])
    squares, mean, constant, extra = statistics(alg, under, x)
    if (mean is None) == (op == "layer_norm"):
        raise Refused("kind", f"this is not a {op}", score=0.2)
    axes, at = _feature_axes(alg, form, base, squares, x)
    d = tuple(at[k] for k in axes)
    n = math.prod(alg.sizes[i] for i in d)
    if not isinstance(n, int):
        raise Refused("symbolic", f"a norm over a symbolic width, {n}", score=0.5)
    alpha = squares[1]
    scale, bias = _affine(find, form, base, x, at, d, n, alpha, outside)
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
    if len(axes) > 1 and c is not None and _is_scaled_later(find, value):
        raise Refused(
            "unscaled",
            "several axes are normalised and scaled otherwise: "
            "a group, instance or batch norm",
            score=0.6,
        )
    find.require_proved(ev)
    params["eps"] = constant / (alpha * n)
    if source.of_squares:
        params["of_squares"] = True
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
        may_be_inside=bool(rest),  # one row: its scale's gradient is such a product
    )


def _is_scaled_later(find: Finder, value: int) -> bool:
    """Whether a result is multiplied by an array, such as its own scale."""
    same = [value, *find.regions.chain(value, lambda n: n.prim in MOVED)]
    factors = [
        i for v in same for n in find.graph.users(v) if n.prim == "mul" for i in n.ins
    ]
    return any(i not in same and find.number(i) is None for i in factors)


def _plain(a: Any) -> Any:
    if isinstance(a, int):
        return a
    raise Refused("axes", "an axis of x is a digit of another", score=0.4)


def _root(alg: Algebra, form: Poly, x: int) -> int:
    """The atom whose root divides the result."""
    for kind in ("pow", "sum"):  # one sum, if there is no epsilon under the root
        for _, mono in form:
            for a, e in mono:
                if e == HALF and alg.kind(a) == kind:
                    return a
    if any(_is_root_and_more(alg, a) for _, mono in form for a, e in mono if e == -1):
        raise Refused(
            "eps",
            "something is added to the root, and not inside it: another function",
            score=0.5,
            suggestion="x / sqrt(mean(x²) + eps) is found, x / (sqrt(mean(x²)) + eps) "
            "is not",
        )
    raise Refused("root", "the result is not divided by a root", score=0.25)


def _is_root_and_more(alg: Algebra, atom: int) -> bool:
    """Whether an atom is a sum with a root as a term."""
    if alg.kind(atom) != "pow":
        return False
    terms = alg.thaw(alg.defs[atom][1])
    return len(terms) > 1 and any(
        len(mono) == 1
        and mono[0][1] == -HALF
        and alg.kind(mono[0][0]) in ("pow", "sum")
        for _, mono in terms
    )


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


def _affine(find, form, base, x, at, d, n, alpha, outside):
    """Reads scale and bias off the terms with and without the root."""
    alg = find.algebra
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
    for name, p in (("scale", scale), ("bias", bias)):
        _require_one_array(alg, name, p)
        if not outside:
            _along(find, name, p, set(d))
    if outside and (len(scale) != 1 or len(bias) > 1 or not alg.ids(scale) & set(d)):
        raise Refused("scale", "the scale varies along other axes too", score=0.4)
    chosen = any(flag != TRUE for flag, _ in scale)
    own = {alg.defs[a][1] for p in (scale, bias) for a in alg.poly_leaves(p)}
    if outside and (chosen or x in own):  # what is not finite stays so, times 0
        raise Refused(
            "scale",
            "a condition selects the result, and no scale multiplies it",
            score=0.4,
        )
    return scale, bias


def _require_one_array(alg: Algebra, name: str, p: Poly) -> None:
    """Refuses products of arrays that the program does not compute.

    It multiplies the result by one after the other, which may be a number where their
    product overflows.
    """
    for _, mono in p:
        if sum(abs(e) for a, e in mono if alg.kind(a) == "leaf") > 1:
            raise Refused(
                name,
                f"the {name} would be a product of arrays, which may overflow",
                difference=alg.show({(TRUE, mono): 1.0}),
                score=0.4,
            )


def _along(find: Finder, name: str, p: Poly, d: set[int]) -> None:
    """Checks that scale or bias varies along the normalised axes only."""
    alg = find.algebra
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
        or (ids and not ids & d and name == "scale" and _is_parameter(find, p))
    ):
        raise Refused(
            "group",
            f"the {name} does not vary with the normalised axis: a "
            "group, instance or batch norm",
            score=0.6,
        )
    if ids - d:
        raise Refused(name, f"the {name} varies along other axes too", score=0.4)


def _is_parameter(find: Finder, p: Poly) -> bool:
    """A single leaf with one varying axis, such as a scale per channel.

    A value computed from positions alone, such as a ramp, is no parameter.
    """
    alg = find.algebra
    leaves = alg.poly_leaves(p)
    return len(leaves) == 1 and all(
        sum(a is not None for a in alg.defs[x][2]) == 1
        and not all(_of_integers(find.graph, v) for v in values_named(alg.defs[x][1]))
        for x in leaves
    )


def _of_integers(graph: Graph, value: int) -> bool:
    """Whether a value is computed from integers and numbers alone."""
    seen, queue = {value}, [value]
    while queue:
        value = queue.pop()
        node = graph.node_of(value)
        if node is not None:
            queue += {*node.ins} - seen
            seen.update(node.ins)
        elif graph.scalar(value) is None and (
            value in graph.constants
            or not jnp.issubdtype(graph.dtype(value), jnp.integer)
        ):
            return False
    return True


STEPS = (Step(REDUCE), Step(ANCHORS))
PATTERN = ReaderPattern("layer_norm", ANCHORS, propose_layer_norm, STEPS)
RMS_NORM = ReaderPattern(
    "rms_norm", ANCHORS, propose_rms_norm, STEPS, above=frozenset({"sub"})
)
"""The RMS norm of x minus its mean is a layer norm, though all else is the same."""
