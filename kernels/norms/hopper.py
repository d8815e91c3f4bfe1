"""Norms of rows on Hopper GPUs: what the kernel supports, and both passes.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rewriter.kernels.norms import by_rows, forward_time, xla
from rewriter.kernels.norms.by_rows import Call
from rewriter.kernels.norms.estimate import estimate
from rewriter.kernels.norms.forms import kernels, refusals
from rewriter.kernels.norms.hopper_config import (
    Norm,
    Teams,
    norm_of,
    of_spec,
    proposed,
    usual,
    verdict_of,
)
from rewriter.kernels.norms.hopper_measured import measured
from rewriter.kernels.norms.memory import temporary
from rewriter.kernels.shared.hopper import by_estimate, importable, processors, runs_on
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.device import Device
from rewriter.ops.kernel import Limits, Space, Speed, Traits, saves_nothing
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

DTYPES = ("bfloat16", "float16", "float32")

MOST = 1 << 31
"""Arrays with as many elements overflow the kernels' indices."""


# ------------------------------------------------------------------ what it takes
def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: see `hopper_config.is_spread`."""
    if spec.symbolic:
        return SYMBOLIC
    shape, found = spec.shape("x"), refusals(spec, DTYPES)
    if (size := math.prod(shape)) >= MOST:
        found.append(no("size", f"{size} elements, of at most 2^31 - 1"))
    verdict = all_of(YES, *found)
    if verdict.ok:
        norm = of_spec(spec)
        verdict = verdict_of(usual(norm, False), norm, False)
    return importable("rewriter.kernels.norms.hopper_kernel") if verdict.ok else verdict


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such sizes were measured."""
    del device
    return measured(spec, passes)


def margin(spec: Spec, device: Device, passes: str) -> float | None:
    """Returns the share of XLA's time that is enough where both were compared."""
    del device
    forward = passes == "forward" and forward_time.is_modelled(spec)
    return forward_time.ENOUGH if forward else None


# ------------------------------------------------------------------- its configs
def default(spec: Spec, device: Device, backward: bool) -> Teams:
    """Returns the rule of thumb."""
    return usual(of_spec(spec), backward, processors(device))


def configs(spec: Spec, device: Device, backward: bool) -> list[Teams]:
    """Returns configs worth measuring, most promising first."""
    return proposed(of_spec(spec), backward, processors(device))


def fits(config: Teams, spec: Spec, device: Device, backward: bool) -> Verdict:
    """Returns whether a config can run; see `verdict_of`."""
    del device
    return verdict_of(config, of_spec(spec), backward)


# ------------------------------------------------------------------- both passes
def _normalized(call: Call, config: Teams | None) -> tuple[Array, Array | None]:
    """The norm of rows and, with an addend, the sums that it normalises."""
    from rewriter.kernels.norms import hopper_kernel, hopper_tiles

    norm = _of_call(call)
    teams = _fitting(config, norm, False)
    if teams is None:  # x alone fits
        alone = call.of_sum()
        return _normalized(alone, None)[0], alone.x
    run = hopper_tiles.normalized if teams.tiled else hopper_kernel.normalized
    out, *total = run(norm, call.x, call.given, teams, call.addend)
    return out, total[0] if total else None


def _cotangents(call: Call, up: Array, config: Teams | None) -> dict[str, Array]:
    """The cotangents; where rows do not fit, those of the plain kernel."""
    from rewriter.kernels.norms import hopper_kernel, hopper_tiles

    norm = _of_call(call)
    teams = _fitting(config, norm, True)
    if teams is not None:
        run = hopper_tiles.cotangents if teams.tiled else hopper_kernel.cotangents
        return run(norm, call.x, up, call.given, teams, call.addend)
    if call.addend is not None:  # the other two arrays may fit
        made = _cotangents(replace(call, addend=None), up, config)
        return {**made, "x": made["x"] + call.addend}
    own = {
        "x": call.x, **call.given, "centred": call.centred, "eps": call.eps,
        "of_squares": call.of_squares,
    }  # fmt: skip
    _, kept = xla.forward(**own, residuals=True)
    return xla.backward(**own, out=None, residuals=kept, cotangent=up)


def _of_call(call: Call) -> Norm:
    has_addend = call.addend is not None
    return norm_of(
        call.centred, call.x, call.out_dtype, call.eps, call.given, has_addend,
        call.of_squares,
    )  # fmt: skip


forward = functools.partial(by_rows.forward, _normalized)
"""The result by the kernel of rows."""

backward = functools.partial(by_rows.backward, _cotangents)
"""The cotangents by the kernel of rows."""


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


KERNELS = kernels(
    forward,
    backward,
    name="hopper",
    platforms=("cuda",),
    version=1,
    limits=Limits(supports, runs_on),
    speed=Speed(
        by_estimate,
        by_rule=False,
        estimate=estimate,
        margin=margin,
        modelled=modelled,
        temporary=temporary,
    ),
    traits=Traits(
        memory_bounded=True, saves_out=False, saves=saves_nothing, adds_to="x"
    ),
    space=_space(False),
    backward_space=_space(True),
)
