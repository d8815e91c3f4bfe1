"""A plugin of pytest: tests that call `jax.jit` get `rewriter.optimize` in its place.

Only the tests do. Their modules see a stand-in for the module ``jax``, and the library
under test sees JAX itself. Functions that a test's module wraps while it is imported
stay as they are.

    python3 -m pytest -p tests.support.optimized_jit --pyargs optax.losses
"""

from __future__ import annotations

import types
from typing import Any

import jax
import pytest

import rewriter

calls: list[str] = []
"""The names of functions that were optimized."""


def jit(fun: Any = None, /, **options: Any) -> Any:
    """`rewriter.optimize`, with or without a function as `jax.jit`."""
    calls.append(getattr(fun, "__name__", "?"))
    return (
        rewriter.optimize(**options)
        if fun is None
        else rewriter.optimize(fun, **options)
    )


class StandIn(types.ModuleType):
    """The module ``jax`` with another ``jit``."""

    jit = staticmethod(jit)

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the stand-in into the modules of all tests."""
    stand_in = StandIn("jax")
    for item in items:
        module = getattr(item, "module", None)
        for name, value in list(vars(module).items()) if module else ():
            if value is jax:
                setattr(module, name, stand_in)
            elif value is jax.jit:
                setattr(module, name, jit)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how much was optimized."""
    terminalreporter.write_line(f"{len(calls)} functions optimized")
