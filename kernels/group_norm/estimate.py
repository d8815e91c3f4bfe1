"""Estimates the time of a group norm by XLA and by the kernels, from its bytes.

Both read x twice and write the result. With gradients both read x and the cotangent
twice more, and write x's cotangent. What differs is the share of the bandwidth, and the
number of launches (``tests/bench/results/group_norms_h200.json``).

XLA takes 1.1 to 3 times as long with gradients, unless channels are a power of two.
There it took 0.94 to 1.14 times as long: the kernel reads a cotangent that XLA would
not write, as that of a silu. So such uses take the kernel without gradients only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from rewriter.kernels.group_norm.cost import cost
from rewriter.ops.device import Device
from rewriter.ops.estimate import item, seconds
from rewriter.ops.kernel import Spec
from rewriter.support.sizes import size_text
from rewriter.support.verdict import YES, Verdict, no

OURS = 0.73
"""The share of the bandwidth that the kernel reached, with XLA's equations around it.
"""

XLA = {True: 0.65, False: 0.5}
"""That of XLA's own program, by whether channels are a power of two."""

LAUNCHES = {"forward": 2.0, "gradients": 5.0}
"""How long small kernels took, in launches."""

LEAST = {"forward": 8 << 20, "gradients": 2 << 20}
"""The fewest bytes of x that pay: with fewer, launches are most of the time."""


def _pass(passes: str) -> str:
    return "forward" if passes == "forward" else "gradients"


def is_power_of_two(spec: Spec) -> bool:
    """Returns whether the number of channels is a power of two."""
    *_, groups, channels, _ = spec.shape("x")
    count = groups * channels
    return count & (count - 1) == 0


def modelled(spec: Spec, device: Device, passes: str) -> Verdict:
    """Returns whether such sizes were measured."""
    del device
    least, size = LEAST[_pass(passes)], spec.nbytes("x")
    if item(spec, "x") != 2:
        return no("unmeasured", f"x is {spec.dtype('x')}: measured in 16 bits")
    if size < least:
        text = f"x of {size_text(size)}, of less than {size_text(least)}"
        return no("small", f"{text}: XLA is as fast")
    result = str(spec.param("out_dtype") or spec.dtype("x"))
    if passes != "forward" and jnp.dtype(result).itemsize > 2:
        return no("unmeasured", f"the cotangent is {result}: measured in 16 bits")
    if passes != "forward" and is_power_of_two(spec):
        return no("channels", "a power of two channels: XLA's gradients are as fast")
    return YES


def estimate(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
    """Returns seconds by name: of ``"xla"`` and the kernels of the platform."""
    shapes, dtypes, params = map(dict, (spec.shapes, spec.dtypes, spec.params))
    which = _pass(passes)
    arrays = {"forward": 3 / 2, "gradients": 8 / 5}[which]  # read or written, and least
    moved = cost(shapes, dtypes, params, passes).bytes * arrays
    took = lambda share: seconds(
        device, 0.0, moved, memory=share, launches=LAUNCHES[which]
    )
    share = XLA[is_power_of_two(spec)]
    found = {"xla": took(share), "memory_bounded": took(share / 1.2)}
    if device.platform == "cuda":
        ok = modelled(spec, device, passes).ok
        found["hopper"] = took(OURS) if ok else math.inf
    return found
