"""Paged attention in plain XLA: a gather, then attention in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewriter.kernels.attention import xla
from rewriter.kernels.attention.paged.cost import keys_and_values
from rewriter.kernels.attention.paged.reference import reference
from rewriter.ops.kernel import PLATFORMS, Kernel, Limits, Spec, Speed, Traits
from rewriter.support.verdict import Verdict, no

if TYPE_CHECKING:
    from jax import Array

OWN = ("heads_axis", "wraps", "fills")


def supports(spec: Spec) -> Verdict:
    """Returns whether `forward` supports a use: those of bounded attention."""
    return xla.supports(as_attention(spec))


def as_attention(spec: Spec) -> Spec:
    """Returns the use of attention after the gather."""
    found = keys_and_values(dict(spec.shapes), dict(spec.params))
    shapes, dtypes = [], []
    for name, shape in spec.shapes:
        plain = name.removesuffix("_pages")
        if name != "table":
            shapes.append((plain, found.get(plain, shape)))
            dtypes.append((plain, spec.dtype(name)))
    params = tuple(p for p in spec.params if p[0] not in OWN)
    return Spec("attention", tuple(shapes), tuple(dtypes), params)


def profitable(spec: Spec, platform: str) -> Verdict:
    """Returns no: it does what the program does, and attention's own kernels can."""
    del spec
    text = "it gathers pages as the program does"
    if platform != "tpu":
        text += "; a kernel that reads them where they lie is chosen for TPUs alone"
    return no("gather", text)


def forward(**given: Any) -> Array:
    """Returns paged attention, as `reference` does, with no array of scores."""
    return reference(**given, attend=xla.forward)


KERNEL = Kernel(
    name="gathered",
    op="paged_attention",
    platforms=PLATFORMS,
    version=1,
    forward=forward,
    limits=Limits(supports),
    speed=Speed(profitable),
    traits=Traits(memory_bounded=True),
)
