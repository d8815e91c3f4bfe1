"""Limits of attention by cuDNN in JAX, for a GPU that is not attached.

JAX checks the compute capability of the GPU and the version of cuDNN while it traces
the call, on the GPU's own machine alone. These are the same checks of a stated device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rewriter.support.verdict import YES, Verdict, all_of, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

HOPPER = (9, 0)

WIDEST = {True: 256, False: 128}
"""The widest heads, from Hopper GPUs on and before."""

STEP = 8
"""Heads are as wide as a multiple of it."""

NEEDED = {(10, 3): 91100}
"""The oldest cuDNN for GPUs of a compute capability."""


def traced_on(spec: Spec, device: Device) -> Verdict:
    """Whether JAX traces cuDNN's attention on a device with a known cuDNN.

    Args:
        spec: A use of the kernel: q, k and v have one 16-bit dtype, and heads of equal
            width. Odd lengths, whose gradients cuDNN refuses under a bias, are made
            even before.
        device: Its `capability` and `cudnn` count.
    """
    return all_of(_width(spec, device), _version(device))


def _width(spec: Spec, device: Device) -> Verdict:
    width, widest = spec.shape("q")[3], WIDEST[device.capability >= HOPPER]
    if width <= widest and width % STEP == 0:
        return YES
    limit = f"a multiple of {STEP} up to {widest}"
    return no("width", f"heads are {width} wide: on {device.kind} cuDNN takes {limit}")


def _version(device: Device) -> Verdict:
    needed = NEEDED.get(device.capability[:2], 0)
    if device.cudnn >= needed:
        return YES
    text = f"{device.kind} needs cuDNN {version_text(needed)}"
    return no("version", f"{text}, and {version_text(device.cudnn)} is assumed")


def version_text(version: int) -> str:
    """Returns cuDNN's version in words.

    Example:
        >>> version_text(91002)
        '9.10.2'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
