"""Writes figures as a JSON record: what ran, when, and on what."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rewriter.hardware import conditions
from rewriter.hardware.timing import Samples

RESULTS = pathlib.Path(__file__).parent / "results"


def header(command: str) -> dict[str, Any]:
    """Returns what every record begins with: command, date, device kind, jax, clock.

    Args:
        command: The command that measures the same again.
    """
    at = conditions.now()
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "sm_clock_mhz": at.clock_mhz,
        "driver": at.driver,
    }


def named(name: str) -> pathlib.Path:
    """Returns where the record of a name is kept: ``results/<name>.json``."""
    return RESULTS / f"{name}.json"


def write(path: pathlib.Path, command: str, **figures: Any) -> None:
    """Writes a record: all of it, or nothing.

    Args:
        path: The file; one that exists is replaced, a device is written to.
        command: The command that measures the same again.
        **figures: What follows the header, in this order.

    Raises:
        TypeError: For figures that JSON does not have; the file is as it was.
    """
    text = json.dumps({**header(command), **figures}, indent=1) + "\n"
    path = path.resolve()  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # /dev/null
        path.write_text(text)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def difference(got: jax.Array, want: jax.Array) -> float:
    """Returns the relative difference of two arrays, in the Frobenius norm."""
    wide = want.astype("float32")
    apart = jnp.linalg.norm(got.astype("float32") - wide)
    return float(f"{float(apart / jnp.linalg.norm(wide)):.2g}")


def with_times(
    rows: Sequence[dict[str, Any]], times: Sequence[Samples]
) -> list[dict[str, Any]]:
    """Returns rows of a record with their times in microseconds, the fastest first."""
    made = [
        {
            **row, "us": round(1e6 * t.median, 1), "sigma_us": round(1e6 * t.sigma, 1),
            "method": t.method,
        }
        for row, t in zip(rows, times, strict=True)
    ]  # fmt: skip
    return sorted(made, key=lambda row: row["us"])
