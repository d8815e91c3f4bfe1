"""References in float64, on the CPU: a GPU compiles their many products for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def float64() -> Iterator[None]:
    """Within, JAX computes what is given as NumPy arrays on the CPU, with 64 bits."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
