"""Attention to a latent in plain XLA: joined keys, then attention in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.latent_form import as_attention, attended
from rewriter.kernels.attention.op import LATENT
from rewriter.kernels.shared.kinds import XLA
from rewriter.ops.kernel import Spec, Speed
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from jax import Array


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    return xla.supports(as_attention(spec))


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: it joins keys as the program does, and attention's kernels can."""
    del spec, platform
    return no("join", "it joins keys as the program does, which is no faster")


def forward(**given: Any) -> Array:
    """Returns attention to a latent, as `reference` does, with no array of scores."""
    return attended(xla.forward, **given)


KERNEL = XLA.kernel(
    LATENT.name, forward, None, supports, Speed(profitable), name="joined"
)
