"""Uses of gated linear units of experts to measure, by op and name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, f: int, g: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    matrices = dtype, (g, k, f)
    operands = {"x": (dtype, (m, k)), "w": matrices, "w_up": matrices}
    return {**operands, "group_sizes": ("int32", (g,))}, {}


SHAPES = {
    "ragged_gated_linear_unit": {
        "small": (_use(256, 64, 128, 8, "float32"),),
        # Of models with 8, 64 and 128 experts.
        "targets": (
            _use(8192, 4096, 14336, 8),
            _use(8192, 2048, 1408, 64),
            _use(32768, 2048, 768, 128),
        ),
        "others": (_use(256, 2048, 768, 128),),
        # For the TPU compiler's simulator.
        "simulated": (_use(4096, 2048, 1024, 4),),
    },
}
