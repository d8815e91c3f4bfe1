"""Limits that kernels of several ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


SYMBOLIC = no("symbolic", "sizes must be known, but some are symbolic")
"""The refusal of a use with symbolic sizes."""


def known_sizes(spec: Spec, plain: Callable[[Spec], Verdict]) -> Verdict:
    """Returns no for symbolic sizes, else what the plain kernel says of the use.

    Args:
        spec: The use.
        plain: The `supports` of the op's plain kernel, which takes most uses.

    Example:
        >>> import jax.numpy as jnp
        >>> from rewriter.ops.kernel import takes_all
        >>> from rewriter.ops.registry import registry
        >>> from rewriter.ops.spec import spec_of
        >>> use = spec_of(registry().op("rms_norm"), {"x": jnp.ones((4, 8))}, {})
        >>> known_sizes(use, takes_all).ok
        True
    """
    return SYMBOLIC if spec.symbolic else plain(spec)
