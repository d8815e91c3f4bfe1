"""Attention with a function of scores on Hopper GPUs: what the kernel supports.

The kernels are those of attention. They apply the function to each tile of products in
registers, and multiply changes of scores by its derivative, which is JAX's own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax

from rewriter.kernels.attention import hopper
from rewriter.kernels.attention.empty import PASSES
from rewriter.kernels.attention.estimate import of_xla
from rewriter.kernels.attention.hopper.functions import Function, function_of
from rewriter.kernels.attention.hopper.time_model import estimate as of_attention
from rewriter.kernels.attention.hopper.time_model import modelled as as_measured
from rewriter.kernels.attention.op import SCORED
from rewriter.kernels.attention.scored_form import OWN, TABLES, as_attention
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.shared.hopper import by_estimate, processors
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

RATE = 1.0e11
"""Simple instructions a second that one processor's lanes complete."""


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: that of attention, and a known function."""
    if spec.symbolic:
        return no("symbolic", "the Hopper kernel needs known sizes")
    verdict = hopper.supports(as_attention(spec))
    if spec.has("bias"):
        verdict = all_of(verdict, no("bias", "a bias is added behind the function"))
    if spec.param("empty_rows") in PASSES:
        text = "gradients pass through rows without keys to the function"
        verdict = all_of(verdict, no("empty_rows", text))
    function = _function(spec)
    if not verdict.ok or function is None:
        return verdict
    return all_of(YES, function.supports())


def _function(spec: Spec) -> Function | None:
    """The function of a use."""
    arrays = {
        name: jax.ShapeDtypeStruct(shape, spec.dtype(name))
        for name, shape in spec.shapes
        if name in OWN
    }
    return function_of(spec.param("score"), arrays)


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"hopper"``.

    Those of attention, and the instructions of the function for every number.
    """
    plain = as_attention(spec)
    own = of_attention(plain, device, passes)["hopper"]
    function = _function(spec)
    if function is not None and math.isfinite(own):
        both = passes != "forward"
        each = function.cost(False) + (2 * function.cost(True) if both else 0)
        own += _scores(spec) * each / (RATE * processors(device))
    return {"xla": of_xla(plain, device, passes), "hopper": own}


def _scores(spec: Spec) -> float:
    """The number of scores within the window."""
    (b, t, n, _), s = spec.shape("q"), spec.shape("k")[1]
    seen = Visibility(t, s, *spec.param("window", (None, None)), spec.param("shift", 0))
    return float(b * n * seen.count()[0])


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such uses were measured: as attention, by what is read."""
    verdict = as_measured(as_attention(spec), device, passes)
    moving = [name for name in spec.operands if name in TABLES]
    if moving and passes != "forward":
        text = "gradients of tables are computed by XLA, tile by tile"
        return all_of(verdict, no("tables", text))
    return verdict


KERNEL = HOPPER.kernel(
    SCORED.name, hopper.forward, hopper.backward, supports,
    Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
    Space(hopper.Tiles, hopper.default, hopper.configs, hopper.fits),
    Space(hopper.BackwardTiles, hopper.backward_default, hopper.backward_configs,
          hopper.fits_backward),
    deterministic=hopper.deterministic, saves_out=True, merges=True,
    swaps=(("q", 1, 2), ("k", 1, 2), ("v", 1, 2)),
)  # fmt: skip
