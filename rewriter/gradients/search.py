"""Finds the gradients that the program computes, for all matches."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from jax.extend.core import InconclusiveDimensionOperation

from rewriter.algebra.normal_form import OverBudget
from rewriter.find.match import Match
from rewriter.find.precision import (
    PARAM,
    depends_on_precision,
    exceeds,
    precision_of,
)
from rewriter.find.reading import Reading
from rewriter.find.region import Regions
from rewriter.gradients.addends import returned
from rewriter.gradients.backward import Backward
from rewriter.gradients.backward_place import home_of
from rewriter.gradients.cotangents import (
    cotangents,
    factors_of,
    is_float,
    reduces,
)
from rewriter.gradients.function_parameters import results_here
from rewriter.gradients.insertion_point import obstacle, read_instead
from rewriter.gradients.operand_pieces import OperandPieces
from rewriter.gradients.other_layouts import OtherLayouts
from rewriter.gradients.proof import proved_gradients
from rewriter.gradients.proved_before import ProvedGradients, known, reapplied
from rewriter.gradients.reference import traced_gradients
from rewriter.gradients.steps import STEPS, are_steps
from rewriter.ops.slopes import SLOPES
from rewriter.program.graph import Graph, Scope
from rewriter.support.verdict import Reason

log = logging.getLogger("rewriter.gradients")

ATTEMPTS = 3
"""The search gives up after so many regions of one kind without gradients."""
CANDIDATES = 6
"""The most candidates for the cotangent of one region."""
OF_A_LOSS = 12
"""The same for a loss: its rows' factors, such as a log-sum-exp, have its shape too."""


@dataclass(eq=False)
class ProofCache:
    """Earlier results, for equal regions.

    Attributes:
        returned: What bodies return.
        reference: By the id of a reading, and whether the results of its parameter are
            given: its reference's gradients, traced.
        proved: By the id of a reading, its proved gradients, largest sets first.
        failed: By the id of a reading, the number of regions without gradients.
        alone: The same, counting regions without gradients in any layout of the result.
        ruled: By the id of a reading, those with the gradients of a user's rule.
        unproved: Why gradients of a reading could not be distinguished from others.
        foreign: By the value of a match, what only other spellings compute of its
            function. Gradients through these have other derivatives at kinks.
    """

    returned: set[int]
    reference: dict[tuple[int, bool], Graph] = field(default_factory=dict)
    proved: dict[int, list[ProvedGradients]] = field(default_factory=dict)
    failed: collections.Counter[int] = field(default_factory=collections.Counter)
    alone: collections.Counter[int] = field(default_factory=collections.Counter)
    ruled: dict[int, tuple[Reading, ...]] = field(default_factory=dict)
    unproved: dict[int, str] = field(default_factory=dict)
    foreign: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gradients:
    """The outcome of a search.

    Attributes:
        matches: The matches. A match is extended to another layout of its result, if
            only that has a cotangent. It is restated over pieces, if only these have
            gradients.
        backward: The gradients of each match, or ``None``.
        why: Why a match has none, if they could not be distinguished from other values.
        failures: What went wrong.
    """

    matches: tuple[Match, ...]
    backward: tuple[Backward | None, ...]
    why: tuple[str, ...]
    failures: tuple[Reason, ...]


def search_gradients(regions: Regions, matches: Sequence[Match]) -> Gradients:
    """Finds the gradients that a program computes for its matches."""
    graph = regions.graph
    memory = ProofCache(returned(graph), foreign=_other_spellings(matches))
    layouts, cut = OtherLayouts(regions, memory.returned), OperandPieces(regions)
    failures: list[Reason] = []
    taken: list[tuple[Match, Backward | None]] = []
    results: set[int] = set()
    for match in reversed(matches):  # only the last has its input's gradient
        try:
            match, backward = _at_its_cotangent(graph, match, memory, layouts, cut)
            if backward is not None and not results.isdisjoint(backward.results):
                backward = _elsewhere(graph, match, memory, backward, results)
            some = backward and not _has_all(graph, match, backward)
            if some and are_steps(graph, match, backward):
                memory.unproved[id(match.reading)], backward = STEPS, None
            if backward and (why := _more_exact(graph, match, backward)):
                memory.unproved[id(match.reading)], backward = why, None
        except InconclusiveDimensionOperation as error:
            text = f"a proof needs sizes that are numbers: {str(error).splitlines()[0]}"
            memory.unproved[id(match.reading)] = text
            backward = None
        except Exception as error:
            log.debug("gradients of %s failed", match.op.name, exc_info=error)
            text = f"{match.op.name}: {type(error).__name__}: {error}"
            failures.append(Reason("internal", text, match.where))
            backward = None
        match = match if backward else _over_what_is_named(match, cut)
        taken.append((match, backward))
        if backward is not None:
            results.update(backward.results)
    taken.reverse()
    taken = _without_scale_only(taken)
    why = tuple(
        "" if backward else memory.unproved.get(id(match.reading), "")
        for match, backward in taken
    )
    matches = tuple(match for match, _ in taken)
    return Gradients(matches, _each_once(taken), why, tuple(failures))


def _other_spellings(matches: Sequence[Match]) -> dict[int, frozenset[int]]:
    """By the value of a match, what only other spellings of its function compute.

    Those are matches of the same op with other derivatives at its kinks. They may share
    operands, and even gradients: that of a weight is the same number in each of them.
    """
    slopes = lambda m: tuple(m.spec.param(name) for name in SLOPES)
    with_kinks = [m for m in matches if m.op.differentiated is not None]
    if len(set(map(slopes, with_kinks))) < 2:
        return {}
    return {
        match.value: frozenset().union(
            *(
                other.inner - match.inner
                for other in with_kinks
                if other.op is match.op and slopes(other) != slopes(match)
            )
        )
        for match in with_kinks
    }


def _without_scale_only(
    taken: Sequence[tuple[Match, Backward | None]],
) -> list[tuple[Match, Backward | None]]:
    """Leaves out a match if one inside it has gradients of more of its leaves.

    A norm's result that is scaled and also read without the scale has one cotangent,
    the sum of both. Then the norm is the site, and its product with the scale is none.
    """
    inside = [(m, b) for m, b in taken if b is not None and m.reading.may_be_inside]

    def is_scale_only(match: Match, backward: Backward | None) -> bool:
        grads = set(backward.grads) if backward is not None else set()
        return any(
            m is not match
            and m.value in match.inner
            and not (set(b.grads) & {v for _, v in match.leaves}) <= grads
            for m, b in inside
        )

    return [(m, b) for m, b in taken if not is_scale_only(m, b)]


def _at_its_cotangent(
    graph: Graph,
    match: Match,
    memory: ProofCache,
    layouts: OtherLayouts,
    cut: OperandPieces,
) -> tuple[Match, Backward | None]:
    """A match with its gradients, extended to where its result has a cotangent.

    Or restated over pieces of its operands, if these have gradients.
    """
    backward = find_backward(graph, match, memory)
    key = id(match.reading)
    if backward is not None:
        match, backward = _over_shared_layouts(graph, match, backward, memory, cut)
        match, backward = _over_what_is_given(graph, match, backward, memory, cut)
        return _over_saved_pieces(match, backward, memory, cut)
    if memory.alone[key] >= ATTEMPTS:
        return match, backward
    for lower in layouts.below(match):
        backward = find_backward(graph, lower, memory)
        if backward is not None:
            return lower, backward
    pieces = cut.up(match) if cotangents(graph, match) else None
    if pieces is not None:
        backward = find_backward(graph, pieces, memory)
        if backward is not None:
            return pieces, backward
    for ruled in _by_users_rules(match, memory):
        backward = find_backward(graph, ruled, memory)
        if backward is not None:
            return ruled, backward
    memory.alone[key] += 1
    return match, None


def _by_users_rules(match: Match, memory: ProofCache) -> list[Match]:
    """The match with the gradients that a user's own rule may give it."""
    reading = match.reading
    if id(reading) not in memory.ruled:
        memory.ruled[id(reading)] = tuple(
            replace(
                reading,
                params={**reading.params, **rule},
                other_gradients=(),
                ruled=True,
            )
            for rule in reading.other_gradients
        )
    return [
        replace(match, reading=r, spec=match.spec.with_params(r.params))
        for r in memory.ruled[id(reading)]
    ]


def _over_what_is_named(match: Match, cut: OperandPieces) -> Match:
    """The match over pieces of its operands, if the program names these.

    A policy may save them once the program is differentiated.
    """
    regions, scope = cut.regions, match.node.scope
    named = (n for v in match.inner if (n := regions.graph.node_of(v)) is not None)
    if not any(n.prim == "name" and n.outs != (match.value,) for n in named):
        return match
    pieces = None if read_instead(regions, match, scope) else cut.up(match)
    return pieces if pieces and read_instead(regions, pieces, scope) else match


def _with_more_gradients(
    graph: Graph,
    match: Match,
    backward: Backward,
    memory: ProofCache,
    pieces: Match | None,
) -> tuple[Match, Backward]:
    """The match over pieces if the program has more gradients of these, else itself."""
    found = pieces and find_backward(graph, pieces, memory)
    if pieces and found and len(found.grads) > len(backward.grads):
        return pieces, found
    return match, backward


def _over_shared_layouts(
    graph: Graph,
    match: Match,
    backward: Backward,
    memory: ProofCache,
    cut: OperandPieces,
) -> tuple[Match, Backward]:
    """The match over pieces, if the program has more gradients of these."""
    pieces = None if _has_all(graph, match, backward) else cut.up(match)
    return _with_more_gradients(graph, match, backward, memory, pieces)


def _over_what_is_given(
    graph: Graph,
    match: Match,
    backward: Backward,
    memory: ProofCache,
    cut: OperandPieces,
) -> tuple[Match, Backward]:
    """The match over what its body is given, if the program has more gradients of that.

    A body may be given a bias. Then its gradient is of the bias, and not of the slopes
    that the bias is made of outside.
    """
    body, _ = home_of(match.node.scope)
    leaves = {v for _, v in match.leaves if is_float(graph.dtype(v))}
    around = leaves - backward.grads.keys() - body.first_var.keys()
    pieces = cut.up(match, body, around) if around else None
    return _with_more_gradients(graph, match, backward, memory, pieces)


def _over_saved_pieces(
    match: Match, backward: Backward, memory: ProofCache, cut: OperandPieces
) -> tuple[Match, Backward]:
    """The match over pieces of its operands, if a checkpoint saved only these."""
    lacking = _lacking(cut.regions, match, backward)
    for body in (None, lacking) if lacking is not None else ():
        pieces = cut.up(match, body)
        found = pieces and find_backward(cut.regions.graph, pieces, memory)
        if pieces and found and _lacking(cut.regions, pieces, found) is None:
            return pieces, found
    return match, backward


def _more_exact(graph: Graph, match: Match, backward: Backward) -> str:
    """Why gradients need more digits than the op's parameter promises, or ``""``."""
    if not depends_on_precision(match.op, match.spec):
        return ""
    given = match.spec.param(PARAM)
    asked = precision_of(graph, backward.inner | set(backward.results))
    if not exceeds(asked, given):
        return ""
    named = "the default" if given is None else given
    return f"gradients are products at precision {asked}, and the result at {named}"


def _lacking(regions: Regions, match: Match, backward: Backward) -> Scope | None:
    """The checkpoint that computes the gradients, if it has not all operands.

    Equal values of several checkpoints are one. That which has most of them counts.
    """
    count: collections.Counter[Scope] = collections.Counter()
    for value in backward.inner.union(backward.grads.values()) - match.inner:
        node = regions.graph.node_of(value)
        if node is not None:
            scopes = (node.scope, *(scope for scope, _, _ in node.copies))
            count.update({home_of(s)[0] for s in scopes if s.runs_again})
    for body, _ in count.most_common(1):
        if obstacle(match, body, regions, backward.unread):
            return body
    return None


def _elsewhere(
    graph: Graph, match: Match, memory: ProofCache, found: Backward, taken: set[int]
) -> Backward:
    """Gradients from another cotangent, if they belong to no other match.

    The gradient of a norm's scale shows its rows, but not its scale. Two norms of one
    input without a gradient could be confused.
    """
    without = frozenset([found.cotangent])
    while len(without) < CANDIDATES:
        other = find_backward(graph, match, memory, without)
        if other is None or len(other.grads) < len(found.grads):
            return found
        if taken.isdisjoint(other.results):
            return other
        without |= {other.cotangent}
    return found


def _each_once(
    found: Sequence[tuple[Match, Backward | None]],
) -> tuple[Backward | None, ...]:
    """Drops gradients that share a value with a larger or earlier set.

    The same op on a value and on its copy, such as an offloaded one, shares the
    gradient of a bias. The forward of a ragged dot is the gradient of its gradient. The
    norm of one row is the gradient of its scale's gradient. The earlier one wins.
    """
    taken: set[int] = set()
    forwards: set[int] = set()
    kept: list[Backward | None] = [None] * len(found)
    those = [(i, m, b) for i, (m, b) in enumerate(found) if b is not None]
    those.sort(key=lambda one: (-len(one[2].grads), one[1].value))
    for index, match, backward in those:
        results = backward.results
        if match.value not in taken and (taken | forwards).isdisjoint(results):
            taken.update(results)
            forwards.add(match.value)
            kept[index] = backward
    return tuple(kept)


def find_backward(
    graph: Graph, match: Match, memory: ProofCache, without: Set[int] = frozenset()
) -> Backward | None:
    """The gradients of a match in its program, or None if there are none.

    Args:
        graph: The program.
        match: The match.
        memory: Earlier results.
        without: Values to skip as candidates for the cotangent.
    """
    ruled = match.reading.ruled
    candidates = cotangents(graph, match, ruled=ruled)
    candidates = [v for v in candidates if v not in without]
    if not candidates:
        return None
    key = id(match.reading)
    proved = memory.proved.setdefault(key, [])
    best = reapplied(graph, proved, match, candidates, memory.returned)
    if best is not None and not _is_read_elsewhere(graph, match, best):
        return best
    if memory.failed[key] >= ATTEMPTS:
        return best
    more = _proved(graph, match, candidates, memory, best)
    if more is None:
        memory.failed[key] += 1
        return best
    if len(more.shared) < len(more.grads) and not more.by_value:
        proved.append(known(graph, match, more))
    proved.sort(key=lambda one: -sum(map(len, one.parts.values())))
    return more


def _proved(
    graph: Graph,
    match: Match,
    candidates: Sequence[int],
    memory: ProofCache,
    best: Backward | None,
) -> Backward | None:
    """Proved gradients, if they are more than the best ones so far."""
    key = id(match.reading)

    def reference(given: bool) -> Graph:
        if (key, given) not in memory.reference:
            traced = traced_gradients(graph, match, given)
            memory.reference[key, given] = traced
        return memory.reference[key, given]

    more = None
    most = OF_A_LOSS if reduces(graph, match) else CANDIDATES
    for cotangent in candidates[:most]:
        try:
            found = _proved_at(graph, match, cotangent, reference, memory)
        except (OverBudget, NotImplementedError) as error:
            # Too large a form; or JAX cannot differentiate the reference, as that of
            # a ragged contraction.
            large = isinstance(error, OverBudget)
            name = match.op.name
            what = "too large to compare" if large else f"JAX has no rule for {name}"
            memory.unproved[key] = f"{what}: {error}".splitlines()[0]
            continue
        if found and (best is None or len(found.grads) > len(best.grads)):
            more = best = found
            if _has_all(graph, match, found):
                break
    return more


def _proved_at(
    graph: Graph,
    match: Match,
    cotangent: int,
    reference: Callable[[bool], Graph],
    memory: ProofCache,
) -> Backward | None:
    """The gradients below one candidate for the cotangent, proved in one of the ways.

    Args:
        graph: The program.
        match: The match.
        cotangent: The candidate.
        reference: Returns the expected gradients, if the results of the parameter are
            given, and if they are not.
        memory: Earlier results.
    """
    given, computed = (functools.partial(reference, x) for x in (True, False))
    region = graph, match, cotangent
    proved = functools.partial(
        proved_gradients,
        returned=memory.returned,
        foreign=memory.foreign.get(match.value, frozenset()),
    )
    found = None
    if results := results_here(graph, match):
        found = proved(*region, given, results=results)
        if found is not None and _has_all(graph, match, found):
            return found
    other = proved(*region, computed)
    if other is not None and (found is None or len(other.grads) > len(found.grads)):
        found = other
    if found is None and (factors := factors_of(graph, match, cotangent)):
        found = proved(*region, computed, factors=factors[0])
    return found


def _has_all(graph: Graph, match: Match, backward: Backward) -> bool:
    """Whether every float operand has its gradient."""
    return len(backward.grads) == sum(is_float(graph.dtype(v)) for _, v in match.leaves)


def _is_read_elsewhere(graph: Graph, match: Match, backward: Backward) -> bool:
    """Whether other equations read what gradients read: perhaps another gradient."""
    if _has_all(graph, match, backward):
        return False
    inside = match.inner | backward.inner
    parts = inside.difference((match.value, *backward.results))
    parts |= {backward.cotangent}
    return any(inside.isdisjoint(node.outs) for v in parts for node in graph.users(v))
