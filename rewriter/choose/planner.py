"""Decides for each match: which kernel replaces it, or why it stays as written."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rewriter.choose.cached_operand import unless_cached
from rewriter.choose.choice import AS_WRITTEN, Choice
from rewriter.choose.choose import choose, left_out
from rewriter.choose.choose_ring import choose_ring
from rewriter.choose.nested_sites import choose_among_nested
from rewriter.choose.number_sites import Placed, Plan, in_order, spec_on_device, top
from rewriter.choose.rounded_results import unless_rounded
from rewriter.config import Config
from rewriter.find.match import Match
from rewriter.find.region import Regions
from rewriter.gradients.backward import Backward
from rewriter.gradients.backward_place import (
    has_no_room,
    home_of,
    lies_at,
    residuals_place,
)
from rewriter.gradients.insertion_point import obstacle, places
from rewriter.measure.key import BOTH, FORWARD, Key, key_of
from rewriter.measure.live_products import SAVED, WHY, with_live_products
from rewriter.measure.original_region import NotTaken, as_written, spelling_of
from rewriter.measure.program_key import program_key
from rewriter.measure.programs import Task
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.program.fold import Folded
from rewriter.program.graph import Graph
from rewriter.site import fusable_adds
from rewriter.site.facts import Facts
from rewriter.site.implementation import RING, XLA
from rewriter.site.shards import Shards

DIFFERS = "verify found that its numbers differ from those of the program as written"
UNREACHED = "they are in another loop, branch or checkpoint than the result"
NO_ROOM = "a checkpoint would save more bytes for them than it does as written"


def planned(
    regions: Regions,
    facts: Sequence[Facts],
    config: Config,
    folded: Folded | None = None,
) -> Plan:
    """Returns the plan for all matches: their sites and splices.

    Args:
        regions: The walks over the program's graph.
        facts: The matches found in it, with their gradients and shards.
        config: Forced kernels, targets, measurements.
        folded: The layers that were left out of the program, if any.
    """
    target, graph = target_of(config), regions.graph
    facts = [_with_home(f, regions) for f in facts]
    gradients = [f.backward for f in facts if f.backward is not None]
    covered = frozenset().union(*(b.inner | {*b.results} for b in gradients))
    facts = [
        _with_repeats(f, regions, folded) for f in facts if f.match.value not in covered
    ]
    if config.tune in ("quick", "full") and target == device.attached():
        from rewriter.measure import autotune  # few programs time anything

        autotune.measure_missing(tasks_of(graph, facts), config.tune)
    choices = _choices(graph, facts, config, target)
    inputs = [v.aval for v in (folded.whole if folded else graph.top.jaxpr).invars]
    key = None
    if all(f.shards is None for f in facts):
        key = _program_key(inputs, facts, choices, target)
    choices = _end_to_end(facts, choices, config, target, key)
    placed = [
        p
        for one, choice in zip(facts, choices, strict=True)
        for p in _at_its_places(one, choice, regions)
    ]
    return in_order(placed, config, target, folded, key)


def _with_home(facts: Facts, regions: Regions) -> Facts:
    """The facts with the place whose residuals gradients read, or without gradients."""
    if facts.backward is None:
        return facts
    home = residuals_place(facts.backward, regions, facts.match)
    if home is None:
        crowded = has_no_room(facts.backward, regions, facts.match)
        why = NO_ROOM if crowded else UNREACHED
        return replace(facts, backward=None, no_backward=why)
    return replace(facts, home=home)


def _with_repeats(facts: Facts, regions: Regions, folded: Folded | None) -> Facts:
    """The facts with the number of occurrences, and whether products are kept."""
    match = facts.match
    times = folded.times(top(match.node.scope, match.node.position)) if folded else 1
    kept = facts.backward and _made_again(match, facts.backward, regions)
    return replace(facts, times=times, read_on=SAVED if kept else "")


def _at_its_places(facts: Facts, choice: Choice, regions: Regions) -> Iterator[Placed]:
    """A match at all its places; left as written where a replacement cannot stand.

    One of them is the forward before its gradients, whose residuals they read.
    """
    match, home, shards = facts.match, facts.home, facts.shards
    here = places(match)
    if home is not None and home[0] not in here:
        here = [p for p in here if p[0] is not home[0][0]] + [home[0]]
    for scope, position in here:
        backward = None
        if home is not None and home[0] == (scope, position):
            backward, position = facts.backward, home[1]
        chosen = choice
        spare = backward.unread if backward is not None else frozenset()
        why = obstacle(match, scope, regions, spare) if choice.kernel != XLA else ""
        if why:
            chosen = Choice(AS_WRITTEN, "heuristic", ((choice.kernel, why),))
        copies = match.copies if scope is match.node.scope else 0
        passes = chosen.ring and isinstance(shards, Shards)
        spread = shards.around if passes else shards  # type: ignore[union-attr]
        yield Placed(match, scope, position, chosen, backward, copies, spread)


def _program_key(
    inputs: Sequence[Any],
    facts: Sequence[Facts],
    choices: Sequence[Choice],
    target: Device,
) -> Key | None:
    """The key of the whole program with these choices; None if nothing is replaced."""
    if all(c.implementation.forward == XLA for c in choices):
        return None
    counts: Counter[Any] = Counter()
    for f, c in zip(facts, choices, strict=True):
        if f.match.spec.symbolic:
            return None
        passes = BOTH if f.differentiated else FORWARD
        counts[f.match.spec, passes, c.implementation] += f.times
    sites = [
        (key_of(spec, passes, target.kind), f"{implementation.text} x{count}")
        for (spec, passes, implementation), count in counts.items()
    ]
    texts: dict[Any, str] = {}  # formatting costs more than the rest of this function
    names = [texts.get(a) or texts.setdefault(a, str(a)) for a in inputs]
    return program_key(sites, names, target.kind)


def _end_to_end(
    facts: Sequence[Facts],
    choices: Sequence[Choice],
    config: Config,
    target: Device,
    key: Key | None,
) -> list[Choice]:
    """The choices, without ops that made the whole program slower when measured."""
    if key is None or not config.end_to_end:
        return list(choices)
    ops, why = left_out(config, target, key)
    return [
        Choice(AS_WRITTEN, c.origin, ((c.kernel, why), *c.not_chosen))
        if c.origin != "forced"
        and c.kernel != XLA
        and (ops is None or f.match.op.name in ops)
        else c
        for f, c in zip(facts, choices, strict=True)
    ]


def _choices(
    graph: Graph, facts: Sequence[Facts], config: Config, target: Device
) -> list[Choice]:
    """A kernel for each match; XLA where the region stays computed anyway."""
    saved: Counter[Any] = Counter()  # how often a gradient's residuals are kept
    for f in facts:
        if f.differentiated:
            saved[f.match.spec] += f.match.node.scope.repeats * f.times
    by_reading: dict[Any, Choice] = {}
    choices = []
    for f in facts:
        count = saved[f.match.spec] * f.differentiated
        sum_of = _sum_of(graph, f.match)
        key = id(f.match.reading), count, f.shards, sum_of
        if key not in by_reading:
            by_reading[key] = chosen(graph, f, config, target, count, sum_of)
        choice, refused = by_reading[key], f.match.not_chosen
        choice = unless_rounded(graph, f, choice, target)
        choice = unless_cached(graph, f, choice, target)
        if refused:
            choice = replace(choice, not_chosen=(*choice.not_chosen, *refused))
        choices.append(choice)
    replaced = [f for f, c in zip(facts, choices, strict=True) if c.kernel != XLA]
    if not replaced:
        return choices
    needed = with_live_products(graph, replaced)
    choices = [
        _unless_read(f, choice, needed.get(id(f), ""))
        for f, choice in zip(facts, choices, strict=True)
    ]
    return list(choose_among_nested(facts, choices))


def _unless_read(facts: Facts, choice: Choice, reader: str) -> Choice:
    """The choice; XLA where the match's matrix products stay computed anyway.

    So it is where JAX may differentiate a match of which it does not know how.
    """
    if choice.kernel == XLA:
        return choice
    alone = facts.match.reading.needs_backward
    if alone and facts.backward is None:
        refused = (choice.kernel, alone), *choice.not_chosen
        return Choice(AS_WRITTEN, choice.origin, refused)
    if choice.origin == "forced":
        return choice
    why = facts.read_on
    if reader and not why:
        none = facts.no_backward
        why = WHY.format(reader=reader) + (f" (gradients: {none})" if none else "")
    if not why:
        return choice
    return Choice(AS_WRITTEN, choice.origin, ((choice.kernel, why), *choice.not_chosen))


def chosen(
    graph: Graph,
    facts: Facts,
    config: Config,
    target: Device,
    kept: int,
    sum_of: str,
) -> Choice:
    """Returns a kernel for a match, or for one device's part if it is split.

    Args:
        graph: The program.
        facts: The match, its gradients and shards.
        config: Forced kernels, measurements.
        target: Where it will run.
        kept: How often its residuals are kept for gradients; 0 without gradients.
        sum_of: The operand that is a sum which some kernel can compute; ``""`` without
            one.
    """
    match, shards = facts.match, facts.shards
    kernels = match.pattern.kernels
    left = {(op, where): why for op, where, why in config.failing}
    left |= dict.fromkeys(config.differing, DIFFERS)
    why = left.get((match.op.name, match.where))
    if why is None and isinstance(shards, str):
        why = shards
    if why is not None:
        names = [k.name for k in kernels] or [""]
        return Choice(AS_WRITTEN, "heuristic", tuple((n, why) for n in names))
    assert not isinstance(shards, str)
    ring = () if shards is None else _ring(match, shards, config, target, kept)
    if isinstance(ring, Choice):
        return ring
    spelling = functools.partial(spelling_of, graph, match, facts.backward)
    choice = choose(
        spec_on_device(match, shards), config, kernels, target, kept, match.where,
        str if shards else spelling, sum_of,
    )  # fmt: skip
    others = [x for x in choice.not_chosen if not ring or x[0] != RING]
    return replace(choice, not_chosen=(*others, *ring))


def _sum_of(graph: Graph, match: Match) -> str:
    """The operand that is a sum which a kernel could compute; ``""`` without one."""
    for name in {k.traits.adds_to for k in match.pattern.kernels} - {""}:
        shape = match.spec.shape(name)
        for _, value in match.leaves:
            like = graph.shape(value) == shape
            if like and fusable_adds.lies_in_front(graph, value, match.inner):
                return name
    return ""


def _ring(
    match: Match, shards: Shards, config: Config, target: Device, kept: int
) -> Choice | tuple[tuple[str, str], ...]:
    """A choice that passes operands around; or why not, if the op has a ring."""
    params = {**match.op.defaults, **match.reading.params}
    rule = match.op.spread(params)
    if shards.around is None or rule is None or rule.ring is None:
        return ()
    spec = spec_on_device(match, shards.around)
    count = shards.parts(shards.around.ring)
    kernels = match.pattern.kernels
    arguments = rule.ring, spec, count, config, kernels, target
    found = choose_ring(*arguments, kept, match.where)
    return ((RING, found),) if isinstance(found, str) else found


def _made_again(match: Match, backward: Backward, regions: Regions) -> bool:
    """Whether the gradients' body computes the result again from saved values.

    A checkpoint that saves products does so: they are needed there anyway.
    """
    return any(
        lies_at(backward, regions.graph, home_of(scope)[0])
        for scope, _ in places(match)
        if obstacle(match, scope, regions)
    )


def target_of(config: Config) -> Device:
    """Returns the device to choose for: the configured one, else the attached one."""
    if config.target:
        return device.named(config.target)
    here = device.attached()
    kind = dict(config.targets).get(here.platform)
    return device.of(kind, here.platform) if kind else here


def for_platform(patterns: Sequence[Any], config: Config) -> list[Any]:
    """Returns the patterns whose ops are looked for on the platform to choose for."""
    forced, where = {name for name, *_ in config.implementation}, target_of(config)
    return [
        p
        for p in patterns
        if not p.op.found_on or where.platform in p.op.found_on or p.op.name in forced
    ]


def tasks_of(
    graph: Graph, facts: Sequence[Facts], gradients: bool = False
) -> list[Task]:
    """Returns the tasks that can be measured for matches, equal ones once.

    Args:
        graph: The program.
        facts: The matches found in it.
        gradients: Whether to measure gradients also for matches without gradients.
    """
    found: dict[Task, None] = {}
    for f in facts:
        m, shards = f.match, f.shards
        if isinstance(shards, str):
            continue
        written, why = None, "the program is spread over devices" if shards else ""
        if not shards:
            try:
                written = as_written(graph, m, f.backward)
            except NotTaken as problem:
                why = str(problem)
        passes = [] if f.differentiated else [FORWARD]
        if f.differentiated or gradients:
            passes.append(BOTH)
        for which in passes:
            kernels = tuple(m.pattern.kernels)
            spec = spec_on_device(m, shards)
            task = Task(m.op, spec, kernels, which, (), written, why)
            found.setdefault(task)
    return list(found)
