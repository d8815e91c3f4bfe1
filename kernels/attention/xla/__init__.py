"""Attention in plain XLA, in memory that grows with t + s: tiles and a running softmax.

Queries are taken in blocks of rows, keys in blocks of columns; a tile of
scores exists only while it is used. The loops over key blocks run between
bounds computed from window, offset, prefix and lengths, so that blocks no
query sees cost nothing. Source: Rabe and Staats, "Self-attention Does Not
Need O(n²) Memory" (2021), and Dao et al., "FlashAttention" (2022), for the
backward pass from the row's log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.estimate import estimate
from rewriter.kernels.attention.xla import by_size
from rewriter.kernels.attention.xla.backward import backward as backward
from rewriter.kernels.attention.xla.backward import with_passed as with_passed
from rewriter.kernels.attention.xla.config import Blocks as Blocks
from rewriter.kernels.attention.xla.config import configs as configs
from rewriter.kernels.attention.xla.config import default as default
from rewriter.kernels.attention.xla.forward import forward as forward
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Space, Speed
from rewriter.support.sizes import size_text
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: non-empty sizes, floats.

    Batch, lengths and heads may be symbolic; widths and heads of a group may not.
    """
    checks = [
        no("symbolic", f"{name} has shape {spec.shape(name)}: its width must be known")
        for name in ("q", "k", "v")
        if not isinstance(spec.shape(name)[3], int)
    ]
    group = spec.shape("q")[2] // spec.shape("k")[2]
    if not isinstance(group, int):
        checks.append(no("symbolic", f"{group} heads of a group must be known"))
    checks += [
        no("empty", f"{name} has shape {shape}, and an axis of size 0")
        for name, shape in spec.shapes
        if 0 in shape
    ]
    for name in ("q", "k", "v"):
        if not jnp.issubdtype(spec.dtype(name), jnp.floating):
            checks.append(no("dtype", f"{name} is {spec.dtype(name)}, not a float"))
    return all_of(YES, *checks)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns whether `forward` is likely to beat the program as written.

    On an H200 (``tests/bench/results/tuning_h200.json``) it takes 0.8 of XLA's time in
    float32, and a third of its memory under a causal mask. XLA is faster where a
    program keeps its scores in 16 bits. There this kernel is chosen only if the scores
    would take 32 GiB. Where cuDNN may be used, it takes a tenth. Of symbolic sizes the
    program decides when it runs: see `by_size`.

    The measure is what the program holds in f32: its scores, and its turned
    copies of k and v. The table has the original's time over ours, forward | with
    gradient, and in brackets MiB of scores + those of k and v. It was measured on 2
    cores of an AMD EPYC (Zen 4), f32, jax 0.10.2 and 0.12.0, under changing load:

    causal b1 t128 n8 h64 [0.5 + 0.5]      1.0 | 1.0
    causal b1 t256 n8 h64 [2 + 1]          1.0 | 1.2
    full   b32 t64 n8 h64 [4 + 8]          0.8 to 1.2 | 0.8
    full   b16 t128 n8 h64 [8 + 8]         0.8 to 1.4 | 1.4
    causal b1 t512 n4 h64 [4 + 1]          2.0 | 1.4
    causal b1 t512 n8 h64 [8 + 2]          1.4 | 2.4
    causal b1 t1024 n8 h64 [32 + 4]        2.3 | 3.2
    causal b1 t2048 n8 h64 [128 + 8]       4.2 | 6.9
    full   b1 t2048 n8 h64 [128 + 8]       5.1 | 3.2
    full   b16 t256 n8 h32 [32 + 8]        0.9 to 4.9 | 1.6
    t1 s1024 b4 n8 h64 [0.1 + 16]          0.8 to 1.2 | 0.7
    t1 s2048 b4 n8 h64 [0.3 + 32]          2.0 to 3.0 | 1.3
    t1 s32768 b4 n8 h64 [4 + 512]          4.4 | 1.4
    """
    if spec.symbolic:
        return YES  # `by_size` leaves small ones to the reference
    b, t, n, h = spec.shape("q")
    s, heads, e = spec.shape("k")[1], spec.shape("k")[2], spec.shape("v")[3]
    scores, lines = 4 * b * n * t * s, 4 * b * s * heads * (h + e)
    mib = 1 << 20
    if platform != "cpu":
        return _pays_on_gpu(spec, platform, scores)
    if (scores >= 4 * mib and min(t, s) >= 256) or scores + lines >= 24 * mib:
        return YES
    text = (
        f"scores of {size_text(scores)} and keys and values of {size_text(lines)}"
        " are so small that XLA is as fast"
    )
    return no("small", text)


def _pays_on_gpu(spec: Spec, platform: str, scores: int) -> Verdict:
    if platform != "cuda":
        return no("platform", f"not measured to be faster than XLA on {platform}")
    if scores >= 32 << 30:
        return YES
    if scores < 128 << 20:
        return no("small", f"scores of {size_text(scores)}, for which XLA is as fast")
    if spec.has("mask") and spec.shape("mask")[2] > 1:
        return no("mask", "under a table of masks XLA is faster on cuda")
    if jnp.dtype(spec.dtype("q")).itemsize > 2:
        return YES
    text = f"scores of {scores >> 20} MiB: below 32 GiB XLA's dense attention in 16"
    return no("platform", f"{text} bits is faster on cuda")


def _saves(spec: Spec) -> list[Any]:
    """The log-sum-exp of each row, [b, n, t], or two terms of it."""
    b, t, n, _ = spec.shape("q")
    types = (spec.dtype(name) for name in "qkv")
    wide = jnp.promote_types(jnp.result_type(*types), jnp.float32)
    return [((b, n, t), wide)] * (1 if spec.param("fill") is None else 2)


SPACE = Space(Blocks, default, configs, symbolic=True)

KERNEL = XLA.kernel(
    "attention", by_size.forward, by_size.backward, supports,
    Speed(profitable, estimate=estimate), SPACE, saves_out=True, merges=True,
    saves=_saves, flat=True,
)  # fmt: skip
