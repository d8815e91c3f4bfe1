"""The gated linear unit of experts: act(x·w_gate[group]) · (x·w_up[group])."""

from __future__ import annotations

from rewriter.kernels.ragged.dot.rows import FIRST, anywhere, from_any_row
from rewriter.kernels.ragged.gated_linear_unit import hopper, tpu
from rewriter.kernels.ragged.gated_linear_unit.cost import cost
from rewriter.kernels.ragged.gated_linear_unit.estimate import estimate
from rewriter.kernels.ragged.gated_linear_unit.hopper_estimate import (
    estimate as hopper_estimate,
)
from rewriter.kernels.ragged.gated_linear_unit.reference import (
    distributions,
    general,
    reference,
    sample,
)
from rewriter.kernels.ragged.gated_linear_unit.sharding import sharding
from rewriter.ops.kernel import Kernel, Space
from rewriter.ops.op import Op

OP = Op(
    name="ragged_gated_linear_unit",
    operands=("x", "w", "w_up", "group_sizes", FIRST),
    required=("x", "w", "group_sizes"),
    dims={
        "x": "m k", "w": "g k f", "w_up": "g k f", "group_sizes": "g", FIRST: "",
        "out": "m f",
    },
    reference=from_any_row(reference, "x"),
    sample=sample,
    defaults={
        "activation": "silu", "beta": 1.0, "halves": None, "precision": None,
        "out_dtype": None,
    },
    general=from_any_row(general, "x"),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
    parts="ragged_dot",
)  # fmt: skip

PARTS_ON_HOPPER = Space(
    hopper.Tiles, hopper.default_of_parts, hopper.configs_of_parts, hopper.fits_parts
)

BACKWARD = Space(
    tpu.Tiles, tpu.default_backward, tpu.configs_of_parts, tpu.fits_backward
)

KERNELS = (
    anywhere(
        Kernel(
            name="mosaic_tpu",
            op="ragged_gated_linear_unit",
            platforms=("tpu",),
            version=1,
            supports=tpu.supports,
            tried=False,
            forward=tpu.forward,
            backward=tpu.backward,
            memory_bounded=True,
            profitable=tpu.profitable,
            estimate=estimate,
            saves_out=False,
            space=Space(tpu.Tiles, tpu.default, tpu.configs, tpu.fits),
            backward_space=BACKWARD,
            steps=tpu.steps,
        ),
        "x",
    ),
    anywhere(
        Kernel(
            name="hopper",
            op="ragged_gated_linear_unit",
            platforms=("cuda",),
            version=1,
            supports=hopper.supports,
            runs_on=hopper.runs_on,
            forward=hopper.forward,
            backward=hopper.backward,
            memory_bounded=True,
            profitable=hopper.profitable,
            estimate=hopper_estimate,
            saves_out=False,
            space=Space(hopper.Tiles, hopper.default, hopper.configs, hopper.fits),
            backward_space=PARTS_ON_HOPPER,
        ),
        "x",
    ),
    # The fused kernels are compared with it; where it is best the parts become sites.
    anywhere(
        Kernel(
            name="by_parts",
            comparison_only=True,
            op="ragged_gated_linear_unit",
            platforms=("tpu",),
            version=1,
            supports=tpu.supports_parts,
            tried=False,
            forward=tpu.forward_by_parts,
            backward=tpu.backward,
            memory_bounded=True,
            profitable=tpu.profitable,
            estimate=estimate,
            saves_out=False,
            space=Space(
                tpu.Tiles, tpu.default_of_parts, tpu.configs_of_parts, tpu.fits_parts
            ),
            backward_space=BACKWARD,
            steps=tpu.steps_of_parts,
        ),
        "x",
    ),
    anywhere(
        Kernel(
            name="by_parts_hopper",
            comparison_only=True,
            op="ragged_gated_linear_unit",
            platforms=("cuda",),
            version=1,
            supports=hopper.supports_parts,
            runs_on=hopper.runs_on,
            forward=hopper.forward_by_parts,
            backward=hopper.backward,
            memory_bounded=True,
            profitable=hopper.profitable,
            estimate=hopper_estimate,
            saves_out=False,
            space=PARTS_ON_HOPPER,
            backward_space=PARTS_ON_HOPPER,
        ),
        "x",
    ),
)
