"""Ragged dots of quantized matrices on Hopper, which widens them in shared memory.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.ragged.dot import hopper as ragged_dot
from rewriter.kernels.ragged.dot.hopper import config as of_dot
from rewriter.kernels.ragged.dot.hopper.config import STEP, STORED, WARPGROUPS
from rewriter.kernels.ragged.dot.op import OP
from rewriter.kernels.ragged.dot.op import STORED as STORED_OP
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.dot.stored_estimate import ROWS, estimate
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.shared.hopper import by_estimate
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.stored import EIGHT_BITS, widened_operands, widened_spec
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

NAME = STORED_OP.name
"""The name of the kernel in profiles."""

WIDE = 128
"""Columns of a copy of 8-bit numbers: a row of 128 bytes."""

PLACES = 2
"""Widened parts of a step that a warpgroup holds."""


@dataclass(frozen=True)
class Tiles(of_dot.Tiles):
    """The config of a ragged dot, where each warpgroup has its own columns.

    So a warpgroup widens its own part, and waits for no other one. Tiles have 64 rows
    whose columns both share, or each warpgroup has tiles of its own.
    """

    block_m: int = 64
    block_n: int = 256
    stages: int = 5

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory for 16-bit rows and 8-bit matrices."""
        copied = STEP * self.stages * (2 * self.block_m + self.block_n)
        widened = 2 * WARPGROUPS * PLACES * STEP * self.columns
        return copied + widened + 2 * WARPGROUPS * STORED + of_dot.BARRIERS


MANY = Tiles(128, 128, apart=True)
"""Tiles for many rows of a group."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: 16-bit rows, whole copies."""
    if spec.symbolic:
        return SYMBOLIC
    found = [ragged_dot.supports(widened_spec(OP, spec))]
    if (stored := spec.dtype("rhs")) not in EIGHT_BITS:
        found.append(no("dtype", f"rhs is {stored}, not {', '.join(EIGHT_BITS)}"))
    if (mode := spec.param("mode")) not in ("forward", "transposed"):
        found.append(no("mode", f"no kernel for the mode {mode}"))
    n = spec.shape("rhs")[-1]
    if mode == "forward" and n % WIDE:
        found.append(no("alignment", f"n is {n}, not a multiple of {WIDE}"))
    return all_of(YES, *found)


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config, by rows of a group."""
    del device
    return Tiles() if _few_rows(spec) else MANY


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    del device
    small = [
        Tiles(),
        Tiles(64, 128, 8),
        Tiles(64, 128, apart=True),
        Tiles(behind=False),
    ]
    return small if _few_rows(spec) else [MANY, replace(MANY, width=16), *small[:1]]


def _few_rows(spec: Spec) -> bool:
    """Whether groups have, on average, no more rows than a small tile."""
    return spec.shape("lhs")[0] <= ROWS[0] * spec.shape("group_sizes")[0]


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: as for a ragged dot, and without sharing."""
    found = [of_dot.fits(config, spec, device)]
    if not (config.by_columns or config.apart):
        text = f"{config.block_m} rows that warpgroups share, each with all columns"
        found.append(no("apart", text))
    if spec.param("mode") == "forward" and config.columns not in (64, 128, 256):
        text = f"{config.columns} columns a warpgroup, not 64, 128 or 256"
        found.append(no("block_n", text))
    return all_of(YES, *found)


def forward(
    *operands: Array,
    rhs_scale: Array | None = None,
    residuals: bool = False,
    config: Tiles | None = None,
    **given: Any,
) -> Any:
    """Returns the ragged dot, as `reference` does, for supported uses.

    Products are exact in the float32 that they are summed in, so that `precision`
    changes nothing. Numbers times their scale are rounded to the dtype of lhs.

    Args:
        *operands: The first fields of `Use`.
        rhs_scale: [g, n].
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **given: The other fields of `Use`. The result is of the dtype of lhs by
            default.
    """
    from rewriter.kernels.ragged.dot.hopper import widen
    from rewriter.kernels.ragged.dot.hopper.branches import Branch
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    use = Use(*operands, **given)
    scales = () if rhs_scale is None else (widen.rows(rhs_scale),)
    branch = Branch(use.rhs, within=scales, of_groups=True)
    steps = widen.SCALED if scales else ()
    (out,) = combined(
        NAME, use.lhs, [branch], use.columns, use.group_sizes,
        [lambda product: product], jnp.dtype(use.out_dtype or use.lhs.dtype),
        config or Tiles(), use.transposed, functools.partial(widen.side, steps=steps),
    )  # fmt: skip
    return (out, ()) if residuals else out


def backward(*, cotangent: Array, config: Any = None, **given: Any) -> dict[str, Array]:
    """Returns the cotangent of lhs, by the dequantized matrices.

    The reference computes those of the scale, and of float matrices.

    Args:
        cotangent: As the result of `forward`.
        config: Not needed.
        **given: As for `rewriter.kernels.ragged.dot.xla.backward`, and ``rhs_scale``.
    """
    del config
    found = ragged_dot.backward(cotangent=cotangent, **widened_operands(OP, given))
    return {"lhs": found["lhs"]}


SPACE = Space(Tiles, default, configs, fits)

KERNEL = anywhere(
    HOPPER.kernel(
        NAME, forward, backward, supports, Speed(by_estimate, estimate=estimate),
        SPACE, version=2,
    )
)  # fmt: skip
