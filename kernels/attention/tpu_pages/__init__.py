"""Paged attention on TPUs, in Pallas Mosaic TPU: what the kernel supports.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention.op import PAGED
from rewriter.kernels.attention.pages import AXES, copied
from rewriter.kernels.attention.tpu import sized
from rewriter.kernels.attention.tpu_pages.config import ANY, Chunk, fits, sizes
from rewriter.kernels.attention.tpu_pages.config import configs as configs
from rewriter.kernels.attention.tpu_pages.config import default as default
from rewriter.kernels.shared.kinds import TPU
from rewriter.ops.kernel import Space, Speed, spec_of
from rewriter.ops.tpu import LANES
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

TYPES = ("bfloat16", "float32")
TAKEN = {"q", "k_pages", "v_pages", "table", "kv_lengths", "offset", "sinks"}
ROWS = 256
"""The most queries of all heads of a sequence: their scores are computed at once."""

COPIED = 4 << 20
"""The fewest bytes of gathered keys and values for which avoiding them is worth a
kernel."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: few queries, masks by position."""
    verdict = all_of(sized(spec), _types(spec))
    if not verdict.ok:
        return verdict
    others = ", ".join(n for n in spec.operands if n not in TAKEN)
    found = []
    if others:
        found.append(no("mask", f"the TPU kernel masks by lengths, not by {others}"))
    if (rows := sizes(spec).rows) > ROWS:
        found.append(no("queries", f"{rows} queries of a sequence, more than {ROWS}"))
    if (size := _pool(spec)["z"]) % 8:
        found.append(no("pages", f"pages of {size} keys, not a multiple of 8"))
    if not configs(spec, ANY):
        found.append(fits(Chunk(), spec, ANY))
    return all_of(*found)


def _types(spec: Spec) -> Verdict:
    kinds = {str(jnp.dtype(spec.dtype(n))) for n in ("q", "k_pages", "v_pages")}
    kinds.add(str(jnp.dtype(spec.param("out_dtype") or spec.dtype("q"))))
    if not kinds <= set(TYPES):
        text = ", ".join(sorted(kinds - set(TYPES)))
        return no("dtype", f"the TPU kernel takes bfloat16 or float32, not {text}")
    return YES


def _pool(spec: Spec) -> dict[str, int]:
    """The sizes of a pool of keys, by letter."""
    axes = AXES[spec.param("heads_axis", 2)]
    return dict(zip(axes, spec.shape("k_pages"), strict=True))


def _in_place(spec: Spec) -> Verdict:
    """Whether pools are read in place, without a copy.

    Observed in compiled programs for a v5e (libtpu 0.0.50).
    """
    widths = {spec.shape("k_pages")[3], spec.shape("v_pages")[3]}
    heads = _pool(spec)["k"]
    small = heads in (1, 2, 4) and widths == {LANES}
    if all(w % LANES == 0 for w in widths):
        if spec.param("heads_axis", 2) < 2 or heads % 8 == 0 or small:
            return YES
        text = f"{heads} heads behind the positions of a page"
    else:
        text = f"heads of {' and '.join(map(str, sorted(widths)))}, not of 128"
    return no("copied", f"XLA would copy the pools for a kernel: {text}")


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns yes for large gathered keys and values, which the kernel never writes.

    A rule of thumb, not measured on a TPU. The gather reads and writes all pages of the
    table, and attention reads them again; the kernel reads, once, those up to each
    sequence's length.
    """
    del platform
    size = copied(dict(spec.shapes), dict(spec.dtypes), dict(spec.params))
    if size >= COPIED:
        return _in_place(spec)
    text = f"gathered keys and values of {size >> 10} KiB"
    return no("small", f"{text} are so little that XLA is as fast")


def forward(*, config: Chunk | None = None, **given: Any) -> Array:
    """Returns paged attention; see `rewriter.kernels.attention.tpu_pages.kernel`."""
    from rewriter.kernels.attention.tpu_pages import kernel

    operands = {n: jnp.asarray(given[n]) for n in PAGED.names if n in given}
    params = {n: x for n, x in given.items() if n not in operands}
    chunk = config or default(spec_of(PAGED, operands, params), ANY)
    return kernel.forward(**operands, **params, config=chunk)


KERNEL = TPU.kernel(
    PAGED.name, forward, None, supports, Speed(profitable),
    Space(Chunk, default, configs, fits),
)  # fmt: skip
