"""Traces a function with its arguments, as ``jax.jit(fn)`` does.

Static arguments, weak types, x64, shardings and closed-over values mean what they
always mean. JAX's trace cache answers if the same signature was traced before.
"""

from __future__ import annotations

import functools
import inspect
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.errors import NotTraceable, TraceError, caller, known, raised_at
from rewriter.support import garbage

JIT_OPTIONS = (
    "static_argnums", "static_argnames", "donate_argnums", "donate_argnames",
    "in_shardings", "out_shardings", "keep_unused", "device", "backend", "inline",
    "compiler_options",
)  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A traced call.

    Attributes:
        closed_jaxpr: The program: ``constvars`` are the values the function
            closes over (possibly tracers of a transformation around it),
            ``invars`` the leaves of its arguments.
        kept: What JAX keeps of it, the same object whenever it is asked again.
        out_tree: Structure of the result.
        name: The function's name.
        seconds: How long tracing took.
    """

    closed_jaxpr: ClosedJaxpr
    kept: Any
    out_tree: Any
    name: str
    seconds: float

    @property
    def out_avals(self) -> Sequence[Any]:
        """The abstract values of the result's leaves."""
        return self.closed_jaxpr.out_avals  # type: ignore[no-any-return]

    def run(self, program: Bound, leaves: Sequence[Any]) -> Any:
        """Runs a program in place of this one, as part of the trace under way.

        Args:
            program: Same inputs and outputs as ``closed_jaxpr``; its constants
                may differ.
            leaves: The dynamic arguments, flattened.

        Returns:
            The result, in the structure the function returned.
        """
        results = _jax.inlined(program.closed_jaxpr, [*program.consts, *leaves])
        return self.result(results)

    def result(self, leaves: Sequence[Any]) -> Any:
        """Returns the program's results in the structure the function returned."""
        return jax.tree.unflatten(self.out_tree, leaves)


@dataclass(frozen=True)
class Bound:
    """A program whose constants became leading inputs, and their values."""

    closed_jaxpr: ClosedJaxpr
    consts: tuple[Any, ...]

    @classmethod
    def of(cls, program: ClosedJaxpr) -> Bound:
        """Returns the program with its constants as operands."""
        return cls(_jax.without_constants(program), tuple(program.consts))


def jitted(fn: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Returns ``fn`` under ``jax.jit``, or itself if it already is.

    Args:
        fn: Any callable that JAX can trace.
        options: Options of ``jax.jit``; only the static ones matter here.

    Raises:
        NotTraceable: If ``fn`` is nothing that ``jax.jit`` takes.
    """
    check_callable(fn)
    static = {k: options[k] for k in ("static_argnums", "static_argnames")
              if k in options}  # fmt: skip
    lifted = _jax.jit_options(fn) if _jax.is_jitted(fn) else {}
    if lifted and all(lifted.get(k) == v for k, v in static.items()):
        return fn
    if _jax.is_jitted(fn) and not static:
        return fn
    if not _jax.is_jitted(fn) and can_be_key(fn):
        return jax.jit(fn, **static)
    return jax.jit(renamed(lambda *a, **k: fn(*a, **k), fn), **static)


def check_callable(fn: Any) -> None:
    """Raises for what ``jax.jit`` does not take.

    Raises:
        NotTraceable: If ``fn`` is not callable, a generator function, or a static or
            class method that is not bound yet. It has JAX's message.
    """
    if isinstance(fn, (staticmethod, classmethod)):
        step = f"Put @{type(fn).__name__} above the decorator, or pass fn.__func__"
    elif not callable(fn):
        step = "Pass the function itself, not its result"
    elif inspect.isgeneratorfunction(fn):
        step = "Return a list or stacked arrays instead of yielding values"
    else:
        return
    raise NotTraceable(_refused_by_jit(fn), next_step=step, where=caller())


def _refused_by_jit(fn: Any) -> str:
    """JAX's own message for what ``jax.jit`` does not take."""
    try:
        jax.jit(fn)
    except TypeError as error:
        return str(error)
    return f"{fn!r} is nothing that jax.jit takes"


def can_be_key(fn: Any) -> bool:
    """Whether what is found out of a function can be kept as long as it lives."""
    try:
        weakref.ref(fn)
        hash(fn)
    except TypeError:
        return False
    return True


def renamed(wrapper: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the wrapper with the name, text and signature of ``fn``."""
    wrapper.__name__ = name_of(fn)
    wrapper.__qualname__ = getattr(fn, "__qualname__", wrapper.__name__)
    wrapper.__doc__ = getattr(fn, "__doc__", None)
    wrapper.__module__ = getattr(fn, "__module__", None) or wrapper.__module__
    wrapper.__wrapped__ = fn  # type: ignore[attr-defined]
    return wrapper


def name_in_programs(fn: Any) -> str:
    """Returns the name that JAX gives the program of a function."""
    while not hasattr(fn, "__name__") and isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", "<unnamed function>")


def name_of(fn: Any) -> str:
    """Returns a function's name, also for partials, methods and objects."""
    while not hasattr(fn, "__name__") and hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def jit_options(fn: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``jax.jit`` options given, over those ``fn`` was jitted with.

    Raises:
        UnknownOption: For an option that ``jax.jit`` does not know.
    """
    from rewriter.config import OPTIONS
    from rewriter.errors import UnknownOption

    for name in options:
        if name not in JIT_OPTIONS:
            raise UnknownOption(
                f"unknown option {name!r}",
                next_step=known(name, (*OPTIONS, *JIT_OPTIONS)),
                where=caller(),
            )
    return {**_jax.options_given(fn), **options}


def original_of(fn: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what ``optimize`` was given: the function, and all options in force.

    Args:
        fn: An optimized function, a bound method that is one, or any other function,
            which is returned as it is.
    """
    if isinstance(fn, types.MethodType) and is_optimized(fn.__func__):
        bound = types.MethodType(fn.__func__.original, fn.__self__)
        return bound, {**fn.__func__.options, **_jax.options_given(fn)}
    if not is_optimized(fn):
        return fn, {}
    return fn.original, dict(fn.report.__self__.given)


def options_in_force(
    fn: Any, options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Returns the function, our options and those of ``jax.jit`` for a call of it.

    Args:
        fn: An optimized function, whose options hold too, or any other.
        options: What is given beside; it takes precedence.
    """
    fn, known = original_of(fn)
    given = {**known, **options}
    theirs = {k: v for k, v in given.items() if k in JIT_OPTIONS}
    ours = {k: v for k, v in given.items() if k not in JIT_OPTIONS}
    return fn, ours, jit_options(fn, theirs)


def is_optimized(fn: Any) -> bool:
    """Whether a function is itself one that ``optimize`` returned.

    JAX hands attributes on to what it wraps, as from ``f`` to ``grad(f)``: that one has
    them does not tell.
    """
    maker = getattr(getattr(fn, "report", None), "__self__", None)
    owns = getattr(maker, "owns", None)
    return owns is not None and bool(owns(fn))


def unjitted(fn: Any) -> Any:
    """Returns what ``jax.jit`` was given; a function that is not of it as it is."""
    if _jax.is_jitted(fn) and not is_optimized(fn):
        return _jax.jitted_function(fn)
    return fn


def split(
    fn: Any, args: Any, kwargs: Any, called: Callable[..., Any] | None = None
) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the dynamic leaves, and a function from leaves to ``fn``'s call.

    Args:
        fn: A jitted function; its static arguments stay as they are.
        args: Positional arguments.
        kwargs: Keyword arguments.
        called: What is called in place of ``fn``.
    """
    called = called or fn
    changing, still = split_static(fn, args, kwargs)
    leaves, tree = jax.tree.flatten(changing)

    def call(*leaves: Any) -> Any:
        values, named = join_static(jax.tree.unflatten(tree, leaves), still)
        return called(*values, **named)

    return leaves, renamed(call, fn)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named ones."""


def split_static(fn: Any, args: Any, kwargs: Any) -> tuple[Arguments, Arguments]:
    """Returns the arguments of a jitted function, and the static ones of them.

    In both there is None in the places of the others.
    """
    fixed = _fixed(fn, args)
    _, names = _jax.static_arguments(fn)
    changing = tuple(None if i in fixed else a for i, a in enumerate(args))
    still = tuple(a if i in fixed else None for i, a in enumerate(args))
    return (
        (changing, {k: v for k, v in kwargs.items() if k not in names}),
        (still, {k: v for k, v in kwargs.items() if k in names}),
    )


def join_static(changing: Arguments, still: Arguments) -> Arguments:
    """Returns the arguments that `split_static` divided."""
    pairs = zip(changing[0], still[0], strict=True)
    values = tuple(b if a is None else a for a, b in pairs)
    return values, {**changing[1], **still[1]}


def moving(fn: Any, args: Any) -> tuple[Any, ...]:
    """Returns the positional arguments of a jitted function that are not static."""
    fixed = _fixed(fn, args)
    return tuple(a for i, a in enumerate(args) if i not in fixed)


def _fixed(fn: Any, args: Any) -> set[int]:
    """The positions of the static arguments of a call."""
    numbers, _ = _jax.static_arguments(fn)
    return {n % len(args) for n in numbers if -len(args) <= n < len(args)}


def _equals_itself(value: Any) -> bool:
    try:
        return bool(value == value)
    except Exception:
        return False


def leaf_names(fn: Any, args: Any, kwargs: Any) -> list[str]:
    """Returns a name such as ``"params['wq']"`` for each leaf that `split` gives."""
    _, names = _jax.static_arguments(fn)
    fixed = _fixed(fn, args)
    try:
        listed = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        listed = []
    called = [p.name for p in listed if p.kind is not p.VAR_POSITIONAL]
    parts = [
        (called[i] if i < len(called) else f"args[{i}]", a)
        for i, a in enumerate(args)
        if i not in fixed
    ]
    parts += [(k, v) for k, v in sorted(kwargs.items()) if k not in names]
    return [
        name + jax.tree_util.keystr(path)
        for name, part in parts
        for path, _ in jax.tree_util.tree_leaves_with_path(part)
    ]


def trace(fn: Any, args: Any = (), kwargs: Any = {}) -> Traced:  # noqa: B006
    """Returns the program that ``fn`` computes on these arguments.

    Args:
        fn: A jitted function (see ``jitted``).
        args: Positional arguments: arrays, scalars, ``ShapeDtypeStruct``.
        kwargs: Keyword arguments.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> trace(jax.jit(jnp.sin), (1.0,)).closed_jaxpr.jaxpr.eqns[0].primitive
        sin
    """
    start = time.perf_counter()
    _, (still, named) = split_static(fn, args, kwargs)
    if all(map(_equals_itself, (*still, *named.values()))):
        call, given = fn, (args, kwargs)
    else:  # JAX may compare them, and would only when called with others
        leaves, called = split(fn, args, kwargs, _jax.jitted_function(fn))
        call, given = jax.jit(called), (leaves, {})
    with garbage.paused():
        traced = call.trace(*given[0], **given[1])
    program, kept = _jax.program_of(traced)
    seconds = time.perf_counter() - start
    return Traced(program, kept, traced.out_tree, name_of(fn), seconds)


def wants_arguments(fn: Any) -> bool:
    """Returns whether a function cannot be called without arguments.

    Example:
        >>> wants_arguments(lambda x, y=1: x), wants_arguments(lambda y=1: y)
        (True, False)
    """
    try:
        inspect.signature(fn).bind()
    except TypeError:
        return True
    except ValueError:  # a callable without a signature
        return False
    return False


def trace_error(fn: Any, error: Exception) -> TraceError:
    """Returns the error to raise from a failure in the user's own function."""
    text = str(error).strip().splitlines() or [""]
    return TraceError(
        f"{name_of(fn)} could not be traced: {type(error).__name__}: {text[0]}",
        next_step="jax.jit would stop at the same place",
        where=raised_at(error),
    )
