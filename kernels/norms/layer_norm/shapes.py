"""Uses of a layer norm to measure, by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    rows: int, d: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    operands = {"x": (dtype, (rows, d)), "scale": (dtype, (d,)), "bias": (dtype, (d,))}
    return operands, {"eps": 1e-6}


SHAPES = {
    "small": (_use(1024, 256, "float32"),),
    "targets": (
        _use(16384, 4096),
        _use(8192, 8192),
        _use(65536, 1024),
        _use(4096, 16384),
    ),
    "others": (_use(16384, 4096, "float32"),),
    # For the TPU compiler's simulator.
    "simulated": (_use(8192, 4096),),
}
