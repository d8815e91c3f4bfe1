"""Loops of kernels that are traced without the calls of `jax.jit` in them.

`jax.disable_jit` is what leaves out the calls, and it unrolls the loops of `jax.lax`.
These stay loops. See `flat` in `rewriter.ops.kernel.Traits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def fori_loop(start: Any, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Returns the result of `jax.lax.fori_loop`."""
    inside = _inside(body)
    with jax.disable_jit(False):
        return lax.fori_loop(start, end, inside, carry)


def scan(step: Callable[[Any, Any], Any], carry: Any, parts: Any) -> tuple[Any, Any]:
    """Returns the results of `jax.lax.scan`."""
    inside = _inside(step)
    with jax.disable_jit(False):
        return lax.scan(inside, carry, parts)


def _inside(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of a loop, traced as what is around the loop."""
    around = jax.config.jax_disable_jit

    def traced(*args: Any) -> Any:
        with jax.disable_jit(around):
            return body(*args)

    return traced
