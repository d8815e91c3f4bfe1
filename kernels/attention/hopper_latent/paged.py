"""Latent attention over pages on Hopper GPUs: the kernel reads them in place.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention import hopper_latent
from rewriter.kernels.attention.estimate import READ, STREAMED
from rewriter.kernels.attention.hopper_latent import ANY, Programs, default
from rewriter.kernels.attention.hopper_latent.config import KEYS
from rewriter.kernels.attention.hopper_latent.config import configs as configs
from rewriter.kernels.attention.hopper_latent.config import fits as fits
from rewriter.kernels.attention.op import PAGED_LATENT
from rewriter.kernels.attention.paged_latent_form import as_latent, copied
from rewriter.kernels.attention.pages import numbered
from rewriter.kernels.shared.hopper import by_estimate
from rewriter.kernels.shared.kinds import HOPPER
from rewriter.ops.device import Device
from rewriter.ops.estimate import seconds
from rewriter.ops.kernel import Space, Speed, spec_of
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jax import Array

    from rewriter.ops.kernel import Spec


def supports(spec: Spec) -> Verdict:
    """Returns whether it supports a use: that of a latent in order, with even pages."""
    if spec.symbolic or any(0 in shape for _, shape in spec.shapes):
        return no("sizes", "the Hopper latent kernel needs known sizes above 0")
    verdict = hopper_latent.supports(as_latent(spec))
    size = spec.shape("latent_pages")[1]
    if verdict.ok and (size % 8 or (size % KEYS and KEYS % size)):
        text = f"pages of {size} keys, not 8, 16, 32 or a multiple of {KEYS}"
        return no("pages", text)
    return verdict


def forward(*, config: Programs | None = None, **given: Any) -> Array:
    """Returns latent attention over pages [b, t, n, e], as `reference` does.

    Args:
        config: How the work is split; the default config if absent.
        **given: Operands and parameters of latent attention over pages.
    """
    operands = {n: x for n, x in given.items() if n in PAGED_LATENT.names}
    params = {n: x for n, x in given.items() if n not in operands}
    config = config or default(spec_of(PAGED_LATENT, operands, params), ANY)
    pool, table = given.pop("latent_pages"), given.pop("table")
    wraps, fills = given.pop("wraps", True), given.pop("fills", False)
    given.pop("promises", None)  # which has to do with gradients alone
    table = jnp.broadcast_to(table, (given["q"].shape[0], table.shape[1]))
    table, beyond = numbered(table, pool.shape[0], wraps)
    if "k_rope_pages" in given:
        given["k_rope"] = given.pop("k_rope_pages")
    out = hopper_latent.attend(config, latent=pool, table=table, **given)
    if fills:
        out = jnp.where(beyond[:, None, None, None], jnp.nan, out)
    return out


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns the seconds of ``"xla"``, which gathers first, and of this kernel."""
    plain, pages = as_latent(spec), copied(spec)
    own = hopper_latent.estimate(plain, device, passes)
    if not math.isfinite(own["hopper_latent"]):
        return own
    gathered = seconds(device, 0.0, 2 * pages, memory=STREAMED)
    read = seconds(device, 0.0, pages, memory=READ)
    return {**own, "xla": gathered + max(read, own["xla"])}


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether it was measured; see `time_model`."""
    return hopper_latent.modelled(as_latent(spec), device, passes)


KERNEL = HOPPER.kernel(
    PAGED_LATENT.name, forward, None, supports,
    Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
    Space(Programs, default, configs, fits), name="hopper_latent",
)  # fmt: skip
