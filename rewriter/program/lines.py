"""The lines of source that an equation comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rewriter import _jax
from rewriter.program.graph import Node


def line_of(node: Node) -> str:
    """Returns the line of an equation, or of the call around it; "" if not known.

    It is the innermost one outside of JAX, so it may be a library's. Equations of a
    library's own `jax.jit` know only the line of that call.
    """
    return _innermost(node, _jax.source_of)


def users_line_of(node: Node) -> str:
    """Returns the user's line that an equation comes from, if a library is between.

    Returns:
        The innermost line outside of installed packages; "" if `line_of` is that line,
        or if no line is known.
    """
    found = _innermost(node, _jax.users_source_of)
    return found if found != line_of(node) else ""


def is_of_gradient(node: Node) -> bool:
    """Whether an equation is one that nobody wrote: one of a gradient, by JAX."""
    scope, found = node.scope, _jax.is_of_gradient(node.eqn)
    while not found and scope.parent is not None:
        found = _jax.is_of_gradient(scope.parent.jaxpr.eqns[scope.call])
        scope = scope.parent
    return found


def _innermost(node: Node, source: Callable[[Any], str]) -> str:
    scope, found = node.scope, source(node.eqn)
    while not found and scope.parent is not None:
        found = source(scope.parent.jaxpr.eqns[scope.call])
        scope = scope.parent
    return found
