"""torchax, ready for use: `torchax()` imports it once and adds what it lacks.

torchax names operators of the PyTorch that it was released for. A later PyTorch may
have dropped some of them, and then torchax cannot be imported. Nobody can call such an
operator, so that names that stand for nothing take their places meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

from rewriter import _jax
from rewriter.support.installed import require_package
from rewriter.torch_modules import lowerings

_OPERATOR = re.compile(r"torch\.ops\.aten\.(\w+)(?:\.(\w+))?")


@functools.cache
def torchax() -> Any:
    """Returns the module torchax.

    Raises:
        ConfigError: If PyTorch or torchax is not installed.
    """
    for name in ("torch", "torchax"):
        require_package(name, "torch")
    with warnings.catch_warnings(), _named_operators():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torchax")
        module.interop = importlib.import_module("torchax.interop")
        module.default_env()
    for package in ("torch", "torchax"):  # their lines say nothing of the model
        origin = importlib.util.find_spec(package).origin  # type: ignore[union-attr]
        _jax.hide_source_folder(str(pathlib.Path(origin).parent) + os.sep)  # type: ignore
    for name, lowering in lowerings.added(module).items():
        module.default_env().override_op_definition(name, lowering)
    return module


@contextlib.contextmanager
def _named_operators() -> Iterator[None]:
    """Gives operators that torchax names, and this PyTorch lacks, a name in the block.

    PyTorch drops overloads of operators, and whole operators: `cholesky` in 2.14.
    """
    aten, made = importlib.import_module("torch").ops.aten, []
    for operator, overload in sorted(_operators_named()):
        if not hasattr(aten, operator):
            setattr(aten, operator, _Dropped())
            made.append((aten, operator))
        found = getattr(aten, operator)
        if overload and not hasattr(found, overload):
            setattr(found, overload, _Dropped())
            made.append((found, overload))
    try:
        yield
    finally:
        for owner, name in reversed(made):
            delattr(owner, name)


class _Dropped:
    """An operator, or an overload of one, that this PyTorch does not have."""


def _operators_named() -> set[tuple[str, str]]:
    """The operators in torchax's source: name and overload, which may be ``""``."""
    spec = importlib.util.find_spec("torchax")
    folder = pathlib.Path(spec.origin).parent  # type: ignore[union-attr,arg-type]
    texts = (path.read_text() for path in folder.rglob("*.py"))
    return {pair for text in texts for pair in _OPERATOR.findall(text)}
