"""Finds where a match's replacement can stand, and which variables it reads there."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import jax

from rewriter import _jax
from rewriter.find.match import Match
from rewriter.find.region import Regions
from rewriter.program.graph import Node, Scope


def obstacle(
    match: Match, scope: Scope, regions: Regions, spare: Set[int] = frozenset()
) -> str:
    """Why a replacement cannot stand in a body, or nothing.

    Args:
        match: The region.
        scope: The body.
        regions: The walks over the program's graph.
        spare: Leaves that are not needed.
    """
    place, instead = regions.place(scope), read_instead(regions, match, scope)
    for _, leaf in match.leaves:
        value = instead[leaf].value if leaf in instead else leaf
        if value in scope.first_var:
            continue
        if value not in place.defined and leaf in spare:
            continue
        if value not in place.defined:
            return "an operand cannot be had where the result is computed"
        for inner in (scope, place.defined[value][1]):
            while inner is not place.scope:  # calls that would be inlined
                if _jax.holds_tracers(inner.jaxpr):
                    return "a call around it holds values of a trace around"
                inner = inner.parent
    return ""


def places(match: Match) -> list[tuple[Scope, int]]:
    """The first place of the result in every body that computes it."""
    node = match.node
    found = {id(node.scope): (node.scope, node.position)}
    for scope, position, _ in node.copies:
        found.setdefault(id(scope), (scope, position))
    return list(found.values())


PLACING = frozenset({"pcast", "pvary", "reshard", "sharding_constraint"})
LAYOUT = frozenset({"expand_dims", "reshape", "squeeze", "transpose"})
STEPS = 6
"""The most equations below a leaf at which a name is searched."""


@dataclass(frozen=True)
class Instead:
    """A value that a replacement reads instead of a leaf: it holds the same numbers.

    Attributes:
        value: The value.
        steps: The layout equations from the leaf to the value.
    """

    value: int
    steps: tuple[Node, ...] = ()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for values with the same way back."""
        return tuple(
            (n.prim, n.eqn.invars[0].aval.shape, n.params.get("permutation"))
            for n in self.steps
        )

    def back(self, array: jax.Array) -> jax.Array:
        """Returns the leaf's array from the value's."""
        for node in reversed(self.steps):
            if node.prim == "transpose":
                order = node.params["permutation"]
                array = array.transpose([order.index(k) for k in range(len(order))])
            else:
                array = array.reshape(node.eqn.invars[0].aval.shape)
        return array


def read_instead(regions: Regions, match: Match, scope: Scope) -> dict[int, Instead]:
    """Values to read instead of leaves that the program places or names first.

    A checkpoint's policy saves values by name, and may have saved no others.

    Args:
        regions: The walks over the program's graph.
        match: The region.
        scope: The body in which it is replaced.

    Returns:
        By leaf, the value that the replacement reads instead.
    """
    found: dict[int, Instead] = {}
    for _, leaf in match.leaves:
        instead = Instead(leaf)
        while (below := _placed(regions, match, scope, instead.value)) is not None:
            instead = Instead(below)
        instead = _named(regions, match, scope, instead)
        if instead.value != leaf:
            found[leaf] = instead
    return found


def _is_at_hand(regions: Regions, scope: Scope, value: int) -> bool:
    return value in scope.first_var or value in regions.place(scope).defined


def _placed(regions: Regions, match: Match, scope: Scope, value: int) -> int | None:
    """What a region makes of a value by putting it elsewhere, if that is had.

    Or by a cast to the dtype that it has, as from a weak type. Not what it puts into a
    mesh of another kind, as `jax.sharding.auto_axes` does: the replacement stands in
    that of the result.
    """
    inner, avals = match.inner - {match.value}, regions.graph.avals
    for node in regions.graph.users(value):
        same = node.prim in PLACING or _keeps_dtype(regions, node)
        placed = same and inner.issuperset(node.outs)
        if not placed or not _is_at_hand(regions, scope, node.outs[0]):
            continue
        if _jax.in_one_mesh(avals[node.outs[0]], avals[match.value]):
            return node.outs[0]
    return None


def _keeps_dtype(regions: Regions, node: Node) -> bool:
    """Whether an equation is a cast to the dtype that its operand has."""
    dtypes = map(regions.graph.dtype, (*node.ins, *node.outs))
    return node.prim == "convert_element_type" and len(set(dtypes)) == 1


def _named(regions: Regions, match: Match, scope: Scope, first: Instead) -> Instead:
    """The last available value that a region names, below layouts of a leaf."""
    found, todo = first, [first]
    while todo:
        here = todo.pop()
        for node in regions.graph.users(here.value):
            out = node.outs[0] if len(node.outs) == 1 else match.value
            if out == match.value or out not in match.inner:
                continue
            if node.prim == "name":
                todo.append(Instead(out, here.steps))
                found = todo[-1] if _is_at_hand(regions, scope, out) else found
            elif node.prim in LAYOUT and len(here.steps) < STEPS:
                todo.append(Instead(out, (*here.steps, node)))
    return found
