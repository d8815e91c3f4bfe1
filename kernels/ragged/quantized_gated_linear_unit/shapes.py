"""Uses of quantized units of experts to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, f: int, g: int, stored: str = "int8"
) -> tuple[dict[str, Any], dict[str, Any]]:
    matrices, scales = (stored, (g, k, f)), ("float32", (g, f))
    operands = {"x": ("bfloat16", (m, k)), "w": matrices, "w_up": matrices}
    sizes = {"group_sizes": ("int32", (g,))}
    return {**operands, **sizes, "w_scale": scales, "w_up_scale": scales}, {}


SHAPES = {
    "quantized_ragged_gated_linear_unit": {
        "small": (_use(256, 128, 128, 8),),
        "targets": (_use(256, 2048, 768, 128),),
        "others": (_use(64, 4096, 14336, 8),),
        "simulated": (),
    },
}
