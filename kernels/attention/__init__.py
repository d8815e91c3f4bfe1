"""Attention: softmax(scale · q kᵀ + bias) v."""

from __future__ import annotations

from rewriter.kernels.attention import (
    cudnn,
    hopper,
    hopper_decode,
    hopper_latent,
    hopper_stored,
    tpu,
    tpu_pages,
    xla,
)
from rewriter.kernels.attention.fills import with_fills
from rewriter.kernels.attention.hopper import scored as hopper_scored
from rewriter.kernels.attention.hopper_decode import paged
from rewriter.kernels.attention.hopper_latent import absorbed as hopper_absorbed
from rewriter.kernels.attention.hopper_latent import paged as paged_latent
from rewriter.kernels.attention.op import EXPANDED as EXPANDED
from rewriter.kernels.attention.op import LATENT as LATENT
from rewriter.kernels.attention.op import OP as OP
from rewriter.kernels.attention.op import PAGED as PAGED
from rewriter.kernels.attention.op import PAGED_LATENT as PAGED_LATENT
from rewriter.kernels.attention.op import SCORED as SCORED
from rewriter.kernels.attention.op import STORED as STORED
from rewriter.kernels.attention.overflow import with_overflow
from rewriter.kernels.attention.positions import with_positions
from rewriter.kernels.attention.row_biases import with_row_biases
from rewriter.kernels.attention.weights import in_float32
from rewriter.kernels.attention.xla import absorbed, gathered
from rewriter.kernels.attention.xla import latent as joined_latent
from rewriter.kernels.attention.xla import paged_latent as joined_pages
from rewriter.kernels.attention.xla import scored as with_score
from rewriter.kernels.attention.xla import stored as of_few_bits
from rewriter.ops.kernel import PLATFORMS, Kernel

OPS = (OP, PAGED, SCORED, STORED, LATENT, EXPANDED, PAGED_LATENT)

_OF_ARRAYS = (
    with_positions(cudnn.KERNEL), hopper.KERNEL, with_positions(hopper_decode.KERNEL),
    in_float32(with_positions(tpu.KERNEL)),
    in_float32(xla.KERNEL), in_float32(with_score.KERNEL),
    hopper_scored.KERNEL, hopper_stored.KERNEL, in_float32(of_few_bits.KERNEL),
    hopper_latent.KERNEL, in_float32(joined_latent.KERNEL),
    hopper_absorbed.KERNEL, in_float32(absorbed.KERNEL),
)  # fmt: skip
_OF_PAGES = (
    paged.KERNEL, in_float32(tpu_pages.KERNEL), in_float32(gathered.KERNEL),
    paged_latent.KERNEL, in_float32(joined_pages.KERNEL),
)  # fmt: skip

_BY_TILES = {x.op: in_float32(x) for x in (xla.KERNEL, with_score.KERNEL)}
"""Kernels that weigh hidden keys, by op."""

_WEIGHS = hopper.KERNEL, hopper_scored.KERNEL
"""Others that do for biases."""


def _complete(kernel: Kernel) -> Kernel:
    """Returns a kernel of arrays that gives what the program does in every row."""
    made = with_row_biases(with_overflow(kernel))
    if _is_by_tiles(kernel):
        return made
    return with_fills(made, _BY_TILES.get(kernel.op), kernel in _WEIGHS)


def _is_by_tiles(kernel: Kernel) -> bool:
    """Whether it computes attention by `xla`, which takes fills itself."""
    return kernel.platforms == PLATFORMS


KERNELS = (
    *map(_complete, _OF_ARRAYS),
    *(k if _is_by_tiles(k) else with_fills(k, None) for k in _OF_PAGES),
)
