"""Counts the work of attention by the keys that each query sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewriter.kernels.attention.visibility import Visibility
from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of attention.

    There are p pairs of a query and a key that it sees, n query heads of width h, and
    values of width e. A forward is two products of ``2·b·n·p·h`` and ``2·b·n·p·e``
    operations. If all keys are seen and e is h, these are ``4·b·n·t·s·h``, and half of
    that if causal. A backward is five such products: scores again, and the gradients of
    weights, v, q and k. It is 2.5 times a forward if e is h. The softmax is not
    counted.

    Masks, segments and lengths in arrays are unknown: all keys within the window are
    counted. A prefix is unknown too, and assumed to hold half of the keys.

    Arguments are those of `Op.cost`.

    Example:
        >>> shapes = dict.fromkeys("qkv", (1, 4, 2, 8))
        >>> dtypes = dict.fromkeys("qkv", "float32")
        >>> cost(shapes, dtypes, {"window": (None, 0)})  # 10 of 16 pairs
        Cost(flops=640.0, bytes=1024.0)
    """
    b, t, n, h = shapes["q"]
    s, e = shapes["k"][1], shapes["v"][3]
    prefix = s // 2 if "prefix" in shapes else None
    window = params.get("window", (None, None))
    seen = Visibility(t, s, *window, params.get("shift", 0), prefix=prefix)
    pairs, keys = seen.count_at_most() if "offset" in shapes else seen.count()
    each = b * n * pairs
    flops = of_mode(mode, each * (2 * h + 2 * e), each * (6 * h + 4 * e))
    dtype = params.get("out_dtype") or dtypes["q"]
    read = dict.fromkeys("kv", keys / s if s else 1.0)
    return Cost(
        float(flops), float(moved(shapes, dtypes, (b, t, n, e), dtype, mode, read))
    )
