"""Products of blocks of 8 bits on Hopper: each part's sum is scaled in registers.

The kernel is that of products of 8-bit rows and matrices, see `eight_bits`. There sums
of some steps are added to float32 registers. Here these steps are a part of the summed
axis, and its sums are multiplied by the scales of the part's rows and columns first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.quantized_dot.by_blocks import NAME, Blocks, sizes
from rewriter.kernels.quantized_dot.by_blocks_estimate import estimate, modelled
from rewriter.kernels.quantized_dot.eight_bits import finished
from rewriter.kernels.ragged.dot.hopper import config as of_dot
from rewriter.kernels.ragged.dot.hopper.config import Tiles
from rewriter.kernels.ragged.dot.hopper.eight_bits import (
    FLOATS,
    MIXED,
    PROMOTED,
    STEP,
    WIDE,
)
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import Behind, behind_in_float32
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.widening import ROWS
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: both of 8 bits, parts of whole steps."""
    if spec.symbolic:
        return SYMBOLIC
    found = [importable("jax.experimental.pallas.mosaic_gpu"), _takes(spec)]
    m, k, n = sizes(spec)
    own = k // int(spec.param("groups"))
    if own % STEP or not own:
        found.append(no("groups", f"parts of {own} numbers, not a multiple of {STEP}"))
    if n % WIDE or not n:
        found.append(no("alignment", f"n is {n}, not a multiple of {WIDE}"))
    if not m:
        found.append(no("rows", "there are no rows"))
    if spec.dtype("x") in FLOATS:
        most = PROMOTED.get(spec.param("precision"))
        if most is None:
            text = f"it does not multiply at precision {spec.param('precision')!r}"
            found.append(no("precision", text))
        elif most and own > most * STEP:
            text = f"sums of {own} products in 14 bits, at most {most * STEP}"
            found.append(no("sums", text))
    if spec.param("widen"):
        found.append(no("widen", "the matrix is widened before the product"))
    return all_of(*found, *_refused_steps(spec))


def _takes(spec: Spec) -> Verdict:
    """Whether tensor cores multiply numbers of these dtypes, and sum in 32 bits."""
    x, w, sums = spec.dtype("x"), spec.dtype("w"), spec.param("sums")
    floats = x in FLOATS and w in FLOATS
    if not (floats or x == w == "int8"):
        return no("dtype", f"x is {x}, and w {w}: not both int8, or 8-bit floats")
    if x != w and not MIXED:
        return no("dtype", f"{x} times {w} needs jax 0.11")
    wanted = "float32" if floats else "int32"
    return YES if sums == wanted else no("sums", f"sums are {sums}, not {wanted}")


def _refused_steps(spec: Spec) -> list[Verdict]:
    """Why steps before or behind the sum over parts are not computed."""
    found = []
    for name, how in zip(("inside", "behind"), _steps(spec.param), strict=True):
        if how is None or any(sign == "/" for sign, _ in how.steps):  # rounded apart
            text = f"it does not compute the steps {spec.param(name)!r}"
            found.append(no(name, text))
        elif name == "inside" and how.dtype != "float32":
            found.append(no(name, f"parts are added up in {how.dtype}, not float32"))
    return found


def _steps(param: Any) -> tuple[Behind | None, Behind | None]:
    """The steps before the sum over parts, and behind it."""
    inside = behind_in_float32(str(param("inside") or ""), str(param("sums")))
    return inside, behind_in_float32(str(param("behind") or ""), "float32")


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config."""
    del device
    return FEW if sizes(spec)[0] <= 64 else MORE


FEW = Tiles(64, 128, 8, claimed=False)
"""Tiles of few rows."""

MORE = Tiles(128, 128, 6, claimed=False)
"""Tiles of which each warpgroup has half the rows, and registers for sums twice."""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own = default(spec, device)
    others = [MORE, replace(MORE, width=16), Tiles(128, 192, 4, claimed=False), FEW]
    return list(dict.fromkeys([own, *others]))


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: as for a ragged dot, with sums held twice."""
    found = [of_dot.fits(config, spec, device)]
    if config.registers > MOST // 2:
        text = f"{2 * config.registers} for sums, of at most {MOST}"
        found.append(no("registers", text))
    return all_of(YES, *found)


MOST = 192
"""Registers per lane for sums of both kinds."""


def forward(
    *, residuals: bool = False, config: Tiles | None = None, **given: Any
) -> Any:
    """Returns the result, as `computed` does, for supported uses.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **given: The fields of `Blocks`.
    """
    from rewriter.kernels.ragged.dot.hopper.branches import Branch, Inside
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    use, config = Blocks(**given), config or MORE
    n, (*before, k) = use.columns, use.x.shape
    rows, steps = math.prod(before), k // use.groups // STEP
    inside, behind = _steps(lambda name: getattr(use, name))
    assert inside is not None
    assert behind is not None
    matrix = use.w if use.transposed else use.w.T
    joined = tuple(_joined(use, name, dtype, config) for name, dtype in inside.dtypes)
    (out,) = combined(
        "block_scaled_dot", use.x.reshape(rows, k), [Branch(matrix[None])], n, None,
        [finished(behind)], jnp.dtype(behind.dtype), config, True, promoted=steps,
        inside=Inside(finished(inside), joined),
    )  # fmt: skip
    out = out.reshape(*before, n)
    return (out, ()) if residuals else out


def _joined(use: Blocks, name: str, dtype: str, config: Tiles) -> Any:
    """Scales as the kernel reads them: for whole tiles."""
    from rewriter.kernels.ragged.dot.hopper.branches import Blocks as Scales

    if name == ROWS:
        assert use.x_scale is not None
        values = use.x_scale.reshape(-1, use.x_scale.shape[-1]).T.astype(dtype)
        return Scales(_padded(values, config.block_m), "rows")
    assert use.w_scale is not None
    values, n = use.w_scale.astype(dtype), use.columns
    wide = n // values.shape[1]
    if wide % config.columns == 0:
        return Scales(values.astype(jnp.float32), "tiles", wide)
    return Scales(_padded(jnp.repeat(values, wide, 1), config.block_n), "columns")


def _padded(values: Array, size: int) -> Array:
    """Values with as many columns as whole tiles have."""
    return jnp.pad(values, ((0, 0), (0, -values.shape[1] % size)))


KERNEL = HOPPER.kernel(
    NAME, forward, None, supports,
    Speed(by_estimate, estimate=estimate, modelled=modelled),
    Space(Tiles, default, configs, fits),
)  # fmt: skip
