"""Times a call on a TPU: the device's own seconds, from JAX's profiler.

It follows the profiler's documented format, and is tested on a small profile in that
format. It has not run on a TPU. If anything fails here, the wall clock is used.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

from rewriter._jax import NothingSeen

DEVICE = "/device:TPU:"
"""The prefix of names of TPU cores' planes."""

LINES = ("XLA Modules", "XLA Ops")
"""The profile's lines that show when a core works: programs, else operations."""


def seconds(run: Callable[[], Any]) -> tuple[float, tuple[str, ...]]:
    """Runs a call to its end; returns the TPU cores' seconds and the names of events.

    Raises:
        NothingSeen: If the profiler cannot run or has no plane of a TPU.
    """
    options = ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=options):
                jax.block_until_ready(run())
        except RuntimeError as problem:  # another profile is being taken
            raise NothingSeen(str(problem)) from problem
        pattern = os.path.join(folder, "**", "*.xplane.pb")
        for path in glob.glob(pattern, recursive=True):
            return of_profile(ProfileData.from_file(path))
    raise NothingSeen("the profiler wrote nothing")


def of_profile(profile: Any) -> tuple[float, tuple[str, ...]]:
    """Returns the seconds that the busiest TPU core of a profile worked.

    For each core, the events of the line ``XLA Modules`` are summed, one for each run
    of a program. If that line is missing, ``XLA Ops`` is used.

    Args:
        profile: A `jax.profiler.ProfileData`, or an object with the same planes, lines,
            events.

    Returns:
        Seconds, and the events' names in order.

    Raises:
        NothingSeen: If no TPU core did anything.
    """
    found = []
    for plane in profile.planes:
        if not plane.name.startswith(DEVICE):
            continue
        lines = {line.name: list(line.events) for line in plane.lines}
        events = next((lines[n] for n in LINES if lines.get(n)), [])
        if events:
            total = sum(event.duration_ns for event in events)
            found.append((1e-9 * total, tuple(event.name for event in events)))
    if not found:
        raise NothingSeen("the profile has no plane of a TPU with events")
    return max(found)
