"""What becomes of a program's matches: a kernel for each, or why there is none."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rewriter.choose.choose import AS_WRITTEN, Choice, choose, left_out
from rewriter.choose.choose_ring import choose_ring
from rewriter.choose.placing import Placed, Plan, in_order, spec_on_device, top
from rewriter.config import Config
from rewriter.find.match import Match
from rewriter.find.region import Regions
from rewriter.gradients.backward import Backward
from rewriter.gradients.backward_place import home_of, lies_at, residuals_place
from rewriter.gradients.insertion_point import obstacle, places
from rewriter.measure import autotune
from rewriter.measure.as_written import NotTaken, as_written, spelling_of
from rewriter.measure.key import BOTH, FORWARD, Key, key_of
from rewriter.measure.program_key import program_key
from rewriter.measure.programs import Task
from rewriter.measure.still_needed import SAVED, WHY, computed_anyway
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.program.fold import Folded
from rewriter.program.graph import Graph
from rewriter.rewrite.locate import Located
from rewriter.site import fusable_adds
from rewriter.site.implementation import RING, XLA
from rewriter.site.shards import Shards

DIFFERS = "verify found that its numbers differ from those of the program as written"
UNREACHED = "they are in another loop, branch or checkpoint than the result"


def planned(
    regions: Regions,
    matches: Sequence[Match],
    config: Config,
    backward: Mapping[int, Backward],
    why_none: Mapping[int, str],
    folded: Folded | None,
    located: Located = MappingProxyType({}),
) -> Plan:
    """Returns what becomes of all matches: their sites and the splices.

    Args:
        regions: The walks over the program's graph.
        matches: What was found in it.
        config: Forced kernels, targets, measurements.
        backward: By the id of a match, its gradients.
        why_none: By the id of a match, why no gradients were found.
        folded: What was left out of the program, if anything was.
        located: By the id of a match, how it is spread over devices, or why it is
            left to XLA.
    """
    target = target_of(config)
    graph = regions.graph
    homes = {
        id(m): residuals_place(backward[id(m)], regions, m)
        for m in matches
        if id(m) in backward
    }
    unreached = {k: UNREACHED for k, home in homes.items() if home is None}
    why_none = {**why_none, **unreached}
    backward = {k: b for k, b in backward.items() if k not in unreached}
    covered = frozenset().union(*(b.inner | {*b.results} for b in backward.values()))
    matches = [m for m in matches if m.value not in covered]
    anyway = {
        id(m): SAVED
        for m in matches
        if id(m) in backward and _made_again(graph, m, backward[id(m)], regions)
    }
    if config.tune in ("quick", "full") and target == device.attached():
        autotune.measure_missing(
            tasks_of(graph, matches, backward, located=located), config.tune
        )
    times = {
        id(m): folded.times(top(m.node.scope, m.node.position)) if folded else 1
        for m in matches
    }
    choices = _choices(
        graph, matches, config, target, backward, anyway, why_none, times, located
    )
    inputs = [v.aval for v in (folded.whole if folded else graph.top.jaxpr).invars]
    key = None
    if not located:
        key = _program_key(inputs, matches, choices, backward, target, times)
    choices = _end_to_end(matches, choices, config, target, key)
    placed = [
        p
        for match, choice in zip(matches, choices, strict=True)
        for p in _at_its_places(
            match,
            choice,
            regions,
            backward,
            homes.get(id(match)),
            located.get(id(match)),
        )
    ]
    return in_order(placed, config, target, folded, key)


def _at_its_places(
    match: Match,
    choice: Choice,
    regions: Regions,
    backward: Mapping[int, Backward],
    home: Any,
    shards: Shards | str | None,
) -> Iterator[Placed]:
    """A match at all its places; as written where a replacement cannot stand.

    One of them is where its gradients read what it keeps, in front of them.
    """
    here = places(match)
    if home is not None and home[0] not in here:
        here = [p for p in here if p[0] is not home[0][0]] + [home[0]]
    for scope, position in here:
        its = None
        if home is not None and home[0] == (scope, position):
            its, position = backward[id(match)], home[1]
        made = choice
        why = obstacle(match, scope, regions) if choice.kernel != XLA else ""
        if why:
            made = Choice(AS_WRITTEN, "heuristic", ((choice.kernel, why),))
        copies = match.copies if scope is match.node.scope else 0
        passes = made.ring and isinstance(shards, Shards)
        spread = shards.around if passes else shards  # type: ignore[union-attr]
        yield Placed(match, scope, position, made, its, copies, spread)


def _program_key(
    inputs: Sequence[Any],
    matches: Sequence[Match],
    choices: Sequence[Choice],
    backward: Mapping[int, Backward],
    target: Device,
    times: Mapping[int, int],
) -> Key | None:
    """The key of the whole program with these choices; None if nothing is replaced."""
    if all(c.implementation.forward == XLA for c in choices):
        return None
    counts: Counter[Any] = Counter()
    for m, c in zip(matches, choices, strict=True):
        if m.spec.symbolic:
            return None
        passes = BOTH if id(m) in backward else FORWARD
        counts[m.spec, passes, c.implementation] += times[id(m)]
    sites = [
        (key_of(spec, passes, target.kind), f"{made.text} x{count}")
        for (spec, passes, made), count in counts.items()
    ]
    texts: dict[Any, str] = {}  # a text costs more than all else that is done here
    names = [texts.get(a) or texts.setdefault(a, str(a)) for a in inputs]
    return program_key(sites, names, target.kind)


def _end_to_end(
    matches: Sequence[Match],
    choices: Sequence[Choice],
    config: Config,
    target: Device,
    key: Key | None,
) -> list[Choice]:
    """The choices, but for ops without which the whole program was measured faster."""
    if key is None or not config.end_to_end:
        return list(choices)
    ops, why = left_out(config, target, key)
    return [
        Choice(AS_WRITTEN, c.origin, ((c.kernel, why), *c.not_chosen))
        if c.origin != "forced"
        and c.kernel != XLA
        and (ops is None or m.op.name in ops)
        else c
        for m, c in zip(matches, choices, strict=True)
    ]


def _choices(
    graph: Graph,
    matches: Sequence[Match],
    config: Config,
    target: Device,
    backward: Mapping[int, Backward],
    anyway: Mapping[int, str],
    why_none: Mapping[int, str],
    times: Mapping[int, int],
    located: Located,
) -> list[Choice]:
    """A kernel for each match; XLA where the kernel's work would come on top."""
    kept: Counter[Any] = Counter()  # how often a gradient's residuals are kept
    for m in matches:
        if id(m) in backward:
            kept[m.spec] += m.node.scope.repeats * times[id(m)]
    by_reading: dict[Any, Choice] = {}
    keys = [
        (
            id(m.reading),
            kept[m.spec] * (id(m) in backward),
            located.get(id(m)),
            _sum_of(graph, m),
        )
        for m in matches
    ]
    for key, match in zip(keys, matches, strict=True):
        if key not in by_reading:
            by_reading[key] = chosen(graph, match, config, target, backward, *key[1:])
    choices = [
        replace(c, not_chosen=(*c.not_chosen, *m.not_chosen)) if m.not_chosen else c
        for c, m in zip((by_reading[key] for key in keys), matches, strict=True)
    ]
    replaced = [m for m, c in zip(matches, choices, strict=True) if c.kernel != XLA]
    reasons = {
        key: f"{WHY} (gradients: {why_none[key]})" if key in why_none else WHY
        for key in computed_anyway(graph, replaced, backward)
    } | dict(anyway)
    return [
        Choice(AS_WRITTEN, c.origin, ((c.kernel, reasons[id(m)]), *c.not_chosen))
        if id(m) in reasons and c.kernel != XLA and c.origin != "forced"
        else c
        for m, c in zip(matches, choices, strict=True)
    ]


def chosen(
    graph: Graph,
    match: Match,
    config: Config,
    target: Device,
    backward: Mapping[int, Backward],
    kept: int,
    shards: Shards | str | None,
    sum_of: str,
) -> Choice:
    """Returns a kernel for a match; for what one device has of it, if it is spread.

    Args:
        graph: The program.
        match: The match.
        config: Forced kernels, measurements.
        target: Where it will run.
        backward: By the id of a match, its gradients.
        kept: How often what is saved for its gradients is kept; 0 without them.
        shards: How it is spread over devices, or why it is left to XLA.
        sum_of: The operand that is a sum which some kernel makes itself; ``""`` if
            there is none.
    """
    kernels = match.pattern.kernels
    if (match.op.name, match.where) in config.differing:
        why = tuple((k.name, DIFFERS) for k in kernels)
        return Choice(AS_WRITTEN, "heuristic", why or (("", DIFFERS),))
    if isinstance(shards, str):
        names = [k.name for k in kernels] or [""]
        return Choice(AS_WRITTEN, "heuristic", tuple((n, shards) for n in names))
    ring = () if shards is None else _ring(match, shards, config, target, kept)
    if isinstance(ring, Choice):
        return ring
    spelling = functools.partial(spelling_of, graph, match, backward.get(id(match)))
    choice = choose(
        spec_on_device(match, shards), config, kernels, target, kept, match.where,
        str if shards else spelling, sum_of,
    )  # fmt: skip
    others = [x for x in choice.not_chosen if not ring or x[0] != RING]
    return dataclasses.replace(choice, not_chosen=(*others, *ring))


def _sum_of(graph: Graph, match: Match) -> str:
    """The operand that is a sum which a kernel could make; ``""`` if there is none."""
    for name in {k.adds_to for k in match.pattern.kernels} - {""}:
        shape = match.spec.shape(name)
        for _, value in match.leaves:
            like = graph.shape(value) == shape
            if like and fusable_adds.lies_in_front(graph, value, match.inner):
                return name
    return ""


def _ring(
    match: Match, shards: Shards, config: Config, target: Device, kept: int
) -> Choice | tuple[tuple[str, str], ...]:
    """The choice to pass operands around; else why not, if they could be."""
    params = {**match.op.defaults, **match.reading.params}
    rule = match.op.spread(params)
    if shards.around is None or rule is None or rule.ring is None:
        return ()
    spec = spec_on_device(match, shards.around)
    count = shards.parts(shards.around.ring)
    kernels = match.pattern.kernels
    given = rule.ring, spec, count, config, kernels, target
    found = choose_ring(*given, kept, match.where)
    return ((RING, found),) if isinstance(found, str) else found


def _made_again(
    graph: Graph, match: Match, backward: Backward, regions: Regions
) -> bool:
    """Whether the body with the gradients makes the result from what is saved for it.

    So it is with a checkpoint that saves products: they are needed there anyway.
    """
    return any(
        lies_at(backward, graph, home_of(scope)[0])
        for scope, _ in places(match)
        if obstacle(match, scope, regions)
    )


def target_of(config: Config) -> Device:
    """Returns the device to choose for: the one asked for, else the attached one."""
    if config.target:
        return device.named(config.target)
    here = device.attached()
    kind = dict(config.targets).get(here.platform)
    return device.of(kind, here.platform) if kind else here


def tasks_of(
    graph: Graph,
    matches: Sequence[Match],
    backward: Mapping[int, Backward],
    gradients: bool = False,
    located: Located = MappingProxyType({}),
) -> list[Task]:
    """Returns what can be measured for matches, equal ones once.

    Args:
        graph: The program.
        matches: What was found in it.
        backward: By the id of a match, its gradients.
        gradients: Whether to measure gradients of the others too.
        located: By the id of a match, how it is spread over devices.
    """
    found: dict[Task, None] = {}
    for m in matches:
        shards = located.get(id(m))
        if isinstance(shards, str):
            continue
        written, why = None, "the program is spread over devices" if shards else ""
        try:
            if shards:
                raise NotTaken(why)
            written = as_written(graph, m, backward.get(id(m)))
        except NotTaken as problem:
            why = str(problem)
        differentiated = id(m) in backward
        passes = [] if differentiated else [FORWARD]
        if differentiated or gradients:
            passes.append(BOTH)
        for which in passes:
            kernels = tuple(m.pattern.kernels)
            spec = spec_on_device(m, shards)
            task = Task(m.op, spec, kernels, which, (), written, why)
            found.setdefault(task)
    return list(found)
