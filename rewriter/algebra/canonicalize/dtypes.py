"""Kinds of dtypes, and which casts keep values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rewriter.algebra.normal_form import Algebra, Poly


@functools.lru_cache(maxsize=256)
def kind_of(dtype: Any) -> str:
    """'f' for floats of every width, 'i' for integers, 'b' for booleans."""
    kind = np.dtype(dtype).kind if not hasattr(dtype, "_rules") else "V"
    if kind in "iu" or (kind == "V" and str(dtype) in _FEW_BITS):
        return "i"
    if kind == "b":
        return "b"
    return "f" if kind in "fV" else kind


_FEW_BITS = frozenset({"int2", "uint2", "int4", "uint4"})
"""Integers that NumPy does not know as such."""


def is_coarse(dtype: Any) -> bool:
    """Whether a dtype is of floats of fewer than 16 bits.

    Rounding to one is a step of the program, not the rounding of an intermediate:
    quantization by hand keeps two to four digits, and may overflow to NaN.
    """
    return kind_of(dtype) == "f" and np.dtype(dtype).itemsize < 2


def is_stored(dtype: Any) -> bool:
    """Whether a dtype is of integers, or of floats of fewer than 16 bits."""
    return kind_of(dtype) == "i" or is_coarse(dtype)


def is_lossless(old: Any, new: Any) -> bool:
    """Whether every value of a dtype exists in another."""
    try:
        return bool(np.can_cast(old, new, "safe")) or (str(old), str(new)) in _WIDER
    except TypeError:
        return old == new


def may_wrap(old: Any, new: Any) -> bool:
    """Whether a cast of integers may change values, as from uint32 to int32."""
    narrower = np.dtype(new).itemsize < np.dtype(old).itemsize
    return narrower or not is_lossless(old, new)


_NARROW = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")

_WIDER = {
    (small, wide)
    for small in ("bfloat16", "float16", *_NARROW)
    for wide in ("float32", "float64")
} | {(small, wide) for small in _NARROW for wide in ("bfloat16", "float16")}


def takes_integers(alg: Algebra, p: Poly) -> bool:
    """Whether a form takes only integer values: positions, flags, truncated values."""
    return all(
        float(c).is_integer() and all(e == 1 and _whole_atom(alg, a) for a, e in m)
        for (_, m), c in p.items()
    )


def _whole_atom(alg: Algebra, atom: int) -> bool:
    d = alg.defs[atom]
    if d[0] == "relu":
        return takes_integers(alg, alg.thaw(d[1]))
    if d[0] == "fn" and d[1] in ("idiv", "rem", "floor_divide", "remainder", "sign"):
        return all(takes_integers(alg, alg.thaw(x)) for x in d[2:])
    return d[0] in ("iota", "ind") or d[:2] == ("fn", "trunc")
