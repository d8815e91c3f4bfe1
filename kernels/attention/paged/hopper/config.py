"""Configs of the decode kernel for pages: blocks of whole pages, or parts of one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rewriter.kernels.attention import hopper_decode
from rewriter.kernels.attention.hopper_decode import Split
from rewriter.kernels.attention.paged.reference import AXES
from rewriter.kernels.attention.paged.xla import as_attention
from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

ROWS = 16
"""Keys of a block are a multiple of it."""


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
