"""Uses of group norms to measure, by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    samples: int, positions: int, channels: int, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    each = (32, channels // 32)
    operands = {"x": (dtype, (samples, positions, *each, 1))}
    operands |= dict.fromkeys(("scale", "bias"), ("float32", each))
    return operands, {"eps": 1e-6}


SHAPES = {
    "group_norm": {
        "small": (_use(2, 256, 64, "float32"),),
        "targets": (
            _use(8, 64 * 64, 320),
            _use(8, 32 * 32, 640),
            _use(8, 64 * 64, 960),
            _use(2, 512 * 512, 128),
        ),
    }
}
