"""Reads a regular file as text: it never waits, and reads a limited number of bytes."""

from __future__ import annotations

import os
import stat

MOST_BYTES = 16 << 20
"""The largest file of one key; real ones have some 10 kB."""

_FLAGS = os.O_RDONLY
for _name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):  # some systems lack one
    _FLAGS |= getattr(os, _name, 0)


def read_text(path: str, most: int = MOST_BYTES) -> str:
    """Returns a file's text, read as `read_bytes` reads it.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no regular file, too large, or not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def read_bytes(path: str, most: int = MOST_BYTES) -> bytes:
    """Returns a file's content.

    A pipe, a socket, a device or a folder is refused before it is opened, since opening
    may wait or act. The check is repeated afterwards, in case the file was exchanged.

    Args:
        path: The file, or a link to one.
        most: The largest size in bytes.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no regular file, or too large.
    """
    _check(os.stat(path), most)
    with open(os.open(path, _FLAGS), "rb") as file:
        _check(os.fstat(file.fileno()), most)
        data = file.read(most + 1)  # the file may grow meanwhile
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    return data


def _check(found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if found.st_size > most:
        raise ValueError(f"{found.st_size:,} bytes, and at most {most:,} are read")
