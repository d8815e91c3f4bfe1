"""Uses of paged attention to measure, by op and by the name of the set."""

from __future__ import annotations

from typing import Any


def _use(
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
    pool = tuple(sizes[x] for x in ("kpzh", "pkzh", "pzkh")[heads_axis])
    own = {
        "q": (dtype, (b, 1, n, h)),
        "k_pages": (dtype, pool),
        "v_pages": (dtype, pool),
        "table": ("int32", (b, p)),
        "kv_lengths": ("int32", (b,)),
    }
    return own, {"scale": h**-0.5, "heads_axis": heads_axis}


SHAPES = {
    "paged_attention": {
        "small": (_use(2, 8, 4, 2, 32, dtype="float32"),),
        "targets": (
            _use(32, 128, 32, 8, 128, size=32),
            _use(32, 128, 32, 8, 128, size=32, heads_axis=0),
        ),
        "others": (
            _use(8, 256, 16, 16, 128, dtype="float32"),
            _use(64, 64, 64, 8, 128, size=64),
        ),
        "simulated": (_use(8, 16, 32, 8, 128, size=32),),
    },
}
