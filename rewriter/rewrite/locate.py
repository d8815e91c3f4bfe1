"""Finds how each match in a program on a mesh is split over its devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from rewriter import _jax
from rewriter.find.match import Match
from rewriter.find.reading import leaves_of
from rewriter.find.region import Regions
from rewriter.gradients.insertion_point import obstacle, places, read_instead
from rewriter.ops.op import OUT
from rewriter.program.graph import Scope
from rewriter.program.placement import MANUAL, MIXED, SYMBOLIC
from rewriter.program.propagation import (
    Placement,
    Split,
    Unreadable,
    mark,
    propagated,
    split_by,
)
from rewriter.rewrite.replace import replace
from rewriter.rewrite.splice import Splice
from rewriter.site.shards import NoShards, Shards, shards_of

log = logging.getLogger("rewriter.locate")

ENTIRELY = "every axis of the mesh is manual around it"


def located(
    regions: Regions, matches: Sequence[Match], placement: Placement | str | None
) -> tuple[Shards | str | None, ...]:
    """Returns for each match how it is split over the mesh, or why it is left to XLA.

    It is ``None`` for a match that one device computes entirely.

    Where the mesh's axes are explicit, types state the split. Otherwise, as inside of
    `jax.sharding.auto_axes`, the program is written with each op's reference in place
    of the site, and with marked operands. XLA's propagation then finds how those are
    split.

    Args:
        regions: The walks over the program's graph.
        matches: What was found in it.
        placement: Where the program's inputs are; or why that is not known. ``None``
            on one device.
    """
    found: list[Shards | str | None] = [None] * len(matches)
    rest: dict[int, Match] = {}
    for index, m in enumerate(matches):
        manual = _manual(m.node.scope) if placement is not None else ENTIRELY
        if manual == ENTIRELY:
            continue
        found[index] = why = _unknown(m, placement, manual)
        if why is not None:
            continue
        if placement is not None and _is_mixed(regions, m, placement.mesh):
            found[index] = MIXED
        elif placement is not None and _has_types(regions, m):
            found[index] = _stated(regions, m, placement)
        else:
            rest[index] = m
    if isinstance(placement, Placement):
        for index, shards in _propagated(regions, rest, placement).items():
            found[index] = shards
        for m, shards in zip(matches, found, strict=True):
            log.debug("%s at %s: %s", m.op.name, m.where, shards or ENTIRELY)
    return tuple(found)


def _unknown(
    match: Match, placement: Placement | str | None, manual: str
) -> str | None:
    """Says why a match cannot be split, whatever its operands' placement is."""
    if isinstance(placement, str):
        return placement
    if manual == MANUAL:
        return MANUAL
    return SYMBOLIC if match.spec.symbolic else None


def _propagated(
    regions: Regions, matches: Mapping[int, Match], placement: Placement
) -> dict[int, Shards | str]:
    """How matches are split, by XLA's propagation on a program with marks."""
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    splices = []
    for index, m in matches.items():
        for scope, position in places(m):
            if not obstacle(m, scope, regions):
                seen = shapes[index] = {}
                call = _observed(m, index, seen)
                splices.append(Splice(m, scope, position, call, key=index))
                break
    if not splices:
        return {}
    try:
        program, _ = replace(regions, splices)
        splits = propagated(program, placement)
    except Unreadable as problem:
        why = f"its placement is not known: {problem}"
        return dict.fromkeys(shapes, why)
    found: dict[int, Shards | str] = {}
    placement = dataclasses.replace(placement, mesh=_automatic(placement.mesh))
    for index, seen in shapes.items():
        m = matches[index]
        try:
            found[index] = _shards(m, index, seen, splits, placement)
            _require_asked(regions, m, found[index])
        except NoShards as why:
            found[index] = str(why)
    return found


def _require_asked(regions: Regions, match: Match, shards: Shards) -> None:
    """Refuses a split that lacks one which the program asks for inside of the match.

    Raises:
        NoShards: If it does.
    """
    used = {a for _, axes in shards.letters for a in axes}
    for value in match.inner:
        node = regions.graph.node_of(value)
        if node is None or node.prim != "sharding_constraint":
            continue
        spec = getattr(node.params["sharding"], "spec", ())
        spec = [s for s in spec if s is not jax.P.UNCONSTRAINED]
        asked = [a for axes in split_by(spec, len(spec)) for a in axes]
        more = [a for a in asked if a not in used and shards.mesh.shape.get(a, 1) > 1]
        if more:
            text = "the program asks for a value inside of it to be split over"
            raise NoShards(f"{text} {' and '.join(dict.fromkeys(more))}")


def _automatic(mesh: Any) -> Any:
    """The mesh as code inside of `jax.sharding.auto_axes` sees it."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def _has_types(regions: Regions, match: Match) -> bool:
    """Whether types state where a match's result is, on explicit axes."""
    return _jax.explicit_mesh([regions.graph.avals[match.value]]) is not None


def _is_mixed(regions: Regions, match: Match, mesh: Any) -> bool:
    """Whether a match is where only some axes of the program's mesh are automatic.

    So it is inside of `jax.sharding.auto_axes` over a part of them.
    """
    here = getattr(regions.graph.avals[match.value], "sharding", None)
    kinds = here.mesh.axis_types if here is not None else ()
    return len(set(kinds)) > 1 and kinds != mesh.axis_types


def _manual(scope: Scope | None) -> str:
    """Whether a body already sees one device's part, inside a shard_map."""
    manual: set[str] = set()
    sizes: dict[str, int] = {}
    while scope is not None:
        if scope.kind == "shard_map" and scope.parent is not None:
            own, sizes = _jax.manual_axes(scope.parent.jaxpr.eqns[scope.call])
            manual |= own
        scope = scope.parent
    if not sizes:
        return ""
    rest = [a for a, n in sizes.items() if n > 1 and a not in manual]
    return MANUAL if rest else ENTIRELY


def _observed(
    match: Match, index: int, seen: dict[str, tuple[int, ...]]
) -> Callable[..., jax.Array]:
    """The op's reference, with marked operands and result."""
    names = set(match.op.names)

    def call(**given: Any) -> jax.Array:
        operands = {k: mark(v, f"{index}/{k}") for k, v in given.items() if k in names}
        params = {k: v for k, v in given.items() if k not in names}
        out = match.op.reference(**operands, **{**match.op.defaults, **params})
        seen.update({k: v.shape for k, v in operands.items()}, **{OUT: out.shape})
        return mark(out, f"{index}/{OUT}")

    return call


def _stated(regions: Regions, match: Match, placement: Placement) -> Shards | str:
    """How a match is split where the types of its operands state it."""
    graph, reading = regions.graph, match.reading
    here, names = dict(match.leaves), leaves_of(reading)
    placed = {
        leaf: instead.value
        for leaf, instead in read_instead(regions, match, match.node.scope).items()
        if not instead.steps
    }
    avals = [graph.avals[placed.get(here[v], here[v])] for v in names]
    own, params = set(match.op.names), {**match.op.defaults, **reading.params}
    shapes: dict[str, tuple[int, ...]] = {}
    splits: dict[str, Split | None] = {}

    def call(**given: Any) -> jax.Array:
        operands = {k: v for k, v in given.items() if k in own}
        structs = {
            k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in operands.items()
        }
        out = jax.eval_shape(lambda o: match.op.reference(**o, **params), structs)
        for name, x in {**operands, OUT: out}.items():
            shapes[name] = x.shape
            spec = () if name == OUT else jax.typeof(x).sharding.spec
            splits[name] = split_by(spec, len(x.shape))
        return jnp.zeros(out.shape, out.dtype)

    def code(*arrays: jax.Array) -> jax.Array:
        leaves = dict(zip(names, arrays, strict=True))
        shape, dtype = graph.shape(reading.value), graph.dtype(reading.value)
        return reading.build(call, leaves, shape, dtype)

    try:
        _jax.trace_placed(code, avals)
        return shards_of(match.op, params, shapes, splits, placement.mesh)
    except NoShards as why:
        return str(why)
    except Exception as problem:  # JAX has no rule for a layout of these placements
        text = (str(problem).splitlines() or [""])[0]
        return f"its operands cannot be laid out as they are placed: {text}"


def _shards(
    match: Match,
    index: int,
    shapes: Mapping[str, tuple[int, ...]],
    splits: Mapping[str, Any],
    placement: Placement,
) -> Shards:
    missing = [n for n in shapes if f"{index}/{n}" not in splits]
    if missing:  # its result is not used, as far as propagation sees
        raise NoShards(f"the compiler does not say where {missing[0]} is")
    here = {n: splits[f"{index}/{n}"] for n in shapes}
    params = {**match.op.defaults, **match.reading.params}
    return shards_of(match.op, params, shapes, here, placement.mesh)
