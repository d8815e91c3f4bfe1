"""Attention: softmax(scale · q kᵀ + bias) v."""

from __future__ import annotations

from rewriter.kernels.attention import cudnn, hopper, hopper_decode, tpu, xla
from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.reference import (
    distributions,
    reference,
    sample,
    usual,
)
from rewriter.kernels.attention.sharding import sharding
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

KERNELS = (cudnn.KERNEL, hopper.KERNEL, hopper_decode.KERNEL, tpu.KERNEL, xla.KERNEL)
