"""Tells where the arrays of a traced call are: given, in types, or not known yet.

A program is spread over devices if any of its arrays is on a mesh. Under `jax.jit` an
argument's placement is known while tracing only if ``in_shardings`` or its type (on
explicit mesh axes) states it. Otherwise it is known when JAX lowers the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from rewriter import _jax
from rewriter.program.propagation import Placement
from rewriter.program.trace import Traced, moving, split, trace

OTHER_MESHES = "its arrays are on more than one mesh"
SYMBOLIC = "sizes are symbolic, and JAX cannot call such a program with jax.shard_map"
AUTOMATIC = "some axes of the mesh are manual around the function, others automatic"


@dataclass(frozen=True)
class Later:
    """A placement that is known only when the call is lowered.

    Attributes:
        mesh: The mesh that arguments are on.
        inputs: What is known of the inputs.
        outputs: As in `Placement`.
        waiting: Positions of the inputs that are waited for.
    """

    mesh: Any
    inputs: tuple[PartitionSpec | None, ...]
    outputs: tuple[PartitionSpec | None, ...]
    waiting: tuple[int, ...]

    def known(self, specs: Mapping[int, PartitionSpec | None]) -> Placement:
        """Returns the placement, with those of the inputs that were waited for."""
        inputs = tuple(specs.get(i, spec) for i, spec in enumerate(self.inputs))
        return Placement(self.mesh, inputs, self.outputs)


def placed(
    fn: Any, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[Traced, Placement | Later | str | None]:
    """Returns a traced call, and where its arrays are.

    Args:
        fn: A jitted function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        options: Those of ``jax.jit``, of which shardings matter.
    """
    traced = trace(fn, args, kwargs)
    leaves, _ = split(fn, args, kwargs)
    return traced, placement_of(traced, leaves, moving(fn, args), options)


def placement_of(
    traced: Traced, leaves: Sequence[Any], args: Any, options: Mapping[str, Any]
) -> Placement | Later | str | None:
    """Returns where a call's arrays are.

    Args:
        traced: The call.
        leaves: Its dynamic arguments, flattened.
        args: Its dynamic positional arguments.
        options: Those of ``jax.jit``, of which shardings matter.

    Returns:
        None for a program on one device, or one in which every axis of the mesh is
        manual; a text for one whose placement cannot be known.
    """
    count = len(leaves)
    of_inputs = _by_leaf(options.get("in_shardings"), args, count)
    wanted = _of_results(options.get("out_shardings"), traced)
    stated = [_stated(x) for x in leaves]
    here = [asked or _committed(x) for asked, x in zip(of_inputs, leaves, strict=True)]
    shardings = (*here, *stated, *wanted, *_constraints(traced))
    mesh = _mesh_of(shardings)
    if mesh is None or isinstance(mesh, str):
        return mesh or None
    if len(traced.closed_jaxpr.jaxpr.invars) != count:
        return "its arguments are not those of the function"
    specs: list[PartitionSpec | None] = []
    waiting = []
    for i, (sharding, type_) in enumerate(zip(here, stated, strict=True)):
        if isinstance(sharding, Sharding) and sharding.num_devices > 1:
            if not isinstance(sharding, NamedSharding):
                return f"an argument has a {type(sharding).__name__}"
            specs.append(sharding.spec)
            continue
        on_mesh = type_ is not None and _is_of_several(dict(type_.mesh.shape))
        specs.append(type_.spec if on_mesh else None)
        if on_mesh and AxisType.Auto in _kinds(type_.mesh):
            waiting.append(i)
    outputs = tuple(s.spec if isinstance(s, NamedSharding) else None for s in wanted)
    outputs = outputs if any(s is not None for s in outputs) else ()
    if waiting:
        return Later(mesh, tuple(specs), outputs, tuple(waiting))
    return Placement(mesh, tuple(specs), outputs)


def _stated(leaf: Any) -> Any:
    """The sharding of an array's type; None for an array that is on one device.

    Moved there from a mesh, its type has the mesh still.
    """
    here = _committed(leaf)
    if isinstance(here, Sharding) and here.num_devices == 1:
        return None
    return getattr(jax.typeof(leaf), "sharding", None)  # a token has none


def _committed(leaf: Any) -> Any:
    """The sharding of an array, or of one described; None while tracing."""
    return None if _jax.is_tracer(leaf) else getattr(leaf, "sharding", None)


def _mesh_of(shardings: Sequence[Any]) -> Any:
    """The one mesh of several devices, ``""`` if all of it is manual; None for none.

    A text says why there is not one.
    """
    meshes = [
        s.mesh
        for s in shardings
        if isinstance(s, NamedSharding) and _is_of_several(dict(s.mesh.shape))
    ]
    if any(dict(m.shape) != dict(meshes[0].shape) for m in meshes):
        return OTHER_MESHES
    kinds = {kind for m in meshes for kind in _kinds(m)}
    if kinds == {AxisType.Manual}:
        return ""
    if kinds >= {AxisType.Manual, AxisType.Auto}:
        return AUTOMATIC
    if not meshes:
        return None
    first = meshes[0]  # an argument's, if any: bodies may see axes of other kinds
    like = (m for m in meshes if m.axis_types == first.axis_types)
    return next((m for m in like if isinstance(m, jax.sharding.Mesh)), first)


def _kinds(mesh: Any) -> set[AxisType]:
    """The kinds of a mesh's axes that have more than one device."""
    sizes = dict(mesh.shape)
    return {
        kind
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if sizes[name] > 1
    }


def _of_results(shardings: Any, traced: Traced) -> list[Any]:
    """Shardings given for the results, one for each leaf.

    If they are given part by part, the tree of results is made with stand-ins for its
    leaves. ``jax.jit`` uses the same ones, since a type may check what it is made of.
    """
    count = len(traced.out_avals)
    if _ends(shardings):
        return [shardings] * count
    results = jax.tree.unflatten(traced.out_tree, [object()] * count)
    try:
        return _by_leaf(shardings, results, count)
    except (TypeError, ValueError):  # trees that differ, of which JAX tells
        return [None] * count


def _ends(x: Any) -> bool:
    return x is None or isinstance(x, (Sharding, PartitionSpec))


def _by_leaf(shardings: Any, tree: Any, count: int) -> list[Any]:
    """Shardings given for a tree or parts of it, one for each leaf; None for none."""
    if shardings is None:
        return [None] * count
    found: list[Any] = []
    jax.tree.map(
        lambda s, part: found.extend([s] * len(jax.tree.leaves(part))),
        shardings,
        tree,
        is_leaf=_ends,
    )
    return [*found, *[None] * (count - len(found))]


def _constraints(traced: Traced) -> Iterator[Any]:
    """The shardings that the program itself asks for, and those of its constants."""
    yield from (getattr(c, "sharding", None) for c in traced.closed_jaxpr.consts
                if not _jax.is_tracer(c))  # fmt: skip
    yield from _asked(traced.closed_jaxpr.jaxpr)


def _asked(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield eqn.params["sharding"]
        if eqn.primitive.name != "shard_map":
            for body in jaxprs_in_params(eqn.params):
                yield from _asked(body)


def _is_of_several(sizes: Mapping[str, int]) -> bool:
    """Whether a mesh of these axes has more than one device."""
    return any(n > 1 for n in sizes.values())
