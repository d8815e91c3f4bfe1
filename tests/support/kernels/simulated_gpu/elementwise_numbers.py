"""What elementwise functions emit for GPUs, computed by NumPy in float32.

Instructions of exact functions and of rare integers are left out.
"""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir.dialects import arith

from rewriter.kernels.shared import (
    elementwise_exact,
    elementwise_fast,
    elementwise_gpu,
    elementwise_scaled,
    register_tiles,
)

MODULES = (
    register_tiles, elementwise_fast, elementwise_exact, elementwise_scaled,
    elementwise_gpu,
)  # fmt: skip

INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "neg": np.negative, "div": np.divide,
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": lambda x: np.float32(1) / x,
    "max": np.maximum, "min": np.minimum,
    "copysign": lambda sign, size: np.copysign(size, sign),
    "fma": lambda x, y, z: (
        x.astype(np.float64) * y + z.astype(np.float64)
    ).astype(np.float32),
}  # fmt: skip
"""PTX instructions by what is before their first point."""

COUNTED: collections.Counter[str] = collections.Counter()
"""How often each operation of numbers that differ ran."""

COMPARE = {
    "OEQ": np.equal, "UNE": np.not_equal, "OLT": np.less, "OLE": np.less_equal,
    "OGT": np.greater, "OGE": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "slt": np.less, "sle": np.less_equal, "sgt": np.greater, "sge": np.greater_equal,
}  # fmt: skip


class _Names:
    """Names as they are."""

    def __getattr__(self, name: str) -> str:
        return name


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mulf": np.multiply, "addf": np.add, "subf": np.subtract, "divf": np.divide,
    "negf": np.negative, "muli": np.multiply, "addi": np.add, "subi": np.subtract,
    "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor,
    "maxsi": np.maximum, "minsi": np.minimum,
    "select": np.where,
    "cmpf": lambda kind, x, y: COMPARE[kind](x, y),
    "cmpi": lambda kind, x, y: COMPARE[kind](x, y),
    "sitofp": lambda _, x: x.astype(np.float32),
}  # fmt: skip


def _mapped(op: Callable[..., Any], *tiles: np.ndarray) -> np.ndarray:
    for name, made in ARITHMETIC.items():
        if getattr(arith, name, None) is op:
            return _counted(name, np.asarray(made(*tiles)))
    return np.asarray(op(*tiles))


def _instruction(name: str, kind: str = "f", result: str = "f") -> Callable[..., Any]:
    first = name.split(".")[0]

    return lambda *tiles: _counted(first, np.asarray(INSTRUCTIONS[first](*tiles)))


def _counted(name: str, made: np.ndarray) -> np.ndarray:
    """Counts an operation, unless it gives one number for the whole tile."""
    COUNTED[name] += bool((made != made.flat[0]).any())
    return made


def _constant(value: Any, dtype: Any, like: np.ndarray) -> np.ndarray:
    floats = str(np.dtype(dtype)) in ("float32", "bfloat16", "float16")
    return np.full(like.shape, value, np.float32 if floats else dtype)


def _rounded(tile: np.ndarray, dtype: str) -> np.ndarray:
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    return tile.astype(kinds[dtype]).astype(np.float32) if dtype in kinds else tile


def _with_type(tile: np.ndarray, kind: Any, op: Callable[..., Any]) -> np.ndarray:
    if op.__name__ == "bitcast":
        return tile.view(np.float32)
    return tile.astype(np.float32 if kind == "f32" else np.int32)


STAND_INS = {
    "mapped": _mapped, "instruction": _instruction, "constant": _constant,
    "rounded": _rounded, "with_type": _with_type,
    "arith": types.SimpleNamespace(
        **{n: getattr(arith, n) for n in ARITHMETIC if hasattr(arith, n)}
        | {n: ARITHMETIC[n] for n in ("cmpf", "cmpi", "select")},
        CmpFPredicate=_Names(), CmpIPredicate=_Names(),
    ),
    "ir": types.SimpleNamespace(
        F32Type=types.SimpleNamespace(get=lambda: "f32"),
        IntegerType=types.SimpleNamespace(get_signless=lambda bits: f"i{bits}"),
    ),
}  # fmt: skip


@contextlib.contextmanager
def simulated() -> Iterator[collections.Counter[str]]:
    """Tiles are NumPy arrays inside; gives the operations that ran."""
    COUNTED.clear()
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        for module in MODULES:
            for name, made in STAND_INS.items():
                if hasattr(module, name):
                    patch.setattr(module, name, made)
        yield COUNTED
