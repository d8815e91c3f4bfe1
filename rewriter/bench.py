"""Time and temporary memory of a function before and after rewriting."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from rewriter import trace
from rewriter.errors import ConfigError, caller
from rewriter.optimize import optimize
from rewriter.report import Report, size
from rewriter.verify import with_gradient

TURN_MS = 200.0
MODES = {"forward": ("forward",), "gradient": ("gradient",),
         "both": ("forward", "gradient")}  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """One program's figures.

    Attributes:
        median_ms: Median time of a run, in milliseconds.
        spread: Median distance from the median, as a share of it.
        temp_bytes: Temporary memory of the compiled program, or ``None`` where
            the backend does not say.
        compile_s: Seconds to trace, lower and compile.
    """

    median_ms: float
    spread: float
    temp_bytes: int | None
    compile_s: float


@dataclass(frozen=True)
class Comparison:
    """Original and rewritten program of one mode."""

    mode: str
    original: Timing
    rewritten: Timing

    @property
    def speedup(self) -> float:
        """Original time over rewritten time."""
        return self.original.median_ms / self.rewritten.median_ms


@dataclass(frozen=True)
class Benchmark:
    """What ``benchmark`` measured.

    Attributes:
        name: The function's name.
        device: The device kind it ran on.
        pairs: How many turns both programs had, one after the other.
        rows: One comparison per mode.
        report: What was rewritten.
    """

    name: str
    device: str
    pairs: int
    rows: tuple[Comparison, ...]
    report: Report

    def json(self) -> str:
        """Returns the figures as JSON."""
        rows = [{**asdict(r), "speedup": r.speedup} for r in self.rows]
        return json.dumps({"function": self.name, "device": self.device,
                           "pairs": self.pairs, "rows": rows}, indent=1)  # fmt: skip

    def __str__(self) -> str:
        head = (
            f"rewriter.benchmark({self.name})   {self.device}, "
            f"{self.pairs} interleaved pairs"
        )
        return "\n".join([head, *(f" {_line(r)}" for r in self.rows)])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre class='rewriter'>{escape(str(self))}</pre>"


def benchmark(
    fn: Callable[..., Any], /, *, mode: str = "both", pairs: int = 10, **options: Any
) -> Callable[..., Benchmark]:
    """Returns a function that measures ``fn`` as written and rewritten.

    Both programs are compiled first, then take turns of a few calls in a row, so
    that a machine that slows down slows both. Donation is dropped: the inputs are
    used again.

    Args:
        fn: Any callable that ``optimize`` takes.
        mode: ``forward``, ``gradient`` (value and gradient by every float
            argument) or ``both``.
        pairs: How many turns each program gets.
        **options: As in ``optimize``.

    Returns:
        A function of the same arguments to a ``Benchmark``.

    Raises:
        ConfigError: For an unknown mode.

    Example:
        >>> import jax.numpy as jnp, rewriter
        >>> result = rewriter.benchmark(jnp.sin, mode="forward", pairs=2)(jnp.ones(3))
        >>> result.rows[0].mode
        'forward'
    """
    if mode not in MODES:
        choose = f"Choose {', '.join(MODES)}"
        raise ConfigError(f"mode={mode!r}", next_step=choose, where=caller())
    fn, lifted = trace.original_of(fn)
    options = {**lifted, **options}
    theirs = {k: v for k, v in options.items() if k in trace.JIT_OPTIONS}
    ours = {k: v for k, v in options.items() if k not in theirs}
    static = trace.jit_options(fn, theirs)

    def run(*args: Any, **kwargs: Any) -> Benchmark:
        plain = trace.jitted(fn, static)
        leaves, call = trace.split(plain, args, kwargs)
        report = optimize(call, **ours).report(*leaves)
        pair = [jax.jit(call), optimize(call, **ours)]
        both = [jax.jit(with_gradient(f, leaves)) for f in pair]
        forms = {"forward": pair, "gradient": both}
        rows = [_compare(m, forms[m], leaves, pairs) for m in MODES[mode]]
        name = trace.name_of(fn)
        return Benchmark(name, jax.devices()[0].device_kind, pairs, tuple(rows), report)

    return run


def temp_bytes(compiled: Any) -> int | None:
    """Returns the temporary memory of a compiled program, where it is known."""
    try:
        analysis = compiled.memory_analysis()
    except Exception:  # a backend without the analysis
        return None
    return getattr(analysis, "temp_size_in_bytes", None)


def _compare(mode: str, pair: list[Any], leaves: list[Any], pairs: int) -> Comparison:
    programs, seconds = [], []
    for jitted in pair:
        start = time.perf_counter()
        programs.append(jitted.lower(*leaves).compile())
        seconds.append(time.perf_counter() - start)
    times: tuple[list[float], ...] = ([], [])
    for _ in range(pairs):
        for program, record in zip(programs, times, strict=True):
            record.append(_turn(program, leaves))
    timings = [
        _timing(t, temp_bytes(p), s)
        for t, p, s in zip(times, programs, seconds, strict=True)
    ]
    return Comparison(mode, *timings)


def _turn(program: Any, leaves: list[Any]) -> float:
    """Median milliseconds of calls in a row, as a loop makes them.

    The first is left out: it meets the caches and idle cores that the other
    program left behind.
    """
    calls: list[float] = []
    while len(calls) < 3 or (len(calls) < 12 and sum(calls) < TURN_MS):
        start = time.perf_counter()
        jax.block_until_ready(program(*leaves))
        calls.append(1e3 * (time.perf_counter() - start))
    return statistics.median(calls[1:])


def _timing(times_ms: list[float], temp: int | None, compile_s: float) -> Timing:
    median = statistics.median(times_ms)
    spread = statistics.median(abs(t - median) for t in times_ms) / median
    return Timing(median, spread, temp, compile_s)


def _line(row: Comparison) -> str:
    before, after = row.original, row.rewritten
    text = (
        f"{row.mode:<8}  original {_ms(before)}   rewritten {_ms(after)}   "
        f"{row.speedup:.2f}×"
    )
    if before.temp_bytes is None or after.temp_bytes is None:
        return text
    return f"{text}   temporary {size(before.temp_bytes)} → {size(after.temp_bytes)}"


def _ms(timing: Timing) -> str:
    return f"{timing.median_ms:.3g} ms ±{timing.spread:.1%}"
