"""Finds the shard_map in which an equation asks for the number of its device."""

from __future__ import annotations

from typing import Any

from rewriter import _jax
from rewriter.program.values import Scope


def devices_around(scope: Scope, eqn: Any) -> Any:
    """What a device's number along an axis of a mesh is counted in.

    Args:
        scope: The body of the equation.
        eqn: An ``axis_index``.

    Returns:
        The mesh and its manual axes, as `_jax.parts_of` gives them; None if no
        shard_map around makes the axis manual.
    """
    axis = eqn.params["axis_name"]
    while scope.parent is not None:
        owner = scope.parent.jaxpr.eqns[scope.call]
        if scope.kind == "shard_map" and axis in _jax.manual_axes(owner)[0]:
            return _jax.parts_of(owner)[2]
        scope = scope.parent
    return None
