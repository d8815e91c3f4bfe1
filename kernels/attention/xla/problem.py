"""One call: its arrays, sizes and parameters, and slices of the arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.reach import added_reach, is_near, reached
from rewriter.kernels.attention.scored_form import ARRAYS, TABLES
from rewriter.kernels.attention.stored_form import added_to
from rewriter.kernels.attention.visibility import Visibility
from rewriter.kernels.attention.xla.config import DEFAULT
from rewriter.kernels.attention.xla.sizes import Sizes, sizes_of
from rewriter.kernels.shared.loops import fori_loop, zero_after
from rewriter.kernels.shared.slices import part, with_part
from rewriter.ops.score import SOFTMAX
from rewriter.ops.stored import FEW_BITS
from rewriter.ops.widening import applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

    from rewriter.ops.score import Score

AXES = {
    "q": "btnh", "k": "bskh", "v": "bske", "bias": "bnts", "mask": "bnts",
    "dropout": "bnts", "q_segments": "bt", "kv_segments": "bs",
    "kv_positions": "bs", "first_position": "bt", "last_position": "bt",
    "kv_lengths": "b", "offset": "b", "prefix": "b", "alibi": "n", "sinks": "n",
    "scale_factor": "", **dict.fromkeys(ARRAYS, "bnts"), **dict.fromkeys(TABLES, "bnr"),
    "k_scale": "bskh", "k_zero": "bskh", "v_scale": "bske", "v_zero": "bske",
    "out": "btne", "cotangent": "btne", "lse": "bnt", "lse_rest": "bnt",
}  # fmt: skip
"""Every array's axes. All but t and s of k, v, out and lse may have size 1."""


@dataclass(frozen=True)
class Problem:
    """The operands and parameters of one call."""

    arrays: dict[str, Array]
    sizes: Sizes
    zero: Array
    scale: float
    window: tuple[int | None, int | None]
    shift: int
    softcap: float | None
    empty_rows: str
    out_dtype: Any
    wide: Any
    score: Score | None = None
    normalisation: str = SOFTMAX
    divisor: Score | None = None
    widen_k: str | None = None
    widen_v: str | None = None
    fill: float | None = None
    """The score of hidden keys where `reaches` holds."""
    fill_passes: bool = False
    """Whether it is added to their scores, and a gradient passes to these."""
    open_bias: bool = False
    """Whether a bias may be as low as the fill."""
    reaches: Array | None = None
    """Whether hidden keys are weighed, bool []; given if there is a fill."""
    fill_given: bool = False
    """Whether there is a fill, though it may be known not to be reached."""

    @property
    def visibility(self) -> Visibility:
        """What is seen, without numbers that are known at run time."""
        return Visibility(self.sizes.t, self.sizes.s, *self.window)

    def full(self, shape: tuple[int, ...], dtype: Any, value: float = 0) -> Array:
        """Returns a constant array that can start a loop's carry."""
        return jnp.full(shape, value, dtype) + self.zero.astype(dtype)

    def cut(self, name: str, at: dict[str, tuple[Any, int]]) -> Array:
        """Returns an operand's slice at (start, size) by axis letter, widened."""
        steps = {"k": self.widen_k, "v": self.widen_v}.get(name)
        x = self.as_stored(name, at)
        if steps is None:
            return x
        beside = {
            what: self.as_stored(own, at) if own in self.arrays else None
            for what, own in added_to(name).items()
        }
        return applied(x, steps, **beside)

    def as_stored(self, name: str, at: dict[str, tuple[Any, int]]) -> Array:
        """Returns an operand's slice at (start, size) by axis letter."""
        x = self.arrays[name]
        starts, sizes = self.place(AXES[name], x.shape, at)
        return part(x, starts, sizes)

    def place(
        self, axes: str, shape: tuple[int, ...], at: dict[str, tuple[Any, int]]
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Returns the starts and sizes of a slice; axes of size 1 stay whole."""
        whole = [size == 1 or x not in at for x, size in zip(axes, shape, strict=True)]
        starts = [0 if w else at[x][0] for w, x in zip(whole, axes, strict=True)]
        sizes = [
            size if w else at[x][1]
            for w, x, size in zip(whole, axes, shape, strict=True)
        ]
        return starts, tuple(sizes)

    def added(
        self, name: str, into: Array, more: Array, at: dict[str, tuple[Any, int]]
    ) -> Array:
        """Returns `into`, shaped as an operand, plus what is shaped as its slice."""
        starts, sizes = self.place(AXES[name], into.shape, at)
        new = part(into, starts, sizes) + more.reshape(sizes)
        return with_part(into, new.astype(into.dtype), starts)

    def factor(self) -> Array | float:
        """Returns the factor of q kᵀ."""
        if "scale_factor" not in self.arrays:
            return self.scale
        return self.arrays["scale_factor"].astype(self.wide) * self.scale


def loop(start: Any, end: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Runs ``carry = body(i, carry)`` for each i; one step needs no loop."""
    if isinstance(start, int) and isinstance(end, int):
        if start >= end:
            return carry
        if end == start + 1:
            return body(start, carry)
    start, end = jnp.asarray(start, jnp.int32), jnp.asarray(end, jnp.int32)
    return fori_loop(start, end, body, carry)


def problem_of(q: Array, k: Array, v: Array, given: dict[str, Any]) -> Problem:
    """Returns the problem of one call, from arrays and parameters by name."""
    params: dict[str, Any] = {
        "scale": 1.0, "window": (None, None), "shift": 0, "softcap": None,
        "empty_rows": "nan", "out_dtype": None, "score": None, "widen_k": None,
        "widen_v": None, "normalisation": SOFTMAX, "divisor": None, "fill": None,
        "fill_passes": False, "open_bias": False, "reaches": None,
    }  # fmt: skip
    arrays = {"q": q, "k": k, "v": v}
    sizes = sizes_of(q, k, given.pop("config", None) or DEFAULT)
    for name, value in given.items():
        if name in params:
            params[name] = value
        elif value is not None:
            arrays[name] = value
    params["out_dtype"] = jnp.dtype(params["out_dtype"] or q.dtype)
    floats = [x.dtype for x in (q, k, v) if x.dtype.name not in FEW_BITS]
    wide = jnp.promote_types(jnp.result_type(*floats), jnp.float32)
    zero = zero_after(*arrays.values(), dtype=wide)
    params["fill_given"] = params["fill"] is not None
    p = Problem(arrays=arrays, sizes=sizes, zero=zero, wide=wide, **params)
    return p if p.fill is None or p.reaches is not None else _with_reach(p, p.fill)


def _with_reach(p: Problem, fill: float) -> Problem:
    """Returns the problem with whether scores reach its fill, or without the fill."""
    if p.score is not None:  # it may give any number
        near = is_near(fill)
        reaches = jnp.asarray(True) if near else added_reach(p.arrays, fill)
        return replace(p, reaches=reaches)
    numbers = {"scale": p.scale, "shift": p.shift, "softcap": p.softcap}
    reaches = reached({**p.arrays, **numbers, "k": p.cut("k", {})}, fill)
    return replace(p, reaches=reaches, fill=None if reaches is None else fill)
