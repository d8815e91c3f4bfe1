"""TPU generations: their names, and the memory that a kernel may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rewriter.ops.device import Device

LANES = 128
"""Columns of a register; the last axis of a block is a multiple of it."""

_MB = 1 << 20


@dataclass(frozen=True)
class Generation:
    """Facts about a TPU generation, for kernels.

    Attributes:
        name: Its public name, such as ``"v5e"``.
        kind: Its name as `jax.Device.device_kind` has it, such as ``"TPU v5 lite"``.
        topology: The smallest topology of it that programs are compiled for.
        vmem: Bytes of VMEM that a kernel may ask for.
        cores: TensorCores of one device, over which parallel grid axes are split.
        clock: Nominal cycles per second; 0 if unknown.
        fp8: Whether it multiplies 8-bit numbers.
    """

    name: str
    kind: str
    topology: str
    vmem: int
    cores: int = 1
    clock: float = 0.0
    fp8: bool = True


# VMEM: the largest limit with which the compiler takes a kernel of one large window.
GENERATIONS = (
    Generation("v4", "TPU v4", "v4:2x2x1", 16 * _MB, clock=1.05e9, fp8=False),
    Generation("v5e", "TPU v5 lite", "v5e:2x2", 126 * _MB, clock=1.5e9),
    Generation("v5p", "TPU v5", "v5p:2x2x1", 62 * _MB, cores=2, clock=1.75e9),
    Generation("v6e", "TPU v6 lite", "v6e:2x2", 126 * _MB, clock=1.75e9),
    Generation("7x", "TPU7x", "tpu7x:2x2x1", 62 * _MB),
)

UNKNOWN = Generation("any", "tpu", "", 16 * _MB, fp8=False)
"""A TPU of unknown kind, with the features common to all generations."""


def generation(device: Device) -> Generation:
    """Returns a device's generation; `UNKNOWN` if its kind names none.

    Example:
        >>> from rewriter.ops.device import Device
        >>> generation(Device("TPU v5 lite", "tpu")).name
        'v5e'
        >>> generation(Device("tpu", "tpu")).vmem >> 20
        16
    """
    return next((g for g in GENERATIONS if g.kind == device.kind), UNKNOWN)


def part(size: int, most: int) -> int:
    """Returns the size of a block along lanes: the whole axis, a divisor, or `most`.

    Example:
        >>> part(300, 512), part(3072, 1024), part(3200, 1024), part(1100, 512)
        (300, 1024, 640, 512)
    """
    if size <= most:
        return size
    most = max(LANES, most // LANES * LANES)
    divisors = (p for p in range(most, most // 2, -LANES) if size % p == 0)
    return next(divisors, most)
