"""Finds how each match in a program on a mesh is split over its devices."""

from __future__ import annotations

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
from rewriter.ops.op import OUT, Op
from rewriter.program.graph import Scope
from rewriter.program.placement import SYMBOLIC
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
from rewriter.site.shards import NoShards, Shards, plain, shards_of
from rewriter.support.dtypes import is_inexact

log = logging.getLogger("rewriter.locate")

ACROSS = "a part of it is inside of jax.sharding.auto_axes, and a part is not"
NO_LAYOUT = "its operands cannot be laid out as they are placed: "


def located(
    regions: Regions, matches: Sequence[Match], placement: Placement | str | None
) -> tuple[Shards | str | None, ...]:
    """Returns for each match how it is split over the mesh, or why it is left to XLA.

    It is ``None`` for a match that one device computes entirely.

    Where the mesh's axes are explicit, types state the split. Where some are automatic,
    as inside of `jax.sharding.auto_axes`, the program is written with each op's
    reference in place of the site, and with marked operands. XLA's propagation then
    finds how those are split. Axes that a `jax.shard_map` made manual split nothing.

    Args:
        regions: The walks over the program's graph.
        matches: What was found in it.
        placement: Where the program's inputs are; or why that is not known. ``None``
            on one device.
    """
    found: list[Shards | str | None] = [None] * len(matches)
    rest: dict[int, Match] = {}
    for index, m in enumerate(matches):
        if placement is None:
            continue
        if isinstance(placement, str):
            entirely = _is_entirely_manual(m.node.scope)
            found[index] = None if entirely else placement
            continue
        mesh = _mesh_at(regions, m, placement.mesh)
        kinds = _kinds(mesh)
        splits = AxisType.Auto in kinds or AxisType.Explicit in kinds
        if splits and m.spec.symbolic:
            found[index] = SYMBOLIC
        elif AxisType.Auto in kinds:
            rest[index] = m
        elif AxisType.Explicit in kinds:
            found[index] = _stated(regions, m, mesh)
    if isinstance(placement, Placement):
        for index, shards in _propagated(regions, rest, placement).items():
            found[index] = shards
        for m, shards in zip(matches, found, strict=True):
            log.debug("%s at %s: %s", m.op.name, m.where, shards or "one device's part")
    return tuple(found)


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
    found: dict[int, Shards | str] = {}
    try:
        program, _ = replace(regions, splices)
    except Exception:
        splices = [s for s in splices if not _is_noted(regions, s, found)]
        program, _ = replace(regions, splices)
    try:
        splits = propagated(program, placement)
    except Unreadable as problem:
        why = f"its placement is not known: {problem}"
        return dict.fromkeys(shapes, why) | found
    for index in (splice.key for splice in splices):
        m, seen = matches[index], shapes[index]
        try:
            mesh = _mesh_at(regions, m, placement.mesh)
            found[index] = _shards(m, index, seen, splits, mesh)
            _require_asked(regions, m, found[index])
        except NoShards as why:
            found[index] = str(why)
    return found


def _is_noted(regions: Regions, splice: Splice, found: dict[int, Shards | str]) -> bool:
    """Notes why JAX cannot trace a reference of arrays that are on explicit axes.

    It has no rule for some equations of arrays that are split over those.
    """
    if _jax.explicit_mesh([regions.graph.avals[splice.match.value]]) is None:
        return False
    try:
        replace(regions, [splice])
    except Exception as problem:
        found[splice.key] = NO_LAYOUT + _line_of(problem)
    return splice.key in found


def _line_of(problem: Exception) -> str:
    return (str(problem).splitlines() or [""])[0]


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


def _mesh_at(regions: Regions, match: Match, mesh: Any) -> Any:
    """The mesh as code at a match sees it, with the kinds that its axes have there.

    Bodies of `jax.shard_map` see manual axes, and those of `jax.sharding.auto_axes`
    automatic ones.

    Args:
        regions: The walks over the program's graph.
        match: The match.
        mesh: The mesh of the program's arguments.
    """
    here = getattr(regions.graph.avals[match.value], "sharding", None)
    if here is not None and dict(here.mesh.shape) == dict(mesh.shape):
        return mesh if here.mesh.axis_types == mesh.axis_types else here.mesh
    manual = _manual(match.node.scope)
    kinds = tuple(
        AxisType.Manual if name in manual else AxisType.Auto for name in mesh.axis_names
    )
    if kinds == mesh.axis_types:
        return mesh
    if isinstance(mesh, Mesh) and AxisType.Manual not in kinds:
        return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)


def _kinds(mesh: Any) -> set[AxisType]:
    """The kinds of a mesh's axes that have more than one device."""
    every = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return {kind for size, kind in every if size > 1}


def _manual(scope: Scope | None) -> frozenset[str]:
    """The axes that the shard_maps around a body made manual."""
    manual = frozenset[str]()
    while scope is not None:
        if scope.kind == "shard_map" and scope.parent is not None:
            own, _ = _jax.manual_axes(scope.parent.jaxpr.eqns[scope.call])
            manual |= own
        scope = scope.parent
    return manual


def _is_entirely_manual(scope: Scope | None) -> bool:
    """Whether a body already sees one device's part, inside a shard_map."""
    manual = _manual(scope)
    while scope is not None and scope.kind != "shard_map":
        scope = scope.parent
    if scope is None or scope.parent is None:
        return False
    _, sizes = _jax.manual_axes(scope.parent.jaxpr.eqns[scope.call])
    return all(n == 1 or a in manual for a, n in sizes.items())


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


def _stated(regions: Regions, match: Match, mesh: Any) -> Shards | str:
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
        if mesh.manual_axes:
            _require_derivative(match.op, operands, params)
        return jnp.zeros(out.shape, out.dtype)

    def code(*arrays: jax.Array) -> jax.Array:
        leaves = dict(zip(names, arrays, strict=True))
        shape, dtype = graph.shape(reading.value), graph.dtype(reading.value)
        return reading.build(call, leaves, shape, dtype)

    try:
        _jax.trace_placed(code, avals)
        return shards_of(match.op, params, shapes, splits, mesh)
    except NoShards as why:
        return str(why)
    except Exception as problem:  # JAX has no rule for a layout of these placements
        result = graph.avals[match.value]
        together = all(_jax.in_one_mesh(a, result) for a in avals)
        return NO_LAYOUT + _line_of(problem) if together else ACROSS


def _require_derivative(
    op: Op, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> None:
    """Asks JAX for the reference's derivative, which may have no rule for placements.

    In a shard_map over some axes, what differentiates a site once more differentiates
    that. See `rewriter.site.nested_shards`.
    """
    moving = [k for k, x in operands.items() if is_inexact(x)]
    fixed = {k: v for k, v in operands.items() if k not in moving}
    reference = plain(op, [*moving, *fixed], params)
    of = lambda *arrays: reference(*arrays, *fixed.values())
    jax.vjp(of, *(operands[k] for k in moving))


def _shards(
    match: Match,
    index: int,
    shapes: Mapping[str, tuple[int, ...]],
    splits: Mapping[str, Any],
    mesh: Any,
) -> Shards:
    missing = [n for n in shapes if f"{index}/{n}" not in splits]
    if missing:  # its result is not used, as far as propagation sees
        raise NoShards(f"the compiler does not say where {missing[0]} is")
    here = {n: splits[f"{index}/{n}"] for n in shapes}
    params = {**match.op.defaults, **match.reading.params}
    return shards_of(match.op, params, shapes, here, mesh)
