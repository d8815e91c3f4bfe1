"""Quantized dots on Hopper: few rows times a matrix that is widened in shared memory.

The kernel is that of ragged dots of 8-bit matrices. A matrix of few columns has fewer
tiles than a GPU has processors. So its summed axis may be split: each part is a group
of its own, and the parts' products are added up. Numbers are scaled while they are
widened, and rounded as the program rounds them.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.quantized_dot import xla
from rewriter.kernels.quantized_dot.estimate import estimate, modelled
from rewriter.kernels.quantized_dot.use import Use
from rewriter.kernels.ragged.dot.hopper import stored as ragged_dot
from rewriter.kernels.ragged.dot.hopper.config import STEP
from rewriter.kernels.shared.hopper import PROCESSORS, by_estimate
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.kernels.shared.rounding import ROUND, in_float32
from rewriter.ops.kernel import Space, Speed
from rewriter.ops.stored import usual_steps
from rewriter.ops.widening import all_columns
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

NAME = "quantized_dot"
"""The name of the kernel in profiles."""


@dataclass(frozen=True)
class Tiles(ragged_dot.Tiles):
    """The config: tiles as of a ragged dot, and parts of the summed axis.

    Attributes:
        splits: The number of parts that are summed apart.
    """

    block_n: int = 128
    stages: int = 8
    claimed: bool = False
    splits: int = 1


def _sizes(spec: Spec) -> tuple[int, int, int]:
    """Rows, the summed axis, columns."""
    *rows, k = spec.shape("x")
    n = spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]
    return math.prod(rows), k, n


def part_of(spec: Spec) -> Spec:
    """Returns a use as one of a ragged dot with one group; int4 counts as int8."""
    m, k, _ = _sizes(spec)
    stored = "int8" if spec.dtype("w") == "int4" else spec.dtype("w")
    return type(spec)(
        ragged_dot.NAME,
        (("lhs", (m, k)), ("rhs", (1, *spec.shape("w"))), ("group_sizes", (1,))),
        (("lhs", spec.dtype("x")), ("rhs", stored), ("group_sizes", "int32")),
        (("mode", spec.param("mode")), ("out_dtype", "float32")),
    )


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: 16-bit rows, 8-bit or int4 numbers."""
    if spec.symbolic:
        return SYMBOLIC
    base = ragged_dot.supports(part_of(spec))
    if not base.ok:
        return base
    found, (_, k, n) = [base], _sizes(spec)
    if n % ragged_dot.WIDE:
        text = f"n is {n}, not a multiple of {ragged_dot.WIDE}"
        found.append(no("alignment", text))
    how = in_float32(_steps(spec), spec.dtype("x"), spec.dtype("w"))
    if how is None:
        text = f"it does not compute the steps {spec.param('widen')!r}"
        found.append(no("widen", text))
    elif _rounds_a_product_before_a_sum([sign for sign, _ in how.steps]):
        text = "its compiler leaves out the rounding of a product before a sum"
        found.append(no("widen", text))
    for name in ("w_scale", "w_zero"):
        groups = spec.shape(name)[0] if spec.has(name) else 1
        if groups > 1 and (k // groups) % STEP:
            text = f"groups of {k // groups} numbers, not a multiple of {STEP}"
            found.append(no("groups", text))
    return all_of(*found)


def _rounds_a_product_before_a_sum(signs: list[str]) -> bool:
    """Whether a product is rounded, and then something is added to it."""
    three = zip(signs, signs[1:], signs[2:], strict=False)
    return any(a == "*" and b == ROUND and c in "+-" for a, b, c in three)


def _steps(spec: Spec) -> str:
    """The steps of a use."""
    widen = spec.param("widen")
    if widen is not None:
        return widen
    return usual_steps(spec.has("w_scale"), spec.has("w_zero"), spec.dtype("x"))


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: as many parts as leave few processors idle."""
    del device
    m, k, n = _sizes(spec)
    few = PACKED if spec.dtype("w") == "int4" else Tiles()
    return _with_parts(few if m <= 64 else MANY, m, k, n)


PACKED = Tiles(block_n=256, stages=5)
"""Tiles for int4, so that a copied row has 64 bytes."""


MANY = Tiles(128, 128, 5, apart=True)
"""Tiles for more rows than 64."""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    m, k, n = _sizes(spec)
    own = default(spec, device)
    others = [Tiles(block_n=256, stages=5), Tiles(apart=True), MANY]
    found = [own, *(_with_parts(c, m, k, n) for c in others)]
    found += [replace(own, splits=s) for s in (1, 2, 4, 8) if (k // STEP) % s == 0]
    return list(dict.fromkeys(found))


def _with_parts(config: Tiles, m: int, k: int, n: int) -> Tiles:
    """The config with the number of parts that takes the least time."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    count = PROCESSORS * config.owners  # each warpgroup may have tiles of its own
    steps = k // STEP

    def cost(parts: int) -> float:
        turns = -(-tiles * parts // count) * (-(-steps // parts) + FIRST)
        added = 0.0 if parts == 1 else parts * m * ADDED / k
        return turns * count / (tiles * steps) + added

    some = [s for s in (1, 2, 3, 4, 6, 7, 8, 12, 16) if steps % s == 0]
    return replace(config, splits=min(some, key=cost))


FIRST = 4
"""Steps that a tile's first copies and its result take."""

ADDED = 16.0
"""Bytes that are moved for a number of a part's product: written, read, written."""


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: as for a ragged dot, and parts are equal."""
    found = [ragged_dot.fits(config, part_of(spec), device)]
    if (steps := spec.shape("x")[-1] // STEP) % config.splits:
        text = f"{steps} steps do not make {config.splits} equal parts"
        found.append(no("splits", text))
    if config.columns > ragged_dot.WIDE:
        text = f"{config.columns} columns a warpgroup, of at most {ragged_dot.WIDE}"
        found.append(no("block_n", text))
    return all_of(YES, *found)


def forward(
    *, residuals: bool = False, config: Tiles | None = None, **given: Any
) -> Any:
    """Returns the result, as `computed` does, for supported uses.

    Products of 16-bit numbers are exact in the float32 that they are summed in, so
    that `precision` changes nothing.

    Args:
        residuals: Whether to return ``(result, ())``.
        config: The tiles.
        **given: The fields of `Use`.
    """
    from rewriter.kernels.ragged.dot.hopper import widen
    from rewriter.kernels.ragged.dot.hopper.branches import Branch
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    use, config = Use(**given), config or Tiles()
    x, n, parts = use.x, use.columns, config.splits
    rows, k = math.prod(x.shape[:-1]), x.shape[-1]
    lhs = x.reshape(rows, k)
    if parts > 1:
        lhs = lhs.reshape(rows, parts, k // parts)
        lhs = lhs.transpose(1, 0, 2).reshape(parts * rows, k // parts)
    how = in_float32(use.steps, x.dtype.name, use.w.dtype.name)
    assert how is not None
    arrays = {"scale": use.w_scale, "zero": use.w_zero}
    within = [all_columns(arrays[name], own, n) for name, own in how.dtypes]
    names = [name for name, _ in how.dtypes]
    steps = [(s, names.index(x) if x in names else x) for s, x in how.steps]
    branch = Branch(use.w[None], within=tuple(within), split=parts > 1)
    dtype = jnp.dtype(use.sums or x.dtype)
    direct = parts == 1 and not use.behind and dtype in (x.dtype, jnp.float32)
    (out,) = combined(
        NAME, lhs, [branch], n, None, [lambda product: product],
        dtype if direct else jnp.dtype(jnp.float32), config, use.transposed,
        functools.partial(widen.side, steps=steps), parts,
    )  # fmt: skip
    if not direct:
        out = out.reshape(parts, rows, n).sum(0) if parts > 1 else out
        out = use.finished(out.astype(dtype))
    out = out.reshape(*x.shape[:-1], n)
    return (out, ()) if residuals else out


backward = xla.backward
"""The cotangent of x by XLA, block by block."""


KERNEL = HOPPER.kernel(
    NAME, forward, backward, supports,
    Speed(by_estimate, estimate=estimate, modelled=modelled),
    Space(Tiles, default, configs, fits), xla.KERNEL.backward_space,
)  # fmt: skip
