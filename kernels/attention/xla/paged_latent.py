"""Latent attention over pages in plain XLA: gathers the pages into one array first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.op import PAGED_LATENT
from rewriter.kernels.attention.paged_latent_form import as_latent, attended
from rewriter.kernels.attention.xla import latent
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Spec, Speed
from rewriter.support.verdict import Verdict

if TYPE_CHECKING:
    from jax import Array


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of a latent in order."""
    return latent.supports(as_latent(spec))


def forward(**given: Any) -> Array:
    """Returns latent attention over pages, as `reference` does."""
    return attended(xla.forward, **given)


KERNEL = XLA.kernel(
    PAGED_LATENT.name, forward, None, supports, Speed(latent.profitable), name="joined"
)
