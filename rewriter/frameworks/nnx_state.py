"""Carries the state of flax.nnx modules in and out of a program, as `nnx.jit` does.

Modules, optimizers, metrics and random streams of flax.nnx are changed in place. Under
``jax.jit`` a function gets copies, and changes to them are lost. `nnx.jit` passes their
state in and out, and so does this module, around the rewritten program. Flax is not
imported here: its types are looked up among the loaded modules.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax

from rewriter import _jax
from rewriter.errors import StateLost, caller
from rewriter.program import trace

FLAX = "flax.nnx"


# ------------------------------------------------------------------ recognising
def is_node(value: Any) -> bool:
    """Whether a value is one of flax.nnx's mutable objects.

    Those in an ``nnx.State`` are not looked at: that is a value, which a function of
    the functional kind takes and returns.
    """
    nnx = sys.modules.get(FLAX)
    if nnx is None or isinstance(value, (jax.Array, jax.Ref)):
        return False
    return bool(nnx.graph.is_graph_node(value)) and not _is_jaxs(value)


def _is_jaxs(value: Any) -> bool:
    """Whether ``jax.jit`` takes a value as one of its own types, and changes to it."""
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return False
    try:
        jax.typeof(value)
    except (TypeError, ValueError):
        return False
    return True


def holds_nodes(tree: Any) -> bool:
    """Whether there is a mutable object of flax.nnx in a tree."""
    nnx = sys.modules.get(FLAX)
    if nnx is None:
        return False
    ends = lambda x: isinstance(x, nnx.State) or is_node(x)
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=ends)))


def is_jitted(fn: Any) -> bool:
    """Whether a function came out of ``nnx.jit``."""
    return type(fn).__module__.startswith(f"{FLAX}.") and _jax.is_jitted(
        getattr(fn, "jitted_fn", None)
    )


def own_module(fn: Any) -> Any:
    """The mutable object that a function is, or a method of; None if there is not."""
    of = fn.__self__ if isinstance(fn, types.MethodType) else fn
    return of if is_node(of) else None


# -------------------------------------------------------------------- functions
class Updating:
    """A rewritten function of modules, which are updated.

    Args:
        jitted: A function out of ``nnx.jit``.
        optimize: Gives the optimized function of one out of ``jax.jit``.
    """

    def __init__(self, jitted: Any, optimize: Callable[[Any], Any]) -> None:
        copied = copy.copy(jitted)
        pure = jitted.jitted_fn
        options = _jax.jit_options(pure)
        inner = _jax.jitted_function(pure)
        if getattr(inner, "ctxtag", None) is jitted:  # states are told apart by it
            inner = dataclasses.replace(inner, ctxtag=copied)
            pure = jax.jit(inner, **options)
        copied.jitted_fn = optimize(pure)
        self.made, self.fast = copied, copied.jitted_fn

    @property
    def given(self) -> dict[str, Any]:
        """The rewriter's options that were given."""
        return dict(self.fast.options)

    def owns(self, made: Any) -> bool:
        """Whether a function is the optimized one, and not one that wraps it."""
        return made is self.made

    def public(self, original: Any) -> Any:
        """Returns the object of ``nnx.jit``, with what ``optimize`` adds to it."""
        made = self.made
        made.original, made.options = original, self.fast.options
        made.report, made.jaxpr = self.report, self.jaxpr
        made.clear_cache = self.fast.clear_cache
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it, and updates what it was given."""
        return self.made(*args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the report for this signature."""
        return self._pure(self.fast.report, args, kwargs)

    def jaxpr(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rewritten program for this signature."""
        return self._pure(self.fast.jaxpr, args, kwargs)

    def _pure(self, ask: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Asks with the arguments that flax hands to ``jax.jit``."""
        made = self.made
        if not hasattr(made, "_get_pure_args_kwargs"):  # without its graphs
            args = (*getattr(made, "partial_args", ()), *args)
            args, kwargs = made._maybe_to_tree(args, kwargs)
            return ask(*args, **kwargs)
        with sys.modules[FLAX].update_context(made):
            args, kwargs = made._get_pure_args_kwargs(args, kwargs)
            return ask(*args, **kwargs)


def updating(
    fn: Any, options: Mapping[str, Any], optimize: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Returns a rewritten function that updates the modules it is given.

    Args:
        fn: The function, plain or out of ``jax.jit``.
        options: Those of ``jax.jit``.
        optimize: Gives the optimized function of one out of ``jax.jit``.

    Raises:
        StateLost: For an option that ``nnx.jit`` does not have.
    """
    if "compiler_options" in options:
        raise StateLost(
            "compiler_options for a function of flax.nnx modules",
            wanted="options that nnx.jit has",
            next_step="Leave them out, or hand states over by nnx.split and nnx.merge",
            where=caller(),
        )
    jitted = sys.modules[FLAX].jit(trace.unjitted(fn), **options)
    return Updating(jitted, optimize)


def unbound(fn: Any) -> Any:
    """Returns the function that takes `own_module` as its first argument."""
    return fn.__func__ if isinstance(fn, types.MethodType) else type(fn).__call__


# --------------------------------------------------------------------- watching
class Watching:
    """A function that refuses to change modules it is given, as they are copies.

    Args:
        function: Gives the function.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result.

        Raises:
            StateLost: If it changed what cannot be handed out.
        """
        before = [(v, v.get_raw_value()) for v in variables((args, kwargs))]
        out = self.function()(*args, **kwargs)
        changed = [v for v, value in before if v.get_raw_value() is not value]
        if changed or len(variables((args, kwargs))) != len(before):
            kinds = sorted({type(v).__name__ for v in changed}) or ["new variables"]
            name = getattr(self.function(), "__name__", "the function")
            raise StateLost(
                f"{name} changes {', '.join(kinds)} of its arguments, and the change "
                "would be lost",
                wanted="flax.nnx modules passed to a call, or a function that returns "
                "what it changes",
                next_step="Use rewriter.optimize(nnx.jit(fn)), which has lower and "
                "trace too, or return nnx.state(module)",
                where=caller(),
            )
        return out


def variables(tree: Any) -> list[Any]:
    """Returns the variables of flax.nnx in a tree, without those in ``nnx.State``."""
    nnx = sys.modules.get(FLAX)
    if nnx is None:
        return []
    ends = lambda x: isinstance(x, (nnx.Variable, nnx.State))
    leaves = jax.tree.leaves(tree, is_leaf=ends)
    return [x for x in leaves if isinstance(x, nnx.Variable) and not _is_jaxs(x)]


def is_flaxs(fn: Any) -> bool:
    """Whether a function is one by which flax itself hands states in and out."""
    return type(fn).__module__.startswith(f"{FLAX}.") and not is_node(fn)
