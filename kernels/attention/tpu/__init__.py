"""Attention on TPUs, in Pallas Mosaic TPU: what the kernels support.

Pallas takes half a second to import, so the kernels themselves are imported where
they are first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.by_entry import by_entry
from rewriter.kernels.attention.empty_rows import AVERAGED
from rewriter.kernels.attention.tpu.config import (
    ANY,
    SMALLEST,
    SMALLEST_BACKWARD,
    backward_runnable,
    runnable,
)
from rewriter.kernels.attention.tpu.config import BackwardBlocks as BackwardBlocks
from rewriter.kernels.attention.tpu.config import Blocks as Blocks
from rewriter.kernels.attention.tpu.config import (
    backward_configs as backward_configs,
)
from rewriter.kernels.attention.tpu.config import (
    backward_default as backward_default,
)
from rewriter.kernels.attention.tpu.config import configs as configs
from rewriter.kernels.attention.tpu.config import default as default
from rewriter.kernels.attention.tpu.config import fits as fits
from rewriter.kernels.attention.tpu.config import fits_backward as fits_backward
from rewriter.kernels.attention.tpu.sizes import together
from rewriter.kernels.attention.tpu.steps import steps as steps
from rewriter.kernels.shared.kinds import TPU
from rewriter.ops.kernel import Space, Speed
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

TYPES = ("bfloat16", "float32")


def sized(spec: Spec) -> Verdict:
    """Returns whether all sizes of a use are known, and none is 0."""
    if spec.symbolic:
        return no("symbolic", "the TPU kernel needs known sizes")
    empty = [
        no("empty", f"{name} has shape {shape}, and an axis of size 0")
        for name, shape in spec.shapes
        if 0 in shape
    ]
    return all_of(YES, *empty)


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernels support a use: bfloat16 or float32, sizes known."""
    verdict = all_of(sized(spec), _types(spec))
    if not verdict.ok:
        return verdict
    found = [_dropped(spec)]
    if not any(runnable(spec, ANY)):
        found.append(fits(SMALLEST, spec, ANY))
    if not any(backward_runnable(spec, ANY)):
        found.append(fits_backward(SMALLEST_BACKWARD, spec, ANY))
    return all_of(*found)


def _types(spec: Spec) -> Verdict:
    kinds = {str(jnp.dtype(spec.dtype(name))) for name in "qkv"}
    if len(kinds) > 1 or not kinds <= set(TYPES):
        text = (
            f"the TPU kernel takes bfloat16 or float32, not {', '.join(sorted(kinds))}"
        )
        return no("dtype", text)
    for name in ("bias", "dropout", "alibi", "sinks", "scale_factor"):
        if spec.has(name) and spec.dtype(name) not in TYPES:
            return no("dtype", f"{name} is {spec.dtype(name)}, not bfloat16 or float32")
    out = str(jnp.dtype(spec.param("out_dtype") or spec.dtype("q")))
    if out not in TYPES:
        return no("dtype", f"the result is {out}, not bfloat16 or float32")
    return YES


def _dropped(spec: Spec) -> Verdict:
    if spec.has("dropout") and spec.param("empty_rows") in AVERAGED:
        return no("dropout", "a row that sees no key needs the mean of dropped values")
    return YES


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes where it beats XLA in the compiler's simulator, or saves memory.

    Thousands of cycles on a v5e, for 4 heads of 128, causal, in bfloat16 (libtpu
    0.0.50, what a program computes alone); the kernel's are the bundles of its steps:

    tokens    256   512   1024
    XLA        15    25     57
    kernel      4     7     22

    A query of each head
    against a fully visible cache takes the time of reading it, either way.
    """
    del platform
    (b, t, n, _), s = spec.shape("q"), spec.shape("k")[1]
    scores = 4 * b * n * t * s
    if _bytes(spec) > 2 and scores < LARGE:
        text = f"float32 at full precision for scores of {scores >> 20} MiB: XLA"
        return no("float32", f"{text} is as fast, unless the source asked for it")
    if min(t, s) >= FEWEST and scores >= SMALL:
        return YES
    if together(spec) and spec.nbytes("k") >= CACHE and _hides(spec):
        return YES
    text = f"{t} queries, {s} keys and scores of {scores >> 20} MiB"
    return no("small", f"{text} are so little that XLA is as fast")


FEWEST, SMALL, LARGE = 256, 1 << 20, 2 << 30
CACHE = 4 << 20
"""The fewest bytes of keys for which skipping some is worth a kernel."""


def _bytes(spec: Spec) -> int:
    return jnp.dtype(spec.dtype("q")).itemsize


def _hides(spec: Spec) -> bool:
    """Whether keys may be left out."""
    windowed = spec.param("window", (None, None)) != (None, None)
    return windowed or spec.has("kv_lengths") or spec.has("q_segments")


def forward(**given: Any) -> Any:
    """Returns attention; see `rewriter.kernels.attention.tpu.passes`."""
    from rewriter.kernels.attention.tpu import passes

    return passes.forward(**given)


def backward(**given: Any) -> dict[str, Array]:
    """Returns cotangents; see `rewriter.kernels.attention.tpu.passes`."""
    from rewriter.kernels.attention.tpu import passes

    return passes.backward(**given)


def saves(spec: Spec) -> list[Any]:
    """Returns the type of what is kept of each row: with a bias two numbers."""
    b, t, n, _ = spec.shape("q")
    return [((b, n, 2 if spec.has("bias") else 1, t), "float32")]


KERNEL = by_entry(
    TPU.kernel(
        "attention", forward, backward, supports, Speed(profitable, steps=steps),
        Space(Blocks, default, configs, fits),
        Space(BackwardBlocks, backward_default, backward_configs, fits_backward),
        saves_out=True, merges=True, saves=saves,
    )
)  # fmt: skip
