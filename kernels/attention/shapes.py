"""Uses of attention that are measured, by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    b: int, t: int, n: int, k: int, h: int, *, causal: bool, dtype: str = "bfloat16"
) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = (b, t, k, h)
    params = {"scale": h**-0.5, "window": (None, 0 if causal else None)}
    return {"q": (dtype, (b, t, n, h)), "k": (dtype, keys), "v": (dtype, keys)}, params


SHAPES = {
    "small": (
        _use(1, 256, 4, 4, 32, causal=True, dtype="float32"),
        _use(1, 512, 8, 2, 64, causal=False, dtype="float32"),
    ),
    "targets": (
        _use(4, 4096, 16, 16, 128, causal=False),
        _use(4, 4096, 16, 16, 128, causal=True),
        _use(8, 2048, 32, 32, 64, causal=True),
        _use(1, 16384, 16, 16, 128, causal=True),
        _use(4, 4096, 32, 8, 128, causal=True),
        _use(2, 4096, 16, 16, 256, causal=True),
    ),
}
