"""Paged attention in plain XLA: a gather, then attention in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.op import PAGED
from rewriter.kernels.attention.paged_form import attended
from rewriter.kernels.attention.pages import as_attention
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Spec, Speed
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from jax import Array


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    return xla.supports(as_attention(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: it does what the program does, and attention's own kernels can."""
    del spec, platform
    return no("gather", "it gathers pages as the program does, which is no faster")


def forward(**given: Any) -> Array:
    """Returns paged attention, as `reference` does, with no array of scores."""
    return attended(xla.forward, **given)


KERNEL = XLA.kernel(
    PAGED.name, forward, None, supports, Speed(profitable), name="gathered"
)
