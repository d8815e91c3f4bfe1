"""Uses of attention to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any

from rewriter.kernels.attention.pages import AXES


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


def _paged(
    b: int,
    p: int,
    n: int,
    k: int,
    h: int,
    *,
    size: int = 16,
    heads_axis: int = 2,
    dtype: str = "bfloat16",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One token of b sequences with up to p pages, in pools twice as large."""
    sizes = {"p": 2 * b * p, "z": size, "k": k, "h": h}
    pool = tuple(sizes[x] for x in AXES[heads_axis])
    own = {
        "q": (dtype, (b, 1, n, h)),
        "k_pages": (dtype, pool),
        "v_pages": (dtype, pool),
        "table": ("int32", (b, p)),
        "kv_lengths": ("int32", (b,)),
    }
    return own, {"scale": h**-0.5, "heads_axis": heads_axis}


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
        # Heads of 64, of which a tile of heads of 128 says nothing.
        "narrow": (
            _use(4, 4096, 16, 16, 64, causal=True),
            _use(4, 4096, 16, 16, 64, causal=False),
            _use(8, 1024, 12, 12, 64, causal=True),
            _use(4, 4096, 16, 16, 64, causal=True, softcap=30.0),
            _use(4, 4096, 16, 16, 64, causal=False, mask=("bool", (4, 1, 4096, 4096))),
            _use(
                4,
                4096,
                16,
                16,
                64,
                causal=False,
                bias=("bfloat16", (1, 16, 4096, 4096)),
            ),
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
    "paged_attention": {
        "small": (_paged(2, 8, 4, 2, 32, dtype="float32"),),
        "targets": (
            _paged(32, 128, 32, 8, 128, size=32),
            _paged(32, 128, 32, 8, 128, size=32, heads_axis=0),
        ),
        "others": (
            _paged(8, 256, 16, 16, 128, dtype="float32"),
            _paged(64, 64, 64, 8, 128, size=64),
        ),
        "simulated": (_paged(8, 16, 32, 8, 128, size=32),),
    },
}
