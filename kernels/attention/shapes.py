"""Uses of attention to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
    b: int,
    t: int,
    n: int,
    k: int,
    h: int,
    *,
    causal: bool,
    dtype: str = "bfloat16",
    softcap: float | None = None,
    **more: tuple[str, tuple[int, ...]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    keys = (b, t, k, h)
    window = (None, 0 if causal else None)
    params = {"scale": h**-0.5, "window": window, "softcap": softcap}
    own = {"q": (dtype, (b, t, n, h)), "k": (dtype, keys), "v": (dtype, keys)}
    return {**own, **more}, params


SHAPES = {
    "attention": {
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
        # Of a decoder of a billion parameters; and what cuDNN is not given: float32,
        # tables added or masking, lengths, a soft cap.
        "others": (
            _use(2, 4096, 16, 16, 128, causal=True),
            _use(1, 8192, 16, 16, 128, causal=True),
            _use(4, 2048, 16, 16, 64, causal=True, dtype="float32"),
            _use(4, 2048, 16, 16, 64, causal=False, dtype="float32"),
            _use(
                4,
                2048,
                16,
                16,
                128,
                causal=False,
                bias=("bfloat16", (1, 16, 2048, 2048)),
            ),
            _use(4, 2048, 16, 16, 128, causal=False, mask=("bool", (4, 1, 2048, 2048))),
            _use(8, 2048, 16, 16, 128, causal=True, kv_lengths=("int32", (8,))),
            _use(4, 4096, 16, 8, 128, causal=True, softcap=50.0),
            _use(8, 512, 16, 16, 64, causal=False, mask=("bool", (8, 1, 1, 512))),
        ),
        # For TPUs, whose kernels' instructions are counted.
        "counted": (
            _use(1, 8192, 8, 8, 128, causal=True),
            _use(1, 4096, 16, 4, 128, causal=True),
            _use(4, 2048, 16, 16, 64, causal=False),
        ),
        # For the TPU compiler's simulator.
        "simulated": (_use(1, 2048, 4, 4, 128, causal=True),),
    },
}
