"""Keys and measurements in, their JSON out, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rewriter.implementation import Implementation
from rewriter.key import Key
from rewriter.measurement import Measurement

FORMAT = 1
"""The form of the files; those of another one are not read."""


def key_json(key: Key) -> dict[str, Any]:
    """Returns a key as JSON has it."""
    return {"op": key.op, "pass": key.passes, "shapes": dict(key.shapes),
            "dtypes": dict(key.dtypes), "params": dict(key.params),
            "device": key.device, "precision": key.precision}  # fmt: skip


def key_from(data: Mapping[str, Any]) -> Key:
    """Returns the key of its JSON."""
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
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def measurement_json(m: Measurement) -> dict[str, Any]:
    """Returns a measurement as JSON has it."""
    made = asdict(m)
    made["implementation"] = {
        name: dict(value) if isinstance(value, tuple) else value
        for name, value in asdict(m.implementation).items()
        if value not in (None, "")
    }
    made["by_inputs"] = dict(m.by_inputs)
    return {k: v for k, v in made.items() if v not in (None, "", {})}


def measurement_from(data: Mapping[str, Any]) -> Measurement:
    """Returns the measurement of its JSON."""
    given = dict(data)
    parts = dict(given.pop("implementation"))
    for name in ("config", "backward_config"):
        if name in parts:
            parts[name] = tuple((k, _frozen(v)) for k, v in parts[name].items())
    given.setdefault("median_us", None)
    given["by_inputs"] = tuple(given.get("by_inputs", {}).items())
    return Measurement(Implementation(**parts), **given)
