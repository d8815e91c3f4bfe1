"""Group norms on Hopper GPUs: the sums over positions by a kernel, the rest by XLA.

XLA reaches down to a third of the bandwidth in sums over an axis in front of channels.
The kernel reads x, or x and the cotangent, once, at the full bandwidth.

Pallas takes half a second to import, so the kernel itself is imported where it is first
traced.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax.numpy as jnp

from rewriter.kernels.group_norm import xla
from rewriter.kernels.group_norm.estimate import estimate, modelled
from rewriter.kernels.group_norm.hopper_config import work_of
from rewriter.kernels.group_norm.reference import group_mean
from rewriter.kernels.shared.hopper import by_estimate, importable, runs_on
from rewriter.kernels.shared.limits import SYMBOLIC
from rewriter.ops.kernel import Kernel, Limits, Speed, Traits
from rewriter.support.verdict import Verdict, all_of, no

if TYPE_CHECKING:
    from jax import Array

    from rewriter.ops.kernel import Spec

DTYPES = ("bfloat16", "float16", "float32")

MOST = 1 << 31
"""Arrays with as many elements overflow the kernel's indices."""


def supports(spec: Spec) -> Verdict:
    """Returns whether the kernel supports a use: channels that stand last."""
    if spec.symbolic:
        return SYMBOLIC
    shape, found = spec.shape("x"), [xla.supports(spec)]
    given = {"x": spec.dtype("x")}
    given["the result"] = spec.param("out_dtype") or given["x"]
    for name, dtype in given.items():
        if dtype not in DTYPES:
            text = f"{name} is {dtype}, not bfloat16, float16 or float32"
            found.append(no("dtype", text))
    if (size := math.prod(shape)) >= MOST:
        found.append(no("size", f"{size} elements, of at most 2^31 - 1"))
    if shape[-1] != 1:
        text = "positions stand behind the channels, where XLA's sums are fast"
        found.append(no("layout", text))
    elif 0 in shape:
        found.append(no("empty", f"x has shape {shape}: it holds no numbers"))
    elif work_of(shape, list(given.values())) is None:
        *_, positions, groups, channels, _ = shape
        text = f"{positions} positions of {groups * channels} channels do not fill the"
        found.append(no("lanes", f"{text} lanes of a block evenly"))
    verdict = all_of(*found)
    return importable(KERNEL_MODULE) if verdict.ok else verdict


KERNEL_MODULE = "rewriter.kernels.group_norm.hopper_kernel"


def statistics(x: Array) -> tuple[Array, Array]:
    """Returns mean and variance of each group, as `xla.statistics` does."""
    from rewriter.kernels.group_norm.hopper_kernel import means

    work = work_of(x.shape, [str(x.dtype)])
    if work is None:
        return xla.statistics(x)
    found, around = (_by_channel(y, x.shape) for y in means(_flat(x), work))
    mean = group_mean(found)
    return mean, group_mean(around + jnp.square(found - mean))


def sums(up: Array, x: Array, mean: Array, centred: bool) -> list[Array]:
    """Returns sums over positions, as `xla.sums` does."""
    from rewriter.kernels.group_norm import hopper_kernel

    work = work_of(x.shape, [str(x.dtype), str(up.dtype)])
    if work is None:
        return xla.sums(up, x, mean, centred)
    *_, g, c, _ = x.shape
    each = jnp.broadcast_to(mean, (*mean.shape[:-2], c, 1))
    each = each.reshape(work.samples, g * c)
    parts = hopper_kernel.sums(_flat(up), _flat(x), each, work, centred)
    joined = (_by_channel(y, x.shape) for y in parts)
    return [jnp.sum(y, -4, keepdims=True) for y in joined]


def _flat(x: Array) -> Array:
    """[samples, positions, channels] of [..., m, g, c, 1]."""
    *lead, m, g, c, _ = x.shape
    return x.reshape(math.prod(lead), m, g * c)


def _by_channel(y: Array, shape: tuple[int, ...]) -> Array:
    """[..., parts, g, c, 1] of a kernel's result [samples, blocks, columns]."""
    *lead, _, g, c, _ = shape
    return y.reshape(*lead, y.shape[1] * y.shape[2] // (g * c), g, c, 1)


KERNEL = Kernel(
    "hopper",
    "group_norm",
    ("cuda",),
    1,
    forward=functools.partial(xla.forward, statistics),
    backward=functools.partial(xla.backward, sums),
    limits=Limits(supports, runs_on),
    speed=Speed(by_estimate, by_rule=False, estimate=estimate, modelled=modelled),
    traits=Traits(memory_bounded=True, saves_out=False, saves=xla.saves),
)
