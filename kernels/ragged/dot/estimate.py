"""Estimates the time of a ragged dot by each implementation.

On a GPU XLA multiplies every row by every group's matrix. On a TPU it has a kernel of
its own: see `rewriter.kernels.ragged.dot.tpu_estimate`. A loop over the groups launches
a few kernels for each. Tiles copy a matrix for each tile of rows. The kernel for Hopper
GPUs reads each matrix and multiplies whole tiles. The constants are those of an H200
(``tests/bench/results/tuned_h200.json``, ``ragged_h200.json``). The model is within a
fifth of them for 8 to 128 groups in bfloat16, except for the loop over few rows:

m, k, n, g               XLA           loop          tiles         hopper   (model,
8192 4096 4096 16        5.5  5.0      1.0  1.0      1.9  1.9      0.4  0.4  measured;
32768 2048 1536 128     33.0  32.3     3.1  3.1      1.9  2.0      0.4  0.4  ms)
8192 4096 14336 8        9.6  8.4      2.6  2.5      5.5  5.0      1.3  1.3
256 2048 1536 128        0.3  0.3      2.6  1.2      1.0  1.0      0.2  0.2

In float32, by ``hopper_float32_h200.json``:

4097 1408 2048 64        3.8  3.8      1.5  1.4      1.2  0.9      0.8  0.8
8192 4096 4096 16        11   10       3.1  3.3      4.1  3.2      2.1  2.0
256 2048 1536 128                                                  1.6  1.4
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.ragged.dot.tpu_estimate import estimate as of_tpu
from rewriter.ops.device import Device, named
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

DENSE = 0.95
"""The share of the peak of large products."""

LOOPED, LOOPED_WIDE = 0.48, 0.24
"""The share of the peak of products of some hundred rows, in 16 bits and in float32."""

STEP_S = 20e-6
"""Seconds of a group's turn in a loop."""

COPIED = 0.81
"""The share of the bandwidth of copies."""

TILE = 256
"""Rows of a tile."""

SPARE = 96
"""Empty rows of a group's last tile on Hopper, and the cost of a tile, in rows."""

HALVED = 10
"""Bytes read and written to split a float32 number: 4 and 6. The kernel reads 6."""

PRODUCTS = {"forward": 1.0, "vjp": 2.0, "forward_and_vjp": 3.0}
"""The number of products of the forward's size."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds: of ``"xla"``, ``"memory_bounded"``, ``"tiled"``, ``"hopper"``.

    On a TPU also those of ``"mosaic_tpu"``.
    """
    m, k = spec.shape("lhs")
    (groups,) = spec.shape("group_sizes")
    n = spec.shape("rhs")[1 if spec.param("mode") == "transposed" else -1]
    size, times = item(spec, "lhs"), PRODUCTS[passes]
    flops = times * 2.0 * m * k * n
    tiles = m // TILE + min(m, groups)
    copied = times * 3 * tiles * k * n * size  # read, written, read
    filled = tiles * TILE / max(m, 1)
    xla = seconds(device, groups * flops, 0.0, compute=DENSE, item=size, launches=0)
    looped = LOOPED_WIDE if size == 4 and device.platform == "cuda" else LOOPED
    loop = seconds(device, flops, 0.0, compute=looped, item=size, launches=0)
    tiled = seconds(
        device, filled * flops, copied, compute=DENSE, memory=COPIED, item=size,
        launches=0,
    )  # fmt: skip
    loop += times * groups * STEP_S
    active = groups * -math.expm1(-m / groups) if groups else 0.0  # with rows
    read = 6 if size == 4 else size  # halves, one of them twice
    moved = times * (read * (active * k * n + m * k) + size * m * n)
    padded = flops * (1 + min(m, groups) * SPARE / max(m, 1))
    split = 0.0
    if halved := str(spec.dtype("lhs")) == "float32":
        padded *= 3
        split = times * (groups * k * n + m * k) * HALVED
    own = max(
        seconds(
            device,
            padded,
            0.0,
            compute=DENSE,
            item=2 if halved else size,
            launches=3 * times,
        ),
        seconds(device, 0.0, moved, launches=3 * times),
    ) + seconds(device, 0.0, split, memory=COPIED, launches=0)
    made = {"xla": xla, "memory_bounded": loop, "tiled": tiled, "hopper": own}
    return made | of_tpu(spec, device, passes) if device.platform == "tpu" else made


def best(spec: Spec, platform: str, name: str) -> Verdict:
    """Returns yes on CUDA if a kernel for any GPU is the fastest by a fifth.

    It is for GPUs of unknown kind, with the figures of an H200.
    """
    if platform != "cuda":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if spec.symbolic:
        return no("symbolic", "sizes must be known to tell whether it pays")
    found = dict(estimate(spec, named("h200"), "forward"))
    del found["hopper"]  # it may be another GPU
    fastest = min(found, key=found.__getitem__)
    if fastest == name and found[name] < 0.8 * found["xla"]:
        return YES
    mine, theirs = (math.ceil(1e6 * found[x]) for x in (name, fastest))
    if fastest == name:
        theirs = math.ceil(1e6 * found["xla"])
        return no("model", f"estimated to take {mine} µs, and XLA {theirs} µs")
    return no("model", f"estimated to take {mine} µs, and {fastest} {theirs} µs")
