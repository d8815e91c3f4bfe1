"""Writes a file whole or not at all."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import secrets
import time

OLD_S = 3600.0
"""Seconds after which the writer of a temporary file has surely ended."""

_TEMPORARY = re.compile(r"\.rewriter-(?:([0-9a-f]{8})-)?(\d+)-[0-9a-f]{8}")


def write(path: str, data: bytes) -> None:
    """Writes a file in one step: readers see the old one or the new one.

    Also removes temporary files of killed writers from its folder.

    Raises:
        OSError: If writing fails; no file is left behind.
    """
    name = f".rewriter-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
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
    """Removes temporary files from a folder whose writers have ended."""
    before = time.time() - OLD_S
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            parts = _TEMPORARY.fullmatch(entry.name)
            if parts is None:
                continue
            with contextlib.suppress(OSError):  # another process may sweep, too
                old = entry.stat(follow_symlinks=False).st_mtime < before
                if old or (parts[1] == _machine() and _has_ended(int(parts[2]))):
                    os.unlink(entry.path)


@functools.cache
def _machine() -> str:
    """The machine, or the container, whose numbers of processes are meant."""
    text = platform.node()
    with contextlib.suppress(OSError):
        text += str(os.stat("/proc/self/ns/pid").st_ino)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _has_ended(process: int) -> bool:
    """Whether there is surely no such process."""
    if os.name != "posix":
        return False
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return False
