"""What our attention on a Hopper GPU is busy with, and what its warps wait for.

  python3 -m tests.bench.attention_profile [--cases "A;B"] [--json PATH]

Runs the forward of cases of `tests.bench.hopper_attention` once under Nsight Compute
(`ncu`), with its clocks left alone. It writes:

- The shares of the time in which the tensor cores, the unit of exponentials and the
  issue of instructions are busy.
- How many of the kernel's instructions in SASS are products of tensor cores (HGMMA),
  and accesses to spilled registers (LDL, STL).
- What a warp waits for between two instructions, in cycles, the longest first.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from tests.bench import hopper_attention, record

COMMAND = "python3 -m tests.bench.attention_profile"

CASES = (
    "causal, 64 wide, 2k",
    "window of 1024, 64 wide, 16k",
    "window of 1024, 128 wide, 16k",
    "pair bias and mask, 4 heads of 32, 384",
    "causal, 128 wide, 4k",
)

BUSY = {
    "tensor_cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_executed.sum.pct_of_peak_sustained_elapsed",
}

WAITS = "smsp__average_warps_issue_stalled_"
PER_ISSUE = "_per_issue_active.ratio"

COUNTED = ("HGMMA", "LDL", "STL")


def once(name: str) -> None:
    """Runs a case's forward; the last time while the profiler listens."""
    shape, _, names = hopper_attention.CASES[name]
    args = [*hopper_attention.operands(shape, 0)]
    args.append(hopper_attention.beside(shape, names, 0))
    made = hopper_attention.candidates(name, every=False)
    ours = next(f for (p, by), f in made.items() if p == "forward" and "Tiles" in by)
    program = jax.jit(ours).lower(*args).compile()
    driver = ctypes.CDLL("libcuda.so.1")
    for _ in range(2):
        jax.block_until_ready(program(*args))
    driver.cuProfilerStart()
    jax.block_until_ready(program(*args))
    driver.cuProfilerStop()


def profiled(name: str) -> dict[str, Any]:
    """Returns what is kept of a case.

    Raises:
        subprocess.CalledProcessError: If there is no ``ncu``, or it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = str(pathlib.Path(folder) / "report")
        begin = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
        own = [sys.executable, "-m", "tests.bench.attention_profile", "--once", name]
        subprocess.run([*begin, "--set", "full", "-o", report, *own], check=True)
        pages = [
            subprocess.run(
                ["ncu", "--import", f"{report}.ncu-rep", "--page", page, "--csv"],
                check=True, capture_output=True, text=True,
            ).stdout.splitlines()
            for page in ("raw", "source")
        ]  # fmt: skip
    return {"case": name, **figures(*pages)}


def figures(raw: Iterable[str], source: Iterable[str]) -> dict[str, Any]:
    """Returns what is kept of Nsight Compute's two tables of one run.

    Args:
        raw: Lines of the page "raw": names, units, a row for each kernel.
        source: Lines of the page "source": of each kernel its instructions.
    """
    names, _, *rows = csv.reader(raw)
    kernels = (dict(zip(names, row, strict=True)) for row in rows)
    ours = next(k for k in kernels if k["Kernel Name"].startswith("attention"))
    waits = {
        n.removeprefix(WAITS).removesuffix(PER_ISSUE): round(_number(x), 2)
        for n, x in ours.items()
        if n.startswith(WAITS) and n.endswith(PER_ISSUE)
    }
    longest = sorted(waits.items(), key=lambda wait: -wait[1])
    return {
        "us": round(_number(ours["gpu__time_duration.sum"]), 1),
        "busy_percent": {n: round(_number(ours[x]), 1) for n, x in BUSY.items()},
        "registers": int(_number(ours["launch__registers_per_thread"])),
        "instructions": _counted(source),
        "waits_cycles": {n: x for n, x in longest[:7] if n != "selected"},
    }


def _counted(source: Iterable[str]) -> Mapping[str, int]:
    """How many instructions there are of some kinds, in the last kernel."""
    counts = dict.fromkeys(COUNTED, 0)
    column = None
    for row in csv.reader(source):
        if "Source" in row:
            column, counts = row.index("Source"), dict.fromkeys(COUNTED, 0)
        elif column is not None and len(row) > column:
            words = row[column].replace(".", " ").split()
            for kind in COUNTED:
                counts[kind] += kind in words[:2]
    return counts


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def main() -> None:
    """Prints a line for each case; writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--once", help="run this case, for the profiler")
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    if given.once:
        once(given.once)
        return
    rows = []
    for name in given.cases.split(";"):
        rows.append(profiled(name))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        record.write(given.json, COMMAND, results=rows)


if __name__ == "__main__":
    main()
