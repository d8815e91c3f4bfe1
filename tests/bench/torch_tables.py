"""Tables of PyTorch modules: what is found in them, and their times on a GPU."""

from __future__ import annotations

import json

from tests.bench import record
from tests.bench.markdown import table


def models() -> str:
    """One row per PyTorch model: what is found, and how far the numbers are."""
    data = json.loads(record.named("torch_models").read_text())
    rows = [
        (
            row["model"],
            ", ".join(f"{n} {op}" for op, n in row["found"].items()),
            f"{row['kernels']} of {row['by_hand']}",
            f"{row['result']:.0e}",
            f"{row['gradients']:.0e}",
        )
        for row in data["rows"]
    ]
    head = ("model", "found", "by a kernel", "error", "of gradients")
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    return f"{table(head, rows)}\n\nOn a CPU, with {versions}."


def on_gpu() -> str:
    """One row per pass: by torchax, as rewritten, and under torch.compile."""
    data = json.loads(record.named("torch_on_gpu_h200").read_text())
    ms = {(row["pass"], row["by"]): row["ms"] for row in data["rows"]}
    ways = ("torchax", "rewritten", "torch.compile")
    rows = [
        (
            name,
            *(f"{ms[name, way]:.3g} ms" if (name, way) in ms else "" for way in ways),
        )
        for name in ("forward", "gradient")
    ]
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}, {versions})"
    head = ("pass", "torchax alone", "rewritten", "torch.compile")
    more = f" {data['note']}" if "note" in data else ""
    return f"{table(head, rows)}\n\nReproduce with {note}.{more}"
