"""Writes keys and measurements as JSON, and reads them back record by record.

Reading never fails: a wrong record (see `schema`) is reported, and the others are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rewriter.measure.key import Key
from rewriter.measure.measurement import Entry, Measurement
from rewriter.measure.schema import shown, wrong_key, wrong_measurement
from rewriter.site.implementation import Implementation

FORMAT = 1
"""The form of the files; those of another one are not read."""


@dataclass(frozen=True)
class Found:
    """Measurements read from a text, and problems with others.

    Attributes:
        entries: The records that can be used.
        problems: What is wrong with the others, or with the whole text.
    """

    entries: tuple[Entry, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def problems_text(self) -> str:
        """The first problem, and how many more there are."""
        more = len(self.problems) - 1
        return f"{self.problems[0]}{f' (and {more} more)' if more > 0 else ''}"


# -------------------------------------------------------------------- writing
def key_json(key: Key) -> dict[str, Any]:
    """Returns a key as JSON has it."""
    return {"op": key.op, "pass": key.passes, "shapes": dict(key.shapes),
            "dtypes": dict(key.dtypes), "params": dict(key.params),
            "device": key.device, "precision": key.precision}  # fmt: skip


def measurement_json(m: Measurement) -> dict[str, Any]:
    """Returns a measurement as JSON has it."""
    fields = asdict(m)
    fields["implementation"] = {
        name: dict(value) if isinstance(value, tuple) else value
        for name, value in asdict(m.implementation).items()
        if value not in (None, "")
    }
    fields["by_inputs"] = dict(m.by_inputs)
    return {k: v for k, v in fields.items() if v not in (None, "", {})}


def entry_json(entry: Entry) -> dict[str, Any]:
    """Returns a key and its measurements as JSON has them."""
    key, measured = entry
    return {
        "key": key_json(key),
        "measurements": [measurement_json(m) for m in measured],
    }


# -------------------------------------------------------------------- reading
def read_one(text: str) -> Found:
    """Returns what the text of one key holds: a file of the cache."""
    data = _parsed(text)
    return data if isinstance(data, Found) else _entry(data, "")


def read_all(text: str) -> Found:
    """Returns what the text of several keys holds: a file that `Tuned.save` wrote."""
    data = _parsed(text)
    if isinstance(data, Found):
        return data
    if not isinstance(data.get("entries"), list):
        return Found((), ("it has no list 'entries'",))
    found = [_entry(e, f"entries[{i}].") for i, e in enumerate(data["entries"])]
    return Found(
        tuple(e for f in found for e in f.entries),
        tuple(p for f in found for p in f.problems),
    )


def wrong_entry(entry: Any, where: str) -> str:
    """Returns what is wrong with an entry that was not read but made, or ``""``."""
    try:
        data = entry_json(entry)
        hash(entry)
    except (ValueError, TypeError, AttributeError, RecursionError) as problem:
        return f"{where} is no key with measurements: {problem}"
    return next(iter(_entry(data, f"{where}.").problems), "")


def _parsed(text: str) -> dict[str, Any] | Found:
    try:
        data = json.loads(text)
    except RecursionError:
        return Found((), ("it is nested too deep",))
    except ValueError as problem:
        return Found((), (f"it is not JSON: {problem}",))
    if not isinstance(data, dict):
        return Found((), (f"it is {shown(data)}; expected an object",))
    if data.get("format") != FORMAT:
        return Found((), (f"format {shown(data.get('format'))}, expected {FORMAT}",))
    return data


def _entry(data: Any, where: str) -> Found:
    if not isinstance(data, Mapping):
        return Found((), (f"{where[:-1]} is {shown(data)}; expected an object",))
    if problem := wrong_key(data.get("key"), f"{where}key"):
        return Found((), (problem,))
    records = data.get("measurements")
    if not isinstance(records, list):
        return Found((), (f"{where}measurements is {shown(records)}; expected a list",))
    wrong = [
        wrong_measurement(m, f"{where}measurements[{i}]") for i, m in enumerate(records)
    ]
    good = [m for m, problem in zip(records, wrong, strict=True) if not problem]
    entry = _key(data["key"]), tuple(map(_measurement, good))
    return Found((entry,), tuple(filter(None, wrong)))


def _key(data: Mapping[str, Any]) -> Key:
    return Key(
        data["op"],
        data["pass"],
        tuple((n, tuple(s)) for n, s in data["shapes"].items()),
        tuple(data["dtypes"].items()),
        tuple((n, _frozen(v)) for n, v in data["params"].items()),
        data["device"],
        data.get("precision", ""),
    )


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _measurement(data: Mapping[str, Any]) -> Measurement:
    fields = dict(data)
    parts = dict(fields.pop("implementation"))
    for name in ("config", "backward_config"):
        if name in parts:
            parts[name] = tuple((k, _frozen(v)) for k, v in parts[name].items())
    fields.setdefault("median_us", None)
    fields["by_inputs"] = tuple(fields.get("by_inputs", {}).items())
    return Measurement(Implementation(**parts), **fields)
