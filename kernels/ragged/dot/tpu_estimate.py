"""Estimates the time of a ragged dot on a TPU by XLA's own kernel and by ours.

Shares of the peak come from the compiler's simulation (libtpu 0.0.50, bfloat16, m k n
4096 4096 2048, groups of 1024 rows). XLA's are those of the tiles that the compiler
chooses for its own kernel, run as tiles of ours. Up to v5p these are 128 4096 256 and
128 3968 128, from v6e on 256 4096 1024 and 256 4096 256. Ours of rows by matrices are
recorded in ``tests/bench/results/tpu_experts_cycles.json``:

                     v5e          v5p          v6e
                     XLA   ours   XLA   ours   XLA   ours
rows by matrices     0.72  0.95   0.86  0.96   0.78  0.85
of groups            0.38  0.83   0.48  0.82   0.38  0.64

XLA copies transposed matrices before it multiplies by them, at about the bandwidth of
the memory. On v5p that form was published to be fast all the same: 301 of 459 TFLOP/s,
where Pallas kernels took 209 and less. So no copy counts there, and both multiply rows
as fast. The compiler does not simulate v4 and 7x; their shares are those of v5p and
v6e.
"""

from __future__ import annotations

from collections.abc import Mapping

from rewriter.kernels.ragged.dot.products import Product, products
from rewriter.ops import tpu
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Spec

SHARES = {
    "v5e": ((0.72, 0.95), (0.38, 0.83)),
    "v5p": ((0.86, 0.86), (0.48, 0.82)),
    "v6e": ((0.78, 0.85), (0.38, 0.64)),
}
"""Shares of XLA and of ours, for rows by matrices, and for products of groups."""

LIKE = {"v4": "v5p", "7x": "v6e"}
"""The generation whose shares stand for one without a simulator."""

ALIKE = SHARES["v5p"]
"""Shares of an unknown TPU."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"mosaic_tpu"``."""
    found = [] if passes == "vjp" else [*products(spec)]
    if passes != "forward":
        found += products(spec, backward=True)
    name = tpu.generation(device).name
    shares = SHARES.get(LIKE.get(name, name), ALIKE)
    xla = mine = 0.0
    for p in found:
        shares_of_it = shares[p.mode == "contracting"]
        xla += _seconds(p, device, shares_of_it[0]) + _copied(p, device, name)
        mine += _seconds(p, device, shares_of_it[1])
    return {"xla": xla, "mosaic_tpu": mine}


def _seconds(p: Product, device: Device, share: float) -> float:
    """Seconds of a product at a share of the peak, or at the bandwidth."""
    left, right, out = p.items
    matrices = (p.groups if p.mode == "contracting" else min(p.m, p.groups)) * p.k * p.n
    if p.mode == "contracting":
        moved = p.m * (p.k * left + p.n * right) + matrices * out
    else:
        moved = p.m * (p.k * left + p.n * out) + matrices * right
    flops, item = 2.0 * p.m * p.k * p.n, max(left, right)
    of_flops = seconds(device, flops, 0.0, compute=share, item=item)
    return max(of_flops, seconds(device, 0.0, moved))


def _copied(p: Product, device: Device, name: str) -> float:
    """Seconds of the copy of transposed matrices."""
    if p.mode != "transposed" or name in ("v5p", tpu.UNKNOWN.name):
        return 0.0
    return seconds(device, 0.0, 2.0 * p.groups * p.k * p.n * p.items[1])
