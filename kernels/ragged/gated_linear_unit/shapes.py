"""Uses of gated linear units of experts to measure, by op and name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    m: int, k: int, f: int, g: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    matrices = dtype, (g, k, f)
    operands = {"x": (dtype, (m, k)), "w": matrices, "w_up": matrices}
    return {**operands, "group_sizes": ("int32", (g,))}, {}


def _stored(
    m: int, k: int, f: int, g: int, stored: str = "int8"
) -> tuple[dict[str, Any], dict[str, Any]]:
    matrices, scales = (stored, (g, k, f)), ("float32", (g, f))
    operands = {"x": ("bfloat16", (m, k)), "w": matrices, "w_up": matrices}
    sizes = {"group_sizes": ("int32", (g,))}
    return {**operands, **sizes, "w_scale": scales, "w_up_scale": scales}, {}


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
    "quantized_ragged_gated_linear_unit": {
        "small": (_stored(256, 128, 128, 8),),
        "targets": (_stored(256, 2048, 768, 128),),
        "others": (_stored(64, 4096, 14336, 8),),
        "simulated": (),
    },
}
