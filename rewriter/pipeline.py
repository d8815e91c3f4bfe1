"""A program in, the rewritten program out: graph, search, choice, splices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import autotune, device, site
from rewriter.as_written import NotTaken, as_written, spelling_of
from rewriter.backward_place import home_of, lies_at, residuals_place, runs_again
from rewriter.choose import AS_WRITTEN, Choice, choose, left_out
from rewriter.config import Config
from rewriter.device import Device
from rewriter.fold import Cut, Folded, fold
from rewriter.gradients import Backward, search_gradients
from rewriter.graph import Graph, Scope
from rewriter.implementation import XLA, build
from rewriter.kernel import PLATFORMS, Kernel
from rewriter.key import BOTH, FORWARD, Key, key_of
from rewriter.match import Match, search
from rewriter.plan import Site
from rewriter.programs import Task
from rewriter.region import Regions
from rewriter.remains import SAVED, WHY, computed_anyway
from rewriter.replace import Rewritten, Splice, obstacle, replace
from rewriter.sieve import possible
from rewriter.unfold import Labels, Unlike, unfold
from rewriter.whole import program_key

log = logging.getLogger("rewriter.pipeline")


def rewrite(
    closed_jaxpr: ClosedJaxpr, config: Config, user_patterns: Sequence[Any] = ()
) -> Rewritten:
    """Returns the program with every site on the kernel chosen for it.

    Args:
        closed_jaxpr: The program.
        config: Patterns in force, forced kernels, numerics.
        user_patterns: Patterns beyond those that the configuration names.
    """
    from rewriter.patterns.sets import in_force

    clock = _Clock()
    patterns = in_force(config.patterns, (*config.using, *user_patterns))
    with _paused_collection():
        patterns = possible(closed_jaxpr, patterns)
        if not patterns:
            return Rewritten(closed_jaxpr, seconds=clock.seconds)
        return _rewritten(closed_jaxpr, config, patterns, clock)


def tasks(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    user_patterns: Sequence[Any] = (),
    gradients: bool = False,
) -> list[Task]:
    """Returns what can be measured for a program's sites, equal ones once.

    Args:
        closed_jaxpr: The program.
        config: Patterns in force, numerics.
        user_patterns: Patterns beyond those that the configuration names.
        gradients: Whether to measure gradients also of sites that the program does
            not differentiate.
    """
    from rewriter.patterns.sets import in_force

    patterns = in_force(config.patterns, (*config.using, *user_patterns))
    with _paused_collection():
        patterns = possible(closed_jaxpr, patterns)
        if not patterns:
            return []
        graph = Graph(closed_jaxpr)
        matches = search(Regions(graph), patterns, config.numerics).matches
        backward, _, _ = search_gradients(graph, matches)
        return _tasks(graph, matches, backward, gradients)


def _tasks(
    graph: Graph,
    matches: Sequence[Match],
    backward: Mapping[int, Backward],
    gradients: bool = False,
) -> list[Task]:
    found: dict[Task, None] = {}
    for m in matches:
        written, why = None, ""
        try:
            written = as_written(graph, m, backward.get(id(m)))
        except NotTaken as problem:
            why = str(problem)
        differentiated = id(m) in backward
        passes = [] if differentiated else [FORWARD]
        if differentiated or gradients:
            passes.append(BOTH)
        for which in passes:
            kernels = tuple(m.pattern.kernels)
            task = Task(m.op, m.spec, kernels, which, (), written, why)
            found.setdefault(task)
    return list(found)


@contextlib.contextmanager
def _paused_collection() -> Iterator[None]:
    """Many small objects are made and none is garbage: collecting only costs time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rewritten(
    closed_jaxpr: ClosedJaxpr, config: Config, patterns: Sequence[Any], clock: _Clock
) -> Rewritten:
    folded = fold(closed_jaxpr)
    if folded is not None:
        clock("fold")
        try:
            return _whole(closed_jaxpr, config, patterns, clock, folded)
        except Unlike as why:
            log.debug("layers are looked at one by one: %s", why)
    return _whole(closed_jaxpr, config, patterns, clock)


def _whole(
    closed_jaxpr: ClosedJaxpr,
    config: Config,
    patterns: Sequence[Any],
    clock: _Clock,
    folded: Folded | None = None,
) -> Rewritten:
    """The program rewritten; by way of a shorter one, if it was folded."""
    graph = Graph(closed_jaxpr if folded is None else folded.short)
    clock("graph")
    regions = Regions(graph)
    found = search(regions, patterns, config.numerics)
    clock("match")
    backward, why, problems = search_gradients(graph, found.matches)
    clock("gradients")
    plan = _plan(regions, found.matches, config, backward, why, folded)
    clock("choose")
    program, origins = replace(regions, plan.splices)
    graph.release()
    clock("replace")
    if folded is not None:
        program = _unfolded(folded, program, origins, plan.labels)
        clock("unfold")
    return Rewritten(
        program,
        tuple(plan.sites),
        found.misses,
        (*found.failures, *problems),
        clock.seconds,
        plan.key,
    )


def _unfolded(folded: Folded, program: Any, origins: Any, labels: Labels) -> Any:
    if program is folded.short:
        return folded.whole
    if origins is None:
        raise Unlike("residuals are handed from body to body")
    return unfold(folded, program, origins, labels)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self.last
        self.last = now


@dataclass(eq=False)
class _Plan:
    """What becomes of the sites, in order.

    Attributes:
        sites: What is said of them; those of turns that were left out, too.
        splices: The replacements.
        labels: By cut and turn, the labels of its sites; empty for those left alone.
        key: Under which the whole program is measured.
        forward: By the id of a match, the number of its site.
        left_out: Numbers of sites of turns that were left out.
    """

    sites: list[Site] = field(default_factory=list)
    splices: list[Splice] = field(default_factory=list)
    labels: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    key: Key | None = None
    forward: dict[int, int] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Placed:
    """A match at one of its places, with what was chosen for it there."""

    match: Match
    scope: Scope
    position: int
    choice: Choice
    backward: Backward | None
    copies: int


def _plan(
    regions: Regions,
    matches: Sequence[Match],
    config: Config,
    backward: Mapping[int, Backward],
    why_none: Mapping[int, str],
    folded: Folded | None,
) -> _Plan:
    target = _target(config)
    graph = regions.graph
    homes = {
        id(m): residuals_place(
            backward[id(m)],
            graph,
            _unhindered(m, regions),
            [v for _, v in m.leaves],
        )
        for m in matches
        if id(m) in backward
    }
    backward = {k: b for k, b in backward.items() if homes[k] is not None}
    covered = frozenset().union(*(b.inner | {*b.results} for b in backward.values()))
    matches = [m for m in matches if m.value not in covered]
    anyway = {
        id(m): SAVED
        for m in matches
        if id(m) in backward and _made_again(graph, m, backward[id(m)], regions)
    }
    if config.tune in ("quick", "full") and target == device.attached():
        autotune.measure_missing(_tasks(graph, matches, backward), config.tune)
    times = {
        id(m): folded.times(_top(m.node.scope, m.node.position)) if folded else 1
        for m in matches
    }
    choices = _choices(
        graph, matches, config, target, backward, anyway, why_none, times
    )
    inputs = [v.aval for v in (folded.whole if folded else graph.top.jaxpr).invars]
    key = _program_key(inputs, matches, choices, backward, target, times)
    choices = _end_to_end(matches, choices, config, target, key)
    placed = [
        p
        for match, choice in zip(matches, choices, strict=True)
        for p in _at_its_places(match, choice, regions, backward, homes.get(id(match)))
    ]
    return _planned(placed, config, target, folded, key)


def _at_its_places(
    match: Match,
    choice: Choice,
    regions: Regions,
    backward: Mapping[int, Backward],
    home: Any,
) -> Iterator[_Placed]:
    """A match at all its places; as written where a replacement cannot stand."""
    for scope, position in _places(match):
        its = None
        if home is not None and home[0] == (scope, position):
            its, position = backward[id(match)], home[1]
        made = choice
        why = obstacle(match, scope, regions) if choice.kernel != XLA else ""
        if why:
            made = Choice(AS_WRITTEN, "heuristic", ((choice.kernel, why),))
        copies = match.copies if scope is match.node.scope else 0
        yield _Placed(match, scope, position, made, its, copies)


def _planned(
    placed: Sequence[_Placed],
    config: Config,
    target: Device,
    folded: Folded | None,
    key: Key | None,
) -> _Plan:
    """Sites in the order of the program, numbered, and the splices."""
    plan = _Plan(key=key)
    elsewhere: dict[Any, tuple[tuple[str, Kernel | None], ...]] = {}
    said = [_site(p) for p in placed]
    waiting = list(enumerate(folded.cuts)) if folded else []
    for p, site_said in zip(placed, said, strict=True):
        position = _top(p.scope, p.position)
        first = _top(p.match.node.scope, p.match.node.position)  # of its places
        at = folded.kept[first] if folded else 0
        while waiting and at >= waiting[0][1].end:
            _left_out(plan, placed, said, folded, *waiting.pop(0))
        label = _noted(plan, p, site_said)
        if folded and (turn := folded.turn(position)):
            plan.labels.setdefault(turn, []).append(label)
        if label:
            same = id(p.match.reading), p.choice.implementation
            if same not in elsewhere:
                elsewhere[same] = _by_platform(p.match, p.choice, config, target)
            call = _call(p.match, elsewhere[same])
            plan.splices.append(
                Splice(
                    p.match, p.scope, p.position, call, label, p.choice.kernel,
                    p.backward,
                )
            )  # fmt: skip
    for index, cut in waiting:
        _left_out(plan, placed, said, folded, index, cut)
    return plan


def _noted(plan: _Plan, p: _Placed, said: Site, kept: bool = True) -> str:
    """Adds a site, and those computed again there; the label of its replacement.

    What a checkpoint runs again for the gradients is part of the forward's site,
    also where the turn with the forward was left out.
    """
    first, own = len(plan.sites) + 1, plan.forward.get(id(p.match)) if kept else None
    if runs_again(p.scope):
        free = (n for n in plan.left_out if not plan.sites[n - 1].again)
        for number in free if own is None else (own,):
            row = plan.sites[number - 1]
            if _same(row, said):
                plan.sites[number - 1] = _again(row, said)
                return f"rewriter/{said.op}#{number}" if said.replaced else ""
    elif kept:
        plan.forward.setdefault(id(p.match), first)
    else:
        plan.left_out.append(first)
    for index in range(first, first + 1 + p.copies):
        plan.sites.append(dataclasses.replace(said, index=index))
    return f"rewriter/{said.op}#{first}" if said.replaced else ""


def _same(row: Site, said: Site) -> bool:
    """Whether two sites are of one op, and one kernel was chosen for them."""
    names = ("op", "shapes", "params", "kernel", "not_chosen")
    return all(getattr(row, n) == getattr(said, n) for n in names)


def _again(row: Site, said: Site) -> Site:
    """A forward's site that says where a checkpoint runs it again."""
    places = dict.fromkeys(filter(None, (row.again, said.scope)))
    return dataclasses.replace(
        row, backward=row.backward or said.backward, again=", ".join(places)
    )


def _left_out(
    plan: _Plan,
    placed: Sequence[_Placed],
    said: Sequence[Site],
    folded: Folded,
    index: int,
    cut: Cut,
) -> None:
    """Adds the sites of the turns that are left out of a run."""
    like = index, cut.like
    model = [
        (p, s, _top(p.match.anchor.scope, p.match.anchor.position))
        for p, s in zip(placed, said, strict=True)
        if folded.turn(_top(p.scope, p.position)) == like
    ]
    for turn in cut.out:
        labels = plan.labels[index, turn] = []
        for p, s, anchor in model:
            where = folded.where(anchor, turn - cut.like, index, s.where)
            if where != s.where:
                s = dataclasses.replace(s, where=where)
            labels.append(_noted(plan, p, s, kept=False))


def _top(scope: Scope, position: int) -> int:
    """The position at the top of an equation, or of what holds it."""
    while scope.parent is not None:
        scope, position = scope.parent, scope.call
    return position


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
) -> list[Choice]:
    """A kernel for each match; XLA where the kernel's work would come on top."""
    kept: Counter[Any] = Counter()  # how often a gradient's residuals are kept
    for m in matches:
        if id(m) in backward:
            kept[m.spec] += m.node.scope.repeats * times[id(m)]
    by_reading: dict[tuple[int, int], Choice] = {}
    keys = [(id(m.reading), kept[m.spec] if id(m) in backward else 0) for m in matches]
    for key, match in zip(keys, matches, strict=True):
        if key not in by_reading:
            own = backward.get(id(match))
            by_reading[key] = choose(
                match.spec, config, match.pattern.kernels, target, key[1], match.where,
                functools.partial(spelling_of, graph, match, own),
            )  # fmt: skip
    choices = [by_reading[key] for key in keys]
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


def _made_again(
    graph: Graph, match: Match, backward: Backward, regions: Regions
) -> bool:
    """Whether the body with the gradients makes the result from what is saved for it.

    So it is with a checkpoint that saves products: they are needed there anyway.
    """
    return any(
        lies_at(backward, graph, home_of(scope)[0])
        for scope, _ in _places(match)
        if obstacle(match, scope, regions)
    )


def _places(match: Match) -> list[tuple[Scope, int]]:
    """The first place of the result in every body that computes it."""
    node = match.node
    places = {id(node.scope): (node.scope, node.position)}
    for scope, position, _ in node.copies:
        places.setdefault(id(scope), (scope, position))
    return list(places.values())


def _unhindered(match: Match, regions: Regions) -> list[tuple[Scope, int]]:
    """The places where a replacement can stand."""
    return [(s, p) for s, p in _places(match) if not obstacle(match, s, regions)]


def _target(config: Config) -> Device:
    """The device to choose for: the one asked for, else the attached one."""
    if config.target:
        return device.named(config.target)
    here = device.attached()
    kind = dict(config.targets).get(here.platform)
    return device.of(kind, here.platform) if kind else here


def _by_platform(
    match: Match, choice: Choice, config: Config, target: Device
) -> tuple[tuple[str, Kernel | None], ...]:
    """A kernel per platform: an exported program may run on another one."""
    kernels, kinds = match.pattern.kernels, dict(config.targets)
    made = build(choice.implementation, match.op, kernels)
    if choice.origin == "forced":
        return _where_it_runs(made, target)
    pairs = [("default", made)]
    for other in PLATFORMS:
        if other != target.platform:
            its = device.of(kinds.get(other, other), other)
            there = choose(match.spec, config, kernels, its)
            if match.reading.in_blocks and there.kernel == XLA:
                continue  # as written it needs less memory than the op's reference
            if there.implementation != choice.implementation:
                pairs.append((other, build(there.implementation, match.op, kernels)))
    return tuple(pairs)


def _where_it_runs(
    forced: Kernel | None, target: Device
) -> tuple[tuple[str, Kernel | None], ...]:
    """A forced kernel on its platforms, the op's plain form on others."""
    if forced is None or set(forced.platforms) >= set(PLATFORMS):
        return (("default", forced),)
    if target.platform not in forced.platforms:
        return (("default", None), *((p, forced) for p in forced.platforms))
    others = [p for p in PLATFORMS if p not in forced.platforms]
    return (("default", forced), *((p, None) for p in others))


def _call(
    match: Match, kernels: Sequence[tuple[str, Kernel | None]]
) -> Callable[..., jax.Array]:
    names = set(match.op.operands)

    def call(**given: Any) -> jax.Array:
        operands = {k: v for k, v in given.items() if k in names}
        params = {k: v for k, v in given.items() if k not in names}
        return site.bind(match.op, operands, params, kernels)

    return call


def _site(p: _Placed) -> Site:
    """What is said of a match at a place, without its number."""
    match, choice, scope = p.match, p.choice, p.scope
    spec = match.spec
    return Site(
        index=0,
        op=match.op.name,
        where=match.where,
        repeats=scope.repeats,
        scope="/".join(scope.path),
        shapes=" ".join(
            f"{name} {_short(spec.dtype(name))}[{','.join(map(str, shape))}]"
            for name, shape in spec.shapes
        ),
        params=dict(match.reading.params),
        kernel=choice.kernel,
        origin=choice.origin,
        replaced=choice.kernel != XLA,
        not_chosen=choice.not_chosen,
        numerics=match.reading.notes,
        backward=p.backward is not None,
        config=choice.implementation.configs,
    )


@functools.cache
def _short(dtype: str) -> str:
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if dtype.startswith(long):
            return short + dtype.removeprefix(long).split("_")[0]
    return dtype
