"""Tables beside PyTorch: modules, their times on a GPU, and FlexAttention."""

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


def flex() -> str:
    """One row per function of scores and width: FlexAttention, and what is chosen."""
    data = json.loads(record.named("scored_flex_h200").read_text())
    times: dict[str, dict[tuple[str, str], float]] = {}
    for row in data["rows"]:
        name = row["row"].replace(" (menu)", "").replace(", 8x4096x16x", ", ")
        of = times.setdefault(name, {})
        of |= {(by, row["pass"]): us / 1e3 for by, us in row["us"].items()}
    ways = [(by, way) for way in ("forward", "both") for by in ("flex", "chosen")]
    rows = []
    for name, of in sorted(times.items()):
        cells = (f"{of[w]:.3g}" if w in of else "fails" for w in ways)
        gains = (
            f"{of['flex', p] / of['chosen', p]:.2g}×" if ("flex", p) in of else ""
            for p in ("forward", "both")
        )
        rows.append((name, *cells, *gains))
    head = ("function, width", "FlexAttention", "ours", "FlexAttention, both",
            "ours, both", "gain", "gain, both")  # fmt: skip
    note = f"`{data['command']}` ({data['device']}, jax {data['jax']}). {data['note']}"
    return f"{table(head, rows)}\n\nReproduce with {note}"
