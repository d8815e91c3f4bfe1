"""Uses of a gated linear unit to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, f: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    weights = dtype, (k, f)
    return {"x": (dtype, (m, k)), "w_gate": weights, "w_up": weights}, {}


SHAPES = {
    "gated_linear_unit": {
        "small": (_use(256, 128, 512, "float32"),),
        "targets": (
            _use(8192, 4096, 14336),
            _use(16384, 2048, 8192),
            _use(2048, 8192, 28672),
            _use(16, 4096, 14336),
        ),
        # Of a decoder of a billion parameters, and in float32.
        "others": (
            _use(8192, 2048, 5632),
            _use(8192, 2048, 8192, "float32"),
        ),
        # Few enough for the TPU compiler's simulator to end within its time.
        "simulated": (_use(2048, 2048, 4096),),
    },
}
