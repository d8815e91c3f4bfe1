"""Keys and values in pages: pools of pages, and a table that names each sequence's.

Formula    k[b, p z + o, k, h] = k_pages[table[b, p], o, k, h], and v alike
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.ops.kernel import Spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

PARAMS = {"heads_axis": 2, "wraps": True, "fills": False, "promises": False}
"""The parameters of pages, with their defaults."""

AXES = ("kpzh", "pkzh", "pzkh")
"""Axes of a pool by ``heads_axis``: heads k, pages p, positions of a page z, h."""


def mode_of(fills: bool, promises: bool) -> str:
    """Returns the mode of a gather of pages; arguments are as in `gathered`."""
    return "fill" if fills else "promise_in_bounds" if promises else "clip"


def gathered(
    pool: Array,
    table: Array,
    *,
    heads_axis: int = 2,
    wraps: bool = True,
    fills: bool = False,
    promises: bool = False,
) -> Array:
    """Returns the keys or values that a table of pages names, [b, p z, k, h].

    Args:
        pool: Pages, with axes by ``heads_axis``: 0 for [k, pages, z, h], 1 for
            [pages, k, z, h], 2 for [pages, z, k, h].
        table: int [b, p], the pages of each sequence in order.
        heads_axis: The pool's axis of heads.
        wraps: Whether a negative number of a page counts from the end.
        fills: Whether a page beyond the pool is NaN; else it is the nearest one.
        promises: Whether the nearest one has no gradient there.
    """
    axes = AXES[heads_axis]
    at = (slice(None),) * axes.index("p") + (table,)
    taken = pool.at[at].get(mode=mode_of(fills, promises), wrap_negative_indices=wraps)
    found = axes.replace("p", "bp")
    taken = taken.transpose([found.index(x) for x in "bpzkh"])
    b, p, z, k, h = taken.shape
    return taken.reshape(b, p * z, k, h)


def numbered(table: Array, count: int, wraps: bool) -> tuple[Array, Array]:
    """Returns the pages that a table names, and the sequences that name invalid ones.

    Args:
        table: int [b, p].
        count: The number of pages.
        wraps: Whether a negative number counts from the end.

    Returns:
        int32 [b, p], each within the pool, and bool [b].
    """
    if wraps:
        table = jnp.where(table < 0, table + count, table)
    beyond = ((table < 0) | (table >= count)).any(1)
    return jnp.clip(table, 0, count - 1).astype(jnp.int32), beyond


def keys_and_values(
    shapes: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Returns the shapes of gathered keys and values, [b, s, k, h].

    Example:
        >>> pool = (9, 16, 2, 8)
        >>> shapes = {"q": (3, 1, 4, 8), "table": (3, 2), "k_pages": pool,
        ...           "v_pages": pool}
        >>> keys_and_values(shapes, {})["k"]
        (3, 32, 2, 8)
    """
    axes = AXES[params.get("heads_axis", 2)]
    b, p = shapes["q"][0], shapes["table"][1]
    found = {}
    for name in "kv":
        size = dict(zip(axes, shapes[f"{name}_pages"], strict=True))
        found[name] = (b, p * size["z"], size["k"], size["h"])
    return found


def copied(
    shapes: Mapping[str, Any], dtypes: Mapping[str, str], params: Mapping[str, Any]
) -> int:
    """Returns the bytes of gathered keys and values."""
    return sum(
        math.prod(shape) * jnp.dtype(dtypes[f"{name}_pages"]).itemsize
        for name, shape in keys_and_values(shapes, params).items()
    )


def as_attention(spec: Spec) -> Spec:
    """Returns the use of attention after the gather."""
    found = keys_and_values(dict(spec.shapes), dict(spec.params))
    shapes, dtypes = [], []
    for name, shape in spec.shapes:
        plain = name.removesuffix("_pages")
        if name != "table":
            shapes.append((plain, found.get(plain, shape)))
            dtypes.append((plain, spec.dtype(name)))
    params = tuple(p for p in spec.params if p[0] not in PARAMS)
    return Spec("attention", tuple(shapes), tuple(dtypes), params)
