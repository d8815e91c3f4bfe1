"""Ragged dots of rows and matrices of 8 bits on Hopper, whose tensor cores take both.

The kernel is that of 16 bits. Tensor cores read operands of 8 bits along the summed
axis: matrices [g, k, n] are transposed first. Sums of int8 are exact. Of sums of 8-bit
floats tensor cores keep 14 bits, so that these are added up in float32 every few steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax

from rewriter.kernels.ragged.dot.estimate import SPARE
from rewriter.kernels.ragged.dot.estimate import estimate as of_16_bits
from rewriter.kernels.ragged.dot.hopper import config as of_dot
from rewriter.kernels.ragged.dot.rows import anywhere
from rewriter.kernels.ragged.dot.use import Use
from rewriter.kernels.ragged.dot.use import forward as forward_of
from rewriter.kernels.shared.hopper import by_estimate, importable
from rewriter.kernels.shared.hopper import runs_on as runs_on
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

FLOATS = ("float8_e4m3fn", "float8_e5m2")
"""The floats that tensor cores multiply, also by each other."""

STEP, WIDE = 128, 64
"""The extent of a step along the summed axis, and columns that are stored at once."""

PROMOTED = {
    "ANY_F8_ANY_F8_F32_FAST_ACCUM": 0, None: 2,
    "high": 1, "highest": 1, "ANY_F8_ANY_F8_F32": 1,
}  # fmt: skip
"""By precision, the most steps whose products are summed in 14 bits; 0 for any."""

MIXED = jax.__version_info__ >= (0, 11)
"""Whether Mosaic multiplies 8-bit floats of two kinds: not in 0.10."""


@dataclass(frozen=True)
class Tiles(of_dot.Tiles):
    """The config: tiles as of 16 bits, whose bytes are the same.

    Attributes:
        promoted: The number of steps after which sums are added to float32 registers;
            0 for never.
    """

    promoted: int = 0


def _sizes(spec: Spec) -> tuple[int, int, int, int]:
    """Rows, the summed axis, columns and groups."""
    m, k = spec.shape("lhs")
    n = spec.shape("rhs")[1 if spec.param("mode") == "transposed" else -1]
    return m, k, n, spec.shape("rhs")[0]


def _promoted(spec: Spec) -> int:
    """The most steps that are summed in 14 bits, where sums are not exact."""
    if spec.dtype("lhs") not in FLOATS:
        return 0
    steps = _sizes(spec)[1] // STEP
    return math.gcd(steps, PROMOTED.get(spec.param("precision"), 0))


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: both of 8 bits, whole copies."""
    if spec.symbolic:
        return SYMBOLIC
    if spec.param("mode") == "contracting":
        return no("mode", "rows of 8 bits are not summed")
    left, right = spec.dtype("lhs"), spec.dtype("rhs")
    floats = left in FLOATS and right in FLOATS
    if not (floats or left == right == "int8"):
        text = f"lhs is {left} and rhs {right}: not both int8, or 8-bit floats"
        return no("dtype", text)
    found = [importable("jax.experimental.pallas.mosaic_gpu")]
    if left != right and not MIXED:
        found.append(no("dtype", f"{left} times {right} needs jax 0.11"))
    wanted = ("float32", "bfloat16", "float16") if floats else ("int32",)
    if (out := spec.param("out_dtype")) not in wanted:
        found.append(no("out_dtype", f"the result is {out}, not {' or '.join(wanted)}"))
    if floats and spec.param("precision") not in PROMOTED:
        text = f"it does not multiply at precision {spec.param('precision')!r}"
        found.append(no("precision", text))
    m, k, n, groups = _sizes(spec)
    for name, size, step in (("k", k, STEP), ("n", n, WIDE)):
        if size % step or not size:
            text = f"{name} is {size}, not a multiple of {step}"
            found.append(no("alignment", text))
    if not (m and groups):
        found.append(no("empty", "there are no rows, or no groups"))
    return all_of(*found)


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the default config: by rows of a group, as for 16 bits."""
    del device
    m, _, _, groups = _sizes(spec)
    found = FEW if m <= 32 * groups else MORE
    return replace(found, promoted=_promoted(spec))


FEW, MORE = Tiles(64, 128, 6), Tiles(128, 128, 6)
"""Tiles of few rows of a group, and of more."""


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns configs worth measuring, most promising first."""
    own, often = default(spec, device), _promoted(spec)
    others = [MORE, Tiles(128, 192, 4), FEW, Tiles(64, 256, 4)]
    others += [] if often else [Tiles(128, 256, 4)]
    made = [own, *(replace(c, promoted=often) for c in others)]
    return list(dict.fromkeys(made))


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: as for 16 bits, and sums are held twice."""
    found, most = [of_dot.fits(config, spec, device)], _promoted(spec)
    if config.promoted > most or (most and not config.promoted):
        text = f"sums of {config.promoted} steps in 14 bits (0 for all), at most {most}"
        found.append(no("promoted", text))
    if config.promoted and config.registers > MOST // 2:
        text = f"{2 * config.registers} for sums, of at most {MOST}"
        found.append(no("registers", text))
    return all_of(YES, *found)


MOST = 192
"""Registers per lane for sums of both kinds."""


def _product(use: Use, config: Tiles | None) -> Array:
    """The result."""
    from rewriter.kernels.ragged.dot.hopper.branches import Branch
    from rewriter.kernels.ragged.dot.hopper.by_rows import combined

    config = config or MORE
    matrices = use.rhs if use.transposed else use.rhs.swapaxes(1, 2)
    (out,) = combined(
        "ragged_dot_of_8_bits", use.lhs, [Branch(matrices)], use.columns,
        use.group_sizes, [lambda product: product], use.dtype, config, True,
        promoted=config.promoted,
    )  # fmt: skip
    return out


forward = functools.partial(forward_of, _product)
"""Returns the ragged dot, as `reference` does, for supported uses."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"hopper_eight_bits"``.

    XLA multiplies every row by every group's matrix. Gradients are XLA's.
    """
    m, k, n, groups = _sizes(spec)
    xla = of_16_bits(spec, device, passes)["xla"]
    active = groups * -math.expm1(-m / groups)
    padded = 2.0 * m * k * n * (1 + min(m, groups) * SPARE / m)
    moved = active * k * n + m * k + 4.0 * m * n
    own = max(
        seconds(device, padded / FASTER, 0.0, compute=REACHED, launches=3),
        seconds(device, 0.0, moved, launches=3),
    )
    if spec.param("mode") != "transposed":
        own += seconds(device, 0.0, 2.0 * groups * k * n, memory=TURNED)
    rest = xla - of_16_bits(spec, device, "forward")["xla"]
    return {"xla": xla, "hopper_eight_bits": own + rest}


FASTER = 2.0
"""How many times as many products of 8 bits as of 16 bits tensor cores make."""

REACHED, TURNED = 0.8, 0.62
"""The share of the peak of products, and of the bandwidth of transposed copies."""

KERNEL = anywhere(
    HOPPER.kernel(
        "ragged_dot", forward, None, supports,
        Speed(by_estimate, by_rule=False, estimate=estimate),
        Space(Tiles, default, configs, fits), name="hopper_eight_bits",
    )
)  # fmt: skip
