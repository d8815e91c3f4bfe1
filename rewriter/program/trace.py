"""A function and its arguments in, a traced program out.

Tracing is JAX's own: the function runs under ``jax.jit``, so that static
arguments, weak types, x64, shardings and closed-over values mean what they
always mean, and JAX's trace cache answers when the signature was seen before.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from rewriter import _jax
from rewriter.errors import RewriterError, TraceError, caller, known, raised_at

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
        outer: The whole trace, usually one call equation around the program.
        out_tree: Structure of the result.
        name: The function's name.
        seconds: How long tracing took.
    """

    closed_jaxpr: ClosedJaxpr
    outer: ClosedJaxpr
    out_tree: Any
    name: str
    seconds: float

    @property
    def out_avals(self) -> Sequence[Any]:
        """The abstract values of the result's leaves."""
        return [v.aval for v in self.outer.jaxpr.outvars]

    @property
    def call(self) -> JaxprEqn | None:
        """The one equation that calls the program, if there is one."""
        eqns = self.outer.jaxpr.eqns
        is_call = len(eqns) == 1 and eqns[0].primitive.name in ("jit", "pjit")
        return eqns[0] if is_call else None

    def run(self, program: Bound, leaves: Sequence[Any]) -> Any:
        """Runs a program in place of this one, as one call equation.

        Args:
            program: Same inputs and outputs as ``closed_jaxpr``; its constants
                may differ.
            leaves: The dynamic arguments, flattened.

        Returns:
            The result, in the structure the function returned.
        """

        def call(operands: Sequence[Any]) -> list[Any]:
            if self.call is None:
                return jaxpr_as_fun(program.closed_jaxpr)(*program.consts, *operands)
            dropped = _leading(self.call, _values(self.outer))
            params = _jax.call_params(self.call.params, dropped, len(program.consts))
            params["jaxpr"] = program.closed_jaxpr
            return self.call.primitive.bind(*program.consts, *operands, **params)

        return self.calling(call, leaves)

    def calling(
        self, call: Callable[[Sequence[Any]], Sequence[Any]], leaves: Sequence[Any]
    ) -> Any:
        """Returns the function's result, where something else computes the program's.

        Args:
            call: Gives the results of ``closed_jaxpr`` for its inputs.
            leaves: The dynamic arguments, flattened.
        """
        return jax.tree.unflatten(self.out_tree, _called(self, call, leaves))

    def inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the inputs of ``closed_jaxpr``, or the names of their arguments.

        Args:
            leaves: The dynamic arguments, flattened, or a name for each.
        """
        if self.call is None:
            return list(leaves)
        values = _values(self.outer)
        count = _leading(self.call, values)
        values.update(zip(self.outer.jaxpr.invars, leaves, strict=True))
        return [_read(values, x) for x in self.call.invars[count:]]


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
        RewriterError: If ``fn`` is not callable.
    """
    if not callable(fn):
        raise RewriterError(
            f"{fn!r} is not callable",
            wanted="a function of arrays",
            next_step="Pass the function itself, not its result",
            where=caller(),
        )
    static = {k: options[k] for k in ("static_argnums", "static_argnames")
              if k in options}  # fmt: skip
    lifted = _jax.jit_options(fn) if _jax.is_jitted(fn) else {}
    if lifted and all(lifted.get(k) == v for k, v in static.items()):
        return fn
    if _jax.is_jitted(fn) and not static:
        return fn
    return jax.jit(renamed(lambda *a, **k: fn(*a, **k), fn), **static)


def renamed(wrapper: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the wrapper with the name, text and signature of ``fn``."""
    wrapper.__name__ = name_of(fn)
    wrapper.__qualname__ = getattr(fn, "__qualname__", wrapper.__name__)
    wrapper.__doc__ = getattr(fn, "__doc__", None)
    wrapper.__module__ = getattr(fn, "__module__", None) or wrapper.__module__
    wrapper.__wrapped__ = fn  # type: ignore[attr-defined]
    return wrapper


def name_of(fn: Any) -> str:
    """Returns a function's name, also for partials, methods and objects."""
    while not hasattr(fn, "__name__") and hasattr(fn, "func"):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def jit_options(fn: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ``jax.jit`` options given, over those ``fn`` was jitted with.

    Raises:
        ConfigError: For an option that ``jax.jit`` does not know.
    """
    from rewriter.config import OPTIONS
    from rewriter.errors import ConfigError

    for name in options:
        if name not in JIT_OPTIONS:
            raise ConfigError(
                f"unknown option {name!r}",
                next_step=known(name, (*OPTIONS, *JIT_OPTIONS)),
                where=caller(),
            )
    lifted = _jax.jit_options(fn) if _jax.is_jitted(fn) else {}
    return {**lifted, **options}


def original_of(fn: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what ``optimize`` was given: the function, and all options in force.

    Args:
        fn: An optimized function, or any other, which is returned as it is.
    """
    if not is_optimized(fn):
        return fn, {}
    return fn.original, {**fn.options, **_jax.jit_options(fn)}


def is_optimized(fn: Any) -> bool:
    """Whether ``optimize`` returned this very object.

    JAX hands attributes on to what it makes of a function: ``jax.grad(fast)`` has those
    of ``fast``, which are bound to ``fast``.
    """
    return getattr(getattr(fn, "report", None), "__self__", None) is fn


def split(fn: Any, args: Any, kwargs: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the dynamic leaves, and a function from leaves to ``fn``'s call.

    Args:
        fn: A jitted function; its static arguments stay as they are.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    numbers, names = _jax.static_arguments(fn)
    fixed = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
    moving = [a for i, a in enumerate(args) if i not in fixed]
    named = {k: v for k, v in kwargs.items() if k not in names}
    still = {k: v for k, v in kwargs.items() if k in names}
    leaves, tree = jax.tree.flatten((moving, named))

    def call(*leaves: Any) -> Any:
        moving, named = jax.tree.unflatten(tree, leaves)
        rest = iter(moving)
        full = [a if i in fixed else next(rest) for i, a in enumerate(args)]
        return fn(*full, **named, **still)

    return leaves, renamed(call, fn)


def dynamic(fn: Any, args: Any) -> tuple[Any, ...]:
    """Returns the positional arguments of a jitted function that are not static."""
    numbers, _ = _jax.static_arguments(fn)
    fixed = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
    return tuple(a for i, a in enumerate(args) if i not in fixed)


def leaf_names(fn: Any, args: Any, kwargs: Any) -> list[str]:
    """Returns a name such as ``"params['wq']"`` for each leaf that `split` gives."""
    numbers, names = _jax.static_arguments(fn)
    fixed = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
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
    leaves, call = split(fn, args, kwargs)
    outer, shape = jax.make_jaxpr(call, return_shape=True)(*leaves)
    name, tree = name_of(fn), jax.tree.structure(shape)
    seconds = time.perf_counter() - start
    traced = Traced(outer, outer, tree, name, seconds)
    if traced.call is None:
        return traced
    return Traced(_program(outer, traced.call), outer, tree, name, seconds)


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


def _program(outer: ClosedJaxpr, call: JaxprEqn) -> ClosedJaxpr:
    """The called program, with its closed-over operands as constants."""
    inner: ClosedJaxpr = call.params["jaxpr"]
    values = _values(outer)
    count = _leading(call, values)
    if not count:
        return inner
    consts = [*inner.consts, *(_read(values, x) for x in call.invars[:count])]
    invars = inner.jaxpr.invars
    return _jax.with_constants(inner, invars[:count], invars[count:], consts)


def _values(outer: ClosedJaxpr) -> dict[Var, Any]:
    return dict(zip(outer.jaxpr.constvars, outer.consts, strict=True))


def _leading(call: JaxprEqn, values: Mapping[Var, Any]) -> int:
    """How many leading operands are closed-over values; JAX puts those first."""
    arguments = (
        i for i, x in enumerate(call.invars)
        if not _jax.is_literal(x) and x not in values
    )  # fmt: skip
    return next(arguments, len(call.invars))


def _read(values: Mapping[Var, Any], atom: Any) -> Any:
    return atom.val if _jax.is_literal(atom) else values[atom]


def _called(
    traced: Traced,
    call: Callable[[Sequence[Any]], Sequence[Any]],
    leaves: Sequence[Any],
) -> Sequence[Any]:
    outer, eqn = traced.outer, traced.call
    if eqn is None:
        return call(leaves)
    values = _values(outer)
    count = _leading(eqn, values)
    values.update(zip(outer.jaxpr.invars, leaves, strict=True))
    results = call([_read(values, x) for x in eqn.invars[count:]])
    values.update(zip(eqn.outvars, results, strict=True))
    return [_read(values, x) for x in outer.jaxpr.outvars]
