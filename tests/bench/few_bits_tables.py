"""Tables of products, units and rows of few bits, from figures of an H200."""

from __future__ import annotations

import json
from typing import Any

from tests.bench import record
from tests.bench.markdown import table


def packed_dot() -> str:
    """One row per kind and size of a packed matrix, in microseconds."""
    data = _data("packed_dot")
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in data["results"]:
        case = cases.setdefault((row["kind"], *row["m, k, n"]), {})
        if row["by"] in ("xla", "rewriter"):
            case[row["by"]] = row
    rows = []
    for (kind, *sizes), by in cases.items():
        share = f"{100 * by['rewriter']['share']:.0f} %"
        rows.append((", ".join(map(str, sizes)), kind, *_both(by), share))
    head = ("rows, summed, columns", "matrix", "as written", "ours", "bandwidth")
    return _noted(table(head, rows), data)


NAMES = {"int4 groups": "int4"}
"""PyTorch's names of kinds of matrices."""


def few_rows() -> str:
    """One row per kind and size of a matrix, in microseconds: XLA, PyTorch and ours."""
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for name in ("few_rows_tried", "few_rows_tried_later"):
        data = _data(name)
        for row in data.get("rows", ()) or data["results"]:
            size = row["rows"], row["summed"], row["columns"]
            by = "ours" if row.get("default") or row["by"] == "chosen" else row["by"]
            cases.setdefault((row["kind"], *size), {})[by] = row
    torch = _data("quantized_dot_torch")
    peers = {(x["kind"], *x["m, k, n"], x["by"]): x for x in torch["rows"]}
    rows = []
    for (kind, *size), by in sorted(cases.items()):
        if "ours" not in by:
            continue
        key = NAMES.get(kind, kind), *size
        others = by.get("xla"), *(peers.get((*key, x)) for x in ("kernel", "compiled"))
        times = [f"{x['us']:.0f}" if x else "" for x in others]
        ours, share = f"{by['ours']['us']:.1f}", f"{100 * by['ours']['share']:.0f} %"
        rows.append((", ".join(map(str, size)), kind, *times, ours, share))
    head = ("rows, summed, columns", "matrix", "as written", "PyTorch's kernel")
    return table((*head, "`torch.compile`", "ours", "of 4.8 TB/s"), rows)


def quantized_unit() -> str:
    """One row per kind and size of a unit, in microseconds."""
    data = _data("quantized_unit")
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in data["results"]:
        cases.setdefault((row["kind"], *row["m, k, f"]), {})[row["by"]] = row
    rows = []
    for (kind, *sizes), by in cases.items():
        xla, ours = _both(by)
        share = f"{100 * by['rewriter']['share']:.0f} %"
        two = f"{by['products']['us']:.0f}"
        rows.append((", ".join(map(str, sizes)), kind, xla, two, ours, share))
    first = ("rows, summed, columns of a branch", "numbers", "as written")
    head = (*first, "two products", "one launch", "bandwidth")
    return _noted(table(head, rows), data)


def quantized_rows() -> str:
    """One row per norm with rows in 8 bits, in microseconds."""
    data = _data("quantized_rows")
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    names = {"sum": "of a sum", "norm": "read elsewhere", "float32": "float32 rows"}
    for row in data["results"]:
        also = ", ".join(names[x] for x in row["also"])
        case = f"{row['rows']} x {row['columns']}", row["norm"], row["kind"], also
        cases.setdefault(case, {})[row["by"]] = row
    rows = [
        (*case, *_both(by), f"{by['xla']['limit_us']:.0f}")
        for case, by in cases.items()
    ]
    head = ("rows", "norm", "numbers", "", "as written", "one pass", "bytes alone")
    return _noted(table(head, rows), data)


def _data(name: str) -> dict[str, Any]:
    return json.loads(record.named(f"{name}_h200").read_text())


def _both(by: dict[str, Any]) -> tuple[str, str]:
    """The microseconds as written, and as rewritten."""
    return f"{by['xla']['us']:.0f}", f"{by['rewriter']['us']:.0f}"


def _noted(text: str, data: dict[str, Any]) -> str:
    at = f"{data['device']}, jax {data['jax']}, {data['date']}"
    return f"{text}\n\nReproduce with `{data['command']}` ({at})."
