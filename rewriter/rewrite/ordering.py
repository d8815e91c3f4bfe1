"""Orders equations so that each comes after those that make what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriter import _jax


def in_order(rest: Sequence[Any], new: Sequence[Any]) -> list[Any] | None:
    """Returns equations with others among them: each after what it reads.

    Returns:
        None if there is no such order, or if effects would move.
    """
    makers = {v: e for e in (*rest, *new) for v in e.outvars}
    ordered: list[Any] = []
    begun: set[int] = set()
    ended: set[int] = set()
    for first in (*rest, *new):
        stack = [first]
        while stack:
            eqn = stack[-1]
            if id(eqn) in ended:
                stack.pop()
                continue
            wanted = [
                makers[v]
                for v in eqn.invars
                if not _jax.is_literal(v) and v in makers and id(makers[v]) not in ended
            ]
            if not wanted:
                ended.add(id(eqn))
                ordered.append(stack.pop())
                continue
            if id(eqn) in begun or any(e.effects for e in wanted):
                return None
            begun.add(id(eqn))
            stack += wanted
    return ordered
