"""Requires packages that only an extra of this one installs."""

from __future__ import annotations

import importlib.util

from rewriter.errors import ConfigError


def require_package(name: str, extra: str) -> None:
    """Does nothing if a package is installed.

    Args:
        name: The package.
        extra: The extra of this package that installs it.

    Raises:
        ConfigError: If it is not; the text has the command that installs it.

    Example:
        >>> require_package("jax", "cuda")
    """
    if importlib.util.find_spec(name) is None:
        step = f'Run pip install "jaxpr-rewriter[{extra}]"'
        raise ConfigError(f"{name} is not installed", next_step=step)
