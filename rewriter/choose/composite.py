"""Chooses between a composite op and its parts.

A gated linear unit of ragged dots becomes one site where a kernel computes it in one
pass. Elsewhere each of its ragged dots is a site, as if the unit had not been found.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from rewriter.choose.planner import chosen, target_of, tasks_of
from rewriter.config import Config
from rewriter.find.match import Match
from rewriter.find.region import Regions
from rewriter.gradients.insertion_point import obstacle, places
from rewriter.measure.live_products import with_live_products
from rewriter.ops import device
from rewriter.program.propagation import Placement
from rewriter.rewrite.locate import located
from rewriter.site.facts import Facts
from rewriter.site.implementation import XLA

log = logging.getLogger("rewriter.parts")


def elementary(matches: Sequence[Match]) -> tuple[Match, ...]:
    """Returns the matches that have no parts."""
    return tuple(m for m in matches if not m.op.parts)


def composites(
    regions: Regions, matches: Sequence[Match], config: Config
) -> tuple[Match, ...]:
    """Returns the composite matches that may become one site, with their parts.

    Four kinds are left out. Those with values that the program also reads elsewhere, as
    gradients do: these values would be computed twice. Those in an exported program,
    since the parts have kernels for every platform. Those whose parts have forced
    kernels. And those whose parts are a special form of their op, if the whole is not.

    Args:
        regions: The walks over the program's graph.
        matches: What was found in it.
        config: Forced kernels, the target.
    """
    target, found = target_of(config), []
    forced = {name for name, *_ in config.implementation}
    for m in matches:
        if not m.op.parts or config.exporting:
            continue
        here = any(target.platform in k.platforms for k in m.pattern.kernels)
        if m.op.name not in forced and (m.op.parts in forced or not here):
            continue
        if any(obstacle(m, scope, regions) for scope, _ in places(m)):
            continue
        if with_live_products(regions.graph, [Facts(m)]):
            continue
        ops = [p for p in matches if m.op.parts in (p.op.name, p.op.form_of)]
        inside = [p for p in ops if p.value in m.inner]
        if not m.op.form_of and any(p.op.form_of for p in inside):
            continue
        found.append(dataclasses.replace(m, parts=tuple(inside)))
    return tuple(found)


def with_composites(
    regions: Regions,
    matches: Sequence[Match],
    config: Config,
    placement: Placement | str | None,
) -> tuple[Match, ...]:
    """Returns the matches, where each composite replaces its parts or is dropped.

    Args:
        regions: The walks over the program's graph.
        matches: What was found in it.
        config: Forced kernels, the target, measurements.
        placement: Where the program's inputs are, if it runs on several devices; or why
            that is not known.
    """
    rest = elementary(matches)
    if len(rest) == len(matches):
        return rest
    graph, target = regions.graph, target_of(config)
    found = composites(regions, matches, config)
    facts = [
        Facts(m, shards=shards)
        for m, shards in zip(found, located(regions, found, placement), strict=True)
    ]
    if config.tune in ("quick", "full") and target == device.attached():
        from rewriter.measure import autotune  # few programs time anything

        autotune.measure_missing(tasks_of(graph, facts), config.tune)
    taken: dict[int, Match] = {}
    for f in facts:
        m = f.match
        choice = chosen(graph, f, config, target, 0, "")
        log.debug("%s at %s: %s", m.op.name, m.where, choice.kernel)
        if choice.kernel != XLA and not _comparison_only(m, choice.kernel):
            taken[m.value] = m
    inside = {id(p) for m in taken.values() for p in m.parts}
    kept = [taken.get(m.value) if m.op.parts else m for m in matches]
    return tuple(m for m in kept if m is not None and id(m) not in inside)


def _comparison_only(match: Match, name: str) -> bool:
    """Whether a kernel computes a composite by running kernels of its parts."""
    named = [k for k in match.pattern.kernels if k.name == name]
    return any(k.traits.comparison_only for k in named)
