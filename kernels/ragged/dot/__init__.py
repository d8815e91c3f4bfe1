"""Ragged dot: each group of rows times its own matrix."""

from __future__ import annotations

from rewriter.kernels.ragged.dot import hopper, tiled, tpu, xla
from rewriter.kernels.ragged.dot.cost import cost
from rewriter.kernels.ragged.dot.estimate import estimate
from rewriter.kernels.ragged.dot.general import general
from rewriter.kernels.ragged.dot.reference import distributions, reference, sample
from rewriter.kernels.ragged.dot.rows import FIRST, anywhere, from_any_row
from rewriter.kernels.ragged.dot.sharding import sharding
from rewriter.ops.kernel import PLATFORMS, Kernel, Space
from rewriter.ops.op import Op

OP = Op(
    name="ragged_dot",
    operands=("lhs", "rhs", "group_sizes", FIRST),
    required=("lhs", "rhs", "group_sizes"),
    dims={"lhs": "m k", "rhs": "g k n", "group_sizes": "g", FIRST: "", "out": "m n"},
    reference=from_any_row(reference),
    sample=sample,
    defaults={"mode": "forward", "out_dtype": None, "precision": None},
    general=from_any_row(general),
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)

HOPPER = Space(hopper.Tiles, hopper.default, hopper.configs, hopper.fits)

KERNELS = (
    anywhere(
        Kernel(
            name="mosaic_tpu",
            op="ragged_dot",
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
            backward_space=Space(
                tpu.Tiles, tpu.default_backward, tpu.configs, tpu.fits_backward
            ),
            steps=tpu.steps,
        )
    ),
    anywhere(
        Kernel(
            name="hopper",
            op="ragged_dot",
            platforms=("cuda",),
            version=1,
            supports=hopper.supports,
            runs_on=hopper.runs_on,
            forward=hopper.forward,
            backward=hopper.backward,
            memory_bounded=True,
            profitable=hopper.profitable,
            by_rule=False,
            estimate=estimate,
            saves_out=False,
            space=HOPPER,
            backward_space=HOPPER,
        )
    ),
    Kernel(
        name="memory_bounded",
        op="ragged_dot",
        platforms=PLATFORMS,
        version=1,
        supports=xla.supports,
        forward=xla.forward,
        backward=xla.backward,
        memory_bounded=True,
        profitable=xla.profitable,
        estimate=estimate,
        space=Space(xla.Tile, xla.default, xla.configs),
        backward_space=Space(xla.Tile, xla.default, xla.configs),
        saves_out=False,
    ),
    anywhere(
        Kernel(
            name="tiled",
            op="ragged_dot",
            platforms=PLATFORMS,
            version=1,
            supports=tiled.supports,
            forward=tiled.forward,
            backward=tiled.backward,
            memory_bounded=True,
            profitable=tiled.profitable,
            estimate=estimate,
            saves_out=False,
            space=Space(tiled.Tiles, tiled.default, tiled.configs),
            backward_space=Space(tiled.Tiles, tiled.default, tiled.configs),
        )
    ),
)
