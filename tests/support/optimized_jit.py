"""A plugin of pytest: tests that call `jax.jit` get `rewriter.optimize` in its place.

Only the tests do. Their modules see a stand-in for the module ``jax``, and the library
under test sees JAX itself. Functions that a test's module wraps while it is imported
stay as they are. What tests give to ``nnx.jit`` of flax is optimized in it.

    python3 -m pytest -p tests.support.optimized_jit --pyargs optax.losses
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

import jax
import pytest

import rewriter

calls: list[str] = []
"""The names of functions that were optimized."""


class Jit:
    """`rewriter.optimize`, with or without a function as `jax.jit`.

    It equals `jax.jit`, which tests compare with what they are given to test.
    """

    def __call__(self, fun: Any = None, /, **options: Any) -> Any:
        calls.append(getattr(fun, "__name__", "?"))
        return (
            rewriter.optimize(**options)
            if fun is None
            else rewriter.optimize(fun, **options)
        )

    def __eq__(self, other: object) -> bool:
        return other is self or other is jax.jit

    def __hash__(self) -> int:
        return hash(jax.jit)


jit = Jit()


def nnx_jit(fun: Any = None, /, **options: Any) -> Any:
    """`rewriter.optimize` of ``nnx.jit``, with or without a function as that."""
    if not callable(fun):
        return functools.partial(nnx_jit, **options)
    calls.append(getattr(fun, "__name__", "?"))
    return rewriter.optimize(sys.modules["flax.nnx"].jit(fun, **options))


class StandIn(types.ModuleType):
    """A module with another ``jit``."""

    def __init__(self, module: types.ModuleType, jit: Any) -> None:
        super().__init__(module.__name__)
        self.module, self.jit = module, jit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __reduce__(self) -> Any:
        return importlib.import_module, (self.__name__,)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the stand-ins into the modules of all tests."""
    stand_ins = [StandIn(jax, jit)]
    if "flax.nnx" in sys.modules:
        stand_ins.append(StandIn(sys.modules["flax.nnx"], nnx_jit))
    for item in items:
        module = getattr(item, "module", None)
        for name, value in list(vars(module).items()) if module else ():
            for stand_in in stand_ins:
                if value is stand_in.module:
                    setattr(module, name, stand_in)
            if value is jax.jit:
                setattr(module, name, jit)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how much was optimized."""
    terminalreporter.write_line(f"{len(calls)} functions optimized")
