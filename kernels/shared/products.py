"""Products of bfloat16 numbers that are added up in float32, on every CPU.

XLA multiplies such numbers without widening them first where the rows of the left
operand are contiguous. It decides that for a kernel by itself. Then it moves a
transpose from in front of the kernel into the product, and cannot run what it made:
``Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unturned(left: jax.Array) -> jax.Array:
    """Returns the left operand of a product, into which no transpose is moved.

    Its last axis is the one that is summed. On a CPU, a barrier keeps what is in front
    of it out of the product. Elsewhere, and for other dtypes, it is the operand itself.

    Args:
        left: [..., k].

    Example:
        >>> rows = jnp.ones((2, 4), jnp.bfloat16)
        >>> jnp.matmul(unturned(rows), rows.T, preferred_element_type=jnp.float32).shape
        (2, 2)
    """
    if left.dtype != jnp.bfloat16:
        return left
    return jax.lax.platform_dependent(
        left, cpu=jax.lax.optimization_barrier, default=lambda x: x
    )
