"""Assertions for a program's own tests: that its operations are replaced.

Example:
    >>> import jax.numpy as jnp
    >>> from rewriter.testing import assert_rewrites
    >>> report = assert_rewrites(jnp.sin, 1.0, attention=0)
    >>> report.counts()["attention"]
    0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rewriter.errors import RequirementNotMet
from rewriter.reports.report import Report
from rewriter.run.optimize import explain

__all__ = ["assert_rewrites"]


def assert_rewrites(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **required: int | Mapping[str, int],
) -> Report:
    """Asserts that kernels replace so many sites of a function, at least.

    Nothing runs, and shapes are enough: ``jax.ShapeDtypeStruct`` serves as an array.
    Choices are those for the default device, or for ``options={"target": ...}``.

    Args:
        fn: The function, or what `optimize` made of it.
        *args: Its arguments, by position.
        kwargs: Its arguments by name.
        options: Options of `explain`, such as ``{"target": "h200"}``.
        **required: Op name to the number of its sites that are replaced by a kernel,
            or to ``{"found": 2, "replaced": 1}``.

    Returns:
        The report.

    Raises:
        AssertionError: If there are fewer, with the report's reasons.
    """
    __tracebackhide__ = True  # pytest then shows the caller's line
    asked = {**(options or {}), "require": required or None}
    try:
        return explain(fn, **asked)(*args, **(kwargs or {}))
    except RequirementNotMet as error:
        raise AssertionError(str(error)) from None
