"""Paged attention on Hopper GPUs: the decode kernel, which reads pages in place.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention import hopper_decode
from rewriter.kernels.attention.hopper_decode import ANY
from rewriter.kernels.attention.hopper_decode import Split as Split
from rewriter.kernels.attention.hopper_decode import runs_on as runs_on
from rewriter.kernels.attention.hopper_decode.time_model import (
    estimate_pages,
    pages_modelled,
)
from rewriter.kernels.attention.op import PAGED
from rewriter.kernels.attention.pages import AXES, as_attention, numbered
from rewriter.kernels.shared.hopper import by_estimate
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.kernel import Space, Speed, spec_of
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

ROWS = 16
"""Keys of a block are a multiple of it."""


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: that of the decode kernel, with even pages."""
    if spec.symbolic or any(0 in shape for _, shape in spec.shapes):
        return no("sizes", "the Hopper decode kernel needs known sizes above 0")
    verdict = hopper_decode.supports(as_attention(spec), hopper_decode.IN_PAGES)
    if not verdict.ok:
        return verdict
    size, found = page_size(spec), []
    if size % 8:
        found.append(no("pages", f"pages of {size} keys, not a multiple of 8"))
    elif not any(fits(c, spec, ANY).ok for c in configs(spec, ANY)):
        found.append(no("pages", f"pages of {size} keys do not divide into blocks"))
    return all_of(*found)


# ------------------------------------------------------------------- its configs
def page_size(spec: Spec) -> int:
    """Returns the keys of a page."""
    axes = AXES[spec.param("heads_axis", 2)]
    return spec.shape("k_pages")[axes.index("z")]


def default(spec: Spec, device: Device) -> Split:
    """Returns the default config: the first of `configs` that fits."""
    return next(c for c in configs(spec, device) if fits(c, spec, device).ok)


def configs(spec: Spec, device: Device) -> list[Split]:
    """Returns configs worth measuring, most promising first."""
    size, found = page_size(spec), []
    step = math.lcm(size, ROWS)
    for config in hopper_decode.configs(as_attention(spec), device):
        if not _even(config.block_kv, size):
            block = max(1, config.block_kv // step) * step
            config = replace(config, block_kv=block)
        found.append(config)
    return list(dict.fromkeys(found))


def fits(config: Split, spec: Spec, device: Device) -> Verdict:
    """Returns whether a config can run: in the decode kernel, with even pages."""
    size, found = page_size(spec), YES
    if not _even(config.block_kv, size):
        text = f"blocks of {config.block_kv} keys and pages of {size} do not divide"
        found = no("pages", text)
    return all_of(hopper_decode.fits(config, as_attention(spec), device), found)


def _even(block: int, size: int) -> bool:
    return block % size == 0 or size % block == 0


# ------------------------------------------------------------------ the kernel
def forward(*, config: Split | None = None, **given: Any) -> Array:
    """Returns paged attention [b, t, n, e], as `reference` does.

    Args:
        config: How the work is split; the default config if absent.
        **given: Operands and parameters of paged attention.
    """
    operands = {n: jnp.asarray(given[n]) for n in PAGED.names if n in given}
    params = {n: x for n, x in given.items() if n not in operands}
    config = config or default(spec_of(PAGED, operands, params), ANY)
    return _forward(**operands, **params, config=config)


def _forward(
    *,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    table: Array,
    config: Split,
    heads_axis: int = 2,
    wraps: bool = True,
    fills: bool = False,
    promises: bool = False,
    **given: Any,
) -> Array:
    from rewriter.kernels.attention.hopper.use import Use
    from rewriter.kernels.attention.hopper_decode.decode import attend
    from rewriter.kernels.attention.hopper_decode.problem import Pages

    del promises  # which has to do with gradients alone
    axes = AXES[heads_axis]
    pool = dict(zip(axes, k_pages.shape, strict=True))
    table = jnp.broadcast_to(table, (q.shape[0], table.shape[1]))
    table, beyond = numbered(table, pool["p"], wraps)
    pages = Pages(size=pool["z"], count=table.shape[1], axes=axes, listed=True)
    s = pages.size * pages.count
    use = Use(q, k_pages, v_pages, **given)
    out = attend(use, table, pages, s, pool["k"], config)
    if fills:
        out = jnp.where(beyond[:, None, None, None], jnp.nan, out)
    return out


KERNEL = HOPPER.kernel(
    PAGED.name, forward, None, supports,
    Speed(by_estimate, estimate=estimate_pages, modelled=pages_modelled),
    Space(Split, default, configs, fits), name="hopper_decode",
)  # fmt: skip
