"""A path and its content in, a file out: written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets


def write(path: str, data: bytes) -> None:
    """Writes a file in one step: readers see the old one or the new one.

    Raises:
        OSError: If that fails; nothing is left behind.
    """
    name = f".rewriter-{os.getpid()}-{secrets.token_hex(4)}"
    temporary = os.path.join(os.path.dirname(path) or ".", name)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
