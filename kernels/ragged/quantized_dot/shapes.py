"""Uses of quantized ragged dots to measure, by op and name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, n: int, g: int, stored: str = "int8"
) -> tuple[dict[str, Any], dict[str, Any]]:
    operands = {"lhs": ("bfloat16", (m, k)), "rhs": (stored, (g, k, n))}
    sizes, scale = ("int32", (g,)), ("float32", (g, n))
    return {**operands, "group_sizes": sizes, "rhs_scale": scale}, {}


SHAPES = {
    "quantized_ragged_dot": {
        "small": (_use(256, 128, 128, 8),),
        "targets": (
            _use(256, 2048, 1536, 128),
            _use(8192, 4096, 14336, 8),
        ),
        "others": (
            _use(256, 2048, 1536, 128, "float8_e4m3fn"),
            _use(64, 4096, 14336, 8),
        ),
        "simulated": (),
    },
}
