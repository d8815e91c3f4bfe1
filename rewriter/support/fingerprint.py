"""A text that says all of a plain value: the same in every process, else none.

Two values with equal texts act alike, as long as the package's files are the same. Of
our own functions the text gives the name, the code, and what they close over.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
import os
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

OURS = "rewriter"
"""The package whose functions and records are known by their names."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
"""Types whose `repr` is the whole value."""


class NotPlain(Exception):
    """A value of which no text says all, such as a user's function or an array."""


def text_of(value: Any) -> str:
    """Returns the text of a value.

    Args:
        value: Numbers, texts, dtypes, containers of them, and records, functions and
            classes of this package.

    Raises:
        NotPlain: If it holds anything else.

    Example:
        >>> text_of((1, True, 1.0)), text_of((1,)) == text_of((True,))
        ('(tuple 1 True 1.0)', False)
    """
    if type(value) in PLAIN:
        return repr(value)
    for kinds, parts in _PARTS:
        if isinstance(value, kinds):
            return f"({' '.join(parts(value))})"
    if dataclasses.is_dataclass(value):
        return f"({' '.join(_of_record(value))})"
    raise NotPlain(f"{type(value).__module__}.{type(value).__qualname__}")


def _named(value: Any) -> str:
    """The full name of a class or function of this package."""
    name = getattr(value, "__module__", None) or ""
    if name.split(".")[0] != OURS:
        raise NotPlain(f"{name}.{getattr(value, '__qualname__', value)}")
    return f"{name}.{value.__qualname__}"


def _of_items(kind: str, values: Any) -> list[str]:
    return [kind, *map(text_of, values)]


def _of_mapping(value: Mapping[Any, Any]) -> list[str]:
    return _of_items(type(value).__name__, [p for kv in value.items() for p in kv])


def _of_set(value: Any) -> list[str]:
    return [type(value).__name__, *sorted(map(text_of, value))]


def _of_record(value: Any) -> list[str]:
    """The fields of one of this package's dataclasses by which it is compared."""
    fields = [getattr(value, f.name) for f in dataclasses.fields(value) if f.compare]
    return [_named(type(value)), *map(text_of, fields)]


def _of_class(value: type) -> list[str]:
    if value.__module__ in ("builtins", "numpy", "ml_dtypes"):
        return ["class", value.__module__, value.__qualname__]
    return ["class", _named(value)]


def _of_partial(value: functools.partial[Any]) -> list[str]:
    return ["partial", *map(text_of, (value.func, value.args, value.keywords))]


def _of_method(value: types.MethodType) -> list[str]:
    return ["method", text_of(value.__func__), text_of(value.__self__)]


def _of_function(value: types.FunctionType) -> list[str]:
    cells = [c.cell_contents for c in value.__closure__ or ()]
    given = value.__defaults__, value.__kwdefaults__, tuple(cells)
    return ["function", _named(value), _of_code(value.__code__), text_of(given)]


def _of_code(code: types.CodeType) -> str:
    """What tells functions of one name apart, such as two lambdas."""
    inner = [_of_code(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    others = [c for c in code.co_consts if not isinstance(c, types.CodeType)]
    names = code.co_names, code.co_varnames, code.co_freevars
    return f"({text_of((code.co_code, names, others))} {' '.join(inner)})"


_PARTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, lambda v: ["enum", _named(type(v)), v.name]),
    (np.dtype, lambda v: ["dtype", str(v)]),
    (np.generic, lambda v: ["number", str(v.dtype), repr(v.tobytes())]),
    ((list, tuple), lambda v: _of_items(type(v).__name__, v)),
    ((dict, types.MappingProxyType), _of_mapping),
    ((set, frozenset), _of_set),
    (functools.partial, _of_partial),
    (types.MethodType, _of_method),
    (types.FunctionType, _of_function),
    (functools._lru_cache_wrapper, lambda v: ["cached", text_of(v.__wrapped__)]),
    (type, _of_class),
)
"""Types, and what to say of their values."""


LOADED = time.time()
"""When this package was loaded, about."""


@functools.cache
def of_package() -> str:
    """Returns a digest of this package's code.

    Raises:
        OSError: If its files cannot be read, or changed after they were loaded.
    """
    return of_folder(os.path.dirname(os.path.dirname(__file__)), LOADED)


def of_folder(root: str, before: float = math.inf) -> str:
    """Returns a digest of the names and contents of Python files below a folder.

    Raises:
        OSError: If there is none, or one is not as it was before a time.
    """
    found, files = hashlib.sha256(), list[str]()
    for folder, _, names in os.walk(root, followlinks=True):  # a checkout has links
        files += [os.path.join(folder, n) for n in names if n.endswith(".py")]
    if not files:
        raise OSError(f"no Python files in {root}")
    for name in sorted(files):
        with open(name, "rb") as file:
            data, stat = file.read(), os.fstat(file.fileno())
        if max(stat.st_mtime, stat.st_ctime) > before:
            raise OSError(f"{name} changed while it was in use")
        found.update(f"{os.path.relpath(name, root)} {len(data)} ".encode())
        found.update(data)
    return found.hexdigest()
