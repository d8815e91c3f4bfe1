"""Options and environment in, one frozen ``Config`` out.

Precedence, strongest first: an option given to ``optimize``, the innermost
``with config(...)``, the default. Changing one retraces the functions called
inside; going back finds the earlier programs again.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import jax

from rewriter.errors import ConfigError, RewriterWarning, caller, known

Requirement = str | tuple[tuple[str, int], ...]

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
        tune: ``off`` (rules of thumb), ``cached``, ``quick`` or ``full``. There is
            no autotuner yet: whatever it says, rules of thumb choose.
        numerics: ``strict`` accepts exact rewrites only, ``default`` those
            within rounding of the program's own types, ``fast`` also those that
            change what attention gives for a row whose keys are all masked.
        strict: A failure inside the rewriter is an error, not a warning.
        implementation: ``((op, kernel), ...)``: kernels to use where they can be.
        verify: ``once`` compares each site with its reference while tracing.
        target: The device kind to build for; ``None`` is the default device.
        require: An op name, ``((op, count), ...)`` or ``"all"``; else ``None``.
        using: Patterns put in force by ``with using(...)``.
        exporting: Whether the program is traced to be exported.
    """

    patterns: str = "default"
    tune: str = "cached"
    numerics: str = "default"
    strict: bool = False
    implementation: tuple[tuple[str, str], ...] = ()
    verify: str = "off"
    target: str | None = None
    require: Requirement | None = None
    using: tuple[object, ...] = ()
    exporting: bool = False


OPTIONS = tuple(f.name for f in fields(Config) if f.name not in ("using", "exporting"))


def resolve(options: Mapping[str, object]) -> Config:
    """Returns the options over the surrounding ``with config(...)``.

    Raises:
        ConfigError: For an unknown option or value, with a suggestion.
    """
    return _merged(current(), options)


def current() -> Config:
    """Returns what the surrounding ``with config(...)`` says."""
    return _CONTEXT.value or Config()


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
    with _CONTEXT(merged):
        yield merged


@contextmanager
def using(*patterns: object) -> Iterator[Config]:
    """Puts patterns in force for every function traced inside the ``with`` block.

    Args:
        *patterns: Patterns made with `rewriter.pattern`.

    Yields:
        The configuration in force.
    """
    base = current()
    merged = replace(base, using=(*base.using, *patterns))
    with _CONTEXT(merged):
        yield merged


@contextmanager
def exporting() -> Iterator[None]:
    """Uses only what may be part of an exported program inside the block."""
    with _CONTEXT(replace(current(), exporting=True)):
        yield


STAGES = ("trace", "graph", "match", "choose", "replace", "optimize")


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
    return replace(base, **{k: _normal(k, v) for k, v in options.items()})  # type: ignore[arg-type]


def _normal(name: str, value: object) -> object:
    if name in CHOICES:
        return _choice(name, value, CHOICES[name])
    if name == "implementation":
        return _pairs(name, value, str)
    if name == "require" and value is not None and not isinstance(value, str):
        return _pairs(name, value, int)
    if name == "strict":
        return _choice(name, value, (True, False))
    wanted = {"patterns": (str,)}.get(name, (str, type(None)))
    if not isinstance(value, wanted):
        raise ConfigError(f"{name}={value!r}", wanted="a string", where=caller())
    return value


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> object:
    if value in allowed:
        return value
    text = ", ".join(str(a) for a in allowed)
    raise ConfigError(f"{name}={value!r}", next_step=f"Choose {text}", where=caller())


def _pairs(name: str, value: object, kind: type) -> tuple[tuple[str, object], ...]:
    try:
        pairs = tuple(sorted(dict(value).items()))  # type: ignore[call-overload]
    except (TypeError, ValueError):
        pairs = ((0, 0),)
    if all(isinstance(k, str) and isinstance(v, kind) for k, v in pairs):
        return pairs
    wanted = "a dict of op name to " + ("kernel name" if kind is str else "count")
    raise ConfigError(f"{name}={value!r}", wanted=wanted, where=caller())


_CONTEXT = jax.make_user_context(None)
