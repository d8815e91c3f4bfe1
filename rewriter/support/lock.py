"""Locks a folder for one writer, so that a read, change and replace loses no data.

The lock is the operating system's, on the folder itself: no file stays behind, and a
writer that is killed releases it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

try:
    import fcntl
except ImportError:  # Windows, whose folders cannot be opened either
    fcntl = None  # type: ignore[assignment]

WAIT_S = 5.0
"""Seconds to wait for another writer. Writing takes milliseconds, so a longer holder
was stopped or hangs."""

AGAIN_S = 0.002
"""Seconds between two tries."""


@contextlib.contextmanager
def only_writer(folder: str) -> Iterator[bool]:
    """Keeps other processes and threads out of the block, if they use this lock too.

    Args:
        folder: The folder to write to.

    Yields:
        Whether the lock is held. It is not where locks are unsupported, or if another
        writer hangs.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _locked(handle, time.monotonic() + WAIT_S)
    finally:
        _unlock(handle)
        os.close(handle)


def _locked(handle: int, until: float) -> bool:
    if fcntl is None:
        return False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(AGAIN_S)
        except OSError:  # a file system without locks
            return False
        else:
            return True


def _unlock(handle: int) -> None:
    """Releases the lock even if a forked process shares the handle."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
