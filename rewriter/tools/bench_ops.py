"""Benchmarks ops: a row for each implementation, with time, rate, error, or why not."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import errors
from rewriter.hardware import conditions
from rewriter.measure.candidate import (
    Candidate,
    Compiled,
    checked,
    compile_one,
    precise,
    temp_bytes,
    worst,
    wrong,
)
from rewriter.measure.inputs import Args, Inputs, inputs
from rewriter.measure.programs import Task, function, in_passes, reference
from rewriter.measure.times import time_in_turns
from rewriter.ops import device
from rewriter.ops.cost import Cost
from rewriter.ops.kernel import Kernel, Spec, spec_of
from rewriter.ops.op import Op
from rewriter.ops.registry import Registry, package_of, registry
from rewriter.site.implementation import XLA, Implementation, default_configs
from rewriter.support.threads import first_line
from rewriter.tools import bench_peers
from rewriter.tools.bench import MODES, timing_of
from rewriter.tools.bench_table import OpsBenchmark, Row, block, heading


# ----------------------------------------------------------------- the uses
def named_uses(op: str, name: str) -> tuple[Spec, ...]:
    """Returns the uses of an op in a named set; none of an op without such sets.

    Raises:
        UnknownPattern: If there is no such op.
        ConfigError: If the op has sets, but not this one.

    Example:
        >>> named_uses("rms_norm", "small")[0].shape("x")
        (1024, 256)
    """
    found = registry().op(op)
    try:
        sets = importlib.import_module(f"{package_of(op)}.shapes").SHAPES.get(op)
    except ModuleNotFoundError:  # an op of the user's
        return ()
    if sets is None:  # a form of an op that is not measured apart
        return ()
    if name not in sets:
        raise errors.ConfigError(
            f"{op} has no shapes {name!r}", next_step=errors.known(name, sets)
        )
    uses = []
    for operands, params in sets[name]:
        structs = {n: jax.ShapeDtypeStruct(s, d) for n, (d, s) in operands.items()}
        uses.append(spec_of(found, structs, params))
    return tuple(uses)


def use_text(spec: Spec, op: Op) -> str:
    """Returns a use in words: shapes, dtypes, and parameters that are not the default.

    Example:
        >>> use_text(named_uses("rms_norm", "small")[0], registry().op("rms_norm"))
        'rms_norm  float32: x 1024×256, scale 256  eps=1e-06'
    """
    first = spec.dtypes[0][1]
    parts = []
    for name, shape in spec.shapes:
        other = "" if spec.dtype(name) == first else f"{spec.dtype(name)} "
        parts.append(f"{name} {other}{'×'.join(map(str, shape)) or 'scalar'}")
    params = [f"{k}={_value(v)}" for k, v in spec.params if op.defaults.get(k) != v]
    return "  ".join([spec.op, f"{first}: {', '.join(parts)}", *params])


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_names(names: Sequence[str], ops: Sequence[str], among: Registry) -> None:
    """Returns if each name is ``"xla"`` or a kernel of one of the ops.

    Raises:
        ConfigError: If a name is unknown; the message lists the names.
    """
    known = {XLA, *(k.name for op in ops for k in among.kernels(op))}
    for name in names:
        if name not in known:
            raise errors.ConfigError(
                f"implementation {name!r}", next_step=errors.known(name, known)
            )


def _refusal(kernel: Kernel, spec: Spec, on: device.Device) -> str:
    """Why a kernel is not measured, or ``""``."""
    if on.platform not in kernel.platforms:
        return f"runs on {', '.join(kernel.platforms)}, not on {on.platform}"
    try:
        verdict = kernel.limits.runs_on(on)
        verdict = kernel.limits.supports(spec) if verdict.ok else verdict
    except Exception as problem:
        return first_line(problem)
    return "; ".join(reason.text for reason in verdict.reasons)


def _integers(operands: Mapping[str, Any]) -> dict[str, tuple[int, int, int, int]]:
    """Least, median, largest and sum of each integer operand."""
    return {
        n: (int(x.min()), int(jnp.median(x)), int(x.max()), int(x.sum()))
        for n, x in operands.items()
        if jnp.issubdtype(x.dtype, jnp.integer) and x.size
    }


# -------------------------------------------------------------------- timing
def bench_use(
    task: Task,
    *,
    implementations: Sequence[str] = (),
    turns: int = 20,
    peers: bool = False,
) -> tuple[list[Row], tuple[Inputs, ...]]:
    """Returns a row for each implementation of one use, and the inputs it was given.

    Each is compared with the op's reference on every set of inputs before it is timed.
    One that is wrong, refuses or fails has a reason instead of a time.

    Args:
        task: The op, the use, the kernels and the passes.
        implementations: ``"xla"`` and kernels' names; all by default.
        turns: Samples of each.
        peers: Whether other libraries are measured as well.
    """
    spec, on = task.spec, device.attached()
    drawn = inputs(task, on)
    first = drawn[0].sets[0]
    exact = reference(task)
    candidates, refused = _candidates(task, implementations, on)
    if peers:
        others, missing = bench_peers.candidates(spec, on.platform)
        candidates += [Candidate(n, in_passes(f, task.passes)) for n, f in others]
        refused.update(missing)
    wanted = jax.eval_shape(exact, *first)
    with precise(first):
        truth = compile_one(Candidate("the reference", exact), first)
    compiled = [compile_one(c, first, wanted) for c in candidates]
    cost = _cost(task.op, spec, task.passes)
    good = checked(compiled, truth, [args for d in drawn for args in d.sets])
    rows = _timed(good, drawn, turns, cost, on)
    if peers and bench_peers.torch_takes(spec) and "torch" not in refused:
        rows.append(_torch(task, drawn[0].sets, turns, truth, cost, on))
    rows += [Row(name, reason=why) for name, why in refused.items()]
    text = use_text(spec, task.op)
    rows = [replace(r, op=task.op.name, use=text, mode=task.passes) for r in rows]
    return rows, drawn


def _candidates(
    task: Task, names: Sequence[str], on: device.Device
) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates to measure, and reasons against the others."""
    found, refused = [], {}
    if not names or XLA in names:
        found.append(Candidate(XLA, function(task, Implementation())))
    for kernel in task.kernels:
        if kernel.name not in names if names else not kernel.traits.tried:
            continue
        if why := _refusal(kernel, task.spec, on):
            refused[kernel.name] = f"refused: {why}"
        else:
            implementation = default_configs(task.spec, on, kernel)
            found.append(Candidate(kernel.name, function(task, implementation)))
    return found, refused


def _cost(op: Op, spec: Spec, mode: str) -> Cost | None:
    if op.cost is None or spec.symbolic:
        return None
    return op.cost(dict(spec.shapes), dict(spec.dtypes), dict(spec.params), mode)


def _timed(
    compiled: Sequence[Compiled],
    drawn: Sequence[Inputs],
    turns: int,
    cost: Cost | None,
    on: device.Device,
) -> list[Row]:
    found = time_in_turns([c for c in compiled if not c.reason], drawn, turns)
    rows = []
    for c in compiled:
        row = Row(c.name, error=c.error, reason=c.reason, note=c.note)
        times = found.get(c.name)
        if isinstance(times, str):
            row = replace(row, reason=times)
        elif times is not None:
            samples = times.as_one
            temp = temp_bytes(c.program)
            timing = timing_of(
                samples, temp=temp, compile_s=c.seconds, cost=cost, on=on
            )
            row = replace(row, timing=timing, note=_join(c.note, times.text))
        rows.append(row)
    return rows


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _torch(
    task: Task,
    sets: Sequence[Args],
    turns: int,
    truth: Compiled,
    cost: Cost | None,
    on: device.Device,
) -> Row:
    """PyTorch's row, timed by its own events."""
    row = Row("torch", note="by CUDA events: gaps below 15 % say nothing")
    try:
        samples, out = bench_peers.torch_samples(task.spec, task.passes, sets, turns)
        error, allowed, where = worst(out, truth.program(*sets[0]))
    except Exception as problem:  # PyTorch's own, or too little memory for both
        return replace(row, reason=first_line(problem))
    if error > allowed:
        return replace(row, error=error, reason=wrong(error, allowed, where))
    timing = timing_of(samples, temp=None, compile_s=0.0, cost=cost, on=on)
    return replace(row, timing=timing, error=error)


def bench_ops(
    uses: Sequence[Spec],
    *,
    implementations: Sequence[str] = (),
    mode: str = "both",
    turns: int | None = None,
    peers: bool = False,
    among: Registry | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> OpsBenchmark:
    """Returns the time of every implementation of some uses of ops.

    Args:
        uses: Shapes, dtypes and parameters.
        implementations: ``"xla"`` and kernels' names; all by default.
        mode: As in `benchmark`.
        turns: Samples of each; 20, or 5 on a CPU.
        peers: Whether other libraries are measured as well.
        among: Where ops and kernels are; the process's registry by default.
        say: Called with each finished use.

    Raises:
        ConfigError: For an unknown mode or implementation.

    Example:
        >>> found = bench_ops(named_uses("rms_norm", "small"), mode="vjp", turns=1)
        >>> [r.implementation for r in found.rows]
        ['xla', 'memory_bounded', 'hopper']
    """
    if mode not in MODES:
        choose = f"Choose {', '.join(MODES)}"
        raise errors.ConfigError(f"mode={mode!r}", next_step=choose)
    among = among or registry()
    check_names(implementations, [u.op for u in uses], among)
    on = device.attached()
    turns = turns or (5 if on.platform == "cpu" else 20)
    say(heading(on.kind, turns))
    rows: list[Row] = []
    sets, integers = {}, {}
    for spec in uses:
        own: list[Row] = []
        for one in MODES[mode]:
            task = Task(among.op(spec.op), spec, among.kernels(spec.op), one)
            found, drawn = bench_use(
                task, implementations=implementations, turns=turns, peers=peers
            )
            own += found
            text = use_text(spec, task.op)
            sets[text] = sum(len(d.sets) for d in drawn)
            for d in drawn:
                which = f"{text}  {d.drawn}" if d.drawn else text
                integers[which] = _integers(d.sets[0][0])
            del drawn
        rows += own
        say(block(own, sets[text]))
    return OpsBenchmark(on.kind, turns, tuple(rows), sets, integers, _versions())


def _versions() -> dict[str, str]:
    import jaxlib

    at = conditions.now()
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "driver": at.driver,
        "sm_clock_mhz": "" if at.clock_mhz is None else str(at.clock_mhz),
    }
