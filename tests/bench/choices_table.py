"""The table of the default against all else, for rows that models and serving have."""

from __future__ import annotations

import json
from typing import Any

from tests.bench import record
from tests.bench.markdown import table

RECORD = "rows_of_models_h200"
NAMES = {"written": "XLA", "xla": "XLA", "cudnn": "cuDNN"}


def rows_of_models() -> str:
    """One row per use and pass: the default, the best other arm, and their ratio."""
    data = json.loads(record.named(RECORD).read_text())
    rows = [_row(row) for row in data["rows"] if "chosen" in row["us"]]
    head = ("use", "pass", "default", "µs", "best other", "µs", "the default takes")
    on = f"{data['device']}, jax {data['jax']}, {_dates(data)}"
    note = f"Reproduce with `{data['command']}` ({on}, [figures]({_link()}))."
    more = f" {data['note']}" if "note" in data else ""
    return f"{table(head, rows)}\n\n{note}{more}"


def _dates(data: dict[str, Any]) -> str:
    """The first and the last date of rows."""
    dates = sorted({row.get("date", data["date"]) for row in data["rows"]})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def _link() -> str:
    return f"../tests/bench/results/{RECORD}.json"


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    us = dict(row["us"])
    mine = us.pop("chosen")
    kernels = [str(x).split(" ")[0] for x in row["chosen"]] or ["xla"]
    own = next((k for k in kernels if k != "xla"), "xla")
    first = (row["row"], row["pass"], NAMES.get(own, f"`{own}`"), f"{mine:.4g}")
    if not us:
        return (*first, "", "", "")
    other = min(us, key=lambda by: us[by])
    told = NAMES.get(other, f"`{other}`")
    return (*first, told, f"{us[other]:.4g}", f"{mine / us[other]:.2f}")
