"""Puts heads of several arrays together into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Heads


def join(parts: Mapping[str, Array], heads: Mapping[str, Heads]) -> Array:
    """Returns an array [b, t, heads, h] with the heads of several.

    Args:
        parts: The arrays by name, [b, t, n, h].
        heads: Where the heads of each lie. Together they are all of the result's.

    Example:
        >>> from rewriter.ops.kernel import Heads
        >>> x, y = (jnp.full((1, 1, 1, 1), i) for i in (1, 2))
        >>> where = {"x": Heads(1, 1, 1, 2), "y": Heads(0, 1, 1, 2)}
        >>> join({"x": x, "y": y}, where).ravel().tolist()
        [2, 1]
    """
    names = sorted(heads, key=lambda name: heads[name].first)
    if all(heads[name].step == 1 for name in names):
        return jnp.concatenate([parts[name] for name in names], 2)
    total = None
    for name in names:
        at, x = heads[name], parts[name]
        after = at.all - at.first - (at.count - 1) * at.step - 1
        place = (at.first, after, at.step - 1)
        none = (0, 0, 0)
        wide = lax.pad(x, jnp.zeros((), x.dtype), (none, none, place, none))
        total = wide if total is None else total + wide
    assert total is not None
    return total
