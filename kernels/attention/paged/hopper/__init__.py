"""Paged attention on Hopper GPUs: the decode kernel, which reads pages in place.

Pallas takes half a second to import, so the kernel itself is imported where it is
first traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from rewriter.kernels.attention import hopper_decode
from rewriter.kernels.attention.hopper_decode import ANY
from rewriter.kernels.attention.hopper_decode import Split as Split
from rewriter.kernels.attention.hopper_decode import profitable as profitable
from rewriter.kernels.attention.hopper_decode import runs_on as runs_on
from rewriter.kernels.attention.paged.estimate import estimate
from rewriter.kernels.attention.paged.hopper.config import configs as configs
from rewriter.kernels.attention.paged.hopper.config import default as default
from rewriter.kernels.attention.paged.hopper.config import fits as fits
from rewriter.kernels.attention.paged.hopper.config import page_size
from rewriter.kernels.attention.paged.reference import AXES, numbered
from rewriter.kernels.attention.paged.xla import as_attention
from rewriter.ops.kernel import Kernel, Limits, Space, Speed, Traits, spec_of
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec


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


def forward(*, config: Split | None = None, **given: Any) -> Array:
    """Returns paged attention [b, t, n, e], as `reference` does.

    Args:
        config: How the work is split; the default config if absent.
        **given: Operands and parameters of paged attention.
    """
    from rewriter.kernels.attention.paged import OP

    operands = {n: jnp.asarray(given[n]) for n in OP.names if n in given}
    params = {n: x for n, x in given.items() if n not in operands}
    config = config or default(spec_of(OP, operands, params), ANY)
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
    **given: Any,
) -> Array:
    from rewriter.kernels.attention.hopper_decode.decode import attend
    from rewriter.kernels.attention.hopper_decode.problem import Pages

    axes = AXES[heads_axis]
    pool = dict(zip(axes, k_pages.shape, strict=True))
    table = jnp.broadcast_to(table, (q.shape[0], table.shape[1]))
    table, beyond = numbered(table, pool["p"], wraps)
    pages = Pages(size=pool["z"], count=table.shape[1], axes=axes, listed=True)
    s = pages.size * pages.count
    out = attend(q, k_pages, v_pages, table, pages, s, pool["k"], config, **given)
    if fills:
        out = jnp.where(beyond[:, None, None, None], jnp.nan, out)
    return out


KERNEL = Kernel(
    name="hopper_decode",
    op="paged_attention",
    platforms=("cuda",),
    version=1,
    forward=forward,
    limits=Limits(supports, runs_on),
    speed=Speed(profitable, estimate=estimate),
    traits=Traits(memory_bounded=True),
    space=Space(Split, default, configs, fits),
)
