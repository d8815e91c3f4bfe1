"""A table of the records of Hopper kernels beside XLA and cuDNN."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.bench import record

OTHERS = ("xla", "cudnn")
MIXED = ("memory_bounded", "by_parts_hopper", "xla, hopper")
"""What is neither another's nor our kernel alone."""

PASSES = {"forward_and_vjp": "both", "gradients": "gradients", "both": "both"}

DECODED = ("32 MiB", "1 GiB, 64 sequences")
NORMS = ("16384x4096", "4096x16384")
"""Cases of decoding and of norms that are shown."""


def table() -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns the head and the rows: microseconds, of our kernel in its best config."""
    rows = []
    for use, passes, taken in (*_attention(), *_decoding(), *_norms(), *_units()):
        if "ours" not in taken:  # as for gradients that are left to others
            continue
        ours = taken["ours"]
        best = min(us for name, us in taken.items() if name != "ours")
        cells = (_us(taken.get(name)) for name in ("xla", "cudnn", "ours"))
        rows.append((use, passes, *cells, f"{best / ours:.2f}×"))
    return ("use", "pass", "XLA", "cuDNN", "ours", "gain over the better one"), rows


Row = tuple[str, str, dict[str, float]]


def _attention() -> Iterator[Row]:
    for (case, passes), rows in _grouped("attention", "rows", "case", "pass").items():
        taken = _best({(r["by"]): 1e3 * r["ms"] for r in rows})
        yield f"attention: {case}", PASSES.get(passes, passes), taken


def _decoding() -> Iterator[Row]:
    grouped = _grouped("decode", "results", "case", "lengths")
    for (case, lengths), rows in grouped.items():
        if case not in DECODED:
            continue
        times = {r["by"]: r["us"] for r in rows}
        paged = {n: us for n, us in times.items() if n.startswith("pages of 64")}
        plain = {n: us for n, us in times.items() if not n.startswith("pages")}
        others = {n: us for n, us in plain.items() if n in OTHERS}
        name = f"decoding: keys and values of {case}, lengths {lengths}"
        yield name, "forward", _best(plain)
        yield f"{name}, in pages of 64", "forward", _best({**others, **paged})


def _norms() -> Iterator[Row]:
    for (case, passes), rows in _grouped("norms", "rows", "case", "pass").items():
        if case.endswith(NORMS) and passes != "gradients":
            yield (
                case,
                PASSES.get(passes, passes),
                _best({r["by"]: r["us"] for r in rows}),
            )


def _units() -> Iterator[Row]:
    for (case,), rows in _grouped("glu", "results", "case").items():
        m, k, f, _ = rows[0]["m, k, f, g"]
        times: dict[str, float] = {}
        for r in rows:
            name = r["by"] if r["by"] in OTHERS + MIXED else f"{r['by']} {r['config']}"
            times[name] = r["us"]
        yield f"gated linear unit {m}×{k}×{f}, {case}", "forward", _best(times)


def _grouped(
    name: str, key: str, *by: str
) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows of a record that have a time, by some of their columns."""
    data = json.loads(record.named(f"hopper_{name}_h200").read_text())
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in data[key]:
        if row.get("us") or row.get("ms"):
            found.setdefault(tuple(row[x] for x in by), []).append(row)
    return found


def _best(times: dict[str, float]) -> dict[str, float]:
    """Others' times by name, and our best one, if there is any."""
    ours = [us for name, us in times.items() if name not in OTHERS + MIXED]
    others = {n: us for n, us in times.items() if n in OTHERS}
    return others | ({"ours": min(ours)} if ours else {})


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
