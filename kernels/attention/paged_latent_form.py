"""The form of latent attention whose cache lies in pages.

Pages are gathered, and what is gathered is attended to as a latent and rotary keys.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention import latent_form
from rewriter.kernels.attention.latent_form import OWN
from rewriter.kernels.attention.pages import PARAMS, mode_of
from rewriter.ops.form import Form, special_form
from rewriter.ops.op import Op, Operand
from rewriter.ops.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.cost import Dtypes, Shapes
    from rewriter.ops.op import Sample

POOLS = {"latent_pages": "latent", "k_rope_pages": "k_rope"}
"""The operand of latent attention that each pool holds."""

OF_PAGES = tuple(n for n in PARAMS if n != "heads_axis")
"""Parameters that say which pages a number names."""


def paged_latent_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of latent attention whose cache is in pages.

    Args:
        op: Attention.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    operands = _operands(op)
    form = Form(
        operands=operands,
        compute=attended,
        sizes=lambda *given: latent_form.sizes(*gathered_sizes(*given)),
        sharding=functools.partial(latent_form.sharding, operands, op.out),
        sample=_sample,
        defaults={**op.defaults, **{n: PARAMS[n] for n in OF_PAGES}},
    )
    return special_form(op, name, about, form)


def attended(
    attend: Callable[..., Array],
    /,
    *,
    latent_pages: Array,
    table: Array,
    k_rope_pages: Array | None = None,
    wraps: bool = True,
    fills: bool = False,
    promises: bool = False,
    **given: Any,
) -> Array:
    """Returns latent attention over the pages that a table names.

    Operands are documented where the op is declared.

    Args:
        attend: Computes attention of q, k and v.
        wraps: Whether a negative number of a page counts from the end.
        fills: Whether a page beyond the pool is NaN; else it is the nearest one.
        promises: Whether the nearest one has no gradient there.
        **given: The other operands and parameters of latent attention, over s = p z
            keys.

    Returns:
        [b, t, n, e].
    """
    table = jnp.broadcast_to(table, (given["q"].shape[0], table.shape[1]))
    for name, pool in (("latent", latent_pages), ("k_rope", k_rope_pages)):
        if pool is not None:
            mode = mode_of(fills, promises)
            taken = pool.at[table].get(mode=mode, wrap_negative_indices=wraps)
            b, p, z, wide = taken.shape
            given[name] = taken.reshape(b, p * z, wide)
    return latent_form.attended(attend, **given)


def as_latent(spec: Spec) -> Spec:
    """Returns the use of latent attention after the gather."""
    sizes, types = gathered_sizes(
        dict(spec.shapes), dict(spec.dtypes), dict(spec.params)
    )
    params = tuple(p for p in spec.params if p[0] not in OF_PAGES)
    name = "latent_attention"
    return Spec(name, tuple(sizes.items()), tuple(types.items()), params)


# ------------------------------------------------------------ what a form declares
def _operands(op: Op) -> tuple[Operand, ...]:
    _, _, _, *others = op.operands
    return (
        Operand("q", "b t n e", True, "Queries, for the latent."),
        Operand(
            "latent_pages", "y z w", True,
            "A pool of pages of z latents each, with rotary keys behind them where "
            "`k_rope_pages` is absent.",
        ),
        Operand("table", "b|1 p", True, "int: the pages of each sequence, in order."),
        Operand("q_rope", "b t n r", doc="Queries, for the rotary keys."),
        Operand(
            "k_rope_pages", "y z r", doc="A pool of rotary keys, in the same pages."
        ),
        *others,
    )  # fmt: skip


def gathered_sizes(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any]
) -> tuple[Shapes, Dtypes]:
    """Returns the sizes and dtypes of latent attention's operands."""
    del params
    sizes, types = {}, {}
    for name in shapes:
        plain = POOLS.get(name, name)
        types[plain] = dtypes[name]
        sizes[plain] = shapes[name]
        if name in POOLS:
            _, z, wide = shapes[name]
            sizes[plain] = (shapes["q"][0], shapes["table"][1] * z, wide)
    own = [n for n in (*OWN, *sizes) if n in sizes and n != "table"]
    own = list(dict.fromkeys(own))
    return {n: sizes[n] for n in own}, {n: types[n] for n in own}


def _sample(
    draw: Sample, key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Realistic operands: sequences of 1 to s keys, on pages in no order."""
    sizes, types = gathered_sizes(
        {n: x.shape for n, x in operands.items()},
        {n: str(x.dtype) for n, x in operands.items()}, params,
    )  # fmt: skip
    first, key, *keys = jax.random.split(key, 4)
    plain = {n: jax.ShapeDtypeStruct(sizes[n], types[n]) for n in sizes}
    made = latent_form.sample(draw, first, plain, params)
    found = {n: x for n, x in made.items() if n in operands}
    for name, sub in zip(POOLS, keys, strict=True):
        if name in operands:
            x = operands[name]
            found[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    x, (count, _, _) = operands["table"], operands["latent_pages"].shape
    pages = jax.random.randint(key, x.shape, 0, count)
    return {**found, "table": pages.astype(x.dtype)}


def copied(spec: Spec) -> int:
    """Returns the bytes of the gathered cache."""
    plain = as_latent(spec)
    return sum(
        math.prod(plain.shape(n)) * jnp.dtype(plain.dtype(n)).itemsize
        for n in POOLS.values()
        if plain.has(n)
    )
