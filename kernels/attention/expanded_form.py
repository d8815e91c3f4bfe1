"""The form of attention whose keys and values are made of a latent by two matrices.

Keys of each head are ``latent @ w_k``, and values ``latent @ w_v``. So a score is
``q · (latent w_k) = (q w_kᵀ) · latent``, and a result ``p (latent w_v) = (p latent)
w_v``. A kernel may multiply the few queries by the matrices, and not all of the latent:
its weights are absorbed, as in DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.attention.sharding import at_own_positions
from rewriter.ops.form import Form, special_form
from rewriter.ops.op import OUT, Op, Operand, Sharding
from rewriter.ops.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from rewriter.ops.cost import Dtypes, Shapes
    from rewriter.ops.op import Sample

OWN = ("q", "latent", "w_k", "w_v", "q_rope", "k_rope")
"""The operands from which queries, keys and values are made."""


def expanded_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of attention whose keys and values are made of a latent.

    Args:
        op: Attention.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    operands = _operands(op)
    form = Form(
        operands=operands,
        compute=expanded,
        sizes=sizes,
        sharding=functools.partial(sharding, operands, op.out),
        sample=sample,
    )
    return special_form(op, name, about, form)


def expanded(
    attend: Callable[..., Array],
    /,
    *,
    q: Array,
    latent: Array,
    w_k: Array,
    w_v: Array,
    q_rope: Array | None = None,
    k_rope: Array | None = None,
    **given: Any,
) -> Array:
    """Returns attention to keys and values that are made of a latent.

    Operands are documented where the op is declared.

    Args:
        attend: Computes attention of q, k and v.
        **given: The other operands and parameters of attention.

    Returns:
        [b, t, n, e].
    """
    how = {"precision": given.get("precision")}
    k = jnp.einsum("bsc,cnh->bsnh", latent, w_k, **how)
    v = jnp.einsum("bsc,cne->bsne", latent, w_v, **how)
    if k_rope is not None:
        of_heads = (*k.shape[:3], k_rope.shape[-1])
        rope = jnp.broadcast_to(k_rope[:, :, None], of_heads)
        k, q = jnp.concatenate([k, rope], -1), jnp.concatenate([q, q_rope], -1)
    return attend(q=q, k=k, v=v, **given)


def absorbed(
    attend: Callable[..., Array],
    /,
    *,
    q: Array,
    latent: Array,
    w_k: Array,
    w_v: Array,
    out_dtype: Any = None,
    **given: Any,
) -> Array:
    """Returns the same, with the matrices at the queries and at the result.

    Args:
        attend: Computes attention to a latent.
        **given: As for `expanded`.
    """
    how = {"precision": given.get("precision"), "preferred_element_type": jnp.float32}
    own = jnp.einsum("btnh,cnh->btnc", q, w_k, **how).astype(latent.dtype)
    out = attend(q=own, latent=latent, **given)
    dtype = out_dtype or latent.dtype
    return jnp.einsum("btnc,cne->btne", out.astype(w_v.dtype), w_v, **how).astype(dtype)


def as_latent(spec: Spec) -> Spec:
    """Returns the use of attention to a latent that a kernel makes of a use."""
    shapes, dtypes = dict(spec.shapes), dict(spec.dtypes)
    shapes["q"] = (*shapes["q"][:3], shapes["latent"][-1])
    for name in ("w_k", "w_v"):
        del shapes[name], dtypes[name]
    params = tuple((n, x) for n, x in spec.params if n != "out_dtype")
    return Spec(
        "latent_attention", tuple(shapes.items()), tuple(dtypes.items()), params
    )


def as_attention(spec: Spec) -> Spec:
    """Returns the use of attention to keys and values in arrays of their own."""
    shapes, dtypes = sizes(dict(spec.shapes), dict(spec.dtypes), dict(spec.params))
    return Spec("attention", tuple(shapes.items()), tuple(dtypes.items()), spec.params)


def products(spec: Spec) -> tuple[float, float]:
    """Returns operations of the products with both matrices: expanded, absorbed."""
    (b, t, n, h), (_, s, c) = spec.shape("q"), spec.shape("latent")
    each = 2.0 * b * n * c * (h + spec.shape("w_v")[2])
    return each * s, each * t


# ------------------------------------------------------------ what a form declares
def _operands(op: Op) -> tuple[Operand, ...]:
    _, _, _, *others = op.operands
    return (
        Operand("q", "b t n h", True, "Queries, for the keys that are made."),
        Operand("latent", "b s c", True, "What keys and values are made of."),
        Operand("w_k", "c n h", True, "The matrix that makes keys of each head."),
        Operand("w_v", "c n e", True, "The matrix that makes values of each head."),
        Operand("q_rope", "b t n r", doc="Queries, for the rotary keys."),
        Operand("k_rope", "b s r", doc="The rotary keys, which all heads share."),
        *others,
    )


def sharding(
    operands: tuple[Operand, ...], out: str, params: Mapping[str, Any]
) -> Sharding:
    """Returns how a use is split: by sequences, queries and heads, not by keys."""
    del params
    dims = {o.name: o.axes for o in operands} | {OUT: out}
    return Sharding(frozenset("btn"), local=at_own_positions, dims=dims)


def sizes(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any]
) -> tuple[Shapes, Dtypes]:
    """Returns the sizes and dtypes of queries, keys, values and all others."""
    del params
    b, t, n, h = shapes["q"]
    s, wide = shapes["latent"][1], h + shapes.get("q_rope", (0,))[-1]
    value = shapes["w_v"][2]
    own = {"q": (b, t, n, wide), "k": (b, s, n, wide), "v": (b, s, n, value)}
    types = {"q": dtypes["q"], "k": dtypes["latent"], "v": dtypes["latent"]}
    others = [x for x in shapes if x not in OWN]
    return (
        {**own, **{x: shapes[x] for x in others}},
        {**types, **{x: dtypes[x] for x in others}},
    )


def sample(
    draw: Sample, key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Realistic operands: those of attention, normal latents, and matrices."""
    shapes = {n: x.shape for n, x in operands.items()}
    dtypes = {n: str(x.dtype) for n, x in operands.items()}
    wide, types = sizes(shapes, dtypes, params)
    whole = {n: jax.ShapeDtypeStruct(wide[n], types[n]) for n in wide}
    made = draw(key, whole, params)
    found = {n: x for n, x in made.items() if n not in "qkv"}
    for i, name in enumerate(n for n in OWN if n in operands):
        x, shape = operands[name], shapes[name]
        size = shape[0] ** -0.5 if name in ("w_k", "w_v") else 1.0
        drawn = jax.random.normal(jax.random.fold_in(key, i), shape)
        found[name] = (size * drawn).astype(x.dtype)
    return found
