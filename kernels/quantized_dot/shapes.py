"""Uses of a quantized dot to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, n: int, stored: str = "int8", groups: int = 1, x: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    operands = {"x": (x, (m, k)), "w": (stored, (k, n)), "w_scale": (x, (groups, n))}
    return operands, {"widen": f"{x} *scale"}


SHAPES = {
    "quantized_dot": {
        "small": (_use(4, 256, 512),),
        "targets": (
            _use(1, 4096, 14336),
            _use(16, 4096, 14336),
            _use(64, 8192, 28672),
            _use(16, 8192, 28672, "int4", 64),
        ),
        "others": (
            _use(16, 4096, 14336, "float8_e4m3fn"),
            _use(256, 4096, 14336),
        ),
        "simulated": (),
    },
}
