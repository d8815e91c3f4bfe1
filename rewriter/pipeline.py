"""A program in, the rewritten program out."""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr

from rewriter.config import Config
from rewriter.replace import Rewritten


def rewrite(
    closed_jaxpr: ClosedJaxpr, config: Config, user_patterns: tuple[object, ...] = ()
) -> Rewritten:
    """Returns the program unchanged."""
    return Rewritten(closed_jaxpr)
