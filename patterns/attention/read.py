"""Attention: softmax(scale q kᵀ + bias, masked) v, in any layout and spelling.

Formula    out[b,t,n,e] = Σ_s p v[b,s,k,e]
           p = [keep] exp(x) / (Σ_s [keep] exp(x) + sink)
           x = softcap(scale Σ_h q[b,t,n,h] k[b,s,k,h]) + bias
Looks like an exponential between two contractions: one above it gives the
           scores, one below it weighs the values.
Must hold  the form splits into those factors, each mask is a predicate of
           positions or an array, and no other factor is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from rewriter.algebra.canonicalize import TRANSPARENT, adds_zero, kind_of, values_named
from rewriter.algebra.normal_form import OverBudget, Poly
from rewriter.find.finder import Finder, RegionEvaluator
from rewriter.find.match import ReaderPattern
from rewriter.find.reading import Reading, Refused, leaves_of, unproved
from rewriter.find.sieve import Step
from rewriter.patterns.attention.assembly import NAME, assembled
from rewriter.patterns.attention.blocks import (
    Blocks,
    blocks,
    exponentials,
    results,
    weighing,
)
from rewriter.patterns.attention.exponents import added_to_rows
from rewriter.patterns.attention.joined_keys import over_all_keys
from rewriter.patterns.attention.precision import rounded
from rewriter.patterns.attention.result import require_readable, result_form
from rewriter.patterns.attention.softmax import (
    Softmax,
    exponents,
    softmax_parts,
    with_rows_dropped,
)
from rewriter.program.graph import Node

ANCHORS = frozenset({"exp", "exp2"})
DOT = frozenset({"dot_general"})
AFTER = TRANSPARENT | {
    "div", "mul", "select_n", "transpose", "reshape", "squeeze", "broadcast_in_dim",
    "expand_dims", "convert_element_type", "neg",
}  # fmt: skip


ATTEMPTS = 6
"""Results of blocks that are read in vain in one program; reading one is slow."""


SOFTER = frozenset({"rows", "empty_rows", "terms", "weights", "unequal"})
"""Codes of refusals for which fills and biases are read in another way."""


def propose(find: Finder, anchor: Node) -> Iterator[Reading]:
    """Readings of the regions around an exponential."""
    scores = [
        n
        for n in find.regions.above(anchor.ins[0], DOT)
        if n.params["dimension_numbers"][0][0]
        and not find.regions.multiplied(n.outs[0], anchor.ins[0])
    ]
    if not scores or find.known_empty(NAME, anchor):
        return
    if anchor.outs[0] in find.cache.get("exponentials of blocks", ()):
        return  # part of an attention that is found
    if _has_a_rule(find, anchor):
        why = "the softmax has a custom rule for derivatives, which may be another one"
        find.missed(NAME, anchor, Refused("rule", why, score=0.5))
        return
    below = [
        (n, side)
        for n, side in find.regions.below(anchor.outs[0], DOT)
        if n.params["dimension_numbers"][0][0]
    ]
    sums = {n.outs[0] for n, k in below if find.number(n.ins[1 - k]) is not None}
    for pv, side in below:
        if pv in scores or pv.outs[0] in sums or find.done(NAME, pv.outs[0]):
            continue
        before = len(find.found)
        whole = results(find, pv)
        if any(find.done(NAME, v) for v in whole):
            return  # a block of a result that is found
        yield from _in_blocks(find, anchor, scores, pv, whole)
        if len(find.found) > before:
            return
        yield from _around(find, anchor, scores, pv, side, sums)
        if len(find.found) > before:
            return  # weights that several products read are one attention


def _has_a_rule(find: Finder, anchor: Node) -> bool:
    """Whether weights are made in a function with a rule of its own, and leave it."""
    scope = find.regions.place(anchor.scope).scope
    return scope.kind in ("custom_jvp", "custom_vjp") and not any(
        True for _ in find.regions.below(anchor.outs[0], DOT)
    )


def _in_blocks(
    find: Finder, anchor: Node, scores: list[Node], pv: Node, whole: list[int]
) -> Iterator[Reading]:
    """Readings of results that several products add up to."""
    for value in whole:
        key = ("blocks", value)
        if key in find.cache or find.cache.get("failed blocks", 0) >= ATTEMPTS:
            continue
        find.cache[key] = True
        found = blocks(find, value) or weighing(
            find, value, anchor.outs[0], tuple(scores)
        )
        if found is None or (pv.outs[0] not in {n.outs[0] for n, _ in found.products}):
            continue
        failed = find.cache.get("failed blocks", 0)
        find.cache["failed blocks"] = failed + 1
        try:
            yield read(find, value, found, "full")
        except Refused as refusal:
            if refusal.score > 0.5:
                find.missed(NAME, anchor, refusal, value)
        except (OverBudget, RecursionError):
            continue
        if find.done(NAME, value):
            find.cache["failed blocks"] = failed
            inside = find.cache.setdefault("exponentials of blocks", set())
            inside |= exponentials(find, value, found)
            return


def _around(find, anchor, scores, pv, side, sums) -> Iterator[Reading]:
    choices = [scores] if len(scores) == 1 else [scores, *([s] for s in scores)]
    if len(scores) > 3:
        choices = [[s] for s in scores]
    miss: Refused | None = None
    for chosen in choices:
        for k, candidate in enumerate(later_forms(find, pv)):
            for how in ("full", "soft", "whole", "dropped"):
                try:
                    parts = Blocks(tuple(chosen), ((pv, side),))
                    yield from _readings(find, candidate, parts, how, sums)
                except Refused as refusal:
                    if miss is None or refusal.score > miss.score:
                        miss = refusal.with_traceback(None)
                    if refusal.code not in SOFTER:
                        break
                except (OverBudget, RecursionError) as error:
                    miss = miss or unproved(error, 0.3)
                if find.done(NAME, candidate):
                    return
            if (
                k == 0
                and miss is not None
                and miss.code not in ("denominator", "budget")
            ):
                break
    if miss is not None and miss.code == "denominator" and _is_skipped(anchor):
        miss = Refused(
            "cond",
            "the weights of a block of keys are under a lax.cond",
            score=0.5,
            suggestion="mask the blocks; kernels skip those that a mask leaves out",
        )
    elif miss is not None and miss.code == "denominator" and _is_in_a_while(anchor):
        miss = Refused(
            "while",
            "the weights of a block of keys are in a while loop, of which it is not "
            "known how many steps it has",
            score=0.5,
            suggestion="count all blocks; kernels skip those that a mask leaves out",
        )
    if miss is not None and miss.score > 0.2:
        find.missed(NAME, anchor, miss, pv.outs[0])


def _readings(
    find: Finder, value: int, parts: Blocks, how: str, sums: Set[int]
) -> Iterator[Reading]:
    """Readings of one candidate, that with the least arrays of a mask first.

    Raises:
        Refused: If the form is not that of attention.
    """
    reading = read(find, value, parts, how, sums)
    if how == "soft" and _terms_of_bias(reading) > 1:
        try:
            other = read(find, value, parts, "whole", sums)
        except (Refused, OverBudget):
            other = reading
        if _terms_of_bias(other) == 1:  # the program's own sum, and its cotangent
            yield other
    if find.done(NAME, value):
        return
    if _has_table(reading):
        try:
            other = read(find, value, parts, how, sums, by_wraps=False)
        except (Refused, OverBudget):
            other = reading
        if not _has_table(other):
            yield other
    if not find.done(NAME, value):
        yield reading
    if not find.done(NAME, value) and _has_positions(reading):
        yield read(find, value, parts, how, sums, mask_as_array=True)


def later_forms(find: Finder, pv: Node) -> list[int]:
    """A product of weights and values, and what it is once it is normalised."""
    value = pv.outs[0]
    later = [
        v
        for v in find.regions.chain(value, lambda n: _goes_on(find, n), 10)
        if find.graph.node_of(v).prim in ("div", "mul", "select_n")
    ]
    return [rounded(find, v) for v in (value, *later)]


def _terms_of_bias(reading: Reading) -> int:
    """How many terms a bias has: one if it is a value of the program."""
    bias = reading.operands.get("bias")
    return 0 if bias is None else max(len(form) for form, _ in bias.parts)


def _has_table(reading: Reading) -> bool:
    """Whether a mask is an array with a boolean for each query and key."""
    mask, alg = reading.operands.get("mask"), reading.algebra
    if mask is None:
        return False
    ids = alg.ids(alg.of_bool(mask.flag))
    return all(ids & set(axis) for axis in mask.parts[0][1][2:])


def _has_positions(reading: Reading) -> bool:
    """Whether a mask is read as positions and lengths; it may also be an array."""
    numbers = {"offset", "kv_lengths", "prefix", "q_segments", "kv_positions"}
    return "window" in reading.params or not numbers.isdisjoint(reading.operands)


def _is_in_a_while(anchor: Node) -> bool:
    """Whether steps of a while loop compute weights."""
    return "while" in anchor.scope.path


def _is_skipped(anchor: Node) -> bool:
    """Whether steps of a loop compute weights under a condition."""
    path = anchor.scope.path
    return "cond" in path and "scan" in path[: path.index("cond")]


def _goes_on(find: Finder, node: Node) -> bool:
    """Whether what an equation gives may be a later form of the same result."""
    return node.prim in AFTER or adds_zero(node, find.number)


def read(
    find: Finder,
    value: int,
    parts: Blocks,
    how: str,
    sums: Set[int] = frozenset(),
    mask_as_array: bool = False,
    by_wraps: bool = True,
) -> Reading:
    """The reading of one candidate result.

    Args:
        find: The search.
        value: The candidate.
        parts: The contractions it is computed from.
        how: ``"full"``; ``"soft"`` keeps finite fills that are added as a bias;
            ``"whole"`` takes a bias as it is, however it was computed. With
            ``"dropped"`` a mask of whole rows is one of weights that are dropped.
        sums: Contractions of the weights with ones.
        mask_as_array: Whether a mask is taken as it is, however it was computed.
        by_wraps: As for `Evaluator`.

    Raises:
        Refused: If the form is not that of attention.
        OverBudget: If the form grows too large.
    """
    ev = _evaluator(find, value, parts, how, sums, by_wraps)
    form, args = result_form(ev, value)
    if len(parts.products) > 1:
        form = find.algebra.merged(form)
    in_blocks = len(parts.products) > 1 or bool(parts.scans)
    if in_blocks and not parts.at_once:
        ev.notes.add("sums over blocks of keys are taken at once")
    made = _softmax(find, ev, value, parts, form, args, how)
    reading = assembled(replace(made, mask_as_array=mask_as_array))
    reading.in_blocks = in_blocks and not parts.at_once
    require_readable(find, ev, reading)
    _require_addends(find, ev, reading)
    return reading


def _softmax(
    find: Finder,
    ev: RegionEvaluator,
    value: int,
    parts: Blocks,
    form: Poly,
    args: tuple[Any, ...],
    how: str,
) -> Softmax:
    """The softmax and its contractions in the form of a candidate."""
    alg = find.algebra
    values = find.layout_leaves(ev, *(n.ins[1 - k] for n, k in parts.products))
    over = over_all_keys(alg, form, values)
    found = softmax_parts(alg, over.form, values | over.values, how == "soft")
    if how == "dropped":
        found = with_rows_dropped(alg, found)
    sides = find.layout_leaves(ev, *(x for n in parts.scores for x in n.ins[:2]))
    qk, bias = exponents(alg, found, sides | over.joined.keys())
    made = Softmax(
        find=find,
        ev=ev,
        value=value,
        args=args,
        form=form,
        parts=found,
        qk=qk,
        bias=bias,
        scores=frozenset(n.outs[0] for n in parts.scores),
        products=parts.products,
        joined=over.joined,
        some=over.some,
    )
    return replace(made, bias=alg.add(bias, added_to_rows(made)))


def _evaluator(
    find: Finder, value: int, parts: Blocks, how: str, sums: Set[int], by_wraps: bool
) -> RegionEvaluator:
    """What puts the candidate into its normal form; arguments are as in `read`."""
    scores = frozenset(n.outs[0] for n in parts.scores)
    products = frozenset(n.outs[0] for n, _ in parts.products)
    factors = ((n.outs[0], k) for n, k in parts.products)
    regions = find.regions  # the search itself would be a cycle: it holds what it found

    def from_scores(v: int) -> bool:
        return bool(parts.scans) or any(
            regions.depends(v, score, 120) for score in scores
        )

    return find.evaluator(
        value,
        inside=scores | products | parts.scans | sums,
        roots=scores | parts.scans | find.float_carries(parts.scans),
        full_sides=frozenset([*factors, *((n, k) for n in sums for k in (0, 1))]),
        soft_fills=how == "soft",
        in_pieces=from_scores,
        whole_sides=from_scores if how == "whole" else None,
        filled_rows=True,
        by_wraps=by_wraps,
    )


def _require_addends(find: Finder, ev: RegionEvaluator, reading: Reading) -> None:
    """Refuses to leave out what is added to all scores of a row.

    It cancels in the weights; but where it is large the scores are rounded away
    beside it, and where it is infinite or NaN so are they.

    Raises:
        Refused: If a value that feeds the region is nowhere in the operands.
    """
    graph, alg, read = find.graph, find.algebra, set(leaves_of(reading))
    for value in _fed(ev) - read if not reading.joined else ():
        side = ev.is_side(value) and not ev.varies(value)
        if side and kind_of(graph.dtype(value)) == "f":
            raise Refused("rows", "a number is added to all scores of a row", score=0.7)
    forms = [p for o in reading.operands.values() for p, _ in o.parts]
    used = {alg.kind(a) for p in forms for _, mono in p for a, _ in mono}
    if ev.softened and "ind" not in used:
        raise Refused("rows", "a fill is added to all scores of a row", score=0.7)


def _fed(ev: RegionEvaluator) -> set[int]:
    """The program's values in the forms of what the op computes."""
    alg, found = ev.alg, set()
    for (value, _, _), form in ev.memo.items():
        if isinstance(form, dict) and not ev.is_side(value):
            found |= alg.poly_leaves(form)
    names = {v for a in found for v in values_named(alg.defs[a][1])}
    return {v for v in names if isinstance(v, int) and v in ev.leaf_values}


STEPS = (Step(DOT), Step(ANCHORS), Step(DOT))
PATTERN = ReaderPattern(NAME, ANCHORS, propose, STEPS)
