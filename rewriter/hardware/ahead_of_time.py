"""Compiles a function for a device kind that is not attached.

libtpu compiles TPU programs and needs no TPU. It reads its environment when it is
loaded, and may end the process: compile in a child process where that matters.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
)

from rewriter import errors
from rewriter.ops.device import Device
from rewriter.ops.tpu import UNKNOWN, generation

ENVIRONMENT = {
    "TPU_WORKER_HOSTNAMES": "localhost",  # else it warns that none is set
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes at once
    "TPU_SKIP_MDS_QUERY": "1",  # no questions over the network
}
"""Environment variables that libtpu reads when it is loaded on a host without a TPU."""


def can_compile(device: Device) -> bool:
    """Whether programs can be compiled for a device kind here.

    Example:
        >>> from rewriter.ops.device import named
        >>> can_compile(named("h200"))
        False
    """
    known = device.platform == "tpu" and generation(device) is not UNKNOWN
    return known and importlib.util.find_spec("libtpu") is not None


def compiled(device: Device, function: Callable[..., Any], *specs: Any) -> Any:
    """Compiles a function for one device of a kind that need not be attached.

    Args:
        device: The device kind: a TPU generation.
        function: The function.
        *specs: Its arguments: trees of `jax.ShapeDtypeStruct`.

    Returns:
        A `jax.stages.Compiled` that cannot be called here.

    Raises:
        ConfigError: If no compiler for it is installed.
    """
    if not can_compile(device):
        raise errors.ConfigError(
            f"programs for {device.kind!r} cannot be compiled here",
            next_step="Choose a TPU generation, and on Linux pip install 'jax[tpu]'.",
            where=errors.caller(),
        )
    of = topology(generation(device).topology)[0]
    place = SingleDeviceSharding(of)
    described = AbstractDevice(
        device_kind=of.device_kind, num_cores=of.num_cores, platform="tpu"
    )
    # Code that asks for the TPU's properties while it is traced reads this mesh.
    auto = (AxisType.Auto,)  # as in programs without a mesh; it has been Explicit
    mesh = AbstractMesh((1,), ("unused",), auto, abstract_device=described)
    there = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), specs
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*there)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def topology(name: str) -> Any:
    """Returns the descriptions of the devices of a TPU topology such as ``v5e:2x4``."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
