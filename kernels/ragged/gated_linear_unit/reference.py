"""The gated linear unit of experts, made of ragged dots.

Source: Shazeer, "GLU Variants Improve Transformer" (2020), eq. 6, with one pair of
matrices per expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.ragged.dot.general import general as by_groups
from rewriter.kernels.ragged.dot.reference import distributions as distributions_of_dot
from rewriter.kernels.ragged.dot.reference import reference as ragged_dot
from rewriter.kernels.ragged.dot.reference import sample as sample_of_dot
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.slopes import Slopes, with_slopes

if TYPE_CHECKING:
    from jax import Array


def reference(
    *,
    x: Array,
    w: Array,
    group_sizes: Array,
    w_up: Array | None = None,
    activation: str = "silu",
    beta: float = 1.0,
    halves: str | None = None,
    slopes: Slopes = (),
    precision: str | None = None,
    out_dtype: str | None = None,
    product: Callable[..., Array] = ragged_dot,
) -> Array:
    """Returns ``act(x·w[group]) · (x·w_up[group])`` for rows in groups.

    Row i of x belongs to the group whose range of rows holds it, the ranges following
    one another; rows past ``sum(group_sizes)`` belong to none and give zeros.

    Operands are documented where the op is declared.

    Args:
        activation: One of `rewriter.ops.activations.ACTIVATIONS`.
        beta: The number of a parametric activation.
        halves: The order of branches in w: "gate_up" or "up_gate"; None if w holds only
            the branch that goes through the activation.
        slopes: Derivatives of the activation at some numbers, where the program's
            differ, such as 1/2 at 0 for ``max(y, 0)``.
        precision: As in `jax.lax.dot`.
        out_dtype: The result's dtype; x's by default.
        product: A ragged dot, as `rewriter.kernels.ragged.dot.reference.reference`.

    Returns:
        [m, f]. Branches are accumulated and combined in float32, or float64 if x is,
        and rounded once.
    """
    wide = str(jnp.promote_types(x.dtype, jnp.float32))
    gate, up = branches(
        x, w, group_sizes, w_up, halves, product, precision=precision, out_dtype=wide
    )
    act = with_slopes(lambda y: ACTIVATIONS[activation](y, beta), slopes)
    return (act(gate) * up).astype(out_dtype or x.dtype)


def general(**given: Any) -> Array:
    """Computes `reference` in a form that supports every transformation.

    Args:
        **given: As for `reference`.
    """
    return reference(**given, product=by_groups)


def branches(
    x: Array,
    w: Array,
    group_sizes: Array,
    w_up: Array | None,
    halves: str | None,
    product: Callable[..., Array],
    **params: Any,
) -> tuple[Array, Array]:
    """Returns both branches before the activation, [m, f] each.

    Args:
        x: As in `reference`.
        w: As in `reference`.
        group_sizes: As in `reference`.
        w_up: As in `reference`.
        halves: As in `reference`.
        product: As in `reference`.
        **params: The product's.
    """
    first = product(x, w, group_sizes, **params)
    if halves is None:
        return first, product(x, w_up, group_sizes, **params)
    f = w.shape[-1] // 2
    left, right = first[:, :f], first[:, f:]
    return (left, right) if halves == "gate_up" else (right, left)


def _drawn(
    draw: Callable[..., Any],
    key: Array,
    operands: Mapping[str, Any],
    params: Mapping[str, Any],
) -> dict[str, Array]:
    """Draws operands as for one ragged dot; the matrices keep the size of rows."""
    matrices = [name for name in ("w", "w_up") if name in operands]
    keys = jax.random.split(key, len(matrices))
    made: dict[str, Array] = {}
    for name, own in zip(matrices, keys, strict=True):
        of_dot = {
            "lhs": operands["x"],
            "rhs": operands[name],
            "group_sizes": operands["group_sizes"],
        }
        drawn = draw(own, of_dot, params)
        spread = operands[name].shape[1] ** -0.5
        made[name] = (drawn["rhs"] * spread).astype(operands[name].dtype)
        made["x"], made["group_sizes"] = drawn["lhs"], drawn["group_sizes"]
    return made


sample = functools.partial(_drawn, sample_of_dot)
"""Draws normal rows and matrices, and group sizes of rows that choose evenly."""


def distributions(operands: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the ways to draw group sizes, by name, as for a ragged dot."""
    ways = distributions_of_dot(operands)
    return {name: functools.partial(_drawn, draw) for name, draw in ways.items()}
