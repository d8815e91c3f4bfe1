"""Functions under ``jax.jit``: their options, and their programs."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src import core, dtypes, source_info_util, traceback_util
from jax._src.interpreters.partial_eval import DynamicJaxprTracer

from rewriter._jax.programs import with_constants
from rewriter._jax.values import is_literal, is_staging, is_tracer


def is_jitted(fn: Any) -> bool:
    """Whether a callable came out of ``jax.jit``.

    Its attributes do not tell: a bound method has those of its function, and a user's
    object may hand on those of what it wraps.
    """
    return isinstance(fn, _jitted_type())


@functools.cache
def _jitted_type() -> type:
    return type(jax.jit(lambda: None))


def jitted_function(jitted: Any) -> Any:
    """The function that ``jax.jit`` was given."""
    return jitted._fun


def static_arguments(jitted: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the static positions and names of a jitted function."""
    info = jitted._jit_info
    return tuple(info.static_argnums), tuple(info.static_argnames)


def options_given(fn: Any) -> dict[str, Any]:
    """Returns the options with which a function was jitted, if it was.

    A bound method of a jitted function has options for the arguments after the first.
    """
    if is_jitted(fn):
        return jit_options(fn)
    if isinstance(fn, types.MethodType) and is_jitted(fn.__func__):
        return _after_the_first(fn.__func__)
    return {}


def _after_the_first(jitted: Any) -> dict[str, Any]:
    """The options of a jitted function for its arguments but the first."""
    options = jit_options(jitted)
    names = list(inspect.signature(jitted).parameters)
    first = {0, -len(names)}
    if first.isdisjoint(static_arguments(jitted)[0]):  # others have shardings
        shardings = options.get("in_shardings")
        if isinstance(shardings, tuple):
            options["in_shardings"] = shardings[1:]
    for name in ("static_argnums", "donate_argnums"):
        if name in options:
            rest = (k for k in options[name] if k not in first)
            options[name] = tuple(k - 1 if k > 0 else k for k in rest)
    for name in ("static_argnames", "donate_argnames"):
        if name in options:
            options[name] = tuple(n for n in options[name] if n != names[0])
    return options


def jit_options(jitted: Any) -> dict[str, Any]:
    """Returns the keyword arguments that would make the same ``jax.jit`` again."""
    info, options = jitted._jit_info, {}
    for name in (
        "static_argnums", "static_argnames", "donate_argnums", "donate_argnames",
        "device", "backend", "keep_unused",
    ):  # fmt: skip
        if value := getattr(info, name, None):
            options[name] = value
    # True became one of several ways in jax 0.11; what is not said has no public name.
    if info.inline != jax.jit(lambda: 0)._jit_info.inline:
        options["inline"] = info.inline
    # donate_argnames is derived from donate_argnums and the other way round.
    if "donate_argnums" in options:
        options.pop("donate_argnames", None)
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    for side in ("in", "out"):
        leaves = getattr(info, f"{side}_shardings_leaves")
        layouts = getattr(info, f"{side}_layouts_leaves")
        if all(type(s).__name__ == "UnspecifiedValue" for s in leaves):
            continue
        both = [
            s if x is None else jax.experimental.layout.Format(x, s)
            for s, x in zip(leaves, layouts, strict=True)
        ]
        tree = getattr(info, f"{side}_shardings_treedef")
        options[f"{side}_shardings"] = jax.tree.unflatten(tree, both)
    return options


def asking(jitted: Any, other: Callable[[Any, Any], Any]) -> Any:
    """Returns the jitted function, in which something else is asked for some calls.

    It is asked where JAX's own dispatch does not know a call: at the first for a
    signature, inside of another transformation, and for arguments that are no arrays.

    Args:
        jitted: A function out of ``jax.jit``.
        other: Gives a function of no arguments for a call's arguments, whose result is
            the call's, or None for a call that is JAX's.
    """
    state = jitted.__getstate__()  # what it is pickled by
    state["cache_miss"] = traceback_util.api_boundary(
        functools.partial(_asked, state["cache_miss"], other)
    )
    made = type(jitted).__new__(type(jitted))
    made.__setstate__(state)
    made.__dict__.update(jitted.__dict__)
    return made


def _asked(theirs: Any, other: Any, /, *args: Any, **kwargs: Any) -> Any:
    mine = other(args, kwargs)
    if mine is None:
        return theirs(*args, **kwargs)
    return mine(), None, False  # nothing is remembered for a faster dispatch


def program_of(traced: Any) -> tuple[Any, Any]:
    """Returns the closed jaxpr of JAX's own ``Traced``, and what JAX keeps of it.

    They differ where values of a trace around it are closed over: JAX has them as
    leading inputs, and the closed jaxpr as constants.
    """
    program, consts = traced._params["jaxpr"], list(traced._consts)
    if not consts:
        return program, program
    invars, count = program.jaxpr.invars, len(consts)
    both = [*program.consts, *consts]
    return with_constants(program, invars[:count], invars[count:], both), program


def inlined(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Returns the results of a program, whose equations become those of the trace.

    Nothing in an equation is traced again, and each keeps its line and names.

    Args:
        closed: The program, without constants.
        args: Its inputs.
    """
    trace, jaxpr = core.trace_ctx.trace, closed.jaxpr
    if not is_staging() or getattr(jaxpr, "is_high", False):
        return list(jex_core.jaxpr_as_fun(closed)(*args))
    here = source_info_util.current()
    args = [_of_trace(trace, x, here) for x in args]
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any, info: Any) -> Any:
        literal = is_literal(atom)
        return (
            DynamicJaxprTracer(trace, atom.aval, atom, info) if literal else env[atom]
        )

    for eqn in jaxpr.eqns:
        stack = here.name_stack + eqn.source_info.name_stack
        info = eqn.source_info.replace(name_stack=stack)
        effects = {
            e.replace(env[e.input].val) if hasattr(e, "input") else e
            for e in eqn.effects
        }
        outs = trace.emit_eqn(
            [read(x, info) for x in eqn.invars], [v.aval for v in eqn.outvars],
            eqn.primitive, eqn.params, effects or eqn.effects, info, eqn.ctx,
        )  # fmt: skip
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(x, here) for x in jaxpr.outvars]


def _of_trace(trace: Any, value: Any, info: Any) -> Any:
    if not is_tracer(value):
        value = dtypes.canonicalize_value(value)
    return trace.to_jaxpr_tracer(value, info)
