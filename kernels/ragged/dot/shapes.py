"""Uses of a ragged dot to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, n: int, g: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    operands = {"lhs": (dtype, (m, k)), "rhs": (dtype, (g, k, n))}
    return {**operands, "group_sizes": ("int32", (g,))}, {}


def _stored(
    m: int, k: int, n: int, g: int, stored: str = "int8"
) -> tuple[dict[str, Any], dict[str, Any]]:
    operands = {"lhs": ("bfloat16", (m, k)), "rhs": (stored, (g, k, n))}
    sizes, scale = ("int32", (g,)), ("float32", (g, n))
    return {**operands, "group_sizes": sizes, "rhs_scale": scale}, {}


SHAPES = {
    "ragged_dot": {
        "small": (_use(256, 64, 128, 8, "float32"),),
        "targets": (
            _use(8192, 4096, 4096, 16),
            _use(32768, 2048, 1536, 128),
            _use(8192, 4096, 14336, 8),
            _use(256, 2048, 1536, 128),
        ),
        "others": (
            _use(8192, 2048, 2048, 64),
            _use(8192, 2048, 2048, 64, "float32"),
        ),
        # Many experts of many rows: into narrow columns, out of them, and of 4096.
        "large": (
            _use(131072, 7168, 1024, 256),
            _use(131072, 1024, 7168, 256),
            _use(131072, 4096, 1536, 128),
        ),
        # For TPUs, whose kernels' instructions are counted.
        "counted": (
            _use(8192, 4096, 14336, 8),
            _use(32768, 2048, 1536, 128),
        ),
        # For the TPU compiler's simulator.
        "simulated": (_use(4096, 4096, 2048, 4),),
    },
    "quantized_ragged_dot": {
        "small": (_stored(256, 128, 128, 8),),
        "targets": (
            _stored(256, 2048, 1536, 128),
            _stored(8192, 4096, 14336, 8),
        ),
        "others": (
            _stored(256, 2048, 1536, 128, "float8_e4m3fn"),
            _stored(64, 4096, 14336, 8),
        ),
        "simulated": (),
    },
}
