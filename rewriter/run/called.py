"""The object that `jax.jit` traces in place of the user's function.

Equal functions with equal options share one such object, and so one trace and one
compiled program. The object does not keep the function alive: when the function is
freed, so is everything found about it.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from rewriter import _jax
from rewriter.config import disabled, while_traced
from rewriter.errors import RewriterError, RewriterWarning, raised_at
from rewriter.measure import cache
from rewriter.ops.registry import registry
from rewriter.program import trace
from rewriter.run.analysis import Analysis

REMEMBERED = 8  # sets of options per function
READ = ("REWRITER_DISABLE", "XLA_FLAGS")  # variables that decide what is found


class Called:
    """The function that ``jax.jit`` traces: it runs the rewritten program.

    Args:
        fn: The function.
        weak: Whether to leave it to callers to keep the function alive.
        ours: Fields of ``Config``.
        theirs: Options of ``jax.jit``.
        patterns: Patterns beyond those that the configuration names.
    """

    __slots__ = ("__dict__", "__weakref__", "analysis", "fn", "made_of")

    def __init__(
        self,
        fn: Any,
        weak: bool,
        ours: Mapping[str, Any],
        theirs: Mapping[str, Any],
        patterns: tuple[Any, ...],
    ) -> None:
        self.fn: Callable[[], Any] = weakref.ref(fn) if weak else lambda: fn
        self.made_of = ours, theirs, patterns
        self.analysis = Analysis(self.fn, ours, patterns, theirs)
        self.__name__ = trace.name_in_programs(fn)
        self.__qualname__ = getattr(fn, "__qualname__", self.__name__)
        self.__module__ = getattr(fn, "__module__", None) or __name__
        if (code := _code_of(fn)) is not None:
            self.__code__ = code  # for JAX's messages
        try:
            self.__signature__ = inspect.signature(fn)
        except (TypeError, ValueError):  # JAX does without
            self.__signature__ = inspect.signature(lambda *args, **kwargs: 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the rewritten program, as part of a trace.

        Where nothing is traced, as while JAX looks for the first NaN, the function
        itself runs.
        """
        fn = self.fn()
        if disabled() or jax.config.jax_disable_jit or not _jax.is_staging():
            return fn(*args, **kwargs)
        with while_traced(self.forget), _jax.silence_repeated_misses(self.__name__):
            return self._noted(args, kwargs)

    def __repr__(self) -> str:
        return repr(self.fn())

    def __reduce__(self) -> Any:
        return called, (self.fn(), *self.made_of)

    def jitted(self) -> Any:
        """Returns it under ``jax.jit``."""
        return jax.jit(self, **self.made_of[1])

    def forget(self) -> None:
        """Makes JAX forget the programs."""
        self.jitted().clear_cache()

    def _noted(self, args: Any, kwargs: Any) -> Any:
        """The result; a user's own error gets a note with its line."""
        try:
            return self.analysis.result(args, kwargs)
        except (RewriterError, RewriterWarning):
            raise
        except Exception as error:
            where = raised_at(error)
            note = f"rewriter: while tracing {trace.name_of(self.fn())}"
            error.add_note(f"{note}, {where}" if where else note)
            raise


def called(
    fn: Any,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    patterns: tuple[Any, ...] = (),
) -> Called:
    """Returns what ``jax.jit`` traces, the same for the same function and options.

    Keep the function of what is returned alive: it may be another that equals this
    one, as methods bound to one object do.

    Args:
        fn: Any callable that ``jax.jit`` takes.
        ours: Fields of ``Config``.
        theirs: Options of ``jax.jit``.
        patterns: Patterns beyond those that the configuration names.
    """
    try:
        world = registry(), registry().changes, cache.stamp()
        read = tuple(os.environ.get(name) for name in READ)
        key = (_frozen(ours), _frozen(theirs), patterns, world[1:], read, id(world[0]))
        hash(key)
    except TypeError:
        return Called(fn, False, ours, theirs, patterns)
    if not trace.can_be_key(fn):
        return Called(fn, False, ours, theirs, patterns)
    return _shared().of(fn, key, lambda: Called(fn, True, ours, theirs, patterns))


@dataclass
class _Shared:
    """Objects made for functions, each kept as long as its function lives."""

    made: weakref.WeakKeyDictionary[Any, OrderedDict[Any, Called]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    lock: threading.RLock = field(default_factory=threading.RLock)

    def of(self, fn: Any, key: Any, make: Callable[[], Called]) -> Called:
        """Returns what was made for a function and key, or makes it."""
        with self.lock:
            mine = self.made.setdefault(fn, OrderedDict())
            found = mine.get(key)
            if found is None or found.fn() is None:
                found = mine[key] = make()
            mine.move_to_end(key)
            while len(mine) > REMEMBERED:
                mine.popitem(last=False)
            return found


@functools.cache
def _shared() -> _Shared:
    return _Shared()


def _frozen(value: Any) -> Any:
    """The value as one that can be hashed, if what is in it can."""
    if isinstance(value, Mapping):
        return tuple((k, _frozen(v)) for k, v in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    return type(value), value


def _code_of(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(inspect.unwrap(fn), "__code__", None)
