"""The line of a function's definition, for messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rewriter.errors import line_of_file


def source_line(function: Callable[..., Any]) -> str:
    """Returns ``"file.py:12"`` for a function defined there, or ``""``."""
    while True:
        function = inspect.unwrap(function)
        if not isinstance(function, functools.partial):
            break
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return line_of_file(code.co_filename, code.co_firstlineno)
