"""The parts into which ``jax.shard_map`` splits arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core

from rewriter._jax.programs import new_var
from rewriter._jax.types import on_explicit_axes
from rewriter._jax.values import is_drop


def mapped(
    fn: Callable[..., Any], mesh: Any, in_specs: Sequence[Any], out_specs: Any
) -> Callable[..., Any]:
    """The function of each device's part, as a function of whole arrays.

    Args:
        fn: The function.
        mesh: The devices. If some of its axes are manual, the code is inside of the
            `jax.shard_map` that made them so, and the function is mapped over the rest.
        in_specs: How its operands are split.
        out_specs: How its result is.
    """
    specs = {"in_specs": tuple(in_specs), "out_specs": out_specs}
    if not mesh.manual_axes:
        return jax.shard_map(fn, mesh=mesh, **specs)
    rest = set(mesh.axis_names) - set(mesh.manual_axes)
    typed, around = is_typed_part(mesh), jax.sharding.get_abstract_mesh()
    return jax.shard_map(fn, mesh=around, axis_names=rest, check_vma=typed, **specs)


def is_typed_part(mesh: Any) -> bool:
    """Whether code is in a `jax.shard_map` where types say what values vary over.

    Args:
        mesh: The mesh as the code sees it.
    """
    return bool(mesh.manual_axes) and config._check_vma.value


def manual_axes(eqn: Any) -> tuple[frozenset[str], dict[str, int]]:
    """The axes that a shard_map makes manual, and the sizes of all of the mesh."""
    params = eqn.params
    axes = params.get("manual_axes", params.get("newly_manual_axes"))  # new in 0.12
    return frozenset(axes), dict(params["mesh"].shape)


def parts_of(eqn: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
    """(specs of operands, of results, other parameters of the split) of a shard_map."""
    params = eqn.params
    around = params["mesh"], manual_axes(eqn)[0], params["check_vma"]
    return tuple(params["in_specs"]), tuple(params["out_specs"]), around


def _axes_of(aval: Any, around: Any) -> tuple[str, ...]:
    """The manual axes over which a value may vary, in the mesh's order.

    These are all manual axes if types do not state them.
    """
    mesh, manual, typed = around
    varying = aval.mat.varying if typed else manual
    return tuple(a for a in mesh.axis_names if a in varying)


def is_parts(spec: Any, aval: Any, around: Any) -> bool:
    """Whether a shard_map returns each device's own value, and chooses none."""
    mesh, _, typed = around
    named = {a for p in spec for a in (p if isinstance(p, tuple) else (p,))} - {None}
    axes = _axes_of(aval, around)
    if typed:  # what it is split into would be of another type
        return named == set(axes)
    return all(a in named or mesh.shape[a] == 1 for a in axes)


def returning_more_parts(
    eqn: Any,
    body: Any,
    invars: Sequence[Any],
    given: int,
    made: int,
    first: Sequence[Any] = (),
) -> Any:
    """A shard_map with another body that reads and returns further per-device parts.

    Args:
        eqn: The shard_map.
        body: Its new body.
        invars: What it reads.
        given: The number of last operands that are parts.
        made: The number of last results that are parts.
        first: How its first operands, which are new, are split.
    """
    into, out_of, around = parts_of(eqn)
    outs = [v if is_drop(v) else new_var(v.aval) for v in eqn.outvars]
    outs += [new_var(_stacked(a.aval, around)) for a in body.outvars[len(outs) :]]

    def specs(atoms: Sequence[Any], last: int) -> list[Any]:
        avals = [a.aval for a in atoms[len(atoms) - last :]]
        return [jax.P(_axes_of(a, around) or None) for a in avals]

    params = {
        **eqn.params,
        "jaxpr": body,
        "in_specs": (*first, *into, *specs(body.invars, given)),
        "out_specs": (*out_of, *specs(body.outvars, made)),
    }
    return eqn.replace(invars=list(invars), outvars=outs, params=params)


def _stacked(aval: Any, around: Any) -> Any:
    """The type of all devices' parts, one behind the other along the first axis.

    It states how axes are split that are explicit outside.
    """
    mesh, axes = around[0], _axes_of(aval, around)
    rows, *rest = aval.shape
    shape = math.prod(mesh.shape[a] for a in axes) * rows, *rest
    if not mesh.explicit_axes:
        return core.ShapedArray(shape, aval.dtype)
    first, *others = aval.sharding.spec
    named = (first,) if isinstance(first, str) else tuple(first or ())
    spec = on_explicit_axes(jax.P((*axes, *named), *others), mesh)
    sharding = jax.sharding.NamedSharding(mesh.abstract_mesh, spec)
    return core.ShapedArray(shape, aval.dtype, sharding=sharding)


def with_parts(eqn: Any, body: Any, into: Sequence[Any], out_of: Sequence[Any]) -> Any:
    """A shard_map with another body, and specs for its operands and results."""
    specs = {"in_specs": tuple(into), "out_specs": tuple(out_of)}
    return eqn.replace(params={**eqn.params, "jaxpr": body, **specs})
