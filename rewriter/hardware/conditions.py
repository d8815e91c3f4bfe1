"""Reads what times depend on beside the program: clocks and driver."""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass

QUERY = "clocks.sm,driver_version"
WAIT_S = 5.0


@dataclass(frozen=True)
class Conditions:
    """Facts that `nvidia-smi` reports of the first GPU.

    Attributes:
        clock_mhz: The clock of the multiprocessors; None if it is not known.
        driver: The driver's version; ``""`` if it is not known.
    """

    clock_mhz: int | None = None
    driver: str = ""


def now() -> Conditions:
    """Returns the conditions at this moment; empty where there is no `nvidia-smi`.

    Right after timing, the clock is about that of the last runs.
    """
    program = _program()
    if program is None:
        return Conditions()
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return Conditions()
    return parsed(run.stdout)


@functools.cache
def _program() -> str | None:
    return shutil.which("nvidia-smi")


def parsed(text: str) -> Conditions:
    """Returns the conditions of the first line of `nvidia-smi`'s answer.

    Example:
        >>> parsed("1980, 570.86.15")
        Conditions(clock_mhz=1980, driver='570.86.15')
        >>> parsed("[N/A], 570.86.15").clock_mhz is None
        True
    """
    lines = text.strip().splitlines()
    parts = [part.strip() for part in lines[0].split(",")] if lines else []
    if len(parts) != 2:
        return Conditions()
    clock = int(parts[0]) if parts[0].isdigit() else None
    return Conditions(clock, parts[1] if parts[1][:1].isdigit() else "")
