"""Estimates the time of a product of 8-bit rows and an 8-bit matrix.

XLA multiplies such numbers on tensor cores too. It writes the sums, and scales them in
a kernel of its own. It reads both operands along the summed axis, so that it transposes
a matrix [k, n], as our kernel does. In µs on an H200, with scales of rows and columns:

m, k, n             numbers        XLA: model, measured   ours: model, measured
8192 8192 8192      int8           852  837               693  679
1024 4096 14336     int8           107  113                85   80
256 4096 14336      int8            30   34                24   26
64 4096 14336       int8            21   21                19   18
8192 8192 8192      fp8            811  790               733  733
2048 4096 4096      fp8             55   59                54   51
1024 4096 14336     fp8            103  104                94   94
256 4096 14336      fp8             29   30                27   29
64 4096 14336       fp8             21   20                19   18
8192 8192 8192      fp8 highest    879  860               829  829
1024 4096 14336     fp8 highest    110  117               108  108

(``tests/bench/results/eight_bits_tried_h200.json``)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from rewriter.kernels.shared.hopper import PROCESSORS, processors
from rewriter.ops.device import Device
from rewriter.ops.estimate import LAUNCH_S, seconds
from rewriter.ops.kernel import Spec
from rewriter.ops.widening import JOINS
from rewriter.support.verdict import YES, Verdict, no

FASTER = 2.0
"""How many times as many products of 8 bits as of 16 bits tensor cores make."""

XLA = {"int8": 0.87, "fast": 0.92, "float32": 0.92, "exact": 0.84}
"""The share of the peak that XLA's products reach, by kinds of sums."""

OURS = {"int8": 0.965, "fast": 0.9}
"""That of the kernel's where each warpgroup has tiles of its own, and all are busy."""

SHARED = {
    "float32": {128: (1.0, 1120.0), 192: (1.0, 914.0)},
    "exact": {128: (0.825, 1120.0), 192: (0.883, 880.0)},
}
"""Where warpgroups share tiles, by kinds of sums and columns of a tile: the share of
the peak, and how much longer the summed axis would be in the time that a tile's result
takes. Nothing is multiplied then."""

SCALED, TURNED, READ = 0.98, 0.62, 0.9
"""The shares of the bandwidth of scaling sums, of transposing a matrix, and of a
product that takes the time of reading its matrix."""

FAST = "ANY_F8_ANY_F8_F32_FAST_ACCUM"
"""The precision at which sums of 8-bit floats may have 14 bits."""


def narrow(spec: Spec) -> bool:
    """Returns whether the rows are stored in few bits too."""
    return jnp.dtype(spec.dtype("x")).itemsize == 1


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and of ``"hopper_eight_bits"``.

    Gradients are XLA's.
    """
    once, rest = _by_xla(spec, device), 0.0
    if passes != "forward":
        rest = 2 * once
    own = math.inf
    if modelled(spec, device, passes).ok:
        own = _by_kernel(spec, device) + rest
    return {"xla": once + rest, "hopper_eight_bits": own}


def _sizes(spec: Spec) -> tuple[int, int, int]:
    *rows, k = spec.shape("x")
    n = spec.shape("w")[0 if spec.param("mode") == "transposed" else 1]
    return math.prod(rows), k, n


def kind_of_sums(spec: Spec) -> str:
    """Returns the kind of sums: "int8", "fast", "float32" or "exact"."""
    if spec.dtype("x") == "int8":
        return "int8"
    kinds = {None: "float32", FAST: "fast"}
    return kinds.get(spec.param("precision"), "exact")


def _turned(spec: Spec, device: Device) -> float:
    """Seconds of a transposed copy of the matrix, if there is one."""
    _, k, n = _sizes(spec)
    if spec.param("mode") == "transposed":
        return 0.0
    return seconds(device, 0.0, 2.0 * k * n, memory=TURNED, launches=0)


def _is_one_row_of_floats(spec: Spec) -> bool:
    """Whether XLA would multiply one row of floats without tensor cores."""
    floats = kind_of_sums(spec) != "int8"
    return floats and _sizes(spec)[0] == 1 and spec.param("mode") == "transposed"


ONE = 0.092
"""The share of the bandwidth of XLA's product with one row of floats."""


def _read(spec: Spec, device: Device) -> float:
    """Seconds of reading both operands."""
    m, k, n = _sizes(spec)
    return seconds(device, 0.0, float(m * k + k * n), memory=READ)


def _by_xla(spec: Spec, device: Device) -> float:
    m, k, n = _sizes(spec)
    if _is_one_row_of_floats(spec):
        return seconds(device, 0.0, float(k * n), memory=ONE)
    flops = 2.0 * m * k * n / FASTER
    products = seconds(device, flops, 0.0, compute=XLA[kind_of_sums(spec)])
    made = max(products, _read(spec, device)) + _turned(spec, device)
    behind = str(spec.param("behind") or "").split()
    if not any(step[0] in JOINS for step in behind):
        return made
    moved = m * n * (4.0 + 2.0)
    return made + seconds(device, 0.0, moved, memory=SCALED, launches=0)


def _by_kernel(spec: Spec, device: Device) -> float:
    (m, k, n), sums = _sizes(spec), kind_of_sums(spec)
    read = _read(spec, device)
    if m <= 64:
        split = -(-n // 128) * 2 <= processors(device)
        return read + split * LAUNCH_S + _turned(spec, device)
    count = processors(device)
    if sums in SHARED:
        rate, length = 1.0, min(turns(m, k, n, sums, count).values())
    else:
        rate, tiles = OURS[sums], -(-m // 128) * -(-n // 128) / (2 * count)
        length = 2 * 128 * k * (math.ceil(tiles) + tiles) / 2  # the last ones overlap
    flops = 2.0 * 128 * count * length / FASTER
    products = seconds(device, flops, 0.0, compute=rate)
    return max(products, read) + _turned(spec, device)


def turns(
    m: int, k: int, n: int, sums: str, count: int = PROCESSORS
) -> dict[int, float]:
    """Returns the time of shared tiles by their columns, in columns times summed axis.

    Tiles have 128 rows.

    Args:
        m: Rows.
        k: The summed axis.
        n: Columns.
        sums: A key of `SHARED`.
        count: The number of processors.

    Example:
        >>> turns(1024, 4096, 14336, "float32")
        {128: 4673536.0, 192: 4809600.0}
    """
    rows = -(-m // 128)
    return {
        wide: -(-rows * -(-n // wide) // count) * wide * (k / share + more)
        for wide, (share, more) in SHARED[sums].items()
    }


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such sizes were measured: from 64 rows on, a large matrix.

    With 1, 16 and 32 rows both take the time of reading the matrix, within a tenth, but
    for one row of floats: XLA took 133 µs for 4096 x 14336 on an H200, and the kernel
    18.
    """
    del device, passes
    m, k, n = _sizes(spec)
    if m < LEAST_ROWS and not _is_one_row_of_floats(spec):
        return no("rows", f"{m} rows: not measured below {LEAST_ROWS}")
    if k * n < LEAST:
        text = f"a matrix of {k} x {n}: not measured below {LEAST >> 20} Mi numbers"
        return no("small", text)
    return YES


LEAST_ROWS, LEAST = 64, 1 << 24
"""The fewest rows, and numbers of a matrix, that were measured."""


def margin(spec: Spec, device: Device, passes: str) -> float | None:
    """Returns the share of XLA's time that the kernel may take.

    It never writes sums of 32 bits where scales are behind them, so that it needs less
    memory, and the model was within a tenth of what was measured.
    """
    del device
    return MOST if passes == "forward" and spec.param("behind") else None


MOST = 0.97
