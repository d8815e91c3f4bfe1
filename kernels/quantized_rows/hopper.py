"""Programs of rows on Hopper GPUs: what the kernel takes, and where it pays."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax

from rewriter.kernels.norms.hopper_config import LANES
from rewriter.kernels.quantized_rows.config import Rows, likely
from rewriter.kernels.shared.hopper import importable, runs_on
from rewriter.ops.kernel import Kernel, Limits, Traits
from rewriter.ops.row_program import FULL, RowKernel, RowProgram
from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.kernels.norms.hopper_config import Teams
    from rewriter.ops.device import Device

MOST = 1 << 31
"""Arrays with as many elements overflow the kernel's indices."""

LEAST_BYTES = 8 << 20
"""The fewest bytes of the rows: smaller ones stay in the chip's cache."""

MOST_RESULTS = 3
"""The most arrays of rows: numbers, the norm, and a sum in front. More are residuals of
gradients."""

LEAST_COLUMNS = 512
"""Narrower rows are no work for all lanes of a warpgroup."""


def supports(program: RowProgram, m: int, d: int) -> Verdict:
    """Returns whether the kernel takes a program: columns a multiple of 128."""
    if not any(kind == FULL for kind, _ in program.inputs):
        return no("rows", "it reads no rows")
    if m == 0 or d == 0 or d % LANES:
        return no("width", f"rows of {d}, not a multiple of {LANES}")
    if m * d >= MOST:
        return no("size", f"{m * d} elements, of at most 2^31 - 1")
    if not likely(Rows(program, m, d)):
        return no("shared_memory", f"rows of {d} do not fit into shared memory")
    return importable("rewriter.kernels.quantized_rows.hopper_kernel")


def pays(program: RowProgram, m: int, d: int, device: Device) -> Verdict:
    """Returns whether XLA would read the rows more often.

    A sum that needs another one is a further kernel of XLA.
    """
    del device
    rows = Rows(program, m, d)
    if program.depth < 2:
        return no("one sum", "XLA computes one sum and what it gives as fast")
    if (count := sum(program.kind(x) == FULL for x in program.outs)) > MOST_RESULTS:
        return no(
            "results", f"{count} arrays of rows are written, of at most {MOST_RESULTS}"
        )
    if d < LEAST_COLUMNS or m * d * jax.numpy.dtype(rows.dtype).itemsize < LEAST_BYTES:
        return no("small", f"{m} rows of {d} are so small that XLA is as fast")
    return YES


def forward(
    *arrays: Array, program: RowProgram, config: Teams | None = None
) -> list[Array]:
    """Returns the results of a program of rows.

    Args:
        *arrays: By the kinds of the program's inputs [m, d], [m], [d] or [1].
        program: The program.
        config: The teams; the most promising ones by default.

    Returns:
        [m, d] in its dtype, or float32 [m], for each result.
    """
    return _jitted(program, config)(*arrays)


@functools.lru_cache(maxsize=1024)
def _jitted(program: RowProgram, config: Teams | None) -> Any:
    """One function for equal programs, so that layers of a model are lowered once."""
    from rewriter.kernels.quantized_rows import hopper_kernel

    def quantized_rows(*arrays: Array) -> list[Array]:
        return hopper_kernel.computed(program, config, arrays)

    return jax.jit(quantized_rows)


KERNEL = RowKernel(
    Kernel(
        "hopper", "quantized_rows", ("cuda",), 1, forward=forward,
        limits=Limits(runs_on=runs_on), traits=Traits(memory_bounded=True),
    ),
    supports,
    pays,
)  # fmt: skip
"""The kernel of rows."""
