"""Types of arrays: weak types, the axes of a mesh that values vary over, shardings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import core


def with_common_varying(values: Sequence[Any]) -> list[Any]:
    """Returns the arrays, each varying over the manual mesh axes of all of them.

    Inside `jax.shard_map` with ``check_vma=True`` the operands of one equation
    must agree; the casts transpose to the sums that gradients need.
    """
    axes = [core.typeof(v).mat.varying for v in values]
    union = frozenset().union(*axes)
    return [
        jax.lax.pcast(v, tuple(sorted(union - own)), to="varying") if union - own else v
        for v, own in zip(values, axes, strict=True)
    ]


def shaped_like(shape: Sequence[Any], dtype: Any, avals: Sequence[Any]) -> Any:
    """Returns the abstract value of a result of operands with these avals.

    Args:
        shape: The result's shape.
        dtype: The result's dtype.
        avals: The operands' abstract values; the result varies over the manual
            axes that any of them varies over.
    """
    varying = frozenset().union(*(a.mat.varying for a in avals))
    like = next((a for a in avals if a.mat.varying == varying), avals[0])
    meshes = [a.sharding.mesh for a in avals if not a.sharding.mesh.empty]
    if not meshes:
        return core.ShapedArray(tuple(shape), dtype)
    unsharded = jax.P(*[None] * len(shape))
    sharding = jax.sharding.NamedSharding(meshes[0], unsharded)
    return core.ShapedArray(
        tuple(shape), dtype, sharding=sharding, manual_axis_type=like.mat
    )


def weakly_typed(value: Any) -> Any:
    """Returns the array with a weak type, which yields to other types."""
    return jax.lax.convert_element_type_p.bind(
        value, new_dtype=value.dtype, weak_type=True, sharding=None
    )


def without_varying(aval: Any) -> Any:
    """Returns the abstract value without its manual mesh axes, for lowering."""
    return aval.update(manual_axis_type=core.empty_mat) if aval.mat.varying else aval


def sharding_in_type(value: Any) -> Any:
    """Returns the sharding that an array's type states; None if it states none."""
    sharding = core.typeof(value).sharding
    return sharding if any(p is not None for p in sharding.spec) else None


def same_types(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether abstract values agree, ignoring meshes that shard none of their axes."""
    return len(first) == len(second) and all(
        a == b
        or (
            a.shape == b.shape
            and a.dtype == b.dtype
            and a.weak_type == b.weak_type
            and a.mat == b.mat
            and tuple(a.sharding.spec) == tuple(b.sharding.spec)
        )
        for a, b in zip(first, second, strict=True)
    )


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh on whose explicit axes values are placed by their types, or None."""
    explicit = jax.sharding.AxisType.Explicit
    meshes = (a.sharding.mesh for a in avals if hasattr(a, "sharding"))
    return next((m for m in meshes if explicit in m.axis_types), None)


def on_explicit_axes(spec: Any, mesh: Any) -> Any:
    """What types state of a placement: how it uses the explicit axes of its mesh.

    Example:
        >>> from jax.sharding import AbstractMesh, AxisType
        >>> kinds = AxisType.Explicit, AxisType.Auto
        >>> mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)
        >>> on_explicit_axes(jax.P("model", ("data", "model")), mesh)
        P(None, 'data')
    """

    def explicit_ones(axes: Any) -> Any:
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        named = tuple(a for a in axes if a in mesh.explicit_axes)
        return named[0] if len(named) == 1 else named or None

    return jax.P(*map(explicit_ones, spec))


def partly_manual_mesh(avals: Sequence[Any]) -> Any:
    """The mesh of which `jax.shard_map` made some axes manual, but not all; or None."""
    meshes = (a.sharding.mesh for a in avals if hasattr(a, "sharding"))
    return next(
        (m for m in meshes if m.manual_axes and not m.are_all_axes_manual), None
    )


def in_one_mesh(first: Any, second: Any) -> bool:
    """Whether two types are of one mesh, its axes of the same kinds."""
    meshes = [a.sharding.mesh for a in (first, second) if hasattr(a, "sharding")]
    meshes = [m for m in meshes if not m.empty]
    return len(set(meshes)) < 2


def stated(avals: Sequence[Any]) -> tuple[Any, ...]:
    """A key of how types place values, and of what they vary over; () if not at all."""
    varying = tuple(a.mat.varying for a in avals)
    varying = varying if any(varying) else ()
    mesh = explicit_mesh(avals) or partly_manual_mesh(avals)
    if mesh is None:
        return varying
    return (*varying, mesh, *(tuple(a.sharding.spec) for a in avals))
