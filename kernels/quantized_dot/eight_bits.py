"""Rows of 8 bits times a matrix of 8 bits on Hopper, whose tensor cores take both.

The kernel is that of ragged dots, with one group. Scales of rows and columns, a bias
and casts are applied to the sums before they are stored, with each rounding of the
program. Tensor cores read both operands along the summed axis: a matrix [k, n] is
transposed first. A product of few rows has fewer tiles than a GPU has processors, so
its summed axis may be split. The parts' products are then added up behind the kernel.

Sums of int8 are exact. Of sums of 8-bit floats tensor cores keep 14 bits. So these are
added to float32 registers every `promoted` steps: after 256 products, or after 128
where the program asks for a high precision. XLA adds them up in such registers only
then. On an H200, sums of positive products were wrong by this much, relatively::

    products    XLA       after 512   after 256   after 128   XLA, "highest"
    1024        0.015     0.0061      0.0021      0.0006      0.0006
    16384       0.22      0.0061      0.0021      0.0006      0.0006

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.quantized_dot.eight_bits_estimate import (
    estimate,
    kind_of_sums,
    margin,
    modelled,
    turns,
)
from rewriter.kernels.quantized_dot.use import Use
from rewriter.kernels.ragged.dot.hopper import config as of_dot
from rewriter.kernels.ragged.dot.hopper.eight_bits import (
    FLOATS,
    MIXED,
    PROMOTED,
    STEP,
    WIDE,
)
from rewriter.kernels.shared.hopper import PROCESSORS, by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import ROUND, Behind, behind_in_float32
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.widening import BIAS, ROWS
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

NAME = "eight_bit_dot"
"""The name of the kernel in profiles."""


@dataclass(frozen=True)
class Tiles(of_dot.Tiles):
    """The config: tiles as of a ragged dot, whose bytes are the same.

    Attributes:
        splits: The number of parts of the summed axis that are summed apart.
        promoted: The number of steps after which sums are added to float32 registers;
            0 for never.
    """

    claimed: bool = False
    splits: int = 1
    promoted: int = 0


def sizes(spec: Spec) -> tuple[int, int, int]:
    """Returns rows, the summed axis, columns."""
    *rows, k = spec.shape("x")
    n = spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]
    return math.prod(rows), k, n


def promoted(spec: Spec) -> int:
    """Returns the most steps that are summed in 14 bits, where sums are not exact.

    0 is for any number of steps.
    """
    most = PROMOTED.get(spec.param("precision"), 0)
    if spec.dtype("x") not in FLOATS or not most:
        return 0
    return math.gcd(sizes(spec)[1] // STEP, most)


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: both of 8 bits, whole copies."""
    if spec.symbolic:
        return SYMBOLIC
    found = [importable("jax.experimental.pallas.mosaic_gpu"), _takes(spec)]
    m, k, n = sizes(spec)
    if k % STEP or not k:
        found.append(no("alignment", f"k is {k}, not a multiple of {STEP}"))
    if n % WIDE or not n:
        found.append(no("alignment", f"n is {n}, not a multiple of {WIDE}"))
    if not m:
        found.append(no("rows", "there are no rows"))
    if spec.dtype("x") in FLOATS and spec.param("precision") not in PROMOTED:
        text = f"it does not multiply at precision {spec.param('precision')!r}"
        found.append(no("precision", text))
    return all_of(*found, *_refused_steps(spec))


def _takes(spec: Spec) -> Verdict:
    """Whether tensor cores multiply numbers of these dtypes."""
    x, w, sums = spec.dtype("x"), spec.dtype("w"), spec.param("sums")
    text = f"x is {x}, and w {w}: not both int8, or 8-bit floats"
    if x == "int8":
        wanted: tuple[str, ...] = ("int32",)
        verdict = YES if w == x else no("dtype", text)
    else:
        wanted = ("float32", "bfloat16", "float16")
        verdict = YES if x in FLOATS and w in FLOATS else no("dtype", text)
    if verdict.ok and x != w and not MIXED:
        verdict = no("dtype", f"{x} times {w} needs jax 0.11")
    if verdict.ok and sums not in wanted:
        verdict = no("sums", f"sums are {sums}, not {' or '.join(wanted)}")
    return verdict


def _refused_steps(spec: Spec) -> list[Verdict]:
    """Why steps before or behind the product are not computed."""
    found = []
    if spec.param("widen"):
        text = f"the matrix is widened by {spec.param('widen')!r} before the product"
        found.append(no("widen", text))
    behind = str(spec.param("behind") or "")
    how = behind_in_float32(behind, str(spec.param("sums")))
    if how is None or any(sign == "/" for sign, _ in how.steps):  # not rounded alike
        found.append(no("behind", f"it does not compute the steps {behind!r}"))
    elif how.rounds_a_product_before_a_sum:
        text = "its compiler leaves out the rounding of a product before a sum"
        found.append(no("behind", text))
    return found


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: as many parts as leave few processors idle.

    On an H200, 1024 rows by 4096 x 14336 of int8 took 80 µs with tiles of each
    warpgroup's own, and 95 with shared ones of 128 x 256. 8192 cubed took 679 and 673.
    """
    del device
    often = promoted(spec)
    if sizes(spec)[0] <= 64:
        found = FEW
    elif not often:
        found = APART
    else:
        times = turns(*sizes(spec), kind_of_sums(spec))
        found = SHARED if times[128] <= times[192] else WIDER
    return _with_parts(replace(found, promoted=often), spec)


FEW = Tiles(64, 128, 8)
"""Tiles of few rows."""

APART = Tiles(128, 128, 6, apart=True)
"""Tiles of more rows, one for each warpgroup."""

SHARED, WIDER = Tiles(128, 128, 6), Tiles(128, 192, 4)
"""Tiles of which each warpgroup has half the rows, and registers for sums twice."""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own, often = default(spec, device), promoted(spec)
    if often:
        others = [replace(c, promoted=often) for c in (SHARED, WIDER)]
    else:
        others = [APART, Tiles(), Tiles(width=16), Tiles(128, 192)]
    steps = sizes(spec)[1] // STEP
    split = [replace(own, splits=s) for s in (1, 2, 4) if steps % s == 0]
    return list(dict.fromkeys([own, *others, *split]))


def _with_parts(config: Tiles, spec: Spec) -> Tiles:
    """The config with the number of parts that takes the least time."""
    m, k, n = sizes(spec)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    steps = k // STEP

    def cost(parts: int) -> float:
        turns = -(-tiles * parts // PROCESSORS) * (-(-steps // parts) + FIRST)
        added = 0.0 if parts == 1 else parts * m * ADDED / k
        return turns * PROCESSORS / (tiles * steps) + added

    some = [s for s in (1, 2, 4, 8) if steps % (s * max(config.promoted, 1)) == 0]
    return replace(config, splits=min(some or [1], key=cost))


FIRST = 4
"""Steps that a tile's first copies and its result take."""

ADDED = 24.0
"""Bytes that are moved for a number of a part's product: written, read, written."""


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: as for a ragged dot, and parts are equal."""
    found = [of_dot.fits(config, spec, device)]
    steps, often, most = sizes(spec)[1] // STEP, config.promoted, promoted(spec)
    if steps % (config.splits * max(often, 1)):
        text = f"{steps} steps do not make {config.splits} parts of {often} each"
        found.append(no("splits", text))
    if often > most or (most and not often):
        text = f"sums of {often} steps in 14 bits (0 for all), at most {most}"
        found.append(no("promoted", text))
    if often and config.registers > MOST // 2:
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
        **given: The fields of `Use`.
    """
    from rewriter.kernels.ragged.dot.hopper.branches import Along, Branch
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    use, config = Use(**given), config or Tiles()
    n, parts, sums = use.columns, config.splits, jnp.dtype(use.sums)
    rows, k = math.prod(use.x.shape[:-1]), use.x.shape[-1]
    matrix = use.w if use.transposed else use.w.T
    how = behind_in_float32(use.behind, sums.name)
    assert how is not None
    lhs, result, dtype = use.x.reshape(rows, k), _as_it_is, sums
    along: list[Along] = []
    if parts == 1:
        result, dtype = finished(how), jnp.dtype(how.dtype)
        along = [
            Along(_values(use, name, own, rows, n, config.block_m), name == ROWS)
            for name, own in how.dtypes
        ]
    else:
        lhs = lhs.reshape(rows, parts, k // parts).swapaxes(0, 1)
        lhs = lhs.reshape(parts * rows, k // parts)
        dtype = jnp.dtype("int32" if sums == jnp.int32 else "float32")
    (out,) = combined(
        NAME, lhs, [Branch(matrix[None], split=parts > 1)], n, None, [result], dtype,
        config, True, groups=parts, along=along, promoted=config.promoted,
    )  # fmt: skip
    out = out.reshape(parts, *use.x.shape[:-1], n)
    out = out[0] if parts == 1 else use.finished(out.sum(0).astype(sums))
    return (out, ()) if residuals else out


def _as_it_is(product: Any) -> Any:
    return product


def _values(use: Use, name: str, dtype: str, rows: int, n: int, tile: int) -> Array:
    """[rows or n] values in the dtype in which they are joined, for whole tiles."""
    if name == ROWS:
        assert use.x_scale is not None
        return jnp.pad(use.x_scale.reshape(rows).astype(dtype), (0, -rows % tile))
    if name == BIAS:
        assert use.bias is not None
        return use.bias.astype(dtype)
    assert use.w_scale is not None
    return jnp.broadcast_to(use.w_scale[0].astype(dtype), (n,))


def finished(how: Behind) -> Callable[..., Any]:
    """Returns a function of a block of sums, and blocks of what is joined, by name."""
    from rewriter.kernels.shared import pallas_gpu

    names = [name for name, _ in how.dtypes]

    def result(product: Any, *joined: Any) -> Any:
        if how.dtype == "int32":
            return product
        product = product.astype(jnp.float32)
        for sign, what in how.steps:
            if sign == ROUND:
                product = product.astype(what).astype(jnp.float32)
                continue
            if isinstance(what, str):
                others = [joined[names.index(name)] for name in what.split("*")]
                other = functools.reduce(operator.mul, others)
            else:
                other = what
            product = pallas_gpu.JOINS[sign](product, other)
        return product

    return result


KERNEL = HOPPER.kernel(
    "quantized_dot", forward, None, supports,
    Speed(by_estimate, estimate=estimate, margin=margin, modelled=modelled),
    Space(Tiles, default, configs, fits), name="hopper_eight_bits",
)  # fmt: skip
