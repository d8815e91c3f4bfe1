"""A function and arguments in, measurements of its sites out, with a progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rewriter import autotune, device, pipeline, trace
from rewriter.config import resolve
from rewriter.errors import ConfigError, caller
from rewriter.optimize import with_patterns
from rewriter.tuned import Tuned, decide

Progress = Callable[[str, int, int], None]


def tune(
    fn: Callable[..., Any],
    /,
    *,
    level: str = "full",
    budget_s: float = 600.0,
    grad: bool = False,
    again: bool = False,
    patterns: Any = None,
    **options: Any,
) -> Callable[..., Tuned]:
    """Returns a function that measures the kernels of every site on this device.

    Equal sites are measured once, on inputs that the op's `sample` makes. A site whose
    gradient is in the program is measured with it. What is measured is kept in the
    cache (see `rewriter.cache`), where `optimize` finds it.

    Args:
        fn: Any callable that ``optimize`` takes, or an optimized function.
        level: ``full``, every config worth it, or ``quick``, one of each kernel.
        budget_s: Seconds of wall time; what does not fit is not measured.
        grad: Measure gradients too where the program has none, as for
            ``jax.grad(optimize(fn))``.
        again: Measure also what the cache has.
        patterns: As in ``optimize``.
        **options: As in ``optimize``.

    Returns:
        A function of the same arguments (arrays or ``ShapeDtypeStruct``) to `Tuned`.

    Raises:
        ConfigError: For a level that does not exist, or no time.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> tuned = rewriter.tune(jnp.sin)(jnp.ones(3))
        >>> len(tuned)
        0
        >>> fast = rewriter.optimize(jnp.sin, tuned=tuned)
    """
    if level not in autotune.LEVELS:
        choose = ", ".join(autotune.LEVELS)
        raise ConfigError(
            f"level={level!r}", next_step=f"Choose {choose}", where=caller()
        )
    if not budget_s > 0:
        raise ConfigError(
            f"budget_s={budget_s!r}", wanted="seconds above 0", where=caller()
        )
    fn, lifted = trace.original_of(fn)
    if patterns is not None:
        lifted["patterns"] = patterns
    given = {**lifted, **options}
    ours = {k: v for k, v in given.items() if k not in trace.JIT_OPTIONS}
    theirs = {k: v for k, v in given.items() if k in trace.JIT_OPTIONS}
    ours, user_patterns = with_patterns(ours, ours.pop("patterns", None))
    config = resolve(ours)
    inner = trace.jitted(fn, trace.jit_options(fn, theirs))

    def run(*args: Any, **kwargs: Any) -> Tuned:
        start = time.monotonic()
        traced = trace.trace(inner, args, kwargs)
        found = pipeline.tasks(traced.closed_jaxpr, config, user_patterns, grad)
        with _progress() as progress:
            made = autotune.measure(found, level, budget_s, progress, again)
        _summary(made, len(found), time.monotonic() - start)
        return made

    return run


def _shown() -> bool:
    return sys.stderr.isatty()


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """One bar on a terminal, nothing elsewhere."""
    if not _shown():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("tuning {task.description}"), BarColumn(),
               MofNCompleteColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1)

        def progress(text: str, done: int, of: int) -> None:
            bar.update(task, description=text, completed=done, total=of)

        yield progress


def _summary(made: Tuned, wanted: int, seconds: float) -> None:
    if not _shown() or not wanted:
        return
    kernels = sum(
        (d := decide(ms)) is not None and d.best.implementation.name != "xla"
        for _, ms in made.entries
    )
    print(
        f"tuned {len(made)} of {wanted} sites and passes in {seconds:.0f} s on "
        f"{device.attached().kind}: a kernel for {kernels}, XLA for the rest. "
        'Keep it: tuned.save("tuned.json")',
        file=sys.stderr,
    )
