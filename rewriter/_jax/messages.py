"""Silences messages of JAX's log that our own tracing causes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from threading import get_ident

import jax
from jax._src.interpreters import partial_eval


@contextlib.contextmanager
def silence_repeated_misses(name: str) -> Iterator[None]:
    """JAX does not tell again that a function was not found in its cache of traces.

    An optimized function has a trace of its own around that of the function. JAX has
    told of the outer one, with the line of the call. Functions inside are told of.

    Args:
        name: The function's name.
    """
    if not jax.config.jax_explain_cache_misses:
        yield
        return
    here, left = get_ident(), [name]

    def tells(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if get_ident() != here or not text.startswith("TRACING CACHE MISS"):
            return True
        if name not in text.split() or not left:
            return True
        left.clear()
        return False

    partial_eval.logger.addFilter(tells)
    try:
        yield
    finally:
        partial_eval.logger.removeFilter(tells)
