"""Shared code of the models of temporary memory, which hold on NVIDIA GPUs alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from rewriter.ops.device import Device
from rewriter.ops.kernel import Spec

Temporary = Callable[[Spec, Device, str], Mapping[str, float]]
"""As `Speed.temporary`: bytes by name, of a use of known sizes, on a device, for
``"forward"`` or with gradients."""


def on_nvidia_gpus(model: Temporary) -> Temporary:
    """Returns a model that says nothing of other devices.

    Args:
        model: What it says of NVIDIA GPUs.

    Example:
        >>> cpu = Device("cpu", "cpu")
        >>> on_nvidia_gpus(lambda spec, device, passes: {"xla": 1.0})(None, cpu, "vjp")
        {}
    """

    @functools.wraps(model)
    def temporary(spec: Spec, device: Device, passes: str) -> Mapping[str, float]:
        return model(spec, device, passes) if device.platform == "cuda" else {}

    return temporary
