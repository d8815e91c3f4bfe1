"""Few rows of 16 bits times a stored matrix, part by part with scales, on Hopper.

The kernel is `few_rows`, whose steps are the parts of the summed axis here. A part's
product is scaled in registers before it is added up.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax

from rewriter.kernels.quantized_dot import few_rows
from rewriter.kernels.quantized_dot.by_blocks import NAME, Blocks, sizes
from rewriter.kernels.quantized_dot.by_blocks_estimate import estimate, modelled
from rewriter.kernels.quantized_dot.few_rows import FLOATS, TAKEN
from rewriter.kernels.quantized_dot.few_rows.config import (
    MOST,
    Tiles,
    of_warpgroups,
    padded,
)
from rewriter.kernels.shared.hopper import by_estimate, importable, with_stages
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import (
    SIXTEEN,
    Behind,
    behind_in_float32,
    in_float32,
)
from rewriter.ops.cost import FOUR_BITS
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

PARTS = (64, 128)
"""Numbers of a part: those of a step of the kernel."""

WIDE = 128
"""The fewest columns of a block."""


def _part(spec: Spec) -> int:
    return sizes(spec)[1] // int(spec.param("groups"))


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: few 16-bit rows, scales of columns."""
    if spec.symbolic:
        return SYMBOLIC
    found, (m, _, n) = [importable("jax.experimental.pallas.mosaic_gpu")], sizes(spec)
    dtype, stored, part = spec.dtype("x"), spec.dtype("w"), _part(spec)
    if dtype not in SIXTEEN:
        found.append(no("dtype", f"x is {dtype}, not bfloat16 or float16"))
    if stored not in TAKEN:
        found.append(no("dtype", f"w is {stored}, not {', '.join(TAKEN)}"))
    if not 0 < m <= MOST:
        found.append(no("rows", f"{m} rows, not 1 to {MOST}"))
    turned = spec.param("mode") == "transposed" and stored in FOUR_BITS
    if part not in (PARTS[1:] if turned else PARTS):
        found.append(no("groups", f"parts of {part} numbers, not 64 or 128"))
    if n % WIDE or not n:
        found.append(no("alignment", f"n is {n}, not a multiple of {WIDE}"))
    if spec.has("x_scale"):
        found.append(no("x_scale", "it has no scales of rows"))
    widened = in_float32(str(spec.param("widen") or ""), dtype, stored)
    if widened is None or widened.steps:
        text = f"it does not compute the steps {spec.param('widen')!r}"
        found.append(no("widen", text))
    for name, how in zip(("inside", "behind"), _steps(spec.param, dtype), strict=True):
        if how is None or any(sign == "/" for sign, _ in how.steps):  # rounded apart
            text = f"it does not compute the steps {spec.param(name)!r}"
            found.append(no(name, text))
        elif name == "inside" and how.dtype != "float32":
            found.append(no(name, f"parts are added up in {how.dtype}, not float32"))
    return all_of(*found)


def _steps(param: Any, dtype: str) -> tuple[Behind | None, Behind | None]:
    """The steps before the sum over parts, and behind it."""
    sums = str(param("sums") or dtype)
    inside = behind_in_float32(str(param("inside") or ""), sums)
    return inside, behind_in_float32(str(param("behind") or ""), "float32")


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: that of few rows, with parts as steps.

    Three warpgroups in turns took 17.9 µs instead of 19.3 for 16 rows by 4096 x 14336
    of int8, on an H200.
    """
    found = of_warpgroups(spec, device)
    part, z = _part(spec), int(spec.param("groups"))
    stages = found.stages * max(1, found.depth // part)
    made = replace(found, depth=part, stages=stages, splits=min(found.splits, z))
    if padded(sizes(spec)[0]) <= 32 and made.across == 1:
        made = replace(made, turns=3, stages=max(6, stages // 3 * 3))
    return with_stages(made, spec)


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own, part = default(spec, device), _part(spec)
    others = [replace(c, depth=part) for c in few_rows.configs(spec, device)]
    return list(dict.fromkeys([own, *(with_stages(c, spec) for c in others)]))


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: as for few rows, with parts as steps."""
    found = [YES, few_rows.fits(config, spec, device)]
    if config.depth != _part(spec):
        text = f"{config.depth} rows a step are no part of {_part(spec)}"
        found.append(no("depth", text))
    return all_of(*found)


def forward(*, residuals: bool = False, config: Tiles, **given: Any) -> Any:
    """Returns the result, as `computed` does, for supported uses.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **given: The fields of `Blocks`.
    """
    from rewriter.kernels.quantized_dot.few_rows import kernel
    from rewriter.kernels.quantized_dot.few_rows.registers import Steps

    use = Blocks(**given)
    (*before, k), n, dtype = use.x.shape, use.columns, use.x.dtype.name
    inside, behind = _steps(lambda name: getattr(use, name), dtype)
    assert inside is not None
    assert behind is not None
    joined, dtypes = [], tuple(dtype for _, dtype in inside.dtypes)
    for kind in dtypes:
        assert use.of_columns is not None
        scales = use.of_columns.astype(kind)
        joined.append(jnp.broadcast_to(scales, (use.groups, n)))
    steps = tuple((s, 0 if x == "scale" else x) for s, x in inside.steps)
    matrix = use.w
    if matrix.dtype.name == FLOATS:
        matrix = lax.bitcast_convert_type(matrix, jnp.uint4)  # as the hardware knows it
    plan = kernel.Use(
        Steps((), (), dtype), behind.steps, use.w.dtype.name, behind.dtype, config,
        use.transposed, inside=Steps(steps, dtypes, "float32"),
    )  # fmt: skip
    rows = use.x.reshape(math.prod(before), k)
    name = "block_scaled_dot_of_few_rows"
    out = kernel.rows_times_matrix(name, rows, matrix, joined, [], plan)
    out = out.reshape(*before, n)
    return (out, ()) if residuals else out


KERNEL = HOPPER.kernel(
    NAME, forward, None, supports,
    Speed(by_estimate, estimate=estimate, modelled=modelled),
    Space(Tiles, default, configs, fits), name="hopper_few_rows",
)  # fmt: skip
