"""Merges options and environment into one frozen ``Config``.

Precedence, strongest first: an option given to ``optimize``, the innermost
``with config(...)``, the default. Changing one retraces the functions called
inside; going back finds the earlier programs again.

A ``with`` block holds for its own task and thread. JAX tells programs apart by a value
of the thread. That value is updated where a block begins or ends, and wherever this
package is called (`in_step`). Asynchronous tasks take turns on a thread between those
points. JAX is then entered by a call of an optimized function, or by ``lower``: see
`while_traced`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import ParamSpec, TypeVar

import jax

from rewriter.errors import ConfigError, RewriterWarning, caller, known
from rewriter.support.assumptions import ASSUMPTIONS
from rewriter.support.requirement import FORM, Requirements, requirements

Names = tuple[str, ...]
Forced = tuple[str, Names, Names]
"""An op's name, and the kernels of its forward and backward pass, first wins."""

Given = ParamSpec("Given")
Result = TypeVar("Result")

CHOICES = {
    "tune": ("off", "cached", "quick", "full"),
    "numerics": ("strict", "default", "fast"),
    "verify": ("off", "once"),
}


@dataclass(frozen=True)
class Config:
    """Everything that changes how a program is rewritten.

    Attributes:
        patterns: Comma-separated names; ``-name`` removes, only removals imply
            ``default``, ``none`` is the empty set.
        tune: How kernels are chosen. ``off``: by rules of thumb. ``cached``: by earlier
            measurements, here or shipped with the package; nothing is timed. ``quick``:
            also measures the rest, each kernel with its default config. ``full``:
            measures every config worth trying.
        tuned: Measurements to use first, the last strongest: `Tuned` or paths.
        numerics: ``strict`` accepts exact rewrites only, ``default`` those within
            rounding of the program's own types. ``fast`` also accepts those that change
            attention's result in a row whose keys are all masked, or that multiply
            queries in place of keys by a matrix.
        assume: Facts to accept without proof: ``"finite"``, that scores and activations
            hold no NaN or infinity; ``"varied_rows"``, that no normalized row is
            constant. Otherwise sites that depend on them are left as written.
        strict: A failure inside the rewriter is an error, not a warning.
        deterministic: Whether to exclude kernels whose order of additions changes from
            run to run, such as cuDNN's gradients of attention. They are also excluded
            where ``XLA_FLAGS`` asks XLA itself for determinism.
        checkpoint_memory: Bytes that may be spent on saving values for gradients that a
            `jax.checkpoint` computes again, most operations per byte first; 0 leaves
            checkpoints as written.
        end_to_end: Whether to leave an op's sites as written if the whole program was
            measured to be faster that way.
        disable: Names of passes to skip, such as ``("recompute",)``, from
            `PASSES_TO_DISABLE`. The program is also correct without them.
        implementation: ``((op, forward, backward), ...)``: the kernels to use, as
            tuples of names; the first available one is taken, and having none is an
            error. A leading ``"ring"`` passes operands from device to device, and
            computes parts by the first available of the other kernels.
        verify: ``once`` compares each site and the whole program with what was written.
            It does so at the first call for given shapes, on the arguments of the call
            and on probes made from them. Differing sites are left as written, with a
            warning.
        target: The device kind to build for, such as ``"h200"``; ``None`` is the
            default device.
        require: What must be replaced by a kernel, at least: an op's name, a dict of
            op name to count, or ``"all"``, for everything recognised or nearly so. A
            dict in place of a count, such as ``{"found": 2, "replaced": 1}``, tells
            sites that are recognised from those that are replaced.
        using: Patterns put in force by ``with using(...)``.
        exporting: Whether the program is traced to be exported.
        explaining: Whether the program is only described for a device that is not
            attached. It does not run, so what JAX traces only there may be chosen.
        targets: ``((platform, device kind), ...)`` that it is exported for.
        differing: ``((op, the user's line), ...)`` of sites whose numbers were found to
            differ: they are left as written.
        failing: ``((op, the user's line, why), ...)`` of sites for which a step of
            rewriting failed: they are left as written.
    """

    patterns: str = "default"
    tune: str = "cached"
    tuned: tuple[object, ...] = ()
    numerics: str = "default"
    assume: tuple[str, ...] = ()
    strict: bool = False
    deterministic: bool = False
    checkpoint_memory: int = 0
    end_to_end: bool = True
    disable: tuple[str, ...] = ()
    implementation: tuple[Forced, ...] = ()
    verify: str = "off"
    target: str | None = None
    require: Requirements | None = None
    using: tuple[object, ...] = ()
    exporting: bool = False
    explaining: bool = False
    targets: tuple[tuple[str, str], ...] = ()
    differing: tuple[tuple[str, str], ...] = ()
    failing: tuple[tuple[str, str, str], ...] = ()


NO_OPTIONS = (
    "using", "exporting", "explaining", "targets", "differing", "failing",
)  # fmt: skip
OPTIONS = tuple(f.name for f in fields(Config) if f.name not in NO_OPTIONS)


def resolve(options: Mapping[str, object]) -> Config:
    """Returns the options over the surrounding ``with config(...)``.

    Raises:
        ConfigError: For an unknown option or value, with a suggestion.
    """
    return _merged(current(), options)


def current() -> Config:
    """Returns the configuration of the surrounding ``with config(...)``."""
    return _OURS.get() or Config()


@contextmanager
def config(**options: object) -> Iterator[Config]:
    """Sets options for every function traced inside the ``with`` block.

    Args:
        **options: Fields of ``Config``.

    Yields:
        The configuration in force.

    Raises:
        ConfigError: For an unknown option or value, with a suggestion.

    Example:
        >>> import rewriter
        >>> with rewriter.config(numerics="strict", patterns="-layer_norm") as c:
        ...     c.numerics
        'strict'
    """
    merged = _merged(current(), options)
    with _during(merged):
        yield merged


@contextmanager
def using(*patterns: object) -> Iterator[Config]:
    """Puts patterns in force for every function traced inside the ``with`` block.

    Args:
        *patterns: Patterns made with `rewriter.pattern`.

    Yields:
        The configuration in force.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> @rewriter.pattern(dims="x: ... d -> ... d")
        ... def shares(x):
        ...     return x / jnp.abs(x).sum(-1, keepdims=True)
        >>> def model(x):
        ...     return x * (1 / jnp.sum(jnp.abs(x), axis=-1, keepdims=True))
        >>> with rewriter.using(shares):
        ...     report = rewriter.explain(model)(jnp.ones((4, 8)))
        >>> [site.op for site in report.sites]
        ['shares']
    """
    base = current()
    merged = replace(base, using=(*base.using, *patterns))
    with _during(merged):
        yield merged


@contextmanager
def exporting(targets: Mapping[str, str] | None = None) -> Iterator[None]:
    """Allows only exportable kernels inside the block.

    Args:
        targets: Platform to device kind, where the program will run.
    """
    kinds = tuple(sorted((targets or {}).items()))
    with _during(replace(current(), exporting=True, targets=kinds)):
        yield


@contextmanager
def explaining() -> Iterator[None]:
    """Lets kernels be chosen inside the block that JAX traces only on the target."""
    with _during(replace(current(), explaining=True)):
        yield


def enter(tuned: object) -> None:
    """Puts measurements in force until `leave`; earlier ones have lower priority."""
    base = current()
    _BEFORE.set((*_BEFORE.get(), _OURS.get()))
    _set(replace(base, tuned=(*base.tuned, tuned)))


def leave() -> None:
    """Undoes the last `enter` of this task or thread."""
    *before, last = _BEFORE.get()
    _BEFORE.set(tuple(before))
    _set(last)


@contextmanager
def _during(value: Config) -> Iterator[None]:
    before = _OURS.get()
    _set(value)
    try:
        yield
    finally:
        _set(before)


def _set(value: Config | None) -> None:
    """Sets the options of this task, and the thread's value in JAX's cache keys."""
    _OURS.set(value)
    _JAXS(value).__enter__()  # the earlier value may be another task's


def in_step(fn: Callable[Given, Result]) -> Callable[Given, Result]:
    """Returns a function that calls JAX under this task's options."""

    @functools.wraps(fn)
    def asked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        mine = _OURS.get()
        with nullcontext() if mine == _JAXS.value else _JAXS(mine):
            return fn(*args, **kwargs)

    return asked


@contextmanager
def while_traced(forget: Callable[[], None]) -> Iterator[None]:
    """Decides under which options a function is traced.

    JAX caches the program under the thread's options. These may be another task's,
    since tasks take turns. Then the program is traced under this task's options, and
    forgotten at the end of this turn. Without tasks, as in a thread that runs a copy of
    a task's context, the thread's options hold.

    Args:
        forget: A function that makes JAX forget the traced programs.
    """
    mine, kept_under = _OURS.get(), _JAXS.value
    if mine == kept_under:
        yield
    elif (loop := _loop()) is not None:
        loop.call_soon(forget)
        with _JAXS(mine):
            yield
    else:
        _OURS.set(kept_under)
        try:
            yield
        finally:
            _OURS.set(mine)


def _loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


STAGES = (
    "trace", "passes", "match", "gradients", "tune", "choose", "optimize",
)  # fmt: skip
"""The stages that ``REWRITER_LOG`` can show.

``passes`` shows the time of every pass."""

PASSES_TO_DISABLE = (
    "masks_in_branches", "masks_in_loops", "slices_before_loops", "masks_in_shards",
    "joined_losses", "differences_of_softmaxes", "sums_of_cotangents",
    "whole_products", "fold", "gradients",
    "checkpoint_savings", "quantized_rows", "residual_adds", "gradients_with_results",
    "memory_order", "recompute", "recompute_activations", "activations",
    "erfc_in_16_bits", "packed_operands", "aligned_products",
)  # fmt: skip
"""Names of the passes that may be skipped."""


def configure_logging(text: str | None = None) -> None:
    """Sets the loggers ``rewriter.<stage>`` from ``REWRITER_LOG``.

    Args:
        text: Stages separated by commas: ``match`` shows information, ``+match``
            debugging, ``-match`` nothing. By default the environment's.
    """
    logging.getLogger("rewriter").addHandler(logging.NullHandler())
    text = os.environ.get("REWRITER_LOG", "") if text is None else text
    levels = {"+": logging.DEBUG, "-": logging.CRITICAL + 1}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name = part.lstrip("+-")
        if name not in STAGES:
            hint = known(name, STAGES)
            warnings.warn(f"REWRITER_LOG: no stage {name!r}. {hint}", RewriterWarning,
                          stacklevel=2)  # fmt: skip
            continue
        logger = logging.getLogger(f"rewriter.{name}")
        logger.setLevel(levels.get(part[0], logging.INFO))
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)


def disabled() -> bool:
    """Returns whether ``REWRITER_DISABLE`` turns ``optimize`` into ``jax.jit``."""
    return os.environ.get("REWRITER_DISABLE", "0") not in ("", "0")


def _merged(base: Config, options: Mapping[str, object]) -> Config:
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(
                f"unknown option {name!r}",
                next_step=known(name, OPTIONS),
                where=caller(),
            )
    normal = {k: _normal(k, v) for k, v in options.items()}
    if "tuned" in normal:
        normal["tuned"] = (*base.tuned, *normal["tuned"])  # type: ignore[misc]
    return replace(base, **normal)  # type: ignore[arg-type]


def _normal(name: str, value: object) -> object:
    if name in CHOICES:
        return _choice(name, value, CHOICES[name])
    if name == "implementation":
        return _implementations(value)
    if name == "tuned":
        return _several_tuned(value)
    if name == "require" and value is not None:
        return _requirements(value)
    if name in ("strict", "deterministic", "end_to_end"):
        return _choice(name, value, (True, False))
    if name == "assume":
        return _some_of(name, value, tuple(ASSUMPTIONS))
    if name == "disable":
        return _some_of(name, value, PASSES_TO_DISABLE)
    if name == "checkpoint_memory":
        return _bytes(name, value)
    wanted = {"patterns": (str,)}.get(name, (str, type(None)))
    if not isinstance(value, wanted):
        raise ConfigError(f"{name}={value!r}", wanted="a string", where=caller())
    return value


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> object:
    if value in allowed:
        return value
    text = ", ".join(str(a) for a in allowed)
    raise ConfigError(f"{name}={value!r}", next_step=f"Choose {text}", where=caller())


def _some_of(name: str, value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    """Some of the known names, in order; one may stand alone."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list, set, frozenset)):
        wanted = f"some of {', '.join(map(repr, known))}"
        raise ConfigError(f"{name}={value!r}", wanted=wanted, where=caller())
    return tuple(sorted({str(_choice(name, n, known)) for n in names}))


def _bytes(name: str, value: object) -> int:
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if whole and operator.index(value) >= 0:  # type: ignore[arg-type]
        return operator.index(value)  # type: ignore[arg-type]
    raise ConfigError(
        f"{name}={value!r}",
        wanted="a whole number of bytes, 0 or more, such as 2 << 30 for 2 GiB",
        where=caller(),
    )


IMPLEMENTATION = (
    "a dict of op name to a kernel's name, a list of them, "
    "or a dict of those for forward and backward"
)


def _implementations(value: object) -> tuple[Forced, ...]:
    if isinstance(value, tuple) and all(_is_forced(v) for v in value):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"implementation={value!r}", wanted=IMPLEMENTATION, where=caller()
        )
    return tuple((str(op), *_passes(op, value[op])) for op in sorted(value))


def _is_forced(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[1], tuple)


def _passes(op: object, value: object) -> tuple[Names, Names]:
    """The names for the forward and for the backward; () where none are requested."""
    if not isinstance(value, Mapping):
        return _names(op, value), ()
    if unknown := sorted(set(value) - {"forward", "backward"}):
        raise ConfigError(
            f"implementation[{op!r}] names {unknown[0]!r}",
            next_step="Choose forward, backward",
            where=caller(),
        )
    return tuple(  # type: ignore[return-value]
        _names(op, value[p]) if p in value else () for p in ("forward", "backward")
    )


def _names(op: object, value: object) -> Names:
    names = (value,) if isinstance(value, str) else value
    listed = isinstance(names, (list, tuple)) and len(names) > 0
    if listed and all(isinstance(n, str) for n in names):
        return tuple(names)
    raise ConfigError(
        f"implementation[{op!r}]={value!r}", wanted=IMPLEMENTATION, where=caller()
    )


def as_list(value: object) -> list[object]:
    """Returns one value, or several in a list or tuple, as a list; None is none."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [p for p in parts if p is not None]


def _several_tuned(value: object) -> tuple[object, ...]:
    parts = as_list(value)
    for part in parts:
        if not isinstance(part, (str, os.PathLike)) and not hasattr(part, "entries"):
            raise ConfigError(
                f"tuned={part!r}",
                wanted="a result of rewriter.tune, or the path of its file",
                where=caller(),
            )
    return tuple(os.fspath(p) if isinstance(p, os.PathLike) else p for p in parts)


def _requirements(value: object) -> Requirements:
    try:
        return requirements(value)
    except ValueError:
        raise ConfigError(f"require={value!r}", wanted=FORM, where=caller()) from None


_OURS: ContextVar[Config | None] = ContextVar("rewriter.config", default=None)
_BEFORE: ContextVar[tuple[Config | None, ...]] = ContextVar(
    "rewriter.config.before", default=()
)
_JAXS = jax.make_user_context(None)
