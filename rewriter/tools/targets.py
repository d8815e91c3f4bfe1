"""The function and arguments that a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from rewriter import errors
from rewriter.program import trace
from rewriter.tools.files import defined, files_with_arguments

NAMES = ("{}_args", "example_args", "args")
"""Names of arguments that are looked for beside a function, in order."""


@contextmanager
def user_path() -> Iterator[None]:
    """Keeps additions to Python's search path until the end of the block."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def function_and_arguments(
    text: str, args: str | None = None
) -> tuple[Any, tuple[Any, ...], str]:
    """Returns a function, its arguments, and the name under which they were found.

    Args:
        text: ``package.module:function`` or ``folder/file.py:function``.
        args: The same for arguments; a name alone is looked up in the function's file.
            By default the file's ``<function>_args``, ``example_args`` or ``args``.

    Returns:
        The third is empty if the arguments were named, or are none.

    Raises:
        ConfigError: If there is no such function, or no arguments where it takes some.
    """
    module, name = parsed(text)
    fn = lookup(module, name)
    if args:
        place = parsed(args) if ":" in args else (module, args)
        return fn, _values(lookup(*place)), ""
    if not trace.wants_arguments(fn):
        return fn, (), ""
    names = [n.format(name.rpartition(".")[2]) for n in NAMES]
    for found in names:
        if hasattr(load(module), found):
            return fn, _values(lookup(module, found)), f"{module}:{found}"
    raise errors.ConfigError(
        f"{text} takes arguments, and {module} has none of {', '.join(names)}",
        next_step="Define one of them there: a tuple, or a function that makes it; or "
        f"name it: --args {module}:make_args",
    )


def every_function(module: str) -> list[tuple[str, Any, tuple[Any, ...]]]:
    """Returns the functions of a module or file that it has arguments for.

    Args:
        module: ``package.module`` or ``folder/file.py``.

    Returns:
        The name of each public function that is defined there, it, and its arguments.

    Raises:
        ConfigError: If there is none.
    """
    loaded = load(module)
    found = []
    for name, fn in list(vars(loaded).items()):
        here = getattr(fn, "__module__", "") == loaded.__name__ and callable(fn)
        other = _makes_arguments(name) or inspect.isclass(fn) or name[0] == "_"
        if not here or other or not trace.wants_arguments(fn):
            continue
        try:
            _, values, _ = function_and_arguments(f"{module}:{name}")
            inspect.signature(fn).bind(*values)
        except (errors.ConfigError, TypeError, ValueError):
            continue
        found.append((name, fn, values))
    if found:
        return found
    raise errors.ConfigError(
        f"{module} has no function with arguments beside it",
        next_step="Define <function>_args, example_args or args there",
    )


def files(place: str) -> list[str]:
    """Returns the files of a folder that hold arguments; a module or file alone.

    Raises:
        ConfigError: If a folder has none.
    """
    if not os.path.isdir(place):
        return [place]
    if found := files_with_arguments(place, _makes_arguments):
        return found
    raise errors.ConfigError(
        f"{place} has no file with arguments for its functions",
        next_step="Define <function>_args, example_args or args beside a function",
    )


def parsed(text: str) -> tuple[str, str]:
    """Returns the module or file, and the name in it.

    Example:
        >>> parsed("models/block.py:Block.step")
        ('models/block.py', 'Block.step')
    """
    module, _, name = text.rpartition(":")
    if module and name:
        return module, name
    given = text.strip(":")
    names = _functions(given) if given.endswith(".py") else []
    targets = " or ".join(f"{given}:{n}" for n in names[:3]) or f"{given}:main"
    every = f", or --all {given}" if names else ""
    raise errors.ConfigError(
        f"{text!r} names no function",
        wanted="module:name or file.py:name",
        next_step=f"Try {targets}{every}",
    )


def _functions(file: str) -> list[str]:
    """The public functions of a file but those that make arguments; it is not run."""
    names = defined(file, functions=True)
    return [n for n in names if n[0] != "_" and not _makes_arguments(n)]


def _makes_arguments(name: str) -> bool:
    return name in NAMES or name.endswith("_args")


def lookup(module: str, name: str) -> Any:
    """Returns what a module or file has under a name, which may have dots."""
    found: Any = load(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise errors.ConfigError(
                f"{module} has no {name!r}",
                next_step=errors.known(part, _public(found)),
            )
        found = getattr(found, part)
    return found


def _public(owner: Any) -> list[str]:
    """The public names of a module or object but those of modules in it."""
    named = vars(owner).items()
    return [n for n, x in named if n[0] != "_" and not isinstance(x, ModuleType)]


def load(module: str) -> ModuleType:
    """Imports a module, or a file as one; a file runs once.

    Raises:
        ConfigError: If it is not there, or cannot import what it needs.
    """
    try:
        if module.endswith(".py"):
            return _file(os.path.abspath(module))
        return importlib.import_module(module)
    except (ImportError, FileNotFoundError) as error:
        raise errors.ConfigError(
            f"cannot import {module!r}: {error}",
            next_step="Run from the folder that holds it, or install what is missing",
        ) from error


def _file(path: str) -> ModuleType:
    """The module of a file, whose folder is searched for imports, as Python does."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == path:
            return module
    name = os.path.basename(path).removesuffix(".py")
    name = f"_file_{name}" if name in sys.modules else name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(path))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _values(found: Any) -> tuple[Any, ...]:
    found = found() if callable(found) else found
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
