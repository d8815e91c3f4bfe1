"""Attention: softmax(scale · q kᵀ + bias) v."""

from __future__ import annotations

from rewriter.kernels.attention import cudnn, hopper, hopper_decode, tpu, xla
from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.estimate import estimate
from rewriter.kernels.attention.reference import (
    distributions,
    reference,
    sample,
    usual,
)
from rewriter.kernels.attention.sharding import sharding
from rewriter.ops.kernel import PLATFORMS, Kernel, Space
from rewriter.ops.op import Op

_TABLE = "b|1 n|1 t|1 s|1"

OP = Op(
    name="attention",
    operands=(
        "q", "k", "v", "bias", "mask", "q_segments", "kv_segments", "kv_lengths",
        "offset", "prefix", "alibi", "sinks", "dropout", "scale_factor",
    ),
    required=("q", "k", "v"),
    dims={
        "q": "b t n h", "k": "b s k h", "v": "b s k e", "bias": _TABLE,
        "mask": _TABLE, "q_segments": "b|1 t", "kv_segments": "b|1 s",
        "kv_lengths": "b|1", "offset": "b|1", "prefix": "b|1", "alibi": "n",
        "sinks": "n", "dropout": _TABLE, "scale_factor": "", "out": "b t n e",
    },
    reference=reference,
    sample=sample,
    usual=usual,
    defaults={
        "scale": 1.0, "window": (None, None), "shift": 0, "softcap": None,
        "empty_rows": "nan", "out_dtype": None,
    },
    parallel="b",
    cost=cost,
    distributions=distributions,
    sharding=sharding,
)  # fmt: skip

KERNELS = (
    Kernel(
        name="cudnn",
        op="attention",
        platforms=("cuda",),
        version=1,
        supports=cudnn.supports,
        forward=cudnn.forward,
        backward=cudnn.backward,
        memory_bounded=True,
        saves_out=False,
        profitable=cudnn.profitable,
        estimate=estimate,
        exportable=False,
        needs_devices=True,
        deterministic=cudnn.deterministic,
    ),
    Kernel(
        name="hopper",
        op="attention",
        platforms=("cuda",),
        version=1,
        supports=hopper.supports,
        runs_on=hopper.runs_on,
        deterministic=hopper.deterministic,
        forward=hopper.forward,
        backward=hopper.backward,
        memory_bounded=True,
        merges=True,
        profitable=hopper.profitable,
        by_rule=False,
        estimate=estimate,
        space=Space(hopper.Tiles, hopper.default, hopper.configs, hopper.fits),
        backward_space=Space(
            hopper.BackwardTiles,
            hopper.backward_default,
            hopper.backward_configs,
            hopper.fits_backward,
        ),
        swaps=(("q", 1, 2), ("k", 1, 2), ("v", 1, 2)),
    ),
    Kernel(
        name="hopper_decode",
        op="attention",
        platforms=("cuda",),
        version=1,
        supports=hopper_decode.supports,
        runs_on=hopper_decode.runs_on,
        forward=hopper_decode.forward,
        memory_bounded=True,
        profitable=hopper_decode.profitable,
        by_rule=False,
        estimate=estimate,
        space=Space(
            hopper_decode.Split,
            hopper_decode.default,
            hopper_decode.configs,
            hopper_decode.fits,
        ),
        swaps=(("k", 1, 2), ("v", 1, 2)),
    ),
    Kernel(
        name="mosaic_tpu",
        op="attention",
        platforms=("tpu",),
        version=1,
        supports=tpu.supports,
        tried=False,
        forward=tpu.forward,
        backward=tpu.backward,
        memory_bounded=True,
        merges=True,
        profitable=tpu.profitable,
        steps=tpu.steps,
        space=Space(tpu.Blocks, tpu.default, tpu.configs, tpu.fits),
        backward_space=Space(
            tpu.BackwardBlocks,
            tpu.backward_default,
            tpu.backward_configs,
            tpu.fits_backward,
        ),
    ),
    Kernel(
        name="memory_bounded",
        op="attention",
        platforms=PLATFORMS,
        version=1,
        supports=xla.supports,
        forward=xla.forward,
        backward=xla.backward,
        memory_bounded=True,
        merges=True,
        profitable=xla.profitable,
        estimate=estimate,
        space=Space(xla.Blocks, xla.default, xla.configs),
        backward_space=Space(xla.Blocks, xla.default, xla.configs),
    ),
)
