"""Estimates the time of a quantized unit of experts: fused, or dequantized first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.ragged.dot.op import STORED as RAGGED_DOT
from rewriter.kernels.ragged.dot.stored_estimate import estimate as of_dot
from rewriter.kernels.ragged.gated_linear_unit.hopper_estimate import TOUCHED
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"hopper"``, and of ``"xla"``: dequantized before.

    With gradients the branches are needed, so the unit is computed by parts.
    """
    dots = 1 if spec.param("halves") else 2
    times = of_dot(part_of(spec), device, passes)
    columns = spec.shape("w")[2] * dots // 2
    touched = TOUCHED * item(spec, "x") * spec.shape("x")[0] * columns
    return {
        "xla": dots * times["xla"] + seconds(device, 0.0, float(touched)),
        "hopper": dots * times["hopper"] if passes == "forward" else math.inf,
    }


def part_of(spec: Spec) -> Spec:
    """Returns a part as a use of a ragged dot of quantized matrices."""
    names = {
        "lhs": "x", "rhs": "w", "group_sizes": "group_sizes", "rhs_scale": "w_scale",
    }  # fmt: skip
    own = {name: of for name, of in names.items() if spec.has(of)}
    return Spec(
        RAGGED_DOT.name,
        tuple((name, spec.shape(of)) for name, of in own.items()),
        tuple((name, spec.dtype(of)) for name, of in own.items()),
        (("mode", "forward"), ("out_dtype", None), ("precision", None)),
    )
