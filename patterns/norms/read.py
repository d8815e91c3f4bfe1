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
from typing import Any

from rewriter.algebra.normal_form import Algebra, OverBudget, Poly
from rewriter.find.finder import Finder
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import (
    Reading,
    Refused,
    flat_indices,
    leaves_of,
    operand,
    unproved,
)
from rewriter.find.sieve import Step
from rewriter.patterns.norms.affine import affine, scale_and_bias
from rewriter.patterns.norms.form import CENTRED, Form, form_of
from rewriter.patterns.norms.group import read_group
from rewriter.patterns.norms.normalized_value import (
    BOUNDED,
    REDUCE,
    Source,
    masked,
    results_below,
    sources,
)
from rewriter.patterns.norms.reading import Applied, reading_of
from rewriter.patterns.norms.results import is_scaled_later, under_layout
from rewriter.program.graph import Node
from rewriter.program.lines import is_of_gradient

ANCHORS = frozenset({"rsqrt", "sqrt", "pow"})


def propose_layer_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions below a root as a layer norm."""
    yield from _propose(find, anchor, "layer_norm")


def propose_rms_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions below a root as an RMS norm."""
    yield from _propose(find, anchor, "rms_norm")


def propose_group_norm(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions below a root as a group norm."""
    yield from _propose(find, anchor, "group_norm")


def _propose(find: Finder, anchor: Node, op: str) -> Iterator[Reading]:
    if anchor.prim == "pow":
        e = find.graph.scalar(anchor.ins[1])
        if e is None or abs(e) != 0.5:
            return
    if find.known_empty(op, anchor):
        return
    key = ("norm", anchor.outs[0])
    if key not in find.cache:
        find.cache[key] = sources(find, anchor)
    found, miss = find.cache[key]
    layer = any(s.centred for s in found)
    for source in _narrow_first(find, found) if op == "group_norm" else found:
        if source.centred != layer:
            continue  # the norm of a centred value is a layer norm
        if layer != CENTRED[op]:
            return
        readings, refusal = _readings(find, anchor, op, source)
        if readings is None:
            return
        if readings:
            if op == "group_norm":
                _forget_groups(find, anchor)
            yield from readings
            return
        if refusal is not None and (miss is None or refusal.score > miss.score):
            miss = refusal
    if op == "group_norm" and not found:
        miss = masked(find, anchor) or miss
    if miss is not None:
        _note(find, anchor, op, miss)


def _narrow_first(find: Finder, found: list[Source]) -> list[Source]:
    """Sources, with an array in front of what is only laid out and cast from it.

    A kernel then reads the array, and not one of more bytes.
    """
    by_value = {s.x: s for s in found}
    chosen: list[Source] = []
    for source in found:
        value = under_layout(find, source.x)
        narrow = find.graph.dtype(value).itemsize < find.graph.dtype(source.x).itemsize
        if narrow and value in by_value:
            chosen.append(by_value[value])
        chosen.append(source)
    return list(dict.fromkeys(chosen))


def _forget_groups(find: Finder, anchor: Node) -> None:
    """Forgets that a root is no layer norm's because it may be a group norm's."""
    _, refusal = find.misses.get(("layer_norm", anchor.outs[0]), (None, None))
    if refusal is not None and refusal.code in ("group", "unscaled", "axes"):
        del find.misses["layer_norm", anchor.outs[0]]


def _note(find: Finder, anchor: Node, op: str, miss: Refused) -> None:
    """Notes why a root is not an op's, unless that is another op's to say."""
    if op == "group_norm":
        if miss.code in OF_GROUPS:
            _forget_groups(find, anchor)
            find.missed(op, anchor, miss)
    elif miss.code not in {*BOUNDED.values()} - {BOUNDED[op]}:
        find.missed(op, anchor, miss)


def _readings(
    find: Finder, anchor: Node, op: str, source: Source
) -> tuple[list[Reading] | None, Refused | None]:
    """Readings of the results below a root, largest first; None to leave it."""
    results = results_below(find, anchor, source.x)
    if not results or any(find.done(o, v) for v in results for o in FIRST[op]):
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
    reader = read_group if op == "group_norm" else read
    for outside in (False, True):
        for value in results if not readings else ():
            try:
                readings.append(reader(find, ev, op, value, source, outside))
            except Refused as refusal:
                node = find.graph.node_of(value)
                if node is None or not is_of_gradient(node):
                    refusals.append(refusal.with_traceback(None))
            except OverBudget as error:
                refusals.append(unproved(error, 0.3))
    group = next((r for r in reversed(refusals) if r.code == "group"), None)
    if group is not None and not any("scale" in r.operands for r in readings):
        weight_norm = op == "rms_norm" and find.graph.node_of(source.x) is None
        return [], None if weight_norm else group
    bare = [r for r in readings if "bare_l2" in r.params]
    readings = [r for r in readings if "bare_l2" not in r.params]
    if bare:
        # With another number it is still a norm: a query may be scaled as well.
        readings = [r for r in readings if not _times_a_number(r)]
    if bare and not readings:
        text = "an L2 norm: the sum of squares is not divided by their number"
        return [], Refused("l2", text, score=0.5)
    if op == "layer_norm" and _is_in_group_norm(find, anchor, source, readings):
        return [], None
    # the largest covers those inside it
    nearest = max(refusals, key=lambda refusal: refusal.score, default=None)
    if nearest is not None and _is_of_all(find, anchor, source.x):
        nearest = None
    return _useful(find, readings)[::-1], nearest


FIRST = {
    "rms_norm": ("rms_norm",),
    "layer_norm": ("layer_norm",),
    "group_norm": ("group_norm", "layer_norm"),
}
"""By op, those that leave nothing for it at a root where they are found."""


def _is_in_group_norm(
    find: Finder, anchor: Node, source: Source, readings: list[Reading]
) -> bool:
    """Whether layer norms without a scale are a group norm, or parts of one.

    They are parts if a scale for each channel follows. They are one if the rows do not
    lie in memory as rows: the channels, which are not normalised, stand behind.
    """
    if not readings or any(_arrays(r) - {"x"} or r.times for r in readings):
        return False
    last = max(r.value for r in readings)
    turned = any(_is_transposed(r) for r in readings)
    if not turned and not is_scaled_later(find, last):
        return False
    others, _ = _readings(find, anchor, "group_norm", source)
    return any(r.value > last or turned for r in others or ())


def _is_transposed(reading: Reading) -> bool:
    """Whether the axes of x are in another order than in the program's array."""
    alg = reading.algebra
    ((x, groups),) = reading.operands["x"].parts
    (leaf,) = alg.poly_leaves(x)
    at = [i for a in alg.defs[leaf][2] for i in flat_indices(a)]
    return at != [i for group in groups for i in group]


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
    alg, args = find.algebra, ev.indices(value)
    form = form_of(alg, ev.poly(value, args), op, source.x)
    scale, bias = affine(find, form, outside)
    _require_epsilon(form, scale)
    later = Applied()
    if outside:
        later, scale, bias = Applied(scale, bias or None), alg.const(1), {}
    d = form.normalised
    rest = tuple((i,) for a in form.at if a is not None and (i := _plain(a)) not in d)
    groups = (*rest, d)
    bare = op == "rms_norm" and _divides_by_length(alg, scale, form.count)
    operands = {"x": operand(alg.of_atom(alg.atom("leaf", form.x, form.at)), *groups)}
    operands |= scale_and_bias(alg, op, d, scale, bias)
    _require_whole_scale(find, value, form, scale)
    find.require_proved(ev)
    return reading_of(
        find,
        ev,
        op,
        value,
        args,
        form,
        source,
        groups,
        operands,
        later,
        params={"bare_l2": True} if bare else {},  # refused by the caller
        unequal=UNEQUAL[op] if _centred(alg, form) != source.centred else "",
        may_be_inside=bool(rest),  # one row: its scale's gradient is such a product
    )


UNEQUAL = {
    "layer_norm": "x is divided by its deviation, but its mean is not subtracted",
    "rms_norm": "x minus its mean is divided by the root of the mean of x², and not "
    "by its own deviation",
}
"""What is told if a mean is subtracted from x, or under the root, and not from both."""


def _centred(alg: Algebra, form: Form) -> bool:
    """Whether a term of the result is a sum of x: its mean."""
    sums = (a for _, m in form.poly for a, e in m if e == 1 and alg.kind(a) == "sum")
    bodies = (alg.defs[a][3] for a in sums)
    return any(
        len(body) == 1 and body[0][1] == 1
        and alg.kind(body[0][0]) == "leaf" and alg.defs[body[0][0]][1] == form.x
        for body in bodies
    )  # fmt: skip


def _is_of_all(find: Finder, anchor: Node, x: int) -> bool:
    """Whether a root is of a whole array, whose length is meant, as in clipping."""
    one = math.prod(find.graph.shape(anchor.outs[0])) == 1
    return one and len(find.graph.shape(x)) > 1


def _require_epsilon(form: Form, scale: Poly) -> None:
    """Refuses an L2 norm, which divides by the length and not by the mean's root."""
    lengths = (abs(c) * math.sqrt(form.count) for c in scale.values())
    bare = not form.constant and not form.extra
    if bare and any(abs(x - 1) < 1e-3 for x in lengths):
        raise Refused("eps", "no epsilon inside the root: an L2 norm", score=0.4)


def _divides_by_length(alg: Algebra, scale: Poly, n: int) -> bool:
    """Whether a scale makes the norm of several numbers an L2 norm."""
    c = alg.as_constant(scale)
    return c is not None and n > 1 and abs(c * math.sqrt(n) - 1) < 1e-3


def _require_whole_scale(find: Finder, value: int, form: Form, scale: Poly) -> None:
    """Refuses several normalised axes that are not scaled together."""
    alg = find.algebra
    c = alg.as_constant(scale)
    if len(form.axes) < 2:
        return
    if c is None and set(form.normalised) - alg.ids(scale):
        raise Refused(
            "group", "the scale varies along some of the normalised axes only: "
            "a group norm", score=0.6,
        )  # fmt: skip
    if c is not None and is_scaled_later(find, value):
        raise Refused(
            "unscaled",
            "several axes are normalised and scaled otherwise: "
            "a group, instance or batch norm",
            score=0.6,
        )


def _plain(a: Any) -> Any:
    if isinstance(a, int):
        return a
    text = "an axis of x is a part of another axis, after a reshape"
    raise Refused("axes", text, score=0.4)


OF_GROUPS = frozenset({"group", "masked"})
"""Codes of refusals that are of group norms, and not of layer norms."""

STEPS = (Step(REDUCE), Step(ANCHORS))
PATTERN = ReaderPattern("layer_norm", ANCHORS, propose_layer_norm, STEPS)
GROUP_NORM = ReaderPattern("group_norm", ANCHORS, propose_group_norm, STEPS)
RMS_NORM = ReaderPattern(
    "rms_norm", ANCHORS, propose_rms_norm, STEPS, above=frozenset({"sub"})
)
"""The RMS norm of x minus its mean is a layer norm, though all else is the same."""
