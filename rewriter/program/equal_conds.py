"""Finds conds that return the same values by the same choice.

A checkpoint's recomputation runs a cond again, and returns what its gradients read
beside the results. So its equation differs from that of the first run. What the
branches return is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def of_equal_cond(
    numbers: dict[Any, tuple[int, ...]],
    choice: Any,
    returned: Sequence[Sequence[int]],
    outs: Sequence[int],
) -> tuple[int, ...]:
    """The results of a cond, where an earlier one has them.

    Args:
        numbers: By what they are, values of the graph; new ones are added.
        choice: The value that chooses a branch, and the branches around the cond.
        returned: What each branch returns, as values of the graph.
        outs: The results. They are returned if there is no earlier such cond.
    """
    each = zip(zip(*returned, strict=True), outs, strict=True)
    return tuple(
        numbers.setdefault(("cond", choice, *values), (out,))[0] for values, out in each
    )
