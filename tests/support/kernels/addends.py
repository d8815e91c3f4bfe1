"""Norms of sums, and gradients that are added to: what kernels for both chips give."""

from __future__ import annotations

from typing import Any

import numpy as np


def beside(given: Any) -> dict[str, Any]:
    """An addend of x, and one of its cotangent."""
    r, x = np.random.default_rng(1), given["x"]
    made = {n: r.standard_normal(x.shape) for n in ("x", "cotangent")}
    return {n: np.asarray(y, x.dtype) for n, y in made.items()}


def both(kernel: Any, given: Any, up: Any, added: Any, **more: Any) -> dict[str, Any]:
    """The sum, the norm of it as "out", and the cotangents.

    Args:
        kernel: One that `adds_to` x.
        given: Its operands by name.
        up: The norm's cotangent.
        added: As `beside` makes it.
        **more: What else both passes take.
    """
    (total, out), residuals = kernel.forward(
        **given, addend=added["x"], residuals=True, **more
    )
    grads = kernel.backward(
        **{**given, "x": total}, out=None, residuals=residuals, cotangent=up,
        addend=added["cotangent"], **more,
    )  # fmt: skip
    return {"sum": total, "out": out, **grads}
