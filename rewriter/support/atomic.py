"""Writes a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time

OLD_S = 3600.0
"""Seconds after which the writer of a temporary file has surely ended."""

_TEMPORARY = re.compile(r"\.rewriter-\d+-[0-9a-f]{8}")


def write(path: str, data: bytes) -> None:
    """Writes a file in one step: readers see the old one or the new one.

    Also removes temporary files of killed writers from its folder.

    Raises:
        OSError: If writing fails; no file is left behind.
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
    _sweep(os.path.dirname(path) or ".")


def _sweep(folder: str) -> None:
    """Removes old temporary files from a folder."""
    before = time.time() - OLD_S
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if not _TEMPORARY.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another process may sweep, too
                if entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)
