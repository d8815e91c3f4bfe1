"""Hopper GPUs (compute capability 9.0): their names, and the resources of an SM."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rewriter.support.verdict import YES, Verdict, no

if TYPE_CHECKING:
    from rewriter.ops.device import Device
    from rewriter.ops.kernel import Spec

NAMES = ("H100", "H200", "H800", "H20")
"""Substrings of the names of Hopper GPUs, including GH200."""

SHARED_MEMORY = 227 << 10
"""The most bytes of shared memory of a block of threads."""

PROCESSORS = 132
"""Streaming multiprocessors of an H100 SXM, H100 NVL, H200 and GH200."""

BUSY = 0.85
"""The share of processors for which blocks of threads in clusters are made."""

BY_ESTIMATE = "chosen by its estimate alone, for a known Hopper GPU and known sizes"
"""Why no rule of thumb chooses a kernel."""

MPS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The environment variable by which a process has a part of a GPU alone."""

FEWER = {"PCIe": 114, "H20": 78}
"""Multiprocessors of an H100 PCIe and of an H20. More programs than processors would
take twice the time."""


def runs_on(device: Device) -> Verdict:
    """Returns whether a device is a Hopper GPU, or still unknown."""
    if device.kind in ("", device.platform) or any(n in device.kind for n in NAMES):
        return YES
    return no("device", f"{device.kind} is not a Hopper GPU (compute capability 9.0)")


def by_estimate(spec: Spec, platform: str) -> Verdict:
    """Returns no: for known Hopper GPUs the estimate decides."""
    del spec, platform
    return no("device", BY_ESTIMATE)


MOSAIC = (
    "jax.experimental.mosaic.gpu", "jaxlib.mlir.dialects.gpu",
    "jaxlib.mlir.dialects.nvvm",
)  # fmt: skip
"""What Pallas imports for NVIDIA GPUs, and installations without it lack."""


@functools.cache
def importable(module: str) -> Verdict:
    """Returns whether this installation can import a module of kernels.

    Pallas takes half a second to import. It is imported only where something is missing
    that it needs, to say why; elsewhere where a kernel is first traced.
    """
    try:
        if all(map(importlib.util.find_spec, MOSAIC)):
            return YES
        importlib.import_module(module)
    except ImportError as problem:  # a jaxlib without Mosaic GPU, as on Windows
        return no("jax", f"this jax cannot build kernels for NVIDIA GPUs: {problem}")
    return YES


def processors(device: Device) -> int:
    """Returns the number of streaming multiprocessors of a Hopper GPU, by its name.

    Example:
        >>> from rewriter.ops.device import Device
        >>> [processors(Device(f"NVIDIA {x}", "cuda")) for x in ("H200", "H20")]
        [132, 78]
    """
    words = device.kind.split()
    return next((n for name, n in FEWER.items() if name in words), PROCESSORS)


def is_whole(device: Device) -> bool:
    """Returns whether programs have all multiprocessors of a known GPU.

    Blocks that wait for each other must run at once. A part of a GPU, by MIG or by
    MPS, may have too few multiprocessors for that.

    Example:
        >>> from rewriter.ops.device import Device
        >>> kinds = "NVIDIA H200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cuda"
        >>> [is_whole(Device(x, "cuda")) for x in kinds]
        [True, False, False]
    """
    known = device.kind not in ("", device.platform)
    return known and "MIG" not in device.kind.split() and MPS not in os.environ


def with_stages(config: Any, spec: Spec) -> Any:
    """Returns a config, of whichever kernel, with as many of its stages as fit."""
    for stages in range(config.stages, 0, -1):
        made = replace(config, stages=stages)
        fit = made.shared_memory(spec) <= SHARED_MEMORY
        if stages % config.turns == 0 and fit:
            return made
    return replace(config, stages=config.turns)
