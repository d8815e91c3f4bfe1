"""A program in, the rewritten program out: graph, search, choice, splices."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import autotune, device, site
from rewriter.backward_place import home_of, lies_at, residuals_place
from rewriter.choose import AS_WRITTEN, Choice, choose, left_out
from rewriter.config import Config
from rewriter.device import Device
from rewriter.gradients import Backward, search_gradients
from rewriter.graph import Graph, Scope
from rewriter.implementation import XLA, build
from rewriter.kernel import PLATFORMS, Kernel
from rewriter.match import Match, search
from rewriter.plan import Site
from rewriter.programs import Task
from rewriter.region import Regions
from rewriter.remains import SAVED, WHY, computed_anyway
from rewriter.replace import Rewritten, Splice, obstacle, replace
from rewriter.sieve import possible
from rewriter.tuned import BOTH, FORWARD, Key, key_of, program_key
from rewriter.verdict import Reason


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
        return _tasks(matches, backward, gradients)


def _tasks(
    matches: Sequence[Match], backward: Mapping[int, Backward], gradients: bool = False
) -> list[Task]:
    found: dict[Task, None] = {}
    for m in matches:
        differentiated = id(m) in backward
        passes = [] if differentiated else [FORWARD]
        if differentiated or gradients:
            passes.append(BOTH)
        for which in passes:
            found[Task(m.op, m.spec, tuple(m.pattern.kernels), which)] = None
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
    graph = Graph(closed_jaxpr)
    clock("graph")
    regions = Regions(graph)
    found = search(regions, patterns, config.numerics)
    clock("match")
    backward, why, problems = search_gradients(graph, found.matches)
    clock("gradients")
    sites, splices, failures, key = _plan(regions, found.matches, config, backward, why)
    clock("choose")
    program = replace(regions, splices)
    graph.release()
    clock("replace")
    return Rewritten(
        program,
        tuple(sites),
        found.misses,
        (*found.failures, *problems, *failures),
        clock.seconds,
        key,
    )


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = now - self.last
        self.last = now


def _plan(
    regions: Regions,
    matches: Sequence[Match],
    config: Config,
    backward: Mapping[int, Backward],
    why_none: Mapping[int, str],
):
    sites: list[Site] = []
    splices: list[Splice] = []
    failures: list[Reason] = []
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
    covered = frozenset().union(
        *(b.inner | {*b.grads.values()} for b in backward.values())
    )
    matches = [m for m in matches if m.value not in covered]
    anyway = {
        id(m): SAVED
        for m in matches
        if id(m) in backward and _made_again(graph, m, backward[id(m)], regions)
    }
    if config.tune in ("quick", "full") and target == device.attached():
        autotune.measure_missing(_tasks(matches, backward), config.tune)
    choices = _choices(graph, matches, config, target, backward, anyway, why_none)
    program = _program_key(graph, matches, choices, backward, target)
    choices = _end_to_end(matches, choices, config, target, program)
    elsewhere: dict[Any, tuple[tuple[str, Kernel | None], ...]] = {}
    for match, choice in zip(matches, choices, strict=True):
        home = homes.get(id(match))
        for scope, position in _places(match):
            its = None
            if home is not None and home[0] == (scope, position):
                its, position = backward[id(match)], home[1]
            made = choice
            why = obstacle(match, scope, regions) if choice.kernel != XLA else ""
            if why:
                made = Choice(AS_WRITTEN, "heuristic", ((choice.kernel, why),))
            index = len(sites) + 1
            if made.kernel != XLA:
                label = f"rewriter/{match.op.name}#{index}"
                key = id(match.reading), made.implementation
                if key not in elsewhere:
                    elsewhere[key] = _by_platform(match, made, config, target)
                call = _call(match, elsewhere[key])
                splices.append(
                    Splice(match, scope, position, call, label, made.kernel, its)
                )
            sites.append(_site(index, match, scope, made, its is not None))
            copies = match.copies if scope is match.node.scope else 0
            for _ in range(copies):  # computed again here; the result is shared
                sites.append(_site(len(sites) + 1, match, scope, made, its is not None))
    return sites, splices, failures, program


def _program_key(
    graph: Graph,
    matches: Sequence[Match],
    choices: Sequence[Choice],
    backward: Mapping[int, Backward],
    target: Device,
) -> Key | None:
    """The key of the whole program with these choices; None if nothing is replaced."""
    if all(c.implementation.forward == XLA for c in choices):
        return None
    counts: Counter[Any] = Counter()
    for m, c in zip(matches, choices, strict=True):
        if m.spec.symbolic:
            return None
        passes = BOTH if id(m) in backward else FORWARD
        counts[m.spec, passes, c.implementation] += 1
    sites = [
        (key_of(spec, passes, target.kind), f"{made.text} x{count}")
        for (spec, passes, made), count in counts.items()
    ]
    texts: dict[Any, str] = {}  # a text costs more than all else that is done here
    inputs = []
    for v in graph.top.jaxpr.invars:
        inputs.append(texts.get(v.aval) or texts.setdefault(v.aval, str(v.aval)))
    return program_key(sites, inputs, target.kind)


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
) -> list[Choice]:
    """A kernel for each match; XLA where the kernel's work would come on top."""
    kept: Counter[Any] = Counter()  # how often a gradient's residuals are kept
    for m in matches:
        if id(m) in backward:
            kept[m.spec] += m.node.scope.repeats
    by_reading: dict[tuple[int, int], Choice] = {}
    keys = [(id(m.reading), kept[m.spec] if id(m) in backward else 0) for m in matches]
    for key, match in zip(keys, matches, strict=True):
        if key not in by_reading:
            by_reading[key] = choose(
                match.spec, config, match.pattern.kernels, target, key[1], match.where
            )
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
    pairs = [("default", build(choice.implementation, match.op, kernels))]
    for other in PLATFORMS if choice.origin != "forced" else ():
        if other != target.platform:
            its = device.of(kinds.get(other, other), other)
            there = choose(match.spec, config, kernels, its)
            if there.implementation != choice.implementation:
                pairs.append((other, build(there.implementation, match.op, kernels)))
    return tuple(pairs)


def _call(
    match: Match, kernels: Sequence[tuple[str, Kernel | None]]
) -> Callable[..., jax.Array]:
    names = set(match.op.operands)

    def call(**given: Any) -> jax.Array:
        operands = {k: v for k, v in given.items() if k in names}
        params = {k: v for k, v in given.items() if k not in names}
        return site.bind(match.op, operands, params, kernels)

    return call


def _site(
    index: int, match: Match, scope: Scope, choice: Choice, backward: bool
) -> Site:
    spec = match.spec
    return Site(
        index=index,
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
        backward=backward,
        config=choice.implementation.configs,
    )


@functools.cache
def _short(dtype: str) -> str:
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if dtype.startswith(long):
            return short + dtype.removeprefix(long).split("_")[0]
    return dtype
