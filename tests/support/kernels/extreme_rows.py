"""Rows far from 0, large, tiny, constant and of zeros: as exact as the formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rewriter.ops.registry import registry
from tests.support.kernels.float64 import float64

Run = Callable[[dict[str, Any], Any, float], Mapping[str, Any]]
"""From operands, the cotangent and eps to "out" and the cotangent "x"."""


ROWS = 8
"""Rows of a kind."""


def rows(d: int) -> dict[str, np.ndarray]:
    """Rows of d columns by what is special of them, float32 [ROWS, d] each."""
    base = np.random.default_rng(0).standard_normal((ROWS, d))
    made = {
        "mean of 2000": base + 2000,
        "mean of 1e4, spread of 1e-3": 1e4 + base * 1e-3,
        "mean of 100, spread of 1e-3": 100 + base * 1e-3,
        "whole numbers from 4e4": 4e4 + np.arange(d) + base * 0,
        "1e18": base * 1e18,
        "squares that overflow": base * 1e20,
        "1e30": base * 1e30,
        "1e-20": base * 1e-20,
        "1e-30": base * 1e-30,
        "constant": 3.0 + base * 0,
        "zeros": base * 0,
        "NaN": np.where(np.arange(d) == 3, np.nan, base),
    }
    return {name: x.astype(np.float32) for name, x in made.items()}


def check(op: str, d: int, run: Run) -> None:
    """Asserts that errors are those of the formula in float32, and finite what is."""
    cases = rows(d)
    x = np.concatenate(list(cases.values()))
    # As the rows themselves: what is wrong about a mean then shows most.
    alike = np.tile(
        np.random.default_rng(0).standard_normal((ROWS, d)), (len(cases), 1)
    )
    up = np.random.default_rng(1).standard_normal(x.shape) + alike
    up = up.astype(np.float32)
    scale = np.linspace(0.5, 1.5, d, dtype=np.float32)
    for eps in (1e-5, 1e-30, 0.0):
        given = {"x": x, "scale": scale}
        plain = _of_formula(op, given, up, eps)
        with float64():
            wide = {n: np.asarray(a, np.float64) for n, a in given.items()}
            exact = _of_formula(op, wide, up.astype(np.float64), eps)
        made = run(given, up, eps)
        for part in ("out", "x"):
            for i, case in enumerate(cases):
                if case == "constant" and eps < 1e-5:
                    continue  # of rounding alone
                here = slice(i * ROWS, (i + 1) * ROWS)
                trio = (np.asarray(y[part])[here] for y in (made, plain, exact))
                _as_good(*trio, f"{part} of {case}, eps {eps}")


def _as_good(got: Any, plain: Any, exact: Any, which: str) -> None:
    got, plain = (y.astype(np.float64) for y in (got, plain))
    if which.startswith(("out of zeros", "out of NaN")):
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(plain), which)
    # The formula's own gradient has r³, which overflows before the gradient does, and
    # not every device has squares of 1e-20.
    assert np.isfinite(got[np.isfinite(plain)]).all(), which
    fine = np.isfinite(plain) & np.isfinite(exact)
    size = np.abs(exact[fine]).max(initial=1e-30)
    mine, theirs = (np.abs(y - exact)[fine].max(initial=0.0) for y in (got, plain))
    assert mine <= 2 * theirs + 1e-5 * size, f"{which}: {mine:.1e}, {theirs:.1e}"


def _of_formula(op: str, given: dict[str, Any], up: Any, eps: float) -> dict[str, Any]:
    reference = registry().op(op).reference

    @jax.jit
    def both(given: Any, up: Any) -> Any:
        out, back = jax.vjp(
            lambda x: reference(**{**given, "x": x}, eps=eps), given["x"]
        )
        return {"out": out, "x": back(up)[0]}

    return {n: np.asarray(y) for n, y in both(given, up).items()}
