"""The gated linear unit on Hopper: both branches in one pass over x.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.gated_linear_unit import xla
from rewriter.kernels.gated_linear_unit.branches import Use, combine, refused_addends
from rewriter.kernels.gated_linear_unit.memory import temporary
from rewriter.kernels.ragged.dot import hopper as ragged_dot
from rewriter.kernels.ragged.dot.hopper.config import Tiles
from rewriter.kernels.shared import gated_tiles
from rewriter.kernels.shared.activations_hopper import ON_HOPPER
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import known_sizes
from rewriter.ops.kernel import Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec

NAME = "gated_linear_unit"
"""The name of the kernel in profiles."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: 16 bits, k and f multiples of 64."""
    base = known_sizes(spec, xla.supports)
    if not base.ok:
        return base
    found = [YES, ragged_dot.supports(part_of(spec))]
    if spec.dtype("w_up") != spec.dtype("x"):
        text = f"w_up is {spec.dtype('w_up')}, and x {spec.dtype('x')}"
        found.append(no("dtype", text))
    found += refused_addends(spec)
    return all_of(*found, gated_tiles.computes(str(spec.param("activation"))))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: XLA, which is compiled sooner, took 1.04 of its time on an H200."""
    del spec, platform
    return no(
        "measure",
        "1.04 times as fast as XLA on an H200: chosen only where it was measured",
    )


def part_of(spec: Spec) -> Spec:
    """Returns a branch as a use of a ragged dot with one group."""
    *rows, k = spec.shape("x")
    lhs, rhs = (math.prod(rows), k), (1, *spec.shape("w_gate"))
    dtypes = ("lhs", spec.dtype("x")), ("rhs", spec.dtype("w_gate"))
    return type(spec)(
        "ragged_dot",
        (("lhs", lhs), ("rhs", rhs), ("group_sizes", (1,))),
        (*dtypes, ("group_sizes", "int32")),
        (("mode", "forward"), ("out_dtype", spec.param("out_dtype"))),
    )


def _rows(spec: Spec) -> int:
    """The rows."""
    return math.prod(spec.shape("x")[:-1])


SPACE = gated_tiles.space(_rows)


def forward(
    *, residuals: bool = False, config: Tiles | None = None, **given: Any
) -> Any:
    """Returns the result, as `reference` does; there are no residuals.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles; their columns are those of both branches.
        **given: As for `reference`. The result is of x's dtype or float32.
    """
    from rewriter.kernels.ragged.dot.hopper.branches import Branch
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    use = Use.of(given).without_slopes()
    *outer, k = use.x.shape
    branches = [
        Branch(w[None], bias=None if b is None else b.astype(jnp.float32))
        for w, b in ((use.w_gate, use.b_gate), (use.w_up, use.b_up))
    ]
    join = functools.partial(combine, **use.joining, activations=ON_HOPPER)
    f, rows = use.w_gate.shape[1], use.x.reshape(math.prod(outer), k)
    (out,) = combined(
        NAME, rows, branches, f, None, [join], use.dtype, config or Tiles()
    )
    out = out.reshape(*outer, f)
    return (out, ()) if residuals else out


backward = xla.backward
"""The cotangents of every operand by XLA, block by block: branches are not saved.

So forward and gradients have eight products, and those of the program as written six.
On an H200 (``kernels/gated_linear_unit/tuned/nvidia_h200.json``) these run at equal
rates: 8192 rows of 4096 and 14336 took 10.5 ms (730 TFLOP/s) and 8.1 ms (711). No
kernel that computes branches again can be faster. With branches saved, all that a
kernel can save is to read both of them once, 0.1 ms of 8.1.
"""


KERNEL = HOPPER.kernel(
    "gated_linear_unit", forward, backward, supports,
    Speed(profitable, temporary=temporary),
    SPACE, xla.KERNEL.backward_space,
)  # fmt: skip
