"""Evaluates primitives on numbers, or on NumPy arrays of them.

Each function gets the operands and the equation's parameters. Results are those of the
operands' dtypes; callers round them to the dtype of the equation's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def _each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    return np.vectorize(function, otypes=[float])


def _logistic(a: Any) -> Any:
    return 1 / (1 + np.exp(np.negative(a)))


NUMERIC: Mapping[str, Callable[..., Any]] = {
    "add": lambda a, b, p: a + b,
    "add_any": lambda a, b, p: a + b,
    "sub": lambda a, b, p: a - b,
    "mul": lambda a, b, p: a * b,
    "div": lambda a, b, p: np.true_divide(a, b),
    "neg": lambda a, p: -a,
    "max": lambda a, b, p: np.maximum(a, b),
    "min": lambda a, b, p: np.minimum(a, b),
    "clamp": lambda low, a, high, p: np.minimum(np.maximum(a, low), high),
    "abs": lambda a, p: np.abs(a),
    "sign": lambda a, p: np.sign(a),
    "square": lambda a, p: a * a,
    "integer_pow": lambda a, p: np.asarray(a) ** p["y"],
    "pow": lambda a, b, p: np.power(a, b),
    "sqrt": lambda a, p: np.sqrt(a),
    "rsqrt": lambda a, p: 1 / np.sqrt(a),
    "exp": lambda a, p: np.exp(a),
    "exp2": lambda a, p: np.exp2(a),
    "expm1": lambda a, p: np.expm1(a),
    "log": lambda a, p: np.log(a),
    "log1p": lambda a, p: np.log1p(a),
    "logaddexp": lambda a, b, p: np.logaddexp(a, b),
    "exp_neg_sq": lambda a, p: np.exp(-a * a),
    "one_minus_square": lambda a, p: (1 - a) * (1 + a),
    "logistic": lambda a, p: _logistic(a),
    "tanh": lambda a, p: np.tanh(a),
    "erf": lambda a, p: _each(math.erf)(a),
    "erfc": lambda a, p: _each(math.erfc)(a),
    "is_finite": lambda a, p: np.isfinite(a),
    "eq": lambda a, b, p: a == b,
    "ne": lambda a, b, p: a != b,
    "gt": lambda a, b, p: a > b,
    "lt": lambda a, b, p: a < b,
    "ge": lambda a, b, p: a >= b,
    "le": lambda a, b, p: a <= b,
    "and": lambda a, b, p: np.logical_and(a, b),
    "or": lambda a, b, p: np.logical_or(a, b),
    "not": lambda a, p: np.logical_not(a),
}
"""By the primitive's name: its result for operands and parameters. Integers and bits of
integers are not meant."""
