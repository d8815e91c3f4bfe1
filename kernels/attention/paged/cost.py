"""Counts the work of paged attention: attention over all pages of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rewriter.kernels import attention
from rewriter.kernels.attention.paged.reference import AXES
from rewriter.ops.cost import Cost, Dtypes, Shapes


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


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of paged attention.

    They are attention's over the gathered keys and values, each read once; lengths
    are not known, so that all pages of the table count.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.
    """
    pools = {"k_pages": "k", "v_pages": "v"}
    plain = {n: s for n, s in shapes.items() if n not in pools and n != "table"}
    plain |= keys_and_values(shapes, params)
    types = {pools.get(n, n): d for n, d in dtypes.items() if n != "table"}
    order = [n for n in attention.OP.names if n in plain]
    return attention.OP.cost(
        {n: plain[n] for n in order}, {n: types[n] for n in order}, params, mode
    )
