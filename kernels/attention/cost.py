"""Counts the work of attention by the keys that each query sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rewriter.ops.cost import Cost, Dtypes, Shapes, moved, of_mode


def cost(
    shapes: Shapes, dtypes: Dtypes, params: Mapping[str, Any], mode: str = "forward"
) -> Cost:
    """Returns operations and bytes of attention.

    With p pairs of a query and a key that it sees, n query heads of width h and
    values of width e, a forward is two products of ``2·b·n·p·h`` and ``2·b·n·p·e``
    operations: ``4·b·n·t·s·h`` if all keys are seen and e is h, half of that if
    causal. A backward is five such products (scores again, the gradients of
    weights, v, q and k): 2.5 times a forward if e is h. The softmax is not counted.

    Masks, segments and lengths in arrays are unknown: all keys within the window are
    counted. A prefix is unknown too, and assumed to hold half of the keys.

    Args:
        shapes: Shapes by operand name.
        dtypes: Dtype names by operand name.
        params: The op's parameters.
        mode: ``forward``, ``vjp`` or ``forward_and_vjp``.

    Example:
        >>> shapes = dict.fromkeys("qkv", (1, 4, 2, 8))
        >>> dtypes = dict.fromkeys("qkv", "float32")
        >>> cost(shapes, dtypes, {"window": (None, 0)})  # 10 of 16 pairs
        Cost(flops=640.0, bytes=1024.0)
    """
    b, t, n, h = shapes["q"]
    s, e = shapes["k"][1], shapes["v"][3]
    window = params.get("window", (None, None))
    if "offset" in shapes:
        pairs, keys = _anywhere(t, s, window)
    else:
        prefix = s // 2 if "prefix" in shapes else 0
        pairs, keys = seen(t, s, window, params.get("shift", 0), prefix)
    each = b * n * pairs
    flops = of_mode(mode, each * (2 * h + 2 * e), each * (6 * h + 4 * e))
    dtype = params.get("out_dtype") or dtypes["q"]
    read = dict.fromkeys("kv", keys / s if s else 1.0)
    return Cost(
        float(flops), float(moved(shapes, dtypes, (b, t, n, e), dtype, mode, read))
    )


def seen(
    t: int, s: int, window: tuple[int | None, int | None], shift: int, prefix: int = 0
) -> tuple[int, int]:
    """Returns the number of visible pairs of query and key, and of visible keys.

    Args:
        t: Number of queries.
        s: Number of keys.
        window: As the op's.
        shift: As the op's.
        prefix: The number of keys that all queries see, whatever the window.

    Example:
        >>> seen(4, 4, (None, 0), 0), seen(4, 4, (1, 0), 0), seen(1, 9, (2, 0), 8)
        ((10, 4), (7, 4), (3, 3))
        >>> seen(4, 4, (None, 0), 0, 3), seen(1, 9, (2, 0), 8, 2)
        ((13, 4), (5, 5))
    """
    left, right = window
    at = np.arange(t) + shift
    first = np.maximum(at - left, 0) if left is not None else np.zeros_like(at)
    last = np.full_like(at, s - 1)
    if right is not None:
        last = np.minimum(at + right, s - 1)
    some = last >= first
    pairs = int(_joined(first[some], last[some], prefix).sum())
    pairs += prefix * int(np.sum(~some))
    if not some.any():
        return pairs, prefix if t else 0
    return pairs, int(_joined(first[some].min(), last[some].max(), prefix))


def _joined(first: Any, last: Any, prefix: int) -> Any:
    """The number of keys from the first to the last, or in a prefix."""
    both = np.maximum(np.minimum(last, prefix - 1) - first + 1, 0)
    return last - first + 1 + prefix - both


def _anywhere(t: int, s: int, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """The same for positions that are only known at run time: an upper bound."""
    left, right = window
    if left is None or right is None:
        return t * s, s
    width = min(s, max(0, left + right + 1))
    return t * width, min(s, width + t - 1)
