"""Known facts of a device kind, by its name: platform, rates, sizes."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import jax

from rewriter import errors


@dataclass(frozen=True)
class Device:
    """A device's figures, for choosing and measuring.

    Attributes:
        kind: As `jax.Device.device_kind` has it, such as ``"NVIDIA H200"``.
        platform: ``cpu``, ``cuda``, ``rocm`` or ``tpu``, as kernels name it.
        flops: Peak FLOP/s of products of bfloat16 matrices; 0 if unknown.
        bandwidth: Peak bytes/s to and from memory; 0 if unknown.
        memory: Bytes of memory; 0 if unknown.
        cache: Bytes of the last-level cache on the chip; 0 if unknown.
        shared_memory: Bytes of shared memory (VMEM on a TPU) a kernel may have.
        measured: Whether `flops` and `bandwidth` were measured, not taken from a data
            sheet.
    """

    kind: str
    platform: str
    flops: float = 0.0
    bandwidth: float = 0.0
    memory: int = 0
    cache: int = 0
    shared_memory: int = 0
    measured: bool = False


_MB, _GB = 1 << 20, 1 << 30

KNOWN = {
    # A product of 8192 x 8192 normal matrices and a copy of 8.6 GB, by CUPTI.
    "h200": Device("NVIDIA H200", "cuda", 840e12, 4.3e12, 141 * _GB, 60 * _MB,
                   227 << 10, measured=True),
    # From here on as on the makers' data sheets.
    "h100": Device("NVIDIA H100 80GB HBM3", "cuda", 989e12, 3.35e12, 80 * _GB,
                   50 * _MB, 227 << 10),
    "a100": Device("NVIDIA A100-SXM4-80GB", "cuda", 312e12, 2.04e12, 80 * _GB,
                   40 * _MB, 163 << 10),
    "b200": Device("NVIDIA B200", "cuda", 2250e12, 8e12, 180 * _GB, 126 * _MB,
                   227 << 10),
    "l40s": Device("NVIDIA L40S", "cuda", 362e12, 0.864e12, 48 * _GB, 96 * _MB,
                   99 << 10),
    "tpu_v4": Device("TPU v4", "tpu", 275e12, 1.2e12, 32 * _GB, 0, 16 * _MB),
    "tpu_v5e": Device("TPU v5 lite", "tpu", 197e12, 0.819e12, 16 * _GB, 0, 128 * _MB),
    "tpu_v5p": Device("TPU v5", "tpu", 459e12, 2.765e12, 95 * _GB, 0, 64 * _MB),
    "tpu_v6e": Device("TPU v6 lite", "tpu", 918e12, 1.64e12, 32 * _GB, 0, 128 * _MB),
    "tpu_7x": Device("TPU7x", "tpu", 1153e12, 3.69e12, 96 * _GB, 0, 64 * _MB),
    "cpu": Device("cpu", "cpu"),
}  # fmt: skip
"""Device kinds by short name. A chip with two cores is two devices: rates are a core's.
"""


def named(name: str) -> Device:
    """Returns the device kind of a short name or of JAX's own name for it.

    Raises:
        ConfigError: If the name is unknown; the message lists the names.

    Example:
        >>> named("h200").kind, named("NVIDIA H200").platform
        ('NVIDIA H200', 'cuda')
    """
    found = _found(name)
    if found is None:
        raise errors.ConfigError(
            f"target={name!r}",
            next_step=errors.known(_short(name), list(KNOWN)),
            where=errors.caller(),
        )
    return found


def of(kind: str, platform: str) -> Device:
    """Returns the device kind of a name; one without figures if it is not known.

    Example:
        >>> of("h200", "cuda").kind, of("NVIDIA Z80", "cuda").bandwidth
        ('NVIDIA H200', 0.0)
    """
    return _found(kind) or Device(kind, platform)


def _short(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_").removeprefix("nvidia_")


def _found(name: str) -> Device | None:
    """The device kind of a short name or of JAX's own name for it, if it is known."""
    known = KNOWN.get(_short(name))
    alike = (d for d in KNOWN.values() if d.kind.lower() == name.lower())
    return known or next(alike, None)


def attached() -> Device:
    """Returns the first device of the default backend; unknown kinds have no figures.

    Example:
        >>> attached().platform in ("cpu", "cuda", "rocm", "tpu")
        True
    """
    backend = jax.default_backend()
    return _attached(backend, str(jax.devices()[0].device_kind))


@functools.cache
def _attached(backend: str, kind: str) -> Device:
    for device in KNOWN.values():
        if device.kind == kind:
            return device
    platform = "cuda" if backend == "gpu" else backend
    return Device(kind, platform)


def deterministic_xla(flags: str | None = None) -> bool:
    """Returns whether ``XLA_FLAGS`` asks for programs that repeat bit for bit.

    Args:
        flags: The flags; the environment's by default.

    Example:
        >>> deterministic_xla("--xla_gpu_deterministic_ops=true")
        True
        >>> deterministic_xla("--xla_gpu_autotune_level=0")
        False
    """
    flags = os.environ.get("XLA_FLAGS", "") if flags is None else flags
    names = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    asked = {f"--{n}{end}" for n in names for end in ("", "=true", "=True", "=1")}
    return not asked.isdisjoint(flags.split())
