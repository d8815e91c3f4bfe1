"""Estimates the time of attention by XLA, over blocks, by cuDNN and on Hopper.

XLA writes and reads all scores several times, whatever the mask. The loop over blocks
does so in float32 within a few blocks, and skips most hidden ones. cuDNN and our kernel
for Hopper GPUs multiply only what is seen. For heads of 64, 128 and 256 both are
equally fast within a tenth (``tests/bench/results/hopper_attention_h200.json``). cuDNN
is compiled sooner, and so goes first. It pads heads of other widths more than our
kernel does. The constants are those of an H200. XLA's estimates on TPUs agree with
published rates of v5p, v6e and TPU7x within a factor of two.

b, t, n, h                          model and measured; ms
4 4096 16 128 full bf16   forward   cudnn  0.9  0.8   memory_bounded 7.4  6.7
4 4096 16 128 causal bf16 forward   cudnn  0.5  0.5   memory_bounded 5.1  5.2
4 2048 16 64 causal f32   forward   xla    1.9  1.7   memory_bounded 1.2  1.4
4 2048 16 64 causal f32   both      xla    5.3  4.9   memory_bounded 3.5  3.8
2 4096 16 256 full bf16   both      hopper 3.8  3.5   cudnn 4.4  4.2
4 4096 8 of 4 256, capped both      hopper 2.5  2.3   xla   11   10
2 4096 16 128 bias bf16   both      hopper 4.2  4.0   xla   6.6  6.9
4 4096 32 96 causal bf16  both      hopper 3.3  3.0   cudnn 3.7  3.6
32 729 16 72 full bf16    both      hopper 1.2  1.2   xla   2.2  4.7

Here are XLA's time and the loop's, and what models of kernels for GPUs share. Each of
those is where its kernel is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.kernels.attention.cost import cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import LAUNCH_S, item, seconds
from rewriter.ops.kernel import Spec

PASSES, MASKED = 4.5, 2.0
"""The number of times that XLA reads or writes the scores, in the operands' type;
further times under a mask, window or bias."""

ODD = {4: 1.4, 2: 1.6}
"""The factor of its time if rows of scores begin anywhere, not at 16 bytes, by the
bytes of a number. On an H200 it was 1.3 to 1.75 in float32, and 1.1 to 2.2 in 16 bits
(``tests/bench/results/hopper_float32_h200.json``, ``choices_h200.json``)."""

CAPPED = 1.8
"""The factor of time with a soft cap."""

BLOCKED = 6.5
"""The number of times that the loop over blocks reads or writes scores, in float32."""

HIDDEN = 0.35
"""The time of a hidden block, as a share of a visible one's."""

BOTH = 2.8
"""The factor of time with gradients, for XLA and the loop."""

DENSE, FUSED, FUSED_BOTH = 0.6, 0.75, 0.62
"""Shares of the peak: XLA's products, cuDNN's forward, cuDNN's with gradients."""

FEW_ROWS = 64
"""Up to this many rows of a key head (all queries of its group), reading keys takes the
time. XLA reads them at `READ` of the bandwidth, or at `READ_ONCE` for one row, without
tensor cores. The loop over blocks reads at `LOOPED`, our decode kernel at `STREAMED`
(``tests/bench/results/hopper_decode_h200.json``, 32 MiB to 1 GiB of keys, and
``public_decode_h200.json``)."""

READ, READ_ONCE, LOOPED, STREAMED = 0.26, 0.65, 0.2, 0.95

LAUNCHED, LOOP_LAUNCHED, LENGTHS_LAUNCHED = 4.5, 9, 16
"""Kernels of a forward on an NVIDIA GPU, as many as take `LAUNCH_S` each: XLA's, the
loop's, and the loop's further ones with lengths. XLA has seven, of 2.5 µs at least.
With gradients they are `BOTH` times as many (``tests/bench/results/
choices_small_h200.json``, ``held_out_h200.json``)."""

ONE_BLOCK = 512
"""Up to so many queries and keys are one block of the loop, of which none is hidden."""

LEAST = 16 << 20
"""The fewest bytes of keys and values for which decoding was measured."""

FULL_WIDTH = 128
"""Narrower heads reach smaller shares in cuDNN, by the root of their width."""

COPIED = 0.6
"""The share of the bandwidth that padding and slicing copies reach. It is fitted to our
kernels with copies for heads of 72 and 40 in the same record, minus the estimated
products of 80 and 48. The copies that make lengths even for cuDNN were not measured,
and are assumed to reach it too."""

SMALL = 48 << 20
"""The fewest bytes of float32 scores for which our kernel was measured in decoding."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, and of ``"memory_bounded"``."""
    return {
        "xla": of_xla(spec, device, passes),
        "memory_bounded": of_blocks(spec, device, passes),
    }


def of_xla(spec: Spec, device: Device, passes: str, changed: bool = False) -> float:
    """Returns seconds of XLA, which writes and reads all scores several times.

    Args:
        spec: The use.
        device: The device.
        passes: ``"forward"``, ``"backward"`` or ``"both"``.
        changed: Whether scores are changed by a function, as by a mask.
    """
    work, size = _Work.of(spec), item(spec, "q")
    plain = set(spec.operands) == {"q", "k", "v"} and work.share > 0.99 and not changed
    often = PASSES if plain else PASSES + MASKED
    longer = BOTH if passes != "forward" else 1.0
    launches = longer * (LAUNCHED if device.platform == "cuda" else 4)
    xla = seconds(
        device, longer * work.whole,
        longer * (work.capped * often * size * work.scores + work.moved),
        compute=DENSE, item=size, launches=launches, temporary=2.0 * size * work.scores,
    )  # fmt: skip
    if passes != "forward" or device.platform != "cuda" or work.rows > FEW_ROWS:
        odd = device.platform == "cuda" and spec.shape("k")[1] * size % 16 > 0
        launched = launches * LAUNCH_S
        return launched + (xla - launched) * ODD.get(size, 1.0) if odd else xla
    read = READ if work.rows > 1 else READ_ONCE
    streamed = seconds(device, 0.0, work.moved, memory=read)
    return max(xla, streamed) if work.rows > 1 else streamed


def of_blocks(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds of the loop over blocks."""
    work, loop = _Work.of(spec), looped(spec, device, passes)
    if passes != "forward" or device.platform != "cuda" or work.rows > FEW_ROWS:
        return loop
    return max(loop, seconds(device, 0.0, work.moved, memory=LOOPED))


def looped(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds of the loop over blocks where queries are many."""
    work, size = _Work.of(spec), item(spec, "q")
    alone = max(spec.shape("q")[1], spec.shape("k")[1]) <= ONE_BLOCK
    share = 1.0 if alone and device.platform == "cuda" else work.share
    blocks = BLOCKED * 4 * work.scores * (HIDDEN + (1 - HIDDEN) * share)
    longer, launched = BOTH if passes != "forward" else 1.0, 4
    if device.platform == "cuda":
        launched = LOOP_LAUNCHED + LENGTHS_LAUNCHED * spec.has("kv_lengths")
    return seconds(
        device, longer * work.whole * share,
        longer * (work.capped * blocks + work.moved),
        compute=DENSE, item=size,
        launches=longer * launched * max(1.0, spec.shape("q")[1] / 2048),
    )  # fmt: skip


@dataclass(frozen=True)
class _Work:
    """The work of a forward.

    Attributes:
        scores: The number of scores.
        whole: Operations, were all keys seen.
        share: The share of them that are seen.
        moved: Bytes of operands and result.
        capped: The factor of time of a soft cap.
        rows: Query rows of a key head.
    """

    scores: int
    whole: float
    share: float
    moved: float
    capped: float
    rows: int

    @classmethod
    def of(cls, spec: Spec) -> _Work:
        (b, t, n, h), s = spec.shape("q"), spec.shape("k")[1]
        forward = cost(*map(dict, (spec.shapes, spec.dtypes, spec.params)))
        scores = b * n * t * s
        whole = 2.0 * scores * (h + spec.shape("v")[3])
        return cls(
            scores, whole, min(1.0, forward.flops / whole) if whole else 1.0,
            forward.bytes, CAPPED if spec.param("softcap") is not None else 1.0,
            t * n // max(spec.shape("k")[2], 1),
        )  # fmt: skip


# ------------------------------------------------------- of kernels for GPUs
def share(passes: str, width: int) -> float:
    """Returns the share of the peak that heads of a width reach in cuDNN."""
    share = FUSED if passes == "forward" else FUSED_BOTH
    return share * min(1.0, math.sqrt(width / FULL_WIDTH))


def widened(spec: Spec, passes: str, step: int) -> float:
    """Returns operations of heads that are padded to multiples of some columns."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    wider = {
        name: (*shapes[name][:3], -(-shapes[name][3] // step) * step) for name in "qkv"
    }
    return cost({**shapes, **wider}, dtypes, params, passes).flops


def whole(length: int, tile: int) -> float:
    """Returns how many times as long whole tiles are."""
    return -(-length // tile) * tile / max(length, 1)


def least(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds in which operands and results are read and written once."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    return seconds(device, 0.0, cost(shapes, dtypes, params, passes).bytes)


def copies(device: Device, nbytes: float) -> float:
    """Returns seconds of copies that pad or slice."""
    return seconds(device, 0.0, nbytes, memory=COPIED, launches=0)


def made_even(spec: Spec, both: bool, step: int = 2) -> float:
    """Returns bytes of the copies that make numbers of rows multiples of a step.

    Operands get rows, and the result loses them. So do gradients, and the cotangent
    gets them.
    """
    (b, t, n, h), (_, s, heads, e) = spec.shape("q"), spec.shape("v")
    queries, keys = (x * (x % step > 0) for x in (t, s))
    numbers = b * (h + e) * (queries * n + keys * heads)
    return 2.0 * item(spec, "q") * numbers * (2 if both else 1)
