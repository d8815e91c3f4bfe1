"""The loss over a vocabulary on TPUs: no logit is written in the forward pass.

A Pallas kernel multiplies blocks of rows and classes, and reduces each to four numbers
of a row in the product's epilogue. Gradients are those of the plain kernel, with its
blocks of rows for large products.

Pallas takes half a second to import, so the kernel is imported where it is traced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.kernels.linear_cross_entropy import chunks, xla
from rewriter.kernels.linear_cross_entropy.chunks import Chunk
from rewriter.kernels.linear_cross_entropy.reference import OF_ROWS
from rewriter.kernels.shared.kinds import TPU
from rewriter.kernels.shared.limits import known_sizes
from rewriter.kernels.shared.tpu import refused_dtypes, refused_precision
from rewriter.ops import tpu
from rewriter.ops.device import Device
from rewriter.ops.kernel import Space, Spec, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

MORE = 3 << 20
"""Bytes of VMEM for everything but blocks."""


@dataclass(frozen=True)
class Tiles:
    """The config of the forward pass: the largest part of each axis in a block.

    Attributes:
        rows: Rows of x.
        columns: Columns of x, which are summed.
        classes: Classes.
    """

    rows: int = 256
    columns: int = 512
    classes: int = 512


SMALLEST = Tiles()
"""Fits every TPU."""


def supports(spec: Spec) -> Verdict:
    """Takes bfloat16 and float32 of known sizes, on one device's classes."""
    base = known_sizes(spec, xla.supports)
    if not base.ok:
        return base
    floats = {n: d for n, d in spec.dtypes if n not in OF_ROWS}
    found = [*refused_dtypes(floats), *refused_precision(spec)]
    if any(0 in shape for _, shape in spec.shapes):
        found.append(no("empty", "an axis has size 0"))
    if spec.has("other"):
        found.append(no("other", "two labels of a row are not supported"))
    if spec.param("reduced", False):
        found.append(no("reduced", "a vocabulary split over devices is not supported"))
    return all_of(*found) if found else YES


def vmem(sizes: tuple[int, int, int], items: tuple[int, int]) -> int:
    """Returns the bytes of VMEM that a use takes: blocks twice, sums and logits once.

    Operands are counted once more on their way to registers, and logits four times.

    Args:
        sizes: The rows, columns and classes of a block.
        items: Bytes of a number of x, and of a weight.
    """
    (n, k, v), (x, w) = sizes, items
    return 3 * (n * k * x + k * v * w) + 5 * 4 * n * v + 7 * 4 * n * tpu.LANES + MORE


def blocks(spec: Spec, tiles: Tiles) -> tuple[int, int, int]:
    """Returns the rows, columns and classes of a block."""
    (*rows, k), v = spec.shape("x"), spec.shape("w")[1]
    return sizes_of(math.prod(rows), k, v, tiles)


def sizes_of(n: int, k: int, v: int, tiles: Tiles) -> tuple[int, int, int]:
    """Returns the same of n rows, k columns and v classes.

    Example:
        >>> sizes_of(1000, 768, 50257, Tiles(256, 1024, 512))
        (256, 768, 512)
    """
    columns, classes = tpu.part(k, tiles.columns), tpu.part(v, tiles.classes)
    return min(n, tiles.rows), columns, classes


def fits(config: Tiles, spec: Spec, device: Device) -> Verdict:
    """Returns whether the forward can run: alignment, and VMEM."""
    units = {"rows": 16, "columns": tpu.LANES, "classes": tpu.LANES}
    found = [
        no(name, f"{getattr(config, name)} is not a multiple of {unit}")
        for name, unit in units.items()
        if getattr(config, name) % unit or getattr(config, name) <= 0
    ]
    room = tpu.generation(device).vmem
    x, w = (jnp.dtype(spec.dtype(name)).itemsize for name in ("x", "w"))
    if not found and (size := vmem(blocks(spec, config), (x, w))) > room:
        text = f"{size >> 10} KiB of VMEM of {room >> 10} KiB"
        found.append(no("vmem", text))
    return all_of(*found) if found else YES


def configs(spec: Spec, device: Device) -> list[Tiles]:
    """Returns tiles worth measuring, the largest first."""
    del spec
    rows = 1024 if tpu.generation(device).name in ("v6e", "7x") else 512
    return [Tiles(r, k, 1024) for r in (rows, rows // 2) for k in (2048, 1024, 512)]


def default(spec: Spec, device: Device) -> Tiles:
    """Returns the largest tiles that fit."""
    fitting = (t for t in configs(spec, device) if fits(t, spec, device).ok)
    return next(fitting, SMALLEST)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: by the compiler's simulation XLA takes fewer cycles.

    2048 rows of 2048 and 32000 classes take 2.71M cycles on v5e, and 2.51M by XLA
    (``tests/bench/results/tpu_losses_cycles.json``, libtpu 0.0.52). The simulator knows
    no limit of bandwidth, and XLA writes and reads 250 MiB of logits meanwhile. Users
    may ask for the kernel by name.
    """
    del spec, platform
    return no("estimate", "XLA takes fewer cycles, by its own simulation for a TPU")


def forward(
    *,
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    first: jax.Array | None = None,
    out_dtype: str | None = None,
    residuals: bool = False,
    config: Tiles | None = None,
    **how: Any,
) -> Any:
    """Returns the losses, and with `residuals` the sums of exponentials.

    Args:
        config: The tiles.
        **how: Parameters of the op, as in `reference`.
    """
    from rewriter.kernels.linear_cross_entropy.tpu_kernel import reduced

    head, loss = xla.head_and_loss(x, w, bias, first, chunks.DEFAULT, **how)
    given = chunks.flat(x, labels)
    classes = loss.labels(given["labels"])
    below = loss.label_smoothing > 0
    row, picked, less = reduced(
        head, given["x"], loss.picks(classes), config or SMALLEST, below
    )
    row = loss.total(row)
    value = loss.value(row, picked, less, classes).reshape(labels.shape)
    out = value.astype(out_dtype or value.dtype)
    return (out, tuple(a.reshape(labels.shape) for a in row)) if residuals else out


KERNEL = TPU.kernel(
    "linear_cross_entropy", forward, xla.backward, supports, Speed(profitable),
    Space(Tiles, default, configs, fits),
    Space(Chunk, chunks.default, chunks.configs),
    together=xla.together, saves=xla.KERNEL.traits.saves,
)  # fmt: skip
