"""Uses of norms to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any

from rewriter.kernels.norms.forms import CENTRED


def _use(
    op: str, rows: int, d: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = ("scale", "bias") if CENTRED[op] else ("scale",)
    operands = {"x": (dtype, (rows, d)), **dict.fromkeys(names, (dtype, (d,)))}
    return operands, {"eps": 1e-6}


def _sets(op: str) -> dict[str, tuple[Any, ...]]:
    decoder = () if CENTRED[op] else (_use(op, 8192, 2048),)  # of a billion parameters
    return {
        "small": (_use(op, 1024, 256, "float32"),),
        "targets": (
            _use(op, 16384, 4096),
            _use(op, 8192, 8192),
            _use(op, 65536, 1024),
            _use(op, 4096, 16384),
        ),
        "others": (*decoder, _use(op, 16384, 4096, "float32")),
        # For the TPU compiler's simulator.
        "simulated": (_use(op, 8192, 4096),),
    }


SHAPES = {op: _sets(op) for op in CENTRED}
