"""Estimates the time of our kernels for Hopper GPUs, copies of operands included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rewriter.kernels.attention.cost import cost
from rewriter.kernels.attention.estimate import (
    BOTH,
    FEW_ROWS,
    FULL_WIDTH,
    LEAST,
    SMALL,
    STREAMED,
    copies,
    least,
    looped,
    of_xla,
    share,
    whole,
)
from rewriter.kernels.attention.hopper import short
from rewriter.kernels.attention.hopper.backward_config import (
    backward_default,
    fits_backward,
)
from rewriter.kernels.attention.hopper.config import is_one_block, sees_unevenly
from rewriter.kernels.attention.hopper.dtypes import is_halved, products
from rewriter.kernels.attention.hopper.widths import COPIED, filled, filled_backward
from rewriter.kernels.attention.weights import PARAM
from rewriter.kernels.shared.hopper import processors
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.verdict import YES, Verdict, no

MIB = 1 << 20

SMALLEST, SMALLEST_TABLE = 1 << 19, 12 << 20
SMALLEST_SHORT, SMALLEST_SHORT_TABLE = 3 << 16, 1 << 20
"""The fewest bytes of float32 scores that pay, of more queries than decoding has: of
any use, and with the gradient of a bias of pairs; of up to 64 queries and keys. XLA
took 4 times as long for 8 x 80 x 16 heads, and 2.7 times for 64 x 49 x 3 heads with a
bias and its gradient
(``tests/bench/results/choices_small_h200.json``, ``choices_few_scores_h200.json``)."""

SMALLEST_ONE, SMALLEST_MORE = 4 << 20, 1 << 20
"""The same of a single entry, without and with lengths or a bias. XLA takes three
kernels for it, and seven for several: 6.7 of our 7.1 µs for 256 x 12 heads, and 7.0 of
our 6.1 with a bias. A single entry of 64 positions took 1.3 to 1.5 of our time."""

OWN = {"forward": 1.03, "forward_and_vjp": 0.98}
OWN_UNEVEN = {"forward": 1.1, "forward_and_vjp": 1.06}
"""Our rate as a share of cuDNN's, and the same under causal masks and windows. On an
H100 it was 1.04 and 0.97 with all keys, 1.06 to 1.16 and 1.05 to 1.20 under such masks
(``tests/bench/results/choices_attention_h100.json``)."""

LONG, OWN_LONG = 12288, 0.93
"""Keys from which gradients under a causal mask are slower than cuDNN's, and their
rate. With 16k keys they took 1.04 of its time on an H100 and 1.14 on an H200 (the
shipped measurements)."""

AHEAD = 1.06
"""How much faster gradients are where the rows of the next tile are copied ahead. With
all keys seen, 512 positions took 0.92 of the time and 577 took 0.93. With 2048 under a
causal mask it was 0.95 (``tests/bench/results/hopper_float32_h200.json``)."""

TILE, BLOCK = 128, 64
"""Queries of a head that are multiplied at once, and the fewest keys."""

STEPS = {
    "begin": 3.5e-6, "forward": 0.66e-6, "begin backward": 8e-6, "backward": 1e-6,
    "wider backward": 0.5,
}  # fmt: skip
"""Seconds of `BLOCK` keys of a tile, and of its queries in the gradients, in heads of
up to 128; and of what comes before. 27 µs for 2293 keys and 185 queries of 4
heads of 80, 16 for 1024 of 4 of 64, 7 for 256 of 12
(``tests/bench/results/held_out_h200.json``, ``choices_few_scores_h200.json``). Queries
and keys of heads of 128 take 1.5 times as long in the gradients as those of 64
(``few_tiles_h200.json`` there)."""

FEW_TILES = 0.95
"""The share of XLA's time that is enough for few tiles
(``tests/bench/results/few_tiles_h200.json``)."""

STEP_WIDTH = 64
"""Columns of heads up to which all keys may be one block."""

STREAMING = frozenset({"q", "k", "v", "kv_lengths", "offset"})
"""Operands of decoding for which this kernel was measured."""

GROUP, FULL, WAVES = 4, 0.9, 4
"""The most query heads of a key head in decoding, and the fewest blocks of threads as a
share of the device's processors. With lengths, which leave blocks with unequal work,
that many times as many. Then the kernel took 0.87 to 0.98 of the time of the one that
splits keys, on an H100 (``tests/bench/results/choices_h100.json``)."""

SHORT = {"forward": 0.85, "forward_and_vjp": 0.75}
"""The share of the bandwidth that attention of up to 64 positions reaches
(``tests/bench/results/choices_small_h200.json``)."""

CAPPED, TABLED = 1.3, 2.2
"""The factors of its time with a soft cap, and with the cotangent of a bias."""


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, and of ``"hopper"``."""
    own = _seconds(spec, device, passes)
    return {"xla": of_xla(spec, device, passes), "hopper": own}


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether scores are as many as were measured, as for cuDNN.

    Decoding was measured for fewer, see `_streams`.
    """
    (b, t, n, _), (_, s, heads, _) = spec.shape("q"), spec.shape("k")
    decodes = t * n <= FEW_ROWS * heads and not short.takes(spec).ok
    least = SMALL if decodes else _smallest(spec, passes)
    if (scores := 4 * b * n * t * s) >= least or _streams(spec, device, passes):
        return YES
    text = f"scores of {scores / MIB:.3g} MiB: not measured below {least / MIB:g} MiB"
    return no("small", text)


def margin(spec: Spec, device: Device, passes: str) -> float | None:
    """Returns the share of XLA's time that is enough; None for the usual one.

    A forward of few tiles is estimated within a tenth.
    """
    takes = modelled(spec, device, passes).ok and not short.takes(spec).ok
    if passes != "forward" or not takes or _streams(spec, device, passes):
        return None
    few = _in_turn(spec, False) >= _seconds(spec, device, passes)
    return FEW_TILES if few else None


def _smallest(spec: Spec, passes: str) -> int:
    """Returns the fewest bytes of scores that pay."""
    whole, several = short.takes(spec).ok, spec.shape("q")[0] > 1
    if passes != "forward" and spec.has("bias") and 1 not in spec.shape("bias")[2:]:
        return SMALLEST_SHORT_TABLE if whole and several else SMALLEST_TABLE
    if whole:
        return SMALLEST_SHORT
    if not several:
        return SMALLEST_MORE if set(spec.operands) - set("qkv") else SMALLEST_ONE
    return SMALLEST


def _streams(spec: Spec, device: Device, passes: str) -> bool:
    """Whether few queries read keys by as many blocks as the device has processors."""
    (b, t, n, _), heads = spec.shape("q"), spec.shape("k")[2]
    few_rows = t * n <= FEW_ROWS * heads and n <= GROUP * heads
    known = device.platform == "cuda" and set(spec.operands) <= STREAMING
    if passes != "forward" or not few_rows or not known or _moved(spec) < LEAST:
        return False
    waves = 1 if set(spec.operands) == {"q", "k", "v"} else WAVES
    return b * heads >= FULL * waves * processors(device)


def _of_short(spec: Spec, passes: str) -> float:
    """Returns the bytes of q, k, v and the result, and of all that gradients move."""
    read = sum(spec.nbytes(name) for name in "qkv")
    result = spec.nbytes("q") // spec.shape("q")[3] * spec.shape("v")[3]
    return float(read + result if passes == "forward" else 3 * (read + result))


def _moved(spec: Spec) -> float:
    return cost(*map(dict, (spec.shapes, spec.dtypes, spec.params))).bytes


def _seconds(spec: Spec, device: Device, passes: str) -> float:
    """Returns seconds of our kernels for Hopper GPUs, copies of operands included.

    Args:
        spec: A use.
        device: A Hopper GPU.
        passes: ``forward`` or ``forward_and_vjp``.
    """
    h = spec.shape("q")[3]
    if not modelled(spec, device, passes).ok:
        return math.inf
    if _streams(spec, device, passes):
        return seconds(device, 0.0, _moved(spec), memory=STREAMED)
    if short.takes(spec).ok:
        return seconds(device, 0.0, _of_short(spec, passes), memory=SHORT[passes])
    both = passes != "forward"
    own = OWN_UNEVEN if _uneven(spec) else OWN
    reached, launches = own[passes] * share(passes, filled(h)), 7 if both else 2
    launches -= not both and is_one_block(spec)
    if both and _uneven(spec) and min(_lengths(spec)) >= LONG and not _is_window(spec):
        reached *= OWN_LONG / own[passes]
    reached *= AHEAD if both and backward_default(spec, device).ahead > 1 else 1.0
    made = seconds(
        device, _work(spec, both), 0.0, compute=reached, launches=launches
    )  # fmt: skip
    made = max(made, least(spec, device, passes), _in_turn(spec, both))
    made *= CAPPED if spec.param("softcap") is not None else 1.0
    made += copies(device, _made_wider(spec, both) + _made_halves(spec, both))
    return _with_gradients(spec, device, made) if both else made


def _in_turn(spec: Spec, both: bool) -> float:
    """Returns the seconds of a tile's blocks, which follow one another.

    However few tiles there are, they take as long: see `STEPS`. With lengths, blocks
    may be few.
    """
    if spec.has("kv_lengths"):
        return 0.0
    (_, t, _, h), s = spec.shape("q"), spec.shape("k")[1]
    left, right = spec.param("window", (None, None))
    seen = s if left is None or right is None else min(s, left + right + TILE)
    wide = max(1.0, h / FULL_WIDTH)
    blocks = 1 if is_one_block(spec) and h <= STEP_WIDTH else -(-seen // BLOCK)
    forward = STEPS["begin"] + STEPS["forward"] * wide * blocks
    if not both:
        return forward
    tiles = -(-seen // BLOCK) + -(-min(t, seen) // BLOCK)
    wider = 1 + STEPS["wider backward"] * min(1.0, max(0, h - STEP_WIDTH) / STEP_WIDTH)
    step = STEPS["backward"] * max(wide, wider)
    return forward + STEPS["begin backward"] + step * tiles


def _work(spec: Spec, both: bool) -> float:
    """Returns operations, those of gradients in ones at the forward's rate."""
    (_, t, _, h), s, passes = spec.shape("q"), spec.shape("k")[1], "forward_and_vjp"
    tiles = whole(t, TILE) * whole(s, BLOCK)
    forward = _flops(spec, "forward", filled) * tiles
    count = products(spec.param(PARAM), spec.dtype("q"))
    if count == 2:  # v is multiplied twice in the forward
        forward += _flops(spec, "forward", filled) / 2
    times = count if count > 2 else 1  # all products are as many
    if not both:
        return times * forward
    backward = _flops(spec, passes, filled_backward)
    backward -= _flops(spec, "forward", filled_backward)
    wide = filled_backward(h)
    slower = share(passes, filled(h)) / share(passes, wide)
    return times * (forward + backward * tiles * slower)


def _uneven(spec: Spec) -> bool:
    """Whether rows see unequal numbers of keys for no other reason than positions."""
    return sees_unevenly(spec) and not spec.has("prefix")


def _lengths(spec: Spec) -> tuple[int, int]:
    """The numbers of queries and of keys."""
    return spec.shape("q")[1], spec.shape("k")[1]


def _is_window(spec: Spec) -> bool:
    """Whether keys are hidden that are too far before a query."""
    return spec.param("window", (None, None))[0] is not None


def _flops(spec: Spec, passes: str, read: Callable[[int], int]) -> float:
    """Returns the operations with heads as wide as they are read."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    wider = {name: (*shapes[name][:3], read(shapes[name][3])) for name in "qkv"}
    return cost({**shapes, **wider}, dtypes, params, passes).flops


def _made_wider(spec: Spec, both: bool) -> float:
    """Returns bytes of the copies that pad heads to widths that our kernel reads.

    q, k and v are padded once for both passes, and the result is sliced. For gradients
    the result and its cotangent are padded, and three results sliced.
    """
    (b, t, n, h), (_, s, heads, e) = spec.shape("q"), spec.shape("v")
    wide, wide_values = (2 * x + -x % COPIED if x % COPIED else 0 for x in (h, e))
    times, results = (2, 3) if both else (1, 1)
    queries, keys = b * t * n, b * s * heads
    numbers = times * (queries + keys) * wide
    numbers += (times * keys + results * queries) * wide_values
    return float(item(spec, "q") * numbers)


def _made_halves(spec: Spec, both: bool) -> float:
    """Returns bytes read and written to split float32 numbers; see `halves`."""
    if not is_halved(spec.dtype("q")):
        return 0.0
    split = [math.prod(spec.shape(name)) for name in "qkv"]
    (b, t, n, _), e = spec.shape("q"), spec.shape("v")[3]
    return 8.0 * (sum(split) + (b * t * n * e if both else 0))


def _with_gradients(spec: Spec, device: Device, own: float) -> float:
    """Returns seconds of our kernels for Hopper GPUs, gradients of the loop included.

    Args:
        spec: A use.
        device: A Hopper GPU.
        own: Seconds of both passes by kernels.
    """
    tiles = backward_default(spec, device)
    if not fits_backward(tiles, spec, device).ok:
        loop = looped(spec, device, "forward_and_vjp") * (1 - 1 / BOTH)
        return _seconds(spec, device, "forward") + loop
    asked = spec.has("bias") and 1 not in spec.shape("bias")[2:]
    return own * (TABLED if asked else 1.0)
