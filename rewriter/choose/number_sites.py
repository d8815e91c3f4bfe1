"""Numbers the sites in program order, and builds the splice of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from rewriter import _jax
from rewriter.choose.choice import Choice
from rewriter.choose.choose import choose
from rewriter.choose.choose_ring import by_parts
from rewriter.config import Config
from rewriter.find.match import Match
from rewriter.find.reading import leaves_of_operands
from rewriter.gradients.backward import Backward
from rewriter.measure.costs import UNKNOWN, Costs
from rewriter.measure.key import BOTH, Key
from rewriter.ops import device
from rewriter.ops.device import Device
from rewriter.ops.kernel import PLATFORMS, Kernel, Spec
from rewriter.ops.registry import registry
from rewriter.program.fold import Cut, Folded
from rewriter.program.graph import Scope
from rewriter.program.lines import users_line_of
from rewriter.rewrite.plan import Site
from rewriter.rewrite.splice import Splice
from rewriter.site import site
from rewriter.site.implementation import XLA, Implementation, build
from rewriter.site.ring import passed_around
from rewriter.site.shards import Shards, local_spec, spread


@dataclass(eq=False)
class Plan:
    """The numbered sites, in order, and their replacements.

    Attributes:
        sites: The sites, including those of turns that were left out.
        splices: The replacements.
        labels: By cut and turn, the labels of its sites; empty for sites left as
            written.
        key: The key under which the whole program is measured.
        forward: The number of a match's site, by the id of the match.
        left_out: Numbers of the sites in turns that were left out.
    """

    sites: list[Site] = field(default_factory=list)
    splices: list[Splice] = field(default_factory=list)
    labels: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    key: Key | None = None
    forward: dict[int, int] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Placed:
    """A match at one of its places, with the choice for it there.

    Attributes:
        match: The match.
        scope: The body of the place.
        position: The equation after which the replacement stands.
        choice: The chosen implementation.
        backward: Its gradients, if they are replaced with it.
        copies: How often it is computed again in the same body.
        shards: How it is split over devices, or why it is left to XLA.
    """

    match: Match
    scope: Scope
    position: int
    choice: Choice
    backward: Backward | None
    copies: int
    shards: Shards | str | None = None


def in_order(
    placed: Sequence[Placed],
    config: Config,
    target: Device,
    folded: Folded | None,
    key: Key | None,
) -> Plan:
    """Numbers the sites in program order, and makes the splices."""
    plan = Plan(key=key)
    elsewhere: dict[Any, tuple[tuple[str, Kernel | None], ...]] = {}
    said = [_site(p) for p in placed]
    waiting = list(enumerate(folded.cuts)) if folded else []
    for p, site_said in zip(placed, said, strict=True):
        position = top(p.scope, p.position)
        first = top(p.match.node.scope, p.match.node.position)  # of its places
        at = folded.kept[first] if folded else 0
        while waiting and at >= waiting[0][1].end:
            _left_out(plan, placed, said, folded, *waiting.pop(0))
        label = _noted(plan, p, site_said)
        if folded and (turn := folded.turn(position)):
            plan.labels.setdefault(turn, []).append(label)
        if label:
            same = id(p.match.reading), p.choice.implementation, p.shards
            if same not in elsewhere:
                elsewhere[same] = _by_platform(p, config, target)
            call = _call(p, elsewhere[same])
            plan.splices.append(
                Splice(
                    p.match, p.scope, p.position, call, label,
                    (p.choice.kernel, p.shards), p.backward,
                )
            )  # fmt: skip
    for index, cut in waiting:
        _left_out(plan, placed, said, folded, index, cut)
    return plan


def _noted(plan: Plan, p: Placed, said: Site, kept: bool = True) -> str:
    """Adds a site, and its recomputations; returns the label of its replacement.

    A checkpoint's recomputation for gradients is part of the forward's site, even if
    the turn with the forward was left out.
    """
    first, own = len(plan.sites) + 1, plan.forward.get(id(p.match)) if kept else None
    if p.scope.runs_again:
        free = (n for n in plan.left_out if not plan.sites[n - 1].again)
        for number in free if own is None else (own,):
            row = plan.sites[number - 1]
            if _same(row, said):
                plan.sites[number - 1] = _recomputed_site(row, said)
                return f"rewriter/{said.op}#{number}" if said.replaced else ""
    elif kept:
        plan.forward.setdefault(id(p.match), first)
    else:
        plan.left_out.append(first)
    for index in range(first, first + 1 + p.copies):
        plan.sites.append(said.numbered(index))
    return f"rewriter/{said.op}#{first}" if said.replaced else ""


def _same(row: Site, said: Site) -> bool:
    """Whether two sites have the same op and the same kernel."""
    names = ("op", "shapes", "params", "kernel", "not_chosen")
    return all(getattr(row, n) == getattr(said, n) for n in names)


def _recomputed_site(row: Site, said: Site) -> Site:
    """A forward's site, with the place where a checkpoint runs it again."""
    places = dict.fromkeys(filter(None, (row.again, said.scope)))
    return dataclasses.replace(
        row, backward=row.backward or said.backward, again=", ".join(places)
    )


def _left_out(
    plan: Plan,
    placed: Sequence[Placed],
    said: Sequence[Site],
    folded: Folded,
    index: int,
    cut: Cut,
) -> None:
    """Adds the sites of a run's turns that were left out."""
    like = index, cut.like
    model = [
        (p, s, top(p.match.anchor.scope, p.match.anchor.position))
        for p, s in zip(placed, said, strict=True)
        if folded.turn(top(p.scope, p.position)) == like
    ]
    for turn in cut.out:
        labels = plan.labels[index, turn] = []
        for p, s, anchor in model:
            where = folded.where(anchor, turn - cut.like, index, s.where)
            if where != s.where:
                s = dataclasses.replace(s, where=where)
            if s.called_from:
                place = anchor, turn - cut.like, index, s.called_from
                call = folded.where(*place, _jax.users_source_of)
                s = dataclasses.replace(s, called_from=call)
            labels.append(_noted(plan, p, s, kept=False))


def top(scope: Scope, position: int) -> int:
    """The position in the top body of an equation, or of the equation around it."""
    while scope.parent is not None:
        scope, position = scope.parent, scope.call
    return position


def spec_on_device(match: Match, shards: Shards | str | None) -> Spec:
    """Returns the use of an op that a kernel sees: one device's part if it is split."""
    if not isinstance(shards, Shards):
        return match.spec
    spec, params = match.spec, {**match.op.defaults, **match.reading.params}
    structs = {
        name: jax.ShapeDtypeStruct(shape, spec.dtype(name))
        for name, shape in spec.shapes
    }
    return local_spec(match.op, shards, structs, params)


def _by_platform(
    p: Placed, config: Config, target: Device
) -> tuple[tuple[str, Kernel | None], ...]:
    """A kernel per platform: an exported program may run on another one."""
    match, choice = p.match, p.choice
    kernels, kinds = match.pattern.kernels, dict(config.targets)
    kernel = build(choice.implementation, match.op, kernels)
    if choice.ring:
        return _ring_by_platform(p, config, target, kernel)
    if choice.origin == "forced":
        return _where_it_runs(kernel, target)
    pairs, spec = [("default", kernel)], spec_on_device(match, p.shards)
    for other in PLATFORMS:
        if other != target.platform:
            other_device = device.of(kinds.get(other, other), other)
            there = choose(spec, config, kernels, other_device)
            if match.reading.in_blocks and there.kernel == XLA:
                continue  # the user's code needs less memory than the op's reference
            if there.implementation != choice.implementation:
                pairs.append((other, build(there.implementation, match.op, kernels)))
    return tuple(pairs)


def _ring_by_platform(
    p: Placed, config: Config, target: Device, kernel: Kernel | None
) -> tuple[tuple[str, Kernel | None], ...]:
    """A kernel per platform for parts of a ring: each saves residuals for merging."""
    match, shards = p.match, p.shards
    rule = match.op.spread({**match.op.defaults, **match.reading.params})
    assert isinstance(shards, Shards)
    assert rule is not None
    assert rule.ring is not None
    kernels, kinds = match.pattern.kernels, dict(config.targets)
    pairs, spec = [("default", kernel)], spec_on_device(match, shards)
    for other in PLATFORMS:
        if other != target.platform:
            other_device = device.of(kinds.get(other, other), other)
            count = shards.parts(shards.ring)
            there = by_parts(rule.ring, spec, count, config, kernels, other_device)
            if isinstance(there, Implementation) and there != p.choice.implementation:
                pairs.append((other, build(there, match.op, kernels)))
    return tuple(pairs)


def _where_it_runs(
    forced: Kernel | None, target: Device
) -> tuple[tuple[str, Kernel | None], ...]:
    """A forced kernel on its platforms, the op's reference on others."""
    if forced is None or set(forced.platforms) >= set(PLATFORMS):
        return (("default", forced),)
    if target.platform not in forced.platforms:
        return (("default", None), *((p, forced) for p in forced.platforms))
    others = [p for p in PLATFORMS if p not in forced.platforms]
    return (("default", forced), *((p, None) for p in others))


def _call(
    p: Placed, kernels: Sequence[tuple[str, Kernel | None]]
) -> Callable[..., jax.Array]:
    op, shards = p.match.op, p.shards
    names = set(op.names)
    proved = _proved(p)

    def bind(operands: Mapping[str, Any], params: Mapping[str, Any]) -> jax.Array:
        if isinstance(shards, Shards) and shards.passed:
            return passed_around(op, shards, operands, params, kernels)
        return site.bind(op, operands, params, kernels, falls_back=True)

    def call(**given: Any) -> jax.Array:
        operands = {k: v for k, v in given.items() if k in names}
        params = {k: v for k, v in given.items() if k not in names} | {**proved}
        if isinstance(shards, Shards):
            both = p.backward is not None
            return spread(op, shards, operands, {**op.defaults, **params}, bind, both)
        return bind(operands, params)

    return call


def _proved(p: Placed) -> dict[str, Any]:
    """The parameters with which the gradients that are replaced were proved."""
    reading, here = p.match.reading, dict(p.match.leaves)
    grads = p.backward.grads.keys() if p.backward is not None else ()
    found = {}
    for name, proved in reading.backward_params.items():
        leaves = leaves_of_operands(reading, proved.operands)
        if any(here.get(v) in grads for v in leaves):
            found[name] = proved.value
    return found


def _site(p: Placed) -> Site:
    """The report's entry for a match at a place, without its number."""
    match, choice, scope = p.match, p.choice, p.scope
    spec = match.spec
    return Site(
        index=0,
        op=match.op.form_of or match.op.name,
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
        numerics=(*match.reading.notes, *_assumed(p)),
        backward=p.backward is not None,
        config=choice.implementation.configs,
        sharding=p.shards.text if isinstance(p.shards, Shards) else "",
        parts=tuple(part.op.form_of or part.op.name for part in match.parts),
        form=match.op.name if match.op.form_of else "",
        costs=_costs(p),
        called_from=users_line_of(match.anchor),
    )


def _assumed(p: Placed) -> tuple[str, ...]:
    """What the kernels of a place take for granted."""
    names, spec = p.choice.implementation.kernels, p.match.spec
    if spec.op not in registry().ops():
        return ()  # of a user's pattern
    kernels = (k for k in registry().kernels(spec.op) if k.name in names)
    found = (k.assumes(spec) for k in kernels if k.assumes is not None)
    return tuple(dict.fromkeys(text for text in found if text))


def _costs(p: Placed) -> Costs:
    """The costs of a place, if they are of the passes that are replaced there."""
    costs = p.choice.costs
    with_gradients = costs.passes == BOTH
    return costs if with_gradients == (p.backward is not None) else UNKNOWN


@functools.cache
def _short(dtype: str) -> str:
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if dtype.startswith(long):
            return short + dtype.removeprefix(long).split("_")[0]
    return dtype
