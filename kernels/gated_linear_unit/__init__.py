"""Gated linear unit: act(x·w_gate + b_gate) · (x·w_up + b_up)."""

from __future__ import annotations

from rewriter.kernels.gated_linear_unit import hopper, tpu, xla
from rewriter.kernels.gated_linear_unit.cost import cost
from rewriter.kernels.gated_linear_unit.estimate import estimate
from rewriter.kernels.gated_linear_unit.reference import reference, sample, usual
from rewriter.ops.kernel import PLATFORMS, Kernel, Space
from rewriter.ops.op import Op, Sharding

OP = Op(
    name="gated_linear_unit",
    operands=("x", "w_gate", "w_up", "b_gate", "b_up", "rows_gate", "rows_up"),
    required=("x", "w_gate", "w_up"),
    dims={
        "x": "... k", "w_gate": "k f", "w_up": "k f", "b_gate": "f", "b_up": "f",
        "rows_gate": "... f", "rows_up": "... f", "out": "... f",
    },
    reference=reference,
    sample=sample,
    usual=usual,
    defaults={
        "activation": "silu", "beta": 1.0, "clip_gate": (None, None),
        "clip_up": (None, None), "up_shift": 0.0, "precision": None,
        "out_dtype": None,
    },
    parallel="...",
    cost=cost,
    sharding=lambda params: Sharding(frozenset({"...", "f"})),
)  # fmt: skip

KERNELS = (
    Kernel(
        name="mosaic_tpu",
        op="gated_linear_unit",
        platforms=("tpu",),
        version=1,
        supports=tpu.supports,
        tried=False,
        forward=tpu.forward,
        backward=tpu.backward,
        memory_bounded=True,
        saves_out=False,
        profitable=tpu.profitable,
        space=Space(tpu.Tiles, tpu.default, tpu.configs, tpu.fits),
        backward_space=Space(
            tpu.Tiles, tpu.default_backward, tpu.configs, tpu.fits_backward
        ),
    ),
    Kernel(
        name="hopper",
        op="gated_linear_unit",
        platforms=("cuda",),
        version=1,
        supports=hopper.supports,
        runs_on=hopper.runs_on,
        forward=hopper.forward,
        backward=hopper.backward,
        memory_bounded=True,
        saves_out=False,
        profitable=hopper.profitable,
        space=Space(hopper.Tiles, hopper.default, hopper.configs, hopper.fits),
        backward_space=Space(xla.Block, xla.default, xla.configs),
    ),
    Kernel(
        name="memory_bounded",
        op="gated_linear_unit",
        platforms=PLATFORMS,
        version=1,
        supports=xla.supports,
        forward=xla.forward,
        backward=xla.backward,
        memory_bounded=True,
        saves_out=False,
        profitable=xla.profitable,
        estimate=estimate,
        profitable_backward=xla.profitable_backward,
        space=Space(xla.Block, xla.default, xla.configs),
        backward_space=Space(xla.Block, xla.default, xla.configs),
    ),
)
