"""Ragged dot as JAX has it: each group of rows times its own matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from rewriter.kernels.ragged.dot.use import Use

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

CONTRACT = {
    "forward": ((1,), (1,)),
    "transposed": ((1,), (2,)),
    "contracting": ((0,), (0,)),
}
"""The contracted axes of lhs and rhs by mode."""


def reference(*operands: Array, **given: Any) -> Array:
    """Returns `jax.lax.ragged_dot_general` in one of its three modes.

    Row i of lhs belongs to the group whose range of rows holds it, the ranges
    following one another; rows past ``sum(group_sizes)`` belong to none and
    give zeros.

    Args:
        *operands: The first fields of `Use`.
        **given: The others.

    Returns:
        [m, n], or [g, k, n] if contracting.
    """
    use = Use(*operands, **given)
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(CONTRACT[use.mode], ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[] if use.contracting else [0],
    )
    return lax.ragged_dot_general(
        use.lhs,
        use.rhs,
        use.group_sizes,
        numbers,
        precision=use.precision,
        preferred_element_type=None if use.out_dtype is None else use.dtype,
    )


def distributions(operands: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Returns the ways to draw group sizes, by name; they sum to the rows.

    - ``uniform``: each row chooses a group evenly at random.
    - ``dirichlet``: each row chooses with probabilities that are themselves drawn
      from a symmetric Dirichlet distribution of concentration `SKEW`. Some groups
      get several times their share, many next to nothing.
    - ``one_hot``: all rows are in one group, chosen at random.
    """
    del operands
    return {"uniform": sample, "dirichlet": skewed, "one_hot": one_hot}


SKEW = 0.5
"""The concentration: of 16 groups the largest gets about a fifth of the rows."""


def sample(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns normal matrices, and group sizes of rows that choose evenly.

    Args:
        key: A PRNG key.
        operands: Shapes and dtypes by operand name.
        params: The op's parameters; unused.
    """
    del params
    sizes, rest = jax.random.split(key)
    m, g = operands["lhs"].shape[0], operands["group_sizes"].shape[0]
    return _drawn(rest, operands, jax.random.randint(sizes, (m,), 0, g))


def skewed(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns the same with group sizes that are Dirichlet-skewed."""
    del params
    sizes, rows, rest = jax.random.split(key, 3)
    m, g = operands["lhs"].shape[0], operands["group_sizes"].shape[0]
    logits = jax.random.loggamma(sizes, SKEW, (g,))
    return _drawn(rest, operands, jax.random.categorical(rows, logits, shape=(m,)))


def one_hot(
    key: Array, operands: Mapping[str, Any], params: Mapping[str, Any]
) -> dict[str, Array]:
    """Returns the same with all rows in one group."""
    del params
    sizes, rest = jax.random.split(key)
    m, g = operands["lhs"].shape[0], operands["group_sizes"].shape[0]
    chosen = jax.random.randint(sizes, (), 0, g)
    return _drawn(rest, operands, jnp.broadcast_to(chosen, (m,)))


def _drawn(key: Array, operands: Mapping[str, Any], of_row: Array) -> dict[str, Array]:
    sizes = operands["group_sizes"]
    made = {"group_sizes": jnp.zeros(sizes.shape, sizes.dtype).at[of_row].add(1)}
    for name, sub in zip(("lhs", "rhs"), jax.random.split(key), strict=True):
        x = operands[name]
        made[name] = jax.random.normal(sub, x.shape).astype(x.dtype)
    return made
