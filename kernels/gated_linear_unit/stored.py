"""A gated linear unit that widens some columns of its stored matrices at a time.

XLA writes both matrices in the dtype of the rows, and reads them again. This one loops
over blocks of columns. It widens a block of each matrix, multiplies, and joins the two
branches before it goes on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from rewriter.kernels.gated_linear_unit.branches import branch, combine
from rewriter.kernels.gated_linear_unit.op import STORED
from rewriter.kernels.gated_linear_unit.stored_form import ADDED, matrix_of
from rewriter.kernels.gated_linear_unit.xla import product
from rewriter.kernels.shared import columns
from rewriter.kernels.shared.columns import Block
from rewriter.kernels.shared.kinds import XLA
from rewriter.kernels.shared.products import unturned
from rewriter.ops.activations import ACTIVATIONS
from rewriter.ops.kernel import Spec, Speed
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

BRANCHES = ("gate", "up")


MOST = 1 << 19
"""The most numbers of a block of one matrix, unless it has 64 columns."""


def columns_of(spec: Spec) -> int:
    """Returns the columns of a branch."""
    f = spec.shape("w_gate")[1]
    return f if spec.param("halves") is None else f // 2


SPACE = columns.space(MOST, columns_of, (64, 128, 256, 1024))


def supports(spec: Spec) -> Verdict:
    """Takes rows of floats, matrices of known sizes and a known activation."""
    found = [columns.takes(spec, "w_gate")]
    if spec.param("activation") not in ACTIVATIONS:
        found.append(no("activation", f"{spec.param('activation')} is not known"))
    return all_of(*found)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes on a CPU for few rows and large matrices, as for a quantized dot."""
    return columns.pays(spec, platform, spec.shape("w_gate")[0] * columns_of(spec))


def forward(
    *,
    residuals: bool = False,
    config: Block | None = None,
    widen: str | None = None,
    halves: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
    **given: Any,
) -> Any:
    """Returns the result, as the reference does; there are no residuals.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The block.
        widen: As in `stored_form.computed`.
        halves: As there.
        precision: As there.
        out_dtype: As there.
        **given: Operands of the op, and how `combine` joins the branches.
    """
    use = _Use.of(given, widen, halves, precision)
    joining = {**use.joining, "slopes": (), "slopes_up": ()}  # of derivatives
    dtype = out_dtype or use.x.dtype

    def block(first: Any, size: int) -> Array:
        gate, up = (use.branch(b, first, size) for b in BRANCHES)
        return combine(gate, up, **joining).astype(dtype)

    out = columns.joined(block, use.columns, config)
    return (out, ()) if residuals else out


def backward(
    *,
    out: None = None,
    residuals: tuple[()] = (),
    cotangent: Array,
    config: Block | None = None,
    widen: str | None = None,
    halves: str | None = None,
    precision: str | None = None,
    out_dtype: str | None = None,
    **given: Any,
) -> dict[str, Array]:
    """Returns the cotangent of x; the reference computes those of other operands.

    Args:
        out: Not needed.
        residuals: Empty.
        cotangent: [..., f].
        config: The block.
        widen: As in `forward`.
        halves: As in `forward`.
        precision: As in `forward`.
        out_dtype: Not needed.
        **given: As in `forward`.
    """
    del out, residuals, out_dtype
    use = _Use.of(given, widen, halves, precision)
    wide = jnp.promote_types(use.x.dtype, jnp.float32)
    nothing = jnp.zeros((math.prod(use.x.shape[:-1]), use.x.shape[-1]), wide)

    def block(first: Any, size: int) -> Array:
        matrices = [use.matrix(b, first, size) for b in BRANCHES]
        branches = [
            use.branch(b, first, size, w)
            for b, w in zip(BRANCHES, matrices, strict=True)
        ]
        _, back = jax.vjp(functools.partial(combine, **use.joining), *branches)
        own = columns.taken(cotangent, first, size).astype(wide)
        total = jnp.zeros_like(nothing)
        for d, w in zip(back(own), matrices, strict=True):
            narrow = jnp.result_type(use.x, w)
            total += product(
                d.reshape(-1, size), w, (1, 1), precision=precision, narrow=narrow,
                wide=wide,
            )  # fmt: skip
        return total

    total = columns.added(block, nothing, use.columns, config)
    return {"x": total.reshape(use.x.shape).astype(use.x.dtype)}


@dataclass(frozen=True)
class _Use:
    """Operands and parameters of one call.

    Attributes:
        x: The rows.
        arrays: The other operands by name.
        joining: How `combine` joins the branches.
        widen: The steps of both matrices.
        firsts: The array of each branch, and its first column there.
        columns: Columns of a branch.
        precision: As in `jax.lax.dot`.
    """

    x: Array
    arrays: Mapping[str, Array]
    joining: Mapping[str, Any]
    widen: str | None
    firsts: Mapping[str, tuple[str, int]]
    columns: int
    precision: str | None

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        widen: str | None,
        halves: str | None,
        precision: str | None,
    ) -> _Use:
        """Sorts what a kernel is given."""
        arrays = {n: a for n, a in given.items() if n in STORED.names and a is not None}
        joining = {n: a for n, a in given.items() if n not in STORED.names}
        f = given["w_gate"].shape[1]
        firsts = {b: (f"w_{b}", 0) for b in BRANCHES}
        if halves is not None:
            f //= 2
            order = BRANCHES if halves == "gate_up" else BRANCHES[::-1]
            firsts = {b: ("w_gate", i * f) for i, b in enumerate(order)}
        x = arrays.pop("x")
        return cls(x, arrays, joining, widen, firsts, f, precision)

    def matrix(self, name: str, first: Any, size: int) -> Array:
        """Returns some columns of a branch's matrix, widened: [k, size]."""
        array, before = self.firsts[name]
        own: dict[str, Any] = {"x": self.x}
        for one in (array, *(f"{array}_{what}" for what in ADDED)):
            if one in self.arrays:
                own[one] = columns.taken(self.arrays[one], before + first, size)
        return matrix_of(own, array, self.widen)

    def branch(
        self, name: str, first: Any, size: int, matrix: Array | None = None
    ) -> Array:
        """Returns some columns of a branch before its activation: [..., size]."""
        if matrix is None:
            matrix = self.matrix(name, first, size)
        names = (f"b_{name}", f"rows_{name}")
        added = [self.arrays[n] for n in names if n in self.arrays]
        added = [columns.taken(a, first, size) for a in added]
        return branch(unturned(self.x), matrix, added, self.precision)


KERNEL = XLA.kernel(
    STORED.name, forward, backward, supports,
    Speed(profitable), SPACE,
)  # fmt: skip
