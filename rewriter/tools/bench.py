"""Time and temporary memory of a function before and after rewriting."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from rewriter.config import in_step
from rewriter.errors import ConfigError, caller
from rewriter.measure.measurement import time_text
from rewriter.ops import device
from rewriter.ops.cost import MODES as PASSES
from rewriter.ops.cost import Cost
from rewriter.program import trace
from rewriter.reports.report import Report
from rewriter.run.optimize import optimize
from rewriter.support.dtypes import is_float
from rewriter.support.sizes import size_text
from rewriter.tools import roofline

if TYPE_CHECKING:
    from rewriter.hardware.timing import Samples

MODES = {**{m: (m,) for m in PASSES}, "both": ("forward", "forward_and_vjp")}
"""The passes that each mode of `benchmark` measures."""

TIE = 0.02
"""Times that differ by this share, or by three standard errors, are equal."""

UNCOUNTED = ("scan", "while", "pallas_call", "ffi_call")
"""Equations whose operations XLA's analysis counts only once, or not at all."""


@dataclass(frozen=True)
class Timing:
    """One program's figures.

    Attributes:
        median_ms: Median time of a run, in milliseconds.
        spread: Median distance from the median, as a share of it.
        temp_bytes: Temporary memory of the compiled program, or ``None`` where
            the backend does not say.
        compile_s: Seconds to trace, lower and compile.
        minimum_ms: The shortest time.
        error_ms: The standard error of the median.
        method: ``"cupti"`` for the device's own time, ``"wall clock"``, or
            ``"cuda events"``.
        flops: Floating-point operations of the work, if known: for a whole function,
            XLA's count in the program as written.
        bytes: The fewest bytes that the work must move, if known: for a whole function,
            its arguments and results.
        share: The least time that the device needs for that work, over the time
            taken; ``None`` where the device's figures are not known.
        warning: Why the rates cannot be right, or ``""``.
    """

    median_ms: float
    spread: float
    temp_bytes: int | None
    compile_s: float
    minimum_ms: float
    error_ms: float
    method: str
    flops: float | None = None
    bytes: float | None = None
    share: float | None = None
    warning: str = ""

    @property
    def cost(self) -> Cost | None:
        """The work, where both operations and bytes are known."""
        if self.flops is None or self.bytes is None:
            return None
        return Cost(self.flops, self.bytes)


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

    @property
    def faster(self) -> bool:
        """Whether the rewritten program is faster, or as fast.

        It is not if it takes longer by more than 2 % and by more than three standard
        errors of the difference of the medians.
        """
        before, after = self.original, self.rewritten
        noise = 3 * math.hypot(before.error_ms, after.error_ms)
        gap = after.median_ms - before.median_ms
        return gap <= max(TIE * before.median_ms, noise)


@dataclass(frozen=True)
class Benchmark:
    """The result of ``benchmark``.

    Attributes:
        name: The function's name.
        device: The device kind it ran on.
        pairs: The number of turns of both programs, one after the other.
        rows: One comparison per mode.
        report: What was rewritten.
    """

    name: str
    device: str
    pairs: int
    rows: tuple[Comparison, ...]
    report: Report

    @property
    def faster(self) -> bool:
        """Whether the rewritten program is faster, or as fast, in every mode."""
        return all(r.faster for r in self.rows)

    def json(self) -> str:
        """Returns the figures as JSON."""
        rows = [
            {**asdict(r), "speedup": r.speedup, "faster": r.faster} for r in self.rows
        ]
        return json.dumps({"function": self.name, "device": self.device,
                           "pairs": self.pairs, "faster": self.faster,
                           "rows": rows}, indent=1)  # fmt: skip

    def __str__(self) -> str:
        method = self.rows[0].original.method
        head = (
            f"rewriter.benchmark({self.name})   {self.device}, "
            f"{self.pairs} interleaved pairs, {method}"
        )
        width = max(8, *(len(r.mode) for r in self.rows))
        lines = [line for r in self.rows for line in _lines(r, width)]
        return "\n".join([head, *(f" {line}" for line in lines)])

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre class='rewriter'>{escape(str(self))}</pre>"


def benchmark(
    fn: Callable[..., Any], /, *, mode: str = "both", pairs: int = 10, **options: Any
) -> Callable[..., Benchmark]:
    """Returns a function that measures ``fn`` as written and rewritten.

    Both programs are compiled first, then take turns, so that a machine that slows
    down slows both. On an NVIDIA GPU the time is the device's own. The inputs are the
    arguments given, the same in each turn: what fits a cache may be found there.
    Donation is dropped, since the inputs are used again.

    Args:
        fn: Any callable that ``optimize`` takes.
        mode: ``forward``, ``vjp``, ``forward_and_vjp``, or ``both``: the first and the
            last. ``vjp`` returns only the gradients, so that the compiler may drop
            unneeded parts of the forward. ``forward_and_vjp`` returns result and
            gradients, as training with a value does. Gradients are those of all float
            arguments, for random cotangents of the result (1 if it is a scalar).
        pairs: The number of turns of each program.
        **options: As in ``optimize``.

    Returns:
        A function of the same arguments to a ``Benchmark``. A ``jax.ShapeDtypeStruct``
        stands for an array that is drawn.

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
    fn, ours, static = trace.options_in_force(fn, options)

    @in_step
    def run(*args: Any, **kwargs: Any) -> Benchmark:
        from rewriter.verification.probes import with_numbers

        plain = trace.jitted(fn, static)
        leaves, call = trace.split(plain, args, kwargs)
        leaves = with_numbers(leaves)
        report = optimize(call, **ours).report(*leaves)
        pair = [jax.jit(call), optimize(call, **ours)]
        rows = [_compare(m, pair, leaves, pairs) for m in MODES[mode]]
        name = trace.name_of(fn)
        return Benchmark(name, jax.devices()[0].device_kind, pairs, tuple(rows), report)

    return run


def timing_of(
    samples: Samples,
    *,
    temp: int | None,
    compile_s: float,
    cost: Cost | None,
    on: device.Device,
) -> Timing:
    """Returns a program's figures.

    Args:
        samples: Its times.
        temp: Bytes of temporary memory.
        compile_s: Seconds to compile.
        cost: The work it did, if known.
        on: The device it ran on.
    """
    median = samples.median
    distances = [abs(s - median) for s in samples.seconds]
    spread = statistics.median(distances) / median if median else 0.0
    rate = roofline.rate(cost, median, on) if cost and median else None
    return Timing(
        1e3 * median,
        spread,
        temp,
        compile_s,
        1e3 * samples.minimum,
        1e3 * samples.error,
        samples.method,
        cost and cost.flops,
        cost and cost.bytes,
        rate and rate.share,
        rate.warning if rate else "",
    )


# ------------------------------------------------------------------ programs
def with_vjp(
    fn: Callable[..., Any], leaves: Sequence[Any], mode: str
) -> Callable[..., Any]:
    """Returns a function of cotangents and leaves to gradients, or both results.

    Args:
        fn: A function of the leaves.
        leaves: Example leaves; the floating-point ones are differentiated.
        mode: ``vjp`` for the gradients alone; ``forward_and_vjp`` for a pair of the
            result and them.
    """
    moving = [i for i, x in enumerate(leaves) if is_float(x)]

    def run(cotangents: Sequence[Any], *leaves: Any) -> Any:
        def floats(chosen: list[Any]) -> Any:
            full = list(leaves)
            for i, x in zip(moving, chosen, strict=True):
                full[i] = x
            out = fn(*full)
            return [x for x in jax.tree.leaves(out) if is_float(x)], out

        some, back, out = jax.vjp(floats, [leaves[i] for i in moving], has_aux=True)
        given = [
            jnp.ones_like(x) if c is None else c
            for x, c in zip(some, cotangents, strict=True)
        ]
        (gradients,) = back(given)
        return gradients if mode == "vjp" else (out, gradients)

    return trace.renamed(run, fn)


def cotangents_of(fn: Callable[..., Any], leaves: Sequence[Any]) -> list[Any]:
    """Returns normal cotangents of the float results; None stands for a scalar's 1."""
    outs = jax.tree.leaves(jax.eval_shape(fn, *leaves))
    outs = [x for x in outs if is_float(x)]
    keys = jax.random.split(jax.random.key(0), max(1, len(outs)))
    return [
        jax.random.normal(key, x.shape).astype(x.dtype) if x.shape else None
        for key, x in zip(keys, outs, strict=False)
    ]


def _compare(mode: str, pair: list[Any], leaves: list[Any], pairs: int) -> Comparison:
    from rewriter.hardware.timing import measure  # few programs time anything
    from rewriter.measure.candidate import temp_bytes

    args: tuple[Any, ...] = tuple(leaves)
    if mode != "forward":
        args = (cotangents_of(pair[0], leaves), *leaves)
        pair = [jax.jit(with_vjp(f, leaves, mode)) for f in pair]
    programs, seconds = [], []
    for jitted in pair:
        start = time.perf_counter()
        programs.append(jitted.lower(*args).compile())
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(programs[-1](*args))
    cost = counted(pair[0], args, programs[0])
    samples = measure(programs, [args], pairs)
    on = device.attached()
    timings = [
        timing_of(s, temp=temp_bytes(p), compile_s=c, cost=cost, on=on)
        for s, p, c in zip(samples, programs, seconds, strict=True)
    ]
    return Comparison(mode, *timings)


def counted(jitted: Any, args: Sequence[Any], compiled: Any) -> Cost | None:
    """Returns the `Cost` of a whole program by XLA's count; None without one.

    Operations are XLA's count, in the program before or after its optimizations,
    whichever is larger: after them a library's products may be missing. It counts
    the body of a loop once, so a program with loops has no figure. Bytes are the
    program's arguments and results.

    Args:
        jitted: The function.
        args: Its arguments.
        compiled: The compiled program.
    """
    from rewriter.measure import candidate

    memory = candidate.memory(compiled)
    if memory is None or _uncounted(jax.make_jaxpr(jitted)(*args).jaxpr):
        return None
    flops = max(_flops(jitted.lower(*args)), _flops(compiled))
    both = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Cost(flops, float(both)) if flops > 0 else None


def _flops(program: Any) -> float:
    try:
        analysis = program.cost_analysis()
    except Exception:  # a backend without the analysis
        return 0.0
    if isinstance(analysis, (list, tuple)):  # one per computation
        analysis = analysis[0] if analysis else {}
    return float((analysis or {}).get("flops", 0.0))


def _uncounted(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in UNCOUNTED
        or any(_uncounted(getattr(j, "jaxpr", j)) for j in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


# -------------------------------------------------------------------- words
def _lines(row: Comparison, width: int) -> list[str]:
    before, after = row.original, row.rewritten
    text = (
        f"{row.mode:<{width}}  original {ms(before)}   rewritten {ms(after)}   "
        f"{row.speedup:.2f}×"
    )
    if not row.faster:
        text += " slower"
    if before.temp_bytes is not None and after.temp_bytes is not None:
        memory = size_text(before.temp_bytes), size_text(after.temp_bytes)
        text += f"   temporary {memory[0]} → {memory[1]}"
    lines = [text]
    if before.share is not None and after.share is not None:
        shares = f"{before.share:.0%} → {after.share:.0%}"
        lines.append(f"{'':<{width}}  {shares} of what the device can do")
    for name, one in (("original", before), ("rewritten", after)):
        if one.warning:
            lines.append(f"{'':<{width}}  {name}: {one.warning}")
    return lines


def ms(timing: Timing) -> str:
    """Returns a time and its spread in words, such as ``"1.2 ms ±1.0%"``."""
    return f"{time_text(1e3 * timing.median_ms)} ±{timing.spread:.1%}"
