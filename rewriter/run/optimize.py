"""Returns a faster function for a function: `optimize`, and its report: `explain`.

``optimize`` returns a real ``jax.jit`` object. While that jit traces, once per
signature, the function is analysed (`rewriter.run.analysis`), and the equations of the
rewritten program become those of the trace. Where nothing is rewritten, the program is
the one that ``jax.jit`` has.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, overload

import jax
from jax.extend.core import ClosedJaxpr

from rewriter import _jax
from rewriter.choose.planner import target_of
from rewriter.config import OPTIONS, current, disabled, explaining, in_step, resolve
from rewriter.errors import ConfigError, RewriterError, RewriterWarning, caller
from rewriter.frameworks import equinox_modules, nnx_state
from rewriter.measure.sources import check_tuned
from rewriter.ops import device
from rewriter.program import trace
from rewriter.reports.lowered import as_lowered
from rewriter.reports.report import Report
from rewriter.run.analysis import Analysis, Record, check_patterns
from rewriter.run.called import Called, called

log = logging.getLogger("rewriter.optimize")

FRAMEWORKS = (nnx_state.FLAX, equinox_modules.EQUINOX)
"""Packages whose objects mean more than trees of arrays, once they are imported."""


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
def optimize(fn: Any = ..., /, *, patterns: Any = None, **options: Any) -> Any:
    """Returns ``fn`` under ``jax.jit``, with recognised ops on better kernels.

    The result is a ``jax.jit`` object: ``.trace``, ``.lower``, ``.eval_shape``
    and ``.clear_cache`` are JAX's own, and so is dispatch. Added are
    ``.report(*args)``, ``.jaxpr(*args)``, ``.original`` and ``.options``. It nests in
    ``jit``, ``grad``, ``vmap``, ``scan``, ``checkpoint`` and ``optimize``.

    Args:
        fn: Any callable that ``jax.jit`` takes. An already jitted one keeps its
            static arguments, donation and shardings.
        patterns: Comma-separated names, or a sequence of names and patterns.
        **options: Fields of ``Config`` or options of ``jax.jit``.

    Raises:
        ConfigError: For an unknown option or value, with a suggestion.
        UnknownPattern: For an unknown pattern, with a suggestion.
        NotTraceable: If ``fn`` is nothing that ``jax.jit`` takes.

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
    if fn is ...:  # a decorator with options
        return lambda fn: _optimized(fn, ours, theirs, user_patterns)
    return _optimized(fn, ours, theirs, user_patterns)


def explain(
    fn: Callable[..., Any], /, *, patterns: Any = None, **options: Any
) -> Callable[..., Report]:
    """Returns a function that reports what ``optimize`` would do, and why.

    For a ``target`` that is not attached it reports what would be done on that device,
    also with kernels that JAX traces only there, such as cuDNN.

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
        return _described(fn.report, fn.options)
    fn, lifted = trace.original_of(fn)
    if patterns is not None:
        lifted["patterns"] = patterns
    options = {**lifted, **options}
    return _described(optimize(fn, **options).report, options)


def _described(
    report: Callable[..., Report], options: Mapping[str, Any]
) -> Callable[..., Report]:
    """The function that reports; it describes a target that is not attached."""

    @functools.wraps(report)
    def described(*args: Any, **kwargs: Any) -> Report:
        target = options.get("target") or current().target
        if target is None or device.named(target) == device.attached():
            return report(*args, **kwargs)
        with explaining():
            return report(*args, **kwargs)

    return described


def _optimized(
    fn: Any, ours: Mapping[str, Any], theirs: Mapping[str, Any], patterns: Any
) -> Any:
    config = resolve(ours)  # complain now, not when tracing
    check_patterns(config.patterns)
    check_tuned(config)
    _jax.settings_of_kernels()
    trace.check_callable(fn)
    again = lambda pure: optimize(pure, **_as_given(ours, patterns), **theirs)
    if nnx_state.is_jitted(fn):
        return nnx_state.Updating(fn, again).public(fn)
    if equinox_modules.is_jitted(fn):
        return equinox_modules.Jitted(fn, again)
    options = trace.jit_options(fn, theirs)
    what = called(fn, ours, options, patterns)
    maker = Maker(fn, what, what.fn(), config.verify == "once")
    made = _jax.asking(what.jitted(), maker.other)
    theirs = getattr(fn, "__dict__", {}).items()  # of a class it has descriptors, too
    made.__dict__.update({k: v for k, v in theirs if k not in made.__dict__})
    made.__wrapped__ = fn
    made.__doc__ = getattr(fn, "__doc__", None)
    made.__annotations__ = getattr(fn, "__annotations__", {})
    made.original, made.report, made.jaxpr = fn, maker.report, maker.jaxpr
    made.options = maker.options
    return made


def _as_given(ours: Mapping[str, Any], patterns: tuple[Any, ...]) -> dict[str, Any]:
    """The rewriter's options as they were given."""
    if not patterns:
        return dict(ours)
    named = ours.get("patterns", "default").split(",")
    return {**ours, "patterns": [*named, *patterns]}


@dataclass(frozen=True, eq=False)
class Maker:
    """The methods of an optimized function beside those of ``jax.jit``.

    Attributes:
        fn: The function as given.
        called: What ``jax.jit`` traces.
        held: Its function, which equals ``fn``, and is kept alive here.
        compares: Whether calls of new shapes are compared with what is written.
        seen: Kinds of arguments that were.
        frameworks: Functions that know what a framework's arguments mean, by name.
    """

    fn: Any
    called: Called
    held: Any
    compares: bool
    seen: set[Any] = field(default_factory=set)
    frameworks: dict[str, Any] = field(default_factory=dict)

    @property
    def analysis(self) -> Analysis:
        """What was found."""
        return self.called.analysis

    @property
    def options(self) -> dict[str, Any]:
        """The rewriter's options that were given."""
        ours, _, patterns = self.called.made_of
        return _as_given(ours, patterns)

    @property
    def given(self) -> dict[str, Any]:
        """All options that were given, those of ``jax.jit`` too."""
        return {**self.options, **self.called.made_of[1]}

    def owns(self, made: Any) -> bool:
        """Whether a function is the optimized one, and not one that wraps it."""
        return _jax.is_jitted(made) and _jax.jitted_function(made) is self.called

    def other(self, args: Any, kwargs: Any) -> Callable[[], Any] | None:
        """Returns what is called in place of ``jax.jit``, if something is."""
        found = self._of_framework(args, kwargs)
        if found is not None:
            function, options = found
            return lambda: function(*options, **kwargs)
        if self.compares:
            self._compare(args, kwargs)
        return None

    def _of_framework(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The function that knows what a framework means, and positional arguments."""
        if sys.modules.keys().isdisjoint(FRAMEWORKS):
            return None
        if nnx_state.is_flaxs(trace.unjitted(self.fn)):
            return None
        theirs = self.called.made_of[1]
        if (module := nnx_state.own_module(self.fn)) is not None:
            method = nnx_state.unbound(self.fn)
            options = equinox_modules.behind(theirs)
            make = lambda: nnx_state.updating(method, options, self._optimized_anew)
            return self._once("bound", make), (module, *args)
        jitted = self.called.jitted()
        changing, _ = trace.split_static(jitted, args, kwargs)
        if nnx_state.holds_nodes(changing):
            make = lambda: nnx_state.updating(self.fn, theirs, self._optimized_anew)
            return self._once("flax", make), args
        if equinox_modules.holds_modules(changing):
            make = lambda: equinox_modules.Filtering(
                self.fn, jitted, self._optimized_anew
            )
            return self._once("equinox", make), args
        return None

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self.frameworks:
            self.frameworks[name] = make()
        return self.frameworks[name]

    def _optimized_anew(self, fn: Any, **theirs: Any) -> Any:
        """The optimized function of another one."""
        return optimize(fn, **self.options, **theirs)

    @in_step
    def report(self, *args: Any, **kwargs: Any) -> Report:
        """Returns the report for this signature; without arguments, the latest.

        It says of each kernel that cannot be lowered for the target that its site is
        left as written, as far as that can be known here.
        """
        records = self.analysis.records
        if not args and not kwargs and records:
            return self._as_lowered(next(reversed(records.values())))
        if not args and not kwargs and self.frameworks:
            return next(reversed(self.frameworks.values())).fast.report()
        if not args and not kwargs and trace.wants_arguments(self.fn):
            raise RewriterError(
                f"report() of {trace.name_of(self.fn)}, which was not called yet",
                next_step="Give report the arguments, or their shapes",
                where=caller(),
            )
        found = self._of_framework(args, kwargs)
        if found is not None:
            return found[0].report(*found[1], **kwargs)
        return self._as_lowered(self._record(args, kwargs))

    def _as_lowered(self, record: Record) -> Report:
        target = target_of(resolve(self.analysis.options))
        return as_lowered(record.report, target, device.attached())

    @in_step
    def jaxpr(self, *args: Any, **kwargs: Any) -> ClosedJaxpr:
        """Returns the rewritten program for this signature."""
        found = self._of_framework(args, kwargs)
        if found is not None:
            return found[0].jaxpr(*found[1], **kwargs)
        return self._record(args, kwargs).rewritten.closed_jaxpr

    def _record(self, args: Any, kwargs: Any) -> Record:
        try:
            self.called.jitted().trace(*args, **kwargs)  # JAX's own checks and messages
        except (RewriterError, RewriterWarning):
            raise
        except Exception as error:
            raise trace.trace_error(self.fn, error) from error
        return self.analysis(args, kwargs)

    def _compare(self, args: Any, kwargs: Any) -> None:
        """Compares once for given shapes.

        While JAX traces, the numbers in a call's arguments are not known: so they are
        looked at before. Inside of another transformation arguments are drawn instead.
        """
        kinds = None if _jax.is_tracing() else _kinds(args, kwargs)
        if kinds is None or kinds in self.seen or disabled():
            return
        self.seen.add(kinds)
        if not jax.config.jax_disable_jit and _left(self.analysis, args, kwargs):
            self.called.forget()  # what was traced before


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


def with_patterns(
    options: Mapping[str, Any], patterns: Any
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The options with ``patterns`` as text, and the pattern objects in it."""
    if patterns is None:
        return dict(options), ()
    if not isinstance(patterns, Iterable):
        wanted = "names, patterns, or a sequence of both"
        raise ConfigError(f"patterns={patterns!r}", wanted=wanted, where=caller())
    parts = [patterns] if isinstance(patterns, str) else list(patterns)
    names = [p for p in parts if isinstance(p, str)]
    objects = tuple(p for p in parts if not isinstance(p, str))
    text = ",".join(names) or ("default" if objects else "none")
    return {**options, "patterns": text}, objects
