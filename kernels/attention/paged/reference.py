"""Paged attention as its formula: gathers keys and values, then attends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

AXES = ("kpzh", "pkzh", "pzkh")
"""Axes of a pool by ``heads_axis``: heads k, pages p, positions of a page z, h."""


def gathered(
    pool: Array,
    table: Array,
    *,
    heads_axis: int = 2,
    wraps: bool = True,
    fills: bool = False,
) -> Array:
    """Returns the keys or values that a table of pages names, [b, p z, k, h].

    Args:
        pool: Pages, with axes by ``heads_axis``: 0 for [k, pages, z, h], 1 for
            [pages, k, z, h], 2 for [pages, z, k, h].
        table: int [b, p], the pages of each sequence in order.
        heads_axis: The pool's axis of heads.
        wraps: Whether a negative number of a page counts from the end.
        fills: Whether a page beyond the pool is NaN; else it is the nearest one.
    """
    axes = AXES[heads_axis]
    at = (slice(None),) * axes.index("p") + (table,)
    taken = pool.at[at].get(
        mode="fill" if fills else "clip", wrap_negative_indices=wraps
    )
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


def reference(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    *,
    heads_axis: int = 2,
    wraps: bool = True,
    fills: bool = False,
    attend: Callable[..., Array] = attention.OP.reference,
    **given: Any,
) -> Array:
    """Returns attention over the pages that a table names.

    Operands are documented where the op is declared.

    Args:
        heads_axis: The pools' axis of heads.
        wraps: Whether a negative number of a page counts from the end.
        fills: Whether a page beyond the pool is NaN; else it is the nearest one.
        attend: Computes attention over gathered keys and values.
        **given: The other operands and parameters of attention, over s = p z keys.

    Returns:
        [b, t, n, e].
    """
    table = jnp.broadcast_to(table, (q.shape[0], table.shape[1]))
    k, v = (
        gathered(x, table, heads_axis=heads_axis, wraps=wraps, fills=fills)
        for x in (k_pages, v_pages)
    )
    return attend(q=q, k=k, v=v, **given)


def sample(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns realistic operands: sequences of 1 to s keys, on pages in no order.

    Args:
        key: A PRNG key.
        operands: Shapes and dtypes by operand name.
        params: The op's parameters.
    """
    axes = AXES[params.get("heads_axis", 2)]
    pool = dict(zip(axes, operands["k_pages"].shape, strict=True))
    b, p = operands["q"].shape[0], operands["table"].shape[1]
    shape = b, p * pool["z"], pool["k"], pool["h"]
    keys = jax.ShapeDtypeStruct(shape, "float32")
    others = {n: x for n, x in operands.items() if n not in ("k_pages", "v_pages")}
    others["k"] = keys
    del others["table"]
    key, *keys_of = jax.random.split(key, 4)
    made = attention.OP.sample(key, others, params)
    del made["k"]
    for name, sub in zip(("k_pages", "v_pages"), keys_of[:2], strict=True):
        x = operands[name]
        made[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    x = operands["table"]
    pages = jax.random.randint(keys_of[2], x.shape, 0, pool["p"])
    return {**made, "table": pages.astype(x.dtype)}


def distributions(operands: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the ways to draw operands, by name; see attention's."""
    if "kv_lengths" not in operands:
        return {"": sample}
    return {"lengths 1 to s": sample, "lengths s": _full}


def _full(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    made = sample(key, operands, params)
    axes = AXES[params.get("heads_axis", 2)]
    s = made["table"].shape[1] * made["k_pages"].shape[axes.index("z")]
    return {**made, "kv_lengths": jnp.full_like(made["kv_lengths"], s)}
