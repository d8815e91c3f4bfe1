"""The folder in which this machine keeps what it found out."""

from __future__ import annotations

import functools
import os

VARIABLE = "REWRITER_CACHE_DIR"

LOWERED = "lowered"
"""The folder of lowered kernels. In a folder of the user's it is beside devices'."""


def tuned() -> str:
    """Returns the folder of measurements: ``REWRITER_CACHE_DIR``, else the user's."""
    return os.environ.get(VARIABLE) or os.path.join(_users_own(), "tuned")


def lowered() -> str:
    """Returns the folder of lowered kernels."""
    return os.path.join(os.environ.get(VARIABLE) or _users_own(), LOWERED)


@functools.cache
def _users_own() -> str:
    import platformdirs

    return platformdirs.user_cache_dir("jaxpr-rewriter")
