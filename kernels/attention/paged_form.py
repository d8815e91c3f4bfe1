"""The form of attention whose keys and values are pages: what follows from attention.

Pages are gathered, and what is gathered is attended to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.pages import AXES, PARAMS, gathered, keys_and_values
from rewriter.ops.form import Form, special_form
from rewriter.ops.op import OUT, Op, Operand, Sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.cost import Dtypes, Shapes
    from rewriter.ops.op import Sample

POOLS = {"k_pages": "k", "v_pages": "v"}
"""The operand of attention that each pool holds."""


def paged_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of attention whose keys and values are in pages.

    Args:
        op: Attention.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    form = Form(
        operands=_operands(op),
        compute=attended,
        sizes=functools.partial(_sizes, op.names),
        sharding=functools.partial(_sharding, op),
        sample=_sample,
        distributions=functools.partial(_distributions, op.sample),
        defaults={**op.defaults, **PARAMS},
    )
    return special_form(op, name, about, form)


def attended(
    attend: Callable[..., Array],
    /,
    *,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    heads_axis: int = 2,
    wraps: bool = True,
    fills: bool = False,
    promises: bool = False,
    **given: Any,
) -> Array:
    """Returns attention over the pages that a table names.

    Operands are documented where the op is declared.

    Args:
        attend: Computes attention over gathered keys and values.
        heads_axis: The pools' axis of heads.
        wraps: Whether a negative number of a page counts from the end.
        fills: Whether a page beyond the pool is NaN; else it is the nearest one.
        promises: Whether the nearest one has no gradient there.
        **given: The other operands and parameters of attention, over s = p z keys.

    Returns:
        [b, t, n, e].
    """
    table = jnp.broadcast_to(table, (given["q"].shape[0], table.shape[1]))
    how = {"heads_axis": heads_axis, "wraps": wraps, "fills": fills}
    k, v = (gathered(x, table, **how, promises=promises) for x in (k_pages, v_pages))
    return attend(k=k, v=v, **given)


# ------------------------------------------------------------ what a form declares
def _operands(op: Op, heads_axis: int = 2) -> tuple[Operand, ...]:
    """The operands, with pools whose heads are at an axis."""
    pool = " ".join(AXES[heads_axis]).replace("p", "y")
    q, _, _, *others = op.operands
    return (
        q,
        Operand("k_pages", pool, True, "A pool of pages of z keys each."),
        Operand(
            "v_pages", pool.replace("h", "e"), True,
            "A pool of pages of values, with the same axes and pages.",
        ),
        Operand("table", "b|1 p", True, "int: the pages of each sequence, in order."),
        *others,
    )  # fmt: skip


def _sharding(op: Op, params: Mapping[str, Any]) -> Sharding:
    """How a use is split: sequences, and heads with their pages.

    Every device has all pages of its heads.
    """
    axes = {o.name: o.axes for o in _operands(op, params.get("heads_axis", 2))}
    return Sharding(frozenset("bn"), follows={"k": "n"}, dims=axes | {OUT: op.out})


def _sizes(
    names: tuple[str, ...], shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any]
) -> tuple[Shapes, Dtypes]:
    """Those of gathered keys and values, which are read once each.

    Lengths are not known, so that all pages of the table count.
    """
    sizes = {POOLS.get(n, n): s for n, s in shapes.items()}
    sizes |= keys_and_values(shapes, params)
    types = {POOLS.get(n, n): d for n, d in dtypes.items()}
    own = [n for n in names if n in sizes]
    return {n: sizes[n] for n in own}, {n: types[n] for n in own}


# ---------------------------------------------------------------------- samples
def _sample(
    draw: Sample, key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Realistic operands: sequences of 1 to s keys, on pages in no order."""
    axes = AXES[params.get("heads_axis", 2)]
    pool = dict(zip(axes, operands["k_pages"].shape, strict=True))
    b, p = operands["q"].shape[0], operands["table"].shape[1]
    shape = b, p * pool["z"], pool["k"], pool["h"]
    keys = jax.ShapeDtypeStruct(shape, "float32")
    others = {n: x for n, x in operands.items() if n not in ("k_pages", "v_pages")}
    others["k"] = keys
    del others["table"]
    key, *keys_of = jax.random.split(key, 4)
    made = draw(key, others, params)
    del made["k"]
    for name, sub in zip(("k_pages", "v_pages"), keys_of[:2], strict=True):
        x = operands[name]
        made[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    x = operands["table"]
    pages = jax.random.randint(keys_of[2], x.shape, 0, pool["p"])
    return {**made, "table": pages.astype(x.dtype)}


def _distributions(draw: Sample, operands: Mapping[str, Any]) -> dict[str, Any]:
    """The ways to draw operands, by name, as for attention."""
    sample = functools.partial(_sample, draw)
    if "kv_lengths" not in operands:
        return {"": sample}
    return {"lengths 1 to s": sample, "lengths s": functools.partial(_full, sample)}


def _full(
    sample: Callable[..., dict[str, Array]],
    key: Array,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
) -> dict[str, Array]:
    """The same with lengths of all keys."""
    made = sample(key, operands, params)
    axes = AXES[params.get("heads_axis", 2)]
    s = made["table"].shape[1] * made["k_pages"].shape[axes.index("z")]
    return {**made, "kv_lengths": jnp.full_like(made["kv_lengths"], s)}
