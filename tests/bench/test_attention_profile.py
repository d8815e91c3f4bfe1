"""Which figures are kept of tables of Nsight Compute."""

from __future__ import annotations

from tests.bench import attention_profile

NAMES = {
    "Kernel Name": "attention_mosaic_gpu_kernel",
    "gpu__time_duration.sum": "1,340.10",
    "launch__registers_per_thread": "168",
    attention_profile.BUSY["tensor_cores"]: "51.229",
    attention_profile.BUSY["exponentials"]: "53.353",
    attention_profile.BUSY["issue"]: "50.233",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "1.41",
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": "1.00",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "2.42",
}

SOURCE = """"Address","Source"
"0","HGMMA.64x64x16.F32.BF16 R1, R2"
"Address","Source"
"0","HGMMA.64x64x16.F32.BF16 R1, R2"
"1","@P1 HGMMA.64x64x16.F32.BF16 R1, R2"
"2","LDL R5, [R1+0x8]"
"3","LDS R5, [R1]"
"""


def test_figures_are_those_of_our_kernel() -> None:
    """The other kernel and its instructions, which come first, do not count."""
    line = lambda values: ",".join(f'"{x}"' for x in values)
    other = {**dict.fromkeys(NAMES, "7"), "Kernel Name": "loop_select_fusion"}
    raw = [
        line(NAMES),
        line([""] * len(NAMES)),
        *map(line, (other.values(), NAMES.values())),
    ]
    assert attention_profile.figures(raw, SOURCE.splitlines()) == {
        "us": 1340.1,
        "busy_percent": {"tensor_cores": 51.2, "exponentials": 53.4, "issue": 50.2},
        "registers": 168,
        "instructions": {"HGMMA": 2, "LDL": 1, "STL": 0},
        "waits_cycles": {"barrier": 2.42, "wait": 1.41},
    }
