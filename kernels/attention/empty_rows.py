"""Results and gradients of rows that see no key.

The parameter ``empty_rows`` names it. "nan", "zero" and "mean" (of v over all keys) are
what such a row gives. No gradient reaches its scores, as where masks choose between
scores and a number. The names in `PASSES` give the same, and a gradient reaches them.

Some programs hide keys by a large negative number added to their scores, not by a
choice. Such a program gives the mean of all values in a row without keys, as that
number absorbs all digits of the scores (in float32 any beyond -1e9 does). Its gradient
still passes: with all weights 1 / s, ds = (dp - delta) / s for every key. Since dp is a
product of v with the result's cotangent u, ds = u (v - mean)ᵀ / s. The products with
ds need no scores at all: dq is u times a matrix [e, h] of v and k. Likewise, dk is
v - mean times one of u and q.

Where -inf is added, such a row is NaN, and so are the gradients that it passes back.
They are NaN even if the program then chooses zero for the row: `0 * nan` is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jax import Array

PASSING = "mean_passing"
"""The mean forward, with a gradient of the scores."""

NAN_PASSING = "nan_passing"
"""NaN forward, and in gradients of the scores."""

ZERO_NAN_PASSING = "zero_nan_passing"
"""Zero forward, and NaN in gradients of the scores."""

PASSES = frozenset({PASSING, NAN_PASSING, ZERO_NAN_PASSING})
"""The values of ``empty_rows`` with a gradient of the scores."""

NAN = frozenset({"nan", NAN_PASSING})
"""The values of ``empty_rows`` that give NaN."""

ZERO = frozenset({"zero", ZERO_NAN_PASSING})
"""The values of ``empty_rows`` that give zero."""

AVERAGED = frozenset({"mean", PASSING})
"""The values of ``empty_rows`` that give the mean of v over all keys."""


def complete_if_any_empty(
    empty: Array,
    grads: Mapping[str, Array],
    completed: Callable[[dict[str, Array]], Mapping[str, Array]],
) -> dict[str, Array]:
    """Returns cotangents, completed only if some row sees no key.

    Few batches have such a row, though masks of data allow it. Their share takes up to
    a third of the time of the other kernels.

    Args:
        empty: Bool [b, n, t], the rows without keys.
        grads: The cotangents of other rows, by name.
        completed: Gives the cotangents of all rows from those, of any of the names.
    """
    shapes = {n: x.shape for n, x in grads.items()}

    def all_rows(flat: dict[str, Array]) -> dict[str, Array]:
        given = {n: x.reshape(shapes[n]) for n, x in flat.items()}
        made = given | dict(completed(given))
        return {n: x.astype(flat[n].dtype).reshape(-1) for n, x in made.items()}

    # With a single axis there is one layout. XLA would choose those of the products in
    # `completed`, and transpose cotangents that nothing is added to.
    flat = {n: x.reshape(-1) for n, x in grads.items()}
    made = lax.cond(jnp.any(empty), all_rows, lambda flat: flat, flat)
    return {n: x.reshape(shapes[n]) for n, x in made.items()}


def passed(
    operands: Mapping[str, Array],
    params: Mapping[str, Any],
    empty: Array,
    cotangent: Array,
    summed: Callable[[Array], Array] = lambda x: x,
    parts: int = 1,
) -> dict[str, Array]:
    """Returns the share of rows without keys in the cotangents of scores' operands.

    Args:
        operands: Those of the op, without dropout: ds would depend on it.
        params: Its parameters; without a soft cap, for the same reason, unless what
            passes is NaN.
        empty: bool [b, n, t], the rows without keys.
        cotangent: [b, t, n, e].
        summed: Sums over the devices that each have a part of queries and keys.
        parts: The number of these devices.

    Returns:
        Cotangents by name, in float32 or wider: of q, k, and, if present, of a bias,
        slopes and a factor of the scale.
    """
    if params.get("empty_rows") in (NAN_PASSING, ZERO_NAN_PASSING):
        return _nan_passed(operands, empty, summed)
    q, k, v = (operands[n] for n in "qkv")
    wide = jnp.promote_types(jnp.result_type(q, k, v), jnp.float32)
    (b, t, n, _), (s, heads, _) = q.shape, v.shape[1:]
    # Never less exact than the kernels: on TPUs they use full float32 products.
    exact = "highest" if jnp.result_type(q, k, v).itemsize > 2 else None
    dot = lambda text, x, y: jnp.einsum(text, x, y, precision=exact)
    apart = lambda x: x.reshape(b, t, heads, n // heads, -1)
    rows = empty.swapaxes(1, 2)[..., None]
    up, queries = (apart(jnp.where(rows, x.astype(wide), 0)) for x in (cotangent, q))
    there = summed(empty.reshape(b, heads, -1).any(-1).astype(jnp.int32)) > 0
    values = v.astype(wide)
    mean = summed(values.sum(1, keepdims=True)) / (parts * s)
    # Numbers of a head without such rows reach nothing, even if they are NaN.
    away = jnp.where(there[:, None, :, None], values - mean, 0) / (parts * s)
    scale = params.get("scale", 1.0)
    to_queries = summed(dot("bske,bskh->bkeh", away, k.astype(wide))) * scale
    to_keys = summed(dot("btkge,btkgh->bkeh", up, queries)) * scale
    dq = dot("btkge,bkeh->btkgh", up, to_queries)
    made = {"q": jnp.where(rows, dq.reshape(q.shape), 0)}
    dk = dot("bske,bkeh->bskh", away, to_keys)
    made["k"] = jnp.where(there[:, None, :, None], dk, 0)
    if "scale_factor" in operands:
        factor = operands["scale_factor"].astype(wide)
        made["scale_factor"] = (made["q"] * jnp.where(rows, q.astype(wide), 0)).sum()
        made |= {"q": made["q"] * factor, "k": made["k"] * factor}
    if "alibi" in operands:  # from the middle: the same for all keys adds up to 0
        places = jnp.arange(s, dtype=wide) - (s - 1) / 2
        moved = jnp.einsum("s,bske->bke", places, away)
        slopes = jnp.einsum("btkge,bke->kg", up, moved)
        made["alibi"] = slopes.reshape(n)
    if "bias" in operands:
        made["bias"] = _of_bias(operands["bias"].shape, up, away, empty, dot)
    return made


def _nan_passed(
    operands: Mapping[str, Array], empty: Array, summed: Callable[[Array], Array]
) -> dict[str, Array]:
    """Returns NaN for all that scores of rows without keys are made of, 0 else."""
    b, _, heads, _ = operands["k"].shape
    nan = lambda where: jnp.where(where, jnp.nan, jnp.float32(0))
    there = summed(empty.reshape(b, heads, -1).any(-1).astype(jnp.int32)) > 0
    made = {
        "q": nan(empty.swapaxes(1, 2)[..., None]),
        "k": nan(there[:, None, :, None]),
        "scale_factor": nan(there.any()),
        "alibi": nan(empty.any((0, 2))),
    }
    if "bias" in operands:
        shape = operands["bias"].shape
        over = tuple(i for i in range(3) if shape[i] == 1)
        some = empty.any(over, keepdims=True)[..., None]
        made["bias"] = jnp.broadcast_to(nan(some), shape)
    return {n: x for n, x in made.items() if n in operands}


def _of_bias(
    shape: tuple[int, ...], up: Array, away: Array, empty: Array, dot: Any
) -> Array:
    """Returns the share in the cotangent of a bias [b|1, n|1, t|1, s|1]."""
    if shape[3] == 1:  # what rows pass adds up to 0 over all keys
        return jnp.zeros(shape, up.dtype)
    axes = zip(("b", "kg", "t"), shape[:3], strict=True)
    kept = "".join(x for x, size in axes if size > 1)
    of_rows = "btkge"
    if shape[2] == 1:
        up, of_rows = up.sum(1), "bkge"
    over = tuple(i for i in range(3) if shape[i] == 1)
    some = empty.any(over, keepdims=True)[..., None]

    def product() -> Array:
        found = dot(f"{of_rows},bske->{kept}s", up, away).reshape(shape)
        return jnp.where(some, found, 0)

    if shape[2] == 1:
        return product()
    # Zeros that vary over the same mesh axes: without such rows both are 0.
    nothing = lambda: jnp.zeros(shape, up.dtype) + 0 * (up.sum() + away.sum())
    return lax.cond(empty.any(), product, nothing)
