"""Compiles a candidate and checks its numbers, or says why it is not timed.

A candidate must give the reference's numbers on the inputs that it is timed on. One
that does not compile, does not fit, fails or gives other numbers gets a reason; the
others go on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.measure import oracle
from rewriter.measure.inputs import Args
from rewriter.measure.least_time import UNTRIED, least_seconds
from rewriter.measure.measurement import time_text
from rewriter.ops.device import Device
from rewriter.site.implementation import XLA
from rewriter.support.dtypes import is_inexact
from rewriter.support.threads import check_stop, first_line, side_by_side

AT_ONCE = 2
"""Parallel compilations. Python lowers Pallas kernels for Hopper GPUs in half a second
each. Meanwhile others compile in 1.15 s each, one after the other however many threads
there are (jax 0.11.2). More at once would all end later, and a compilation cannot be
skipped once it has begun."""


@dataclass(frozen=True)
class Candidate:
    """One implementation to measure.

    Attributes:
        name: Its name.
        run: A function of the operands by name and, except for ``forward``, of the
            cotangent; it is compiled with `jax.jit`.
        exact: Whether products of wide operands are computed at full precision.
        soon: Whether XLA should compile it quickly, for its numbers and not for speed.
        limit: The device, and a limit in seconds. A candidate whose operations alone
            take longer is not compiled.
    """

    name: str
    run: Callable[..., Any]
    exact: bool = False
    soon: bool = False
    limit: tuple[Device, float] | None = None


@dataclass(frozen=True)
class Compiled:
    """A candidate after compilation: its program, or the reason for having none.

    Attributes:
        name: The candidate's name.
        program: The compiled program; None if there is none.
        seconds: How long compiling took.
        error: Its largest relative error so far.
        reason: Why it is not timed, or ``""``.
        note: A remark, or ``""``.
        of_leaves: Whether it takes the leaves of a region instead of an op's operands.
        least_s: A lower bound of its seconds, if it was skipped because of that.
    """

    name: str
    program: Any = None
    seconds: float = 0.0
    error: float | None = None
    reason: str = ""
    note: str = ""
    of_leaves: bool = False
    least_s: float = 0.0


# ------------------------------------------------------------------ compiling
def compile_one(candidate: Candidate, args: Args, wanted: Any = None) -> Compiled:
    """Returns the compiled program, or why there is none; never raises.

    Args:
        candidate: What to compile.
        args: One set of inputs.
        wanted: Shapes and dtypes that it must return, if known.
    """
    start = time.perf_counter()
    try:
        with precise(args) if candidate.exact else contextlib.nullcontext():
            jitted = jax.jit(candidate.run)
            got = None if wanted is None else jax.eval_shape(jitted, *args)
            if problem := _mismatch(got, wanted):
                return Compiled(candidate.name, reason=problem)
            lowered = jitted.lower(*args)
            if candidate.limit is not None:
                on, most = candidate.limit
                if (least := least_seconds(lowered, on)) > most:
                    return Compiled(
                        candidate.name, reason=_spared(least), least_s=least
                    )
            program = lowered.compile(
                compiler_options=UNTRIED if candidate.soon else None
            )
    except Exception as problem:
        reason = f"does not compile: {first_line(problem)}"
        return Compiled(candidate.name, reason=reason)
    return Compiled(candidate.name, program, time.perf_counter() - start)


def _spared(least: float) -> str:
    took = time_text(1e6 * least)
    return f"not timed: its operations alone take {took}, by XLA's own count"


def compile_all(
    jobs: Sequence[tuple[Candidate, Args, Any]],
    start_by: float,
    end_by: float,
    surely: int = 1,
    done_by: float = math.inf,
) -> list[Compiled]:
    """Runs `compile_one` for several candidates in parallel threads.

    Args:
        jobs: Arguments of `compile_one`, most important first.
        start_by: The `time.monotonic` after which only the first jobs may begin.
        end_by: The `time.monotonic` after which no job is waited for.
        surely: The number of first jobs that may begin at any time.
        done_by: The time by which other jobs must be expected to end, or they do not
            begin.
    """
    runs = [functools.partial(compile_one, *job) for job in jobs]
    found = side_by_side(runs, start_by, end_by, AT_ONCE, surely, done_by)
    return [
        f if isinstance(f, Compiled) else Compiled(c.name, reason=f)
        for (c, *_), f in zip(jobs, found, strict=True)
    ]


def precise(args: Args) -> Any:
    """Returns the precision of the reference's products: full for wide operands."""
    return jax.default_matmul_precision("highest" if wide(args) else None)


def wide(args: Args) -> bool:
    """Returns whether an operand is a float of more than 16 bits."""
    return any(is_inexact(x) and x.dtype.itemsize >= 4 for x in jax.tree.leaves(args))


def _mismatch(got: Any, wanted: Any) -> str:
    """How shapes and dtypes of results differ from the wanted ones, or ``""``."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        return f"returned {jax.tree.structure(got)}"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"returned {_array(a)}, expected {_array(b)}"
    return ""


def _array(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


# ------------------------------------------------------------------- checking
def checked(
    candidates: Sequence[Compiled],
    truth: Compiled,
    inputs: Sequence[Args],
    say: Callable[[int], None] = lambda done: None,
    written: float = 0.0,
) -> list[Compiled]:
    """Returns every candidate with its largest error; never raises.

    An error may be as large as its dtype's rounding explains, or twice that of the
    program as written. If the reference does not run, for example for lack of memory,
    the first candidate that runs takes its place.

    Args:
        candidates: Compiled programs, the program as written first.
        truth: The reference at full precision.
        inputs: The sets of inputs to compare on.
        say: Called with the number of candidates done on the first set.
        written: The error of the program as written, if that is no candidate.
    """
    candidates = list(candidates)
    for number, args in enumerate(inputs):
        wanted, source, problem = _expected_results(candidates, truth, args)
        if source is None:
            return [replace(c, reason=c.reason or problem) for c in candidates]
        done: list[Compiled] = []
        for c in candidates:
            check_stop()
            if number == 0:
                say(len(done))
            own = next((d.error for d in done if d.name == XLA), None) or written
            done.append(_check_one(c, args, wanted, source, problem, own))
        candidates = done
        del wanted
    return candidates


def _expected_results(
    candidates: Sequence[Compiled], truth: Compiled, args: Args
) -> tuple[Any, str | None, str]:
    """Results of the reference, else of the first candidate that runs; and its name."""
    problem = truth.reason
    for one in (truth, *candidates):
        if one.program is None or one.reason:
            continue
        try:
            _room_for(one.program)
            return jax.block_until_ready(one.program(*args)), one.name, problem
        except Exception as failed:
            problem = problem or first_line(failed)
    return None, None, problem


def _check_one(
    c: Compiled, args: Args, wanted: Any, source: str, problem: str, written: float
) -> Compiled:
    if c.program is None or c.reason:
        return c
    if problem:
        note = f"the reference did not run ({problem})"
        note += ": not checked" if c.name == source else f": compared with {source}"
        c = replace(c, note=note)
        if c.name == source:
            return c
    try:
        _room_for(c.program)
        error, allowed, where = worst(c.program(*args), wanted)
    except Exception as failed:
        return replace(c, reason=f"does not run: {first_line(failed)}")
    allowed = max(allowed, 2 * written)
    if error > allowed and c.name != XLA:  # which is the program as written
        return replace(c, error=error, reason=wrong(error, allowed, where))
    return replace(c, error=max(error, c.error or 0.0))


def wrong(error: float, allowed: float, where: str) -> str:
    """Returns why a result is not timed, such as ``"wrong: error 3e-01 in ..."``."""
    return f"wrong: error {error:.0e} in {where}, allowed {allowed:.0e}"


def worst(got: Any, wanted: Any) -> tuple[float, float, str]:
    """Returns the relative error that exceeds what is allowed the most.

    Args:
        got: Results, in any structure.
        wanted: The expected results.

    Returns:
        (error, allowed error of its dtype, its place).
    """
    found = []
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(leaves, jax.tree.leaves(wanted), strict=True):
        names = [str(p.key) for p in path if hasattr(p, "key")]
        where = f"the gradient of {names[-1]}" if names else "the result"
        allowed = oracle.allowed(a.dtype)
        found.append((float(_relative_error(a, b)), allowed, where))
    return max(found, key=lambda f: f[0] / f[1] if f[1] else f[0])


@jax.jit
def _relative_error(got: jax.Array, wanted: jax.Array) -> jax.Array:
    """The norm of the difference over the norm; infinite if other entries are NaN."""
    wide = jnp.promote_types(got.dtype, jnp.float32)
    got, wanted = got.astype(wide), wanted.astype(wide)
    fine = jnp.isfinite(wanted)
    gap = jnp.linalg.norm(jnp.where(fine, got - wanted, 0).ravel())
    scale = jnp.linalg.norm(jnp.where(fine, wanted, 0).ravel())
    same = jnp.all(jnp.isfinite(got) == fine)
    return jnp.where(same, gap / jnp.where(scale > 0, scale, 1), jnp.inf)


# --------------------------------------------------------------------- memory
def temp_bytes(program: Any) -> int | None:
    """Returns a compiled program's temporary memory, if the backend reports it."""
    return getattr(memory(program), "temp_size_in_bytes", None)


def memory(program: Any) -> Any:
    """Returns XLA's analysis of a compiled program's memory, or None."""
    try:
        return program.memory_analysis()
    except Exception:  # a backend without the analysis
        return None


def _room_for(program: Any) -> None:
    """Raises if a program does not fit into the free memory of the device."""
    need = temp_bytes(program)
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if need is None or not limit:
        return
    free = limit - stats.get("bytes_in_use", 0)
    if need > free:
        text = f"takes {need / 2**30:.1f} GiB of {free / 2**30:.1f} GiB"
        raise MemoryError(f"RESOURCE_EXHAUSTED: {text}")
