"""A path and its content in, a file out: written whole or not at all."""

from __future__ import annotations

import os
import tempfile


def write(path: str, data: bytes) -> None:
    """Writes a file in one step: readers see the old one or the new one.

    Raises:
        OSError: If that fails; nothing is left behind.
    """
    folder = os.path.dirname(path) or "."
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".rewriter-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
