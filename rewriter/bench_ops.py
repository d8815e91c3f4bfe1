"""Uses of ops in, a row for each implementation out: time, rate, error, or why not."""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rewriter import bench_peers, device, errors
from rewriter.bench import MODES, measure, temp_bytes, timing_of
from rewriter.bench_programs import (
    XLA,
    Args,
    Candidate,
    Compiled,
    by_kernel,
    by_reference,
    called,
    checked,
    compile_one,
    differentiated,
    said,
    truth_of,
    worst,
    wrong,
)
from rewriter.bench_table import OpsBenchmark, Row, block, heading
from rewriter.cost import Cost
from rewriter.implementation import build, by_thumb
from rewriter.kernel import Kernel, Spec, spec_of
from rewriter.op import Op
from rewriter.registry import Registry, registry

SETS_ON_DEVICE = (3, 16)
"""The least and the most sets of inputs that take turns, but on a CPU."""


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
        sets = importlib.import_module(f"rewriter.kernels.{op}.shapes").SHAPES
    except ModuleNotFoundError:  # an op of the user's
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
    given = [f"{k}={_value(v)}" for k, v in spec.params if op.defaults.get(k) != v]
    return "  ".join([spec.op, f"{first}: {', '.join(parts)}", *given])


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _chosen(names: Sequence[str], op: str, among: Registry) -> list[str]:
    """Names that are asked for and the op has; all if none is asked for."""
    own = [XLA, *(k.name for k in among.kernels(op))]
    return [n for n in own if not names or n in names]


def check_names(names: Sequence[str], ops: Sequence[str], among: Registry) -> None:
    """Returns if each name is ``"xla"`` or a kernel of one of the ops.

    Raises:
        ConfigError: If one is not, with the names there are.
    """
    known = {XLA, *(k.name for op in ops for k in among.kernels(op))}
    for name in names:
        if name not in known:
            raise errors.ConfigError(
                f"implementation {name!r}", next_step=errors.known(name, known)
            )


def _refusal(kernel: Kernel, spec: Spec, platform: str) -> str:
    """Why a kernel is not measured, or ``""``."""
    if platform not in kernel.platforms:
        return f"runs on {', '.join(kernel.platforms)}, not on {platform}"
    try:
        verdict = kernel.supports(spec)
    except Exception as problem:
        return said(problem)
    return "; ".join(reason.text for reason in verdict.reasons)


# -------------------------------------------------------------------- inputs
def input_sets(nbytes: int, on: device.Device) -> int:
    """Returns how many sets of inputs take turns.

    One on a CPU. Elsewhere at least three, and so many that they take twice the
    cache, so that no set is found in it; sixteen at most.

    Example:
        >>> h200 = device.named("h200")
        >>> [input_sets(n, h200) for n in (1 << 30, 20 << 20, 1 << 10)]
        [3, 6, 16]
    """
    if on.platform == "cpu":
        return 1
    least, most = SETS_ON_DEVICE
    return max(least, min(most, math.ceil(2 * on.cache / max(1, nbytes))))


def _inputs(op: Op, spec: Spec, mode: str, on: device.Device) -> list[Args]:
    if op.sample is None:
        raise errors.ConfigError(f"{op.name} has no sample inputs")
    structs = _structs(spec)
    params = dict(spec.params)
    out = jax.eval_shape(functools.partial(called, op.reference, params), structs)
    sets = []
    for i in range(input_sets(sum(map(spec.nbytes, spec.operands)), on)):
        first, second = jax.random.split(jax.random.key(i))
        operands = dict(op.sample(first, structs, params))
        cotangent = jax.random.normal(second, out.shape).astype(out.dtype)
        sets.append((operands,) if mode == "forward" else (operands, cotangent))
    return jax.block_until_ready(sets)


def _structs(spec: Spec) -> dict[str, jax.ShapeDtypeStruct]:
    return {n: jax.ShapeDtypeStruct(s, spec.dtype(n)) for n, s in spec.shapes}


def _integers(operands: Mapping[str, Any]) -> dict[str, tuple[int, int, int, int]]:
    """Least, median, largest and sum of each integer operand."""
    return {
        n: (int(x.min()), int(jnp.median(x)), int(x.max()), int(x.sum()))
        for n, x in operands.items()
        if jnp.issubdtype(x.dtype, jnp.integer) and x.size
    }


# -------------------------------------------------------------------- timing
def bench_use(
    spec: Spec,
    mode: str,
    *,
    implementations: Sequence[str] = (),
    turns: int = 20,
    peers: bool = False,
    among: Registry | None = None,
) -> tuple[list[Row], list[Args]]:
    """Returns a row for each implementation of one use, and the inputs it was given.

    Each is compared with the op's reference on every set of inputs before it is
    timed; what is wrong, refuses or fails has no time but a reason.

    Args:
        spec: The use.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.
        implementations: ``"xla"`` and kernels' names; all by default.
        turns: Samples of each.
        peers: Whether other libraries are measured as well.
        among: Where ops and kernels are; the process's registry by default.
    """
    among = among or registry()
    op, on = among.op(spec.op), device.attached()
    inputs = _inputs(op, spec, mode, on)
    reference = by_reference(op, dict(spec.params), mode, _structs(spec))
    candidates, refused = _candidates(spec, mode, implementations, among, on.platform)
    if peers:
        others, missing = bench_peers.candidates(spec, on.platform)
        candidates += [Candidate(n, differentiated(f, mode)) for n, f in others]
        refused.update(missing)
    wanted = jax.eval_shape(reference, *inputs[0])
    truth = truth_of(reference, inputs[0])
    compiled = [compile_one(c, inputs[0], wanted) for c in candidates]
    cost = _cost(op, spec, mode)
    rows = _timed(checked(compiled, truth, inputs), inputs, turns, cost, on)
    if peers and bench_peers.torch_takes(spec) and "torch" not in refused:
        rows.append(_torch(spec, mode, inputs, turns, truth, cost, on))
    rows += [Row(name, reason=why) for name, why in refused.items()]
    text = use_text(spec, op)
    return [replace(r, op=op.name, use=text, mode=mode) for r in rows], inputs


def _candidates(
    spec: Spec, mode: str, names: Sequence[str], among: Registry, platform: str
) -> tuple[list[Candidate], dict[str, str]]:
    """What is to be measured, and why the rest is not."""
    op, params = among.op(spec.op), dict(spec.params)
    chosen = _chosen(names, op.name, among)
    found, refused = [], {}
    if XLA in chosen:
        plain = by_reference(op, params, mode, _structs(spec), usual=True)
        found.append(Candidate(XLA, plain))
    for kernel in among.kernels(op.name):
        if kernel.name not in chosen:
            continue
        if why := _refusal(kernel, spec, platform):
            refused[kernel.name] = f"refused: {why}"
        else:
            thumb = by_thumb(spec, device.attached(), kernel)
            made = build(thumb, op, [kernel]) or kernel
            found.append(Candidate(kernel.name, by_kernel(made, op, params, mode)))
    return found, refused


def _cost(op: Op, spec: Spec, mode: str) -> Cost | None:
    if op.cost is None or spec.symbolic:
        return None
    return op.cost(dict(spec.shapes), dict(spec.dtypes), dict(spec.params), mode)


def _timed(
    compiled: Sequence[Compiled],
    inputs: Sequence[Args],
    turns: int,
    cost: Cost | None,
    on: device.Device,
) -> list[Row]:
    samples = _samples([c for c in compiled if not c.reason], inputs, turns)
    rows = []
    for c in compiled:
        row = Row(c.name, error=c.error, reason=c.reason, note=c.note)
        found = samples.get(c.name)
        if isinstance(found, str):
            row = replace(row, reason=found)
        elif found is not None:
            temp = temp_bytes(c.program)
            made = timing_of(found, temp=temp, compile_s=c.seconds, cost=cost, on=on)
            row = replace(row, timing=made)
        rows.append(row)
    return rows


def _samples(
    good: Sequence[Compiled], inputs: Sequence[Args], turns: int
) -> dict[str, Any]:
    """Times by name; those of one that fails are the reason in words."""
    if not good:
        return {}
    try:
        found = measure([c.program for c in good], inputs, turns)
        return dict(zip((c.name for c in good), found, strict=True))
    except Exception as problem:
        if len(good) == 1:
            return {good[0].name: said(problem)}
    alone = [_samples([c], inputs, turns) for c in good]
    return {name: found for one in alone for name, found in one.items()}


def _torch(
    spec: Spec,
    mode: str,
    inputs: Sequence[Args],
    turns: int,
    truth: Compiled,
    cost: Cost | None,
    on: device.Device,
) -> Row:
    """PyTorch's row, timed by its own events."""
    row = Row("torch", note="by CUDA events: gaps below 15 % say nothing")
    try:
        samples, out = bench_peers.torch_samples(spec, mode, inputs, turns)
        error, allowed, where = worst(out, truth.program(*inputs[0]))
    except Exception as problem:  # PyTorch's own, or too little memory for both
        return replace(row, reason=said(problem))
    if error > allowed:
        return replace(row, error=error, reason=wrong(error, allowed, where))
    made = timing_of(samples, temp=None, compile_s=0.0, cost=cost, on=on)
    return replace(row, timing=made, error=error)


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
        say: Is told about each use as it is done.

    Raises:
        ConfigError: For an unknown mode or implementation.

    Example:
        >>> found = bench_ops(named_uses("rms_norm", "small"), mode="vjp", turns=1)
        >>> [r.implementation for r in found.rows]
        ['xla', 'memory_bounded']
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
            found, inputs = bench_use(
                spec, one, implementations=implementations, turns=turns,
                peers=peers, among=among,
            )  # fmt: skip
            own += found
            text = use_text(spec, among.op(spec.op))
            sets[text], integers[text] = len(inputs), _integers(inputs[0][0])
            del inputs
        rows += own
        say(block(own, sets[text]))
    return OpsBenchmark(on.kind, turns, tuple(rows), sets, integers, _versions())


def _versions() -> dict[str, str]:
    import jaxlib

    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
