"""Traces the arrays of equinox modules and keeps their other leaves static.

A module of equinox is a tree whose leaves may be functions, names or flags.
`eqx.filter_jit` traces the arrays and keeps the rest. This module does the same around
the rewritten program. Arguments that are no modules mean what they mean to ``jax.jit``.
Equinox is not imported here: its types are looked up, as `nnx_state` does.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rewriter import _jax
from rewriter.program import trace

EQUINOX = "equinox"
Optimize = Callable[..., Any]


# ------------------------------------------------------------------ recognising
def holds_modules(tree: Any) -> bool:
    """Whether there is a module of equinox in a tree with leaves that are no arrays."""
    eqx = sys.modules.get(EQUINOX)
    if eqx is None:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=_is_module)
    return any(
        not _is_value(x) for m in leaves if _is_module(m) for x in jax.tree.leaves(m)
    )


def is_jitted(fn: Any) -> bool:
    """Whether a function came out of ``eqx.filter_jit``."""
    return type(fn).__module__.startswith(f"{EQUINOX}.") and _jax.is_jitted(
        getattr(fn, "_cached", None)
    )


def _is_module(value: Any) -> bool:
    return isinstance(value, sys.modules[EQUINOX].Module)


def _is_value(leaf: Any) -> bool:
    """Whether ``jax.jit`` takes a leaf."""
    scalars = (bool, int, float, complex, np.generic)
    return isinstance(leaf, scalars) or _is_array(leaf)


def _is_array(leaf: Any) -> bool:
    return sys.modules[EQUINOX].is_array(leaf) or isinstance(
        leaf, (jax.ShapeDtypeStruct, jax.Ref)
    )


# -------------------------------------------------------------------- functions
@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """The static part of a tree: its leaves that are no arrays, and its structure."""

    leaves: tuple[Any, ...]
    tree: Any

    def joined(self, arrays: Any) -> Any:
        """Returns the tree with its arrays."""
        rest = jax.tree.unflatten(self.tree, self.leaves)
        return sys.modules[EQUINOX].combine(arrays, rest)


def without_static(tree: Any) -> tuple[Any, Static]:
    """Returns a tree without what in its modules is no array, and that."""
    eqx = sys.modules[EQUINOX]

    def moves(x: Any) -> Any:
        return jax.tree.map(_is_array, x) if _is_module(x) else True

    spec = jax.tree.map(moves, tree, is_leaf=_is_module)
    arrays, rest = eqx.partition(tree, spec)
    leaves, structure = jax.tree.flatten(rest)
    return arrays, Static(tuple(leaves), structure)


class Filtering:
    """A rewritten function whose arguments are modules.

    Args:
        fn: The function.
        jitted: The function under ``jax.jit``, with its options.
        optimize: Gives the optimized function of another one and options.
    """

    def __init__(self, fn: Any, jitted: Any, optimize: Optimize) -> None:
        self.jitted, function = jitted, trace.unjitted(fn)

        def pure(static: Static, *args: Any, **kwargs: Any) -> Any:
            moving, still = trace.split_static(jitted, args, kwargs)
            given, named = trace.join_static(static.joined(moving), still)
            return without_static(function(*given, **named))

        pure.__name__ = trace.name_of(fn)
        pure.__qualname__ = getattr(fn, "__qualname__", pure.__name__)
        options = behind(_jax.jit_options(jitted))
        options["static_argnums"] = (0, *options.get("static_argnums", ()))
        if "out_shardings" in options:
            options["out_shardings"] = (options["out_shardings"], None)
        self.fast = optimize(pure, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        arrays, rest = self._ask(self.fast, args, kwargs)
        return rest.joined(arrays)

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the report for this signature."""
        return self._ask(self.fast.report, args, kwargs)

    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rewritten program for this signature."""
        return self._ask(self.fast.jaxpr, args, kwargs)

    def _ask(self, ask: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        moving, still = trace.split_static(self.jitted, args, kwargs)
        arrays, static = without_static(moving)
        given, named = trace.join_static(arrays, still)
        return ask(static, *given, **named)


def behind(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of ``jax.jit`` for a function with one more first argument."""
    made = dict(options)
    for name in ("static_argnums", "donate_argnums"):
        if name in made:
            numbers = made[name]
            numbers = (numbers,) if isinstance(numbers, int) else numbers
            made[name] = tuple(n + 1 if n >= 0 else n for n in numbers)
    if isinstance(made.get("in_shardings"), (tuple, list)):
        made["in_shardings"] = (None, *made["in_shardings"])
    return made


class Jitted:
    """A function out of ``eqx.filter_jit``, rewritten.

    Args:
        original: The function.
        optimize: Gives the optimized function of one out of ``jax.jit``.
    """

    def __init__(self, original: Any, optimize: Optimize) -> None:
        self.original = original
        self.fast = optimize(original._cached)
        self.made = _with(original, self.fast)
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if (value := getattr(original, name, None)) is not None:
                setattr(self, name, value)
        self.__wrapped__ = original

    @property
    def options(self) -> dict[str, Any]:
        """The rewriter's options that were given."""
        return dict(self.fast.options)

    given = options

    def owns(self, made: Any) -> bool:
        """Whether a function is the optimized one, and not one that wraps it."""
        return made is self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        return self.made(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns equinox's own ``Lowered``."""
        return self.made.lower(*args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the report for this signature; without arguments, the latest."""
        if not args and not kwargs:
            return self.fast.report()
        return self._asked(self.fast.report, args, kwargs)

    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rewritten program for this signature."""
        return self._asked(self.fast.jaxpr, args, kwargs)

    def clear_cache(self) -> None:
        """Forgets compiled programs."""
        self.fast.clear_cache()

    def _asked(self, ask: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Asks with the arguments that equinox hands to ``jax.jit``."""
        asking = types.SimpleNamespace(lower=ask)
        return _with(self.original, asking).lower(*args, **kwargs).lowered


def _with(original: Any, cached: Any) -> Any:
    """The function out of ``eqx.filter_jit`` with another one out of ``jax.jit``."""
    module = object.__new__(type(original))
    for name, value in vars(original).items():
        object.__setattr__(module, name, value)
    object.__setattr__(module, "_cached", cached)
    return module
