"""Rules of a primitive that stands for several primitives of sites in a row.

Under `jax.vmap` and in derivatives it is what it is composed of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from rewriter.site import site
from rewriter.support.dtypes import is_inexact

Composed = Callable[..., Callable[..., Any]]
"""``composed(**params)`` gives a function of an equation's arguments, which returns one
array, or a list for several."""


def batch_rule(composed: Composed) -> Callable[..., Any]:
    """Returns the rule for `jax.vmap`."""

    def rule(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        outs = jax.vmap(composed(**params), in_axes=tuple(dims))(*args)
        return outs, jax.tree.map(lambda _: 0, outs)

    return rule


def jvp_rule(composed: Composed) -> Callable[..., Any]:
    """Returns the rule for derivatives."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        moving = [
            i
            for i, t in enumerate(tangents)
            if is_inexact(primals[i]) and not site.is_zero(t)
        ]

        def of(*chosen: Any) -> Any:
            full = list(primals)
            for i, value in zip(moving, chosen, strict=True):
                full[i] = value
            return composed(**params)(*full)

        points = tuple(primals[i] for i in moving)
        return jax.jvp(of, points, tuple(tangents[i] for i in moving))

    return rule
