"""The form of attention whose values are the first columns of its keys.

Latent attention decodes against a cache of one latent for each token, which all heads
share. Keys are the latent and a few rotary columns, and values are the latent.
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

OWN = ("q", "q_rope", "latent", "k_rope")
"""The operands from which queries, keys and values are made."""


def latent_form(op: Op, name: str, about: str) -> Op:
    """Returns the form of attention whose values are the first columns of its keys.

    Args:
        op: Attention.
        name: The form's name, in reports and measurements.
        about: What it computes, in one line.
    """
    operands = _operands(op)
    form = Form(
        operands=operands,
        compute=attended,
        sizes=sizes,
        sharding=functools.partial(sharding, operands, op.out),
        sample=sample,
    )
    return special_form(op, name, about, form)


def attended(
    attend: Callable[..., Array],
    /,
    *,
    q: Array,
    latent: Array,
    q_rope: Array | None = None,
    k_rope: Array | None = None,
    **given: Any,
) -> Array:
    """Returns attention to a latent and rotary keys, which all heads share.

    Operands are documented where the op is declared.

    Args:
        attend: Computes attention of q, k and v.
        **given: The other operands and parameters of attention.

    Returns:
        [b, t, n, e].
    """
    k = latent if k_rope is None else jnp.concatenate([latent, k_rope], -1)
    v = latent[..., : q.shape[3]]
    q = q if q_rope is None else jnp.concatenate([q, q_rope], -1)
    return attend(q=q, k=k[:, :, None], v=v[:, :, None], **given)


def as_attention(spec: Spec) -> Spec:
    """Returns the use of attention to keys and values in arrays of their own."""
    shapes, dtypes = sizes(dict(spec.shapes), dict(spec.dtypes), dict(spec.params))
    return Spec("attention", tuple(shapes.items()), tuple(dtypes.items()), spec.params)


# ------------------------------------------------------------ what a form declares
def _operands(op: Op) -> tuple[Operand, ...]:
    _, _, _, *others = op.operands
    return (
        Operand("q", "b t n e", True, "Queries, for the latent."),
        Operand(
            "latent", "b s w", True,
            "The latent: keys, and its first e columns are values. The rotary keys "
            "lie behind it where `k_rope` is absent.",
        ),
        Operand("q_rope", "b t n r", doc="Queries, for the rotary keys."),
        Operand("k_rope", "b s r", doc="The rotary keys."),
        *others,
    )  # fmt: skip


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
    b, t, n, c = shapes["q"]
    s, r = shapes["latent"][1], shapes.get("q_rope", (0,))[-1]
    own = {"q": (b, t, n, c + r), "k": (b, s, 1, c + r), "v": (b, s, 1, c)}
    types = {"q": dtypes["q"], "k": dtypes["latent"], "v": dtypes["latent"]}
    others = [x for x in shapes if x not in OWN]
    return (
        {**own, **{x: shapes[x] for x in others}},
        {**types, **{x: dtypes[x] for x in others}},
    )


def sample(
    draw: Sample, key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Realistic operands: those of attention, with normal latents and rotary keys."""
    shapes = {n: x.shape for n, x in operands.items()}
    dtypes = {n: str(x.dtype) for n, x in operands.items()}
    wide, types = sizes(shapes, dtypes, params)
    whole = {n: jax.ShapeDtypeStruct(wide[n], types[n]) for n in wide}
    made = draw(key, whole, params)
    parts = {"q": made["q"], "q_rope": made["q"], "latent": made["k"]}
    parts["k_rope"] = made["k"]
    c, found = shapes["q"][3], {n: x for n, x in made.items() if n not in "qkv"}
    for name in OWN:
        if name in operands:
            x, last = parts[name], shapes[name][-1]
            x = x[..., c : c + last] if "rope" in name else x[..., :last]
            found[name] = x.reshape(shapes[name]).astype(operands[name].dtype)
    return found
