"""Estimates the time of a loss over a vocabulary by XLA and over blocks.

Products take most of it. XLA's take longer where the number of classes is no multiple
of 8: see `rewriter.ops.unaligned`. XLA writes the logits, and reads them for the
maximum, for the sum of exponentials and for the gradient. Picked logits are a gather,
whose gradient is a scatter into zeros in float32. Blocks pad the classes, and pick by
comparing. They add up gradients of the weights in memory, once for each block.

rows, k, v                            model and measured on an H100; ms
8192 768 50257      with gradients    xla 9.0  8.9   memory_bounded 4.3  4.6
8192 4096 128256    with gradients    xla 42   42    memory_bounded 41   43
32768 2560 128256   with gradients    xla 113  116   memory_bounded 108  107
8192 4096 128256    forward           xla 14   14    memory_bounded 14   14

                                      hopper
8192 768 50257      with gradients    3.7  3.6
8192 4096 128256    with gradients    40   42
32768 2560 128256   with gradients    103  106
32768 2560 128256   forward           36   35

On an H200, with a bias, whose gradient reads the logits' once more (``tests/bench/
results/vocabulary_loss_bias_h200.json``):

rows, k, v          with gradients    xla        memory_bounded  hopper
16384 768 30522     measured          7.6        5.1             4.4
8192 768 50265      measured          7.9        5.0             3.5
8192 1024 16384     measured          1.58       1.47            1.40
8192 4096 32000     measured          8.9        8.65            8.62
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rewriter.kernels.cross_entropy.estimate import scattered
from rewriter.kernels.linear_cross_entropy import chunks
from rewriter.kernels.linear_cross_entropy.chunks import Chunk
from rewriter.kernels.linear_cross_entropy.cost import cost
from rewriter.ops import unaligned
from rewriter.ops.cost import Cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import PRODUCTS, item, seconds
from rewriter.ops.kernel import Spec

READS = {"forward": 2, "vjp": 3, "forward_and_vjp": 3}
"""How often logits are read."""

READS_HOPPER = {"forward": 1, "vjp": 3, "forward_and_vjp": 1}
"""How often a kernel reads them from memory that takes a row at a time."""

ADDED = 2
"""Bytes for each weight and block whose gradients are added up: most of the 8 that pass
do so while products run."""

LAUNCHES = 8
"""Kernels that are launched for a block."""

COPIED = 3.0
"""How often cotangents pass where chunks of them are copied, and their product."""

FORWARD = "forward"
"""The passes without gradients."""

WORTH = 1 << 28
"""Bytes of logits that are worth as much time as XLA's."""


def margin(spec: Spec, device: Device, passes: str) -> float | None:
    """Returns 1 for logits that take much memory, and else None."""
    del device, passes
    size = chunks.nbytes(spec) // 4 * chunks.item_of(spec)
    return 1.0 if size >= WORTH else None


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"`` and ``"memory_bounded"``."""
    own = chunks.default(spec, device)
    return {
        "xla": _as_written(spec, device, passes),
        "memory_bounded": _in_blocks(spec, device, passes, own, READS),
    }


def estimate_hopper(
    spec: Spec, device: Device, passes: str, config: Chunk
) -> Mapping[str, float]:
    """Returns these, and the seconds of ``"hopper"`` with a config."""
    found = dict(estimate(spec, device, passes))
    summed = spec.has("bias") and passes != "forward"
    reads = {n: READS_HOPPER[n] + summed for n in READS_HOPPER}
    return found | {"hopper": _in_blocks(spec, device, passes, config, reads)}


def _idle(device: Device, work: Cost) -> float:
    """Bytes that are not read or written while products run."""
    return max(0.0, work.bytes - work.flops / device.flops * device.bandwidth)


def _work(spec: Spec, passes: str) -> Cost:
    """What a use computes."""
    return cost(dict(spec.shapes), dict(spec.dtypes), dict(spec.params), passes)


def _as_written(spec: Spec, device: Device, passes: str) -> float:
    """The seconds of XLA."""
    work, size, gradients = _work(spec, passes), chunks.item_of(spec), passes != FORWARD
    (*rows, k), v = spec.shape("x"), spec.shape("w")[1]
    logits = float(math.prod(rows)) * v
    touched = 1 + READS[passes] + gradients
    slower = 1.0
    if size == 2 and device.platform in unaligned.PLATFORMS:
        slower = _slower(k, v, gradients)
    more = scattered(spec, 4) * logits * gradients
    return seconds(
        device, work.flops, _idle(device, work) + touched * size * logits + more,
        compute=PRODUCTS / slower, item=size, launches=8,
        temporary=(1 + gradients) * size * logits + 4 * logits * (more > 0),
    )  # fmt: skip


def _in_blocks(
    spec: Spec, device: Device, passes: str, config: Chunk, reads: Mapping[str, int]
) -> float:
    """The seconds of blocks, by how often they read logits."""
    work, size, gradients = _work(spec, passes), chunks.item_of(spec), passes != FORWARD
    (*rows, k), v = spec.shape("x"), spec.shape("w")[1]
    count, logits = math.prod(rows), float(math.prod(rows)) * v
    padded, in_place = chunks.padded(v, config), gradients and config.beside is not None
    # Weights are read while products run, unless there are few rows.
    held = chunks.whole_rows(count, padded, size, config)
    blocks = -(-count // max(held, 1)) if held and not in_place else 1
    flops, again = work.flops * padded / v, 0.0
    if in_place:  # the logits of some rows are computed again
        again = max(count - k - (config.beside or 0), 0) / count
        flops += work.flops / 3 * again
        again *= 2
        again += 0.0 if config.one_kernel else COPIED
    elif gradients and not held:
        flops, again = flops * 4 / 3, 2.0
    weights = float(k) * padded
    sums = ADDED * weights * blocks * (gradients and blocks > 1)
    copied = 2 * item(spec, "w") * weights * (1 + gradients) * (padded != v)
    block = logits / max(blocks, 1) * size * (1 + gradients)
    passing = (1 + reads[passes] + gradients + again) * size * logits
    return seconds(
        device, flops, _idle(device, work) + passing + sums + copied,
        compute=0.97 * PRODUCTS, item=size, launches=LAUNCHES * blocks,
        temporary=block + 4 * weights * (sums > 0),
    )  # fmt: skip


def _slower(k: int, v: int, gradients: bool) -> float:
    """How many times longer XLA's products take, of an array [v, k] of weights.

    Of an array [k, v] they take longer still.
    """
    logits = unaligned.slower(k, k, v)
    if not gradients:
        return logits
    of_rows, of_weights = unaligned.slower(v, k, k), unaligned.slower(v, k, k)
    return (logits + of_rows + of_weights) / 3
