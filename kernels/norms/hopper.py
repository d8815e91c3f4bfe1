"""Norms of rows on Hopper GPUs: what the kernel supports, and both passes.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax

from rewriter.kernels.norms import xla
from rewriter.kernels.norms.estimate import estimate
from rewriter.kernels.norms.forms import CENTRED, is_centred
from rewriter.kernels.norms.hopper_config import (
    LANES,
    Norm,
    Teams,
    measured,
    norm_of,
    proposed,
    usual,
    verdict_of,
)
from rewriter.kernels.shared.hopper import BY_ESTIMATE, processors, runs_on
from rewriter.ops.device import Device
from rewriter.ops.kernel import Kernel, Limits, Space, Speed, Traits
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

DTYPES = ("bfloat16", "float16", "float32")

MOST = 1 << 31
"""Arrays with as many elements overflow the kernels' indices."""


# ------------------------------------------------------------------ what it takes
def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: columns a multiple of 128."""
    if spec.symbolic:
        return no("symbolic", "sizes must be known, but some are symbolic")
    shape, found = spec.shape("x"), [YES]
    kinds = {n: spec.dtype(n) for n in spec.operands}
    kinds["the result"] = spec.param("out_dtype") or spec.dtype("x")
    for name, dtype in kinds.items():
        if dtype not in DTYPES:
            text = f"{name} is {dtype}, not {', '.join(DTYPES[:2])} or {DTYPES[2]}"
            found.append(no("dtype", text))
    for name in spec.operands:
        wanted = {"x": shape, "epsilon": ()}.get(name, shape[-1:])
        if spec.shape(name) != wanted:
            found.append(no("shape", f"{name} is {spec.shape(name)}, not {wanted}"))
    if not shape or 0 in shape:
        found.append(no("empty", f"x has shape {shape}: no rows, or none of a width"))
    elif shape[-1] % LANES:
        found.append(no("width", f"rows of {shape[-1]}, no multiple of {LANES}"))
    if (size := math.prod(shape)) >= MOST:
        found.append(no("size", f"{size} elements, of at most 2^31 - 1"))
    verdict = all_of(*found)
    if verdict.ok:
        norm = _of_spec(spec)
        verdict = verdict_of(usual(norm, False), norm, False)
    return _importable() if verdict.ok else verdict


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such sizes were measured."""
    del device, passes
    return measured(spec)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: for known Hopper GPUs the estimate decides."""
    del spec, platform
    return no("device", BY_ESTIMATE)


@functools.cache
def _importable() -> Verdict:
    try:
        from rewriter.kernels.norms import hopper_kernel
    except ImportError as problem:  # a jaxlib without Mosaic GPU, as on Windows
        return no("jax", f"this jax cannot build kernels for NVIDIA GPUs: {problem}")
    del hopper_kernel
    return YES


# ------------------------------------------------------------------- its configs
def _of_spec(spec: Spec) -> Norm:
    given = tuple((n, t) for n, t in spec.dtypes if n != "x")
    (*rows, d), dtype = spec.shape("x"), spec.dtype("x")
    out = spec.param("out_dtype") or dtype
    return Norm(is_centred(spec), 0.0, math.prod(rows), d, dtype, out, given)


def default(spec: Spec, device: Device, backward: bool) -> Teams:
    """Returns the rule of thumb."""
    return usual(_of_spec(spec), backward, processors(device))


def configs(spec: Spec, device: Device, backward: bool) -> list[Teams]:
    """Returns configs worth measuring, most promising first."""
    return proposed(_of_spec(spec), backward, processors(device))


def fits(config: Teams, spec: Spec, device: Device, backward: bool) -> Verdict:
    """Returns whether a config can run; see `verdict_of`."""
    del device
    return verdict_of(config, _of_spec(spec), backward)


# ------------------------------------------------------------------- both passes
def forward(
    *,
    centred: bool,
    x: jax.Array,
    eps: float = 0.0,
    of_squares: bool = False,
    out_dtype: str | None = None,
    addend: jax.Array | None = None,
    residuals: bool = False,
    config: Teams | None = None,
    **given: jax.Array,
) -> Any:
    """Returns the result, as `reference` does; there are no residuals.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        centred: Whether it is a layer norm, and no RMS norm.
        out_dtype: The result's dtype; x's by default.
        addend: As x. The result is then ``(x + addend, its norm)``.
        residuals: Whether to return ``(result, ())``.
        config: The teams.
        **given: scale [d], bias [d] and epsilon [], if present.
    """
    from rewriter.kernels.norms.hopper_kernel import normalized

    norm = norm_of(centred, x, out_dtype, eps, given, addend is not None, of_squares)
    config = _fitting(config, norm, False)
    if config is None:  # x alone fits
        assert addend is not None
        total = x + addend
        out = forward(
            centred=centred, x=total, eps=eps, of_squares=of_squares,
            out_dtype=out_dtype, **given,
        )  # fmt: skip
        return ((total, out), ()) if residuals else (total, out)
    rows = None if addend is None else addend.reshape(norm.m, norm.d)
    made = normalized(norm, x.reshape(norm.m, norm.d), given, config, rows)
    out, *total = (y.reshape(x.shape) for y in made)
    result = (total[0], out) if total else out
    return (result, ()) if residuals else result


def backward(
    *,
    centred: bool,
    x: jax.Array,
    out: None,
    residuals: tuple[()],
    cotangent: jax.Array,
    eps: float = 0.0,
    of_squares: bool = False,
    out_dtype: str | None = None,
    addend: jax.Array | None = None,
    config: Teams | None = None,
    **given: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the cotangents of every operand.

    Operands are those of the op, and parameters are as in `reference`.

    Args:
        centred: Whether it is a layer norm, and no RMS norm.
        out: Not needed.
        residuals: Empty.
        cotangent: As the result.
        addend: As x, added to its cotangent.
        config: The teams.
        **given: As in `forward`.
    """
    from rewriter.kernels.norms.hopper_kernel import cotangents

    del out, residuals, out_dtype
    norm = norm_of(
        centred, x, str(cotangent.dtype), eps, given, addend is not None, of_squares
    )
    fitting = _fitting(config, norm, True)
    if fitting is None and addend is not None:  # the other two arrays may fit
        made = backward(
            centred=centred, x=x, out=None, residuals=(),
            cotangent=cotangent, eps=eps, of_squares=of_squares, config=config,
            **given,
        )  # fmt: skip
        return {**made, "x": made["x"] + addend}
    if fitting is None:
        own = {**given, "of_squares": of_squares, "centred": centred}
        _, kept = xla.forward(x=x, eps=eps, residuals=True, **own)
        return xla.backward(
            x=x, out=None, residuals=kept, cotangent=cotangent, eps=eps, **own
        )
    rows = (norm.m, norm.d)
    added = None if addend is None else addend.reshape(rows)
    up = cotangent.reshape(rows)
    made = cotangents(norm, x.reshape(rows), up, given, fitting, added)
    made["x"] = made["x"].reshape(x.shape)
    return {n: y.astype({"x": x, **given}[n].dtype) for n, y in made.items()}


def _fitting(config: Teams | None, norm: Norm, backward: bool) -> Teams | None:
    """The config, or the usual one if this one does not fit."""
    for teams in (config, usual(norm, backward)):
        if teams is not None and verdict_of(teams, norm, backward).ok:
            return teams
    return None


def _space(backward: bool) -> Space:
    given = {"backward": backward}
    made = (functools.partial(f, **given) for f in (default, configs, fits))
    return Space(Teams, *made)


def _kernel(op: str) -> Kernel:
    centred = CENTRED[op]
    return Kernel(
        name="hopper",
        op=op,
        platforms=("cuda",),
        version=1,
        forward=functools.partial(forward, centred=centred),
        backward=functools.partial(backward, centred=centred),
        limits=Limits(supports, runs_on),
        speed=Speed(profitable, by_rule=False, estimate=estimate, modelled=modelled),
        traits=Traits(memory_bounded=True, saves_out=False, adds_to="x"),
        space=_space(False),
        backward_space=_space(True),
    )


KERNELS = tuple(map(_kernel, CENTRED))
