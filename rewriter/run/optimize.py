"""A function in, a faster one out.

``optimize`` returns a real ``jax.jit`` object. While that jit traces, once per
signature, the function is analysed (`rewriter.run.analysis`), and the rewritten program
called instead.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol, overload

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.config import OPTIONS, disabled, in_step, resolve, while_traced
from rewriter.errors import RewriterError, RewriterWarning, caller, raised_at
from rewriter.measure.sources import check_tuned
from rewriter.program import trace
from rewriter.reports.report import Report
from rewriter.run.analysis import Analysis, Record, check_patterns

log = logging.getLogger("rewriter.optimize")


class Optimized(Protocol):
    """A ``jax.jit`` object with these attributes added."""

    original: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the rewritten function."""
        ...

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Returns the report for this signature; without arguments, the latest."""
        ...

    def jaxpr(self, *args: Any, **kwargs: Any) -> ClosedJaxpr:
        """Returns the rewritten program for this signature."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's own ``Traced``."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns JAX's own ``Lowered``."""
        ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result's shapes and dtypes."""
        ...

    def clear_cache(self) -> None:
        """Forgets compiled programs, as for any ``jax.jit`` object."""
        ...


@overload
def optimize(fn: Callable[..., Any], /, **options: Any) -> Optimized: ...
@overload
def optimize(**options: Any) -> Callable[[Callable[..., Any]], Optimized]: ...
def optimize(fn: Any = None, /, *, patterns: Any = None, **options: Any) -> Any:
    """Returns ``fn`` under ``jax.jit``, with recognised ops on better kernels.

    The result is a ``jax.jit`` object: ``.trace``, ``.lower``, ``.eval_shape``
    and ``.clear_cache`` are JAX's own, and so is dispatch. Added are
    ``.report(*args)``, ``.jaxpr(*args)``, ``.original`` and ``.options``. It nests in
    ``jit``, ``grad``, ``vmap``, ``scan``, ``checkpoint`` and ``optimize``. JAX copies
    these attributes on to ``jax.grad(fast)``, where they are still those of ``fast``;
    ``explain(jax.grad(fast))`` is about the gradient.

    Args:
        fn: Any callable that ``jax.jit`` takes. An already jitted one keeps its
            static arguments, donation and shardings.
        patterns: Comma-separated names, or a sequence of names and patterns.
        **options: Fields of ``Config`` or options of ``jax.jit``.

    Raises:
        ConfigError: For an unknown option or value, with a suggestion.
        UnknownPattern: For an unknown pattern, with a suggestion.
        RewriterError: If ``fn`` is not callable.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> @rewriter.optimize
        ... def double(x):
        ...     return x + x
        >>> float(double(2.0))
        4.0
    """
    ours = {k: v for k, v in options.items() if k in OPTIONS}
    theirs = {k: v for k, v in options.items() if k not in OPTIONS}
    ours, user_patterns = with_patterns(ours, patterns)
    if fn is None:
        return lambda fn: _optimized(fn, ours, theirs, user_patterns)
    return _optimized(fn, ours, theirs, user_patterns)


def explain(
    fn: Callable[..., Any], /, *, patterns: Any = None, **options: Any
) -> Callable[..., Report]:
    """Returns a function that reports what ``optimize`` would do, and why.

    Args:
        fn: Any callable that ``jax.jit`` takes, or an optimized function.
        patterns: As in ``optimize``.
        **options: As in ``optimize``.

    Returns:
        A function of the same arguments (arrays or ``ShapeDtypeStruct``, no
        device needed) to a ``Report``.

    Raises:
        TraceError: If ``fn`` cannot be traced; JAX's error is chained.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> print(rewriter.explain(jnp.sin)(1.0).text().splitlines()[1][:14])
         no candidates
    """
    if trace.is_optimized(fn) and not options and patterns is None:
        return fn.report  # type: ignore[no-any-return]
    fn, lifted = trace.original_of(fn)
    if patterns is not None:
        lifted["patterns"] = patterns
    return optimize(fn, **{**lifted, **options}).report


def _optimized(
    fn: Any, ours: Mapping[str, Any], theirs: Mapping[str, Any], patterns: Any
) -> Any:
    config = resolve(ours)  # complain now, not when tracing
    check_patterns(config.patterns)
    check_tuned(config)
    options = trace.jit_options(fn, theirs)
    analysis = Analysis(fn, trace.jitted(fn, options), ours, patterns, options)

    def call(*args: Any, **kwargs: Any) -> Any:
        if disabled() or jax.config.jax_disable_jit:
            return fn(*args, **kwargs)
        with while_traced(forget):
            return _noted(analysis, args, kwargs)

    fast = jax.jit(trace.renamed(call, fn), **options)
    forget = fast.clear_cache

    @in_step
    def report(_: Any, /, *args: Any, **kwargs: Any) -> Report:
        if not args and not kwargs and analysis.records:
            return next(reversed(analysis.records.values())).report
        if not args and not kwargs and trace.wants_arguments(fn):
            raise RewriterError(
                f"report() of {trace.name_of(fn)}, which was not called yet",
                next_step="Give report the arguments, or their shapes",
                where=caller(),
            )
        return _record(fast, analysis, args, kwargs).report

    @in_step
    def jaxpr(_: Any, /, *args: Any, **kwargs: Any) -> ClosedJaxpr:
        return _record(fast, analysis, args, kwargs).rewritten.closed_jaxpr

    def clear_cache() -> None:
        analysis.forget()
        forget()

    made = _comparing(fast, analysis, fn) if config.verify == "once" else fast
    made.original = fn
    made.report = types.MethodType(report, made)  # bound: see `trace.is_optimized`
    made.jaxpr = types.MethodType(jaxpr, made)
    made.clear_cache = clear_cache  # the next call chooses kernels again
    made.options = dict(ours)
    if patterns:
        made.options["patterns"] = [*ours.get("patterns", "default").split(","),
                                    *patterns]  # fmt: skip
    return made


def _comparing(fast: Any, analysis: Analysis, fn: Any) -> Any:
    """The same function, which compares at the first call for given shapes.

    While JAX traces, the numbers in a call's arguments are not known: so they are
    looked at before. Inside of another transformation arguments are drawn instead.
    """
    seen: set[Any] = set()

    def compare(args: Any, kwargs: Any) -> None:
        kinds = None if _jax.is_tracing() else _kinds(args, kwargs)
        if not (kinds is None or kinds in seen or disabled()):
            seen.add(kinds)
            if not jax.config.jax_disable_jit and _left(analysis, args, kwargs):
                forget()  # what was traced before

    forget = fast.clear_cache
    return trace.renamed(_Compared(fast, compare), fn)


class _Compared:
    """An optimized function that does something else before each call.

    JAX hands the attributes of what it wraps on, as from ``f`` to ``grad(f)``. Those of
    the class are not among them: ``jit(grad(f)).lower`` has to lower the gradient.
    """

    def __init__(self, fast: Any, before: Callable[[Any, Any], None]) -> None:
        self._fast, self._before, self._jit_info = fast, before, fast._jit_info

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(args, kwargs)
        return self._fast(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._fast.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._fast.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._fast.eval_shape(*args, **kwargs)


def _left(analysis: Analysis, args: Any, kwargs: Any) -> bool:
    """Whether anything is left as written; a user's own error is left to the call."""
    try:
        return analysis.compare(args, kwargs)
    except (RewriterError, RewriterWarning):
        raise
    except Exception as error:
        log.debug("nothing is compared", exc_info=error)
        return False


def _kinds(args: Any, kwargs: Any) -> Any:
    """What tells signatures apart; None for one whose arrays have no values yet."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    if any(isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in leaves):
        return None
    found = [
        (x.shape, x.dtype, getattr(x, "sharding", None))
        if hasattr(x, "dtype")
        else (type(x), x if isinstance(x, (str, bytes)) or callable(x) else None)
        for x in leaves
    ]
    return tree, tuple(found), resolve({})


def _noted(analysis: Analysis, args: Any, kwargs: Any) -> Any:
    """The rewritten program's result; a user's own error gets a note with its line."""
    try:
        return analysis.result(args, kwargs)
    except (RewriterError, RewriterWarning):
        raise
    except Exception as error:
        name = trace.name_of(analysis.original)
        where = raised_at(error)
        note = f"rewriter: while tracing {name}"
        error.add_note(f"{note}, {where}" if where else note)
        raise


def _record(fast: Any, analysis: Analysis, args: Any, kwargs: Any) -> Record:
    try:
        fast.trace(*args, **kwargs)  # JAX's own checks and messages
    except (RewriterError, RewriterWarning):
        raise
    except Exception as error:
        raise trace.trace_error(analysis.original, error) from error
    return analysis(args, kwargs)


def with_patterns(
    options: Mapping[str, Any], patterns: Any
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The options with ``patterns`` as text, and the pattern objects in it."""
    if patterns is None:
        return dict(options), ()
    parts = [patterns] if isinstance(patterns, str) else list(patterns)
    names = [p for p in parts if isinstance(p, str)]
    objects = tuple(p for p in parts if not isinstance(p, str))
    text = ",".join(names) or ("default" if objects else "none")
    return {**options, "patterns": text}, objects
