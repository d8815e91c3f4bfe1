"""The format of records in JSON, and what is wrong with one that does not follow it.

A file of measurements may come from anywhere: another version, another machine, a full
disk. A record that passes can be hashed, compared, added up and printed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rewriter.measure.key import PROGRAM

MOST_US = 1e15
"""The longest time in microseconds: some thirty years."""

MOST_COUNT = 2**63 - 1
DEEP, LONG, LONGEST_TEXT = 8, 1000, 100_000
"""The largest depth and length of lists, and length of texts."""


@dataclass(frozen=True)
class Kind:
    """The kind of value that a field may hold.

    Attributes:
        wanted: In words.
        holds: Whether a value is that.
        optional: Whether the field may be left out.
    """

    wanted: str
    holds: Callable[[Any], bool]
    optional: bool = False


# --------------------------------------------------------------------- values
def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_time(x: Any) -> bool:
    return _is_number(x) and 0 < x <= MOST_US  # neither NaN nor infinite


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= MOST_COUNT


def _is_text(x: Any) -> bool:
    if not isinstance(x, str) or len(x) > LONGEST_TEXT:
        return False
    try:
        x.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _is_shape(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) <= LONG and all(map(_is_count, x))


def _is_plain(x: Any, deep: int = DEEP) -> bool:
    if isinstance(x, (list, tuple)):
        return deep > 0 and len(x) <= LONG and all(_is_plain(y, deep - 1) for y in x)
    if _is_number(x):
        return bool(-MOST_COUNT <= x <= MOST_COUNT)
    return x is None or isinstance(x, bool) or _is_text(x)


def _by_name(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: (
        isinstance(x, Mapping)
        and len(x) <= LONG
        and all(_is_text(k) and holds(v) for k, v in x.items())
    )


# -------------------------------------------------------------------- records
TEXT = Kind("a text", _is_text)
WORD = Kind("a text that is not empty", lambda x: _is_text(x) and x != "")
MAY_TEXT = Kind("a text", _is_text, optional=True)
MAY_COUNT = Kind("a whole number from 0 on", _is_count, optional=True)
SETTINGS = Kind(
    "numbers, texts and lists of them by name", _by_name(_is_plain), optional=True
)

KEY: Mapping[str, Kind] = {
    "op": WORD,
    "pass": WORD,
    "shapes": Kind("sizes by name", _by_name(_is_shape)),
    "dtypes": Kind("texts by name", _by_name(_is_text)),
    "params": Kind(SETTINGS.wanted, SETTINGS.holds),
    "device": WORD,
    "precision": MAY_TEXT,
}

IMPLEMENTATION: Mapping[str, Kind] = {
    "forward": WORD,
    "backward": MAY_TEXT,
    "config": SETTINGS,
    "backward_config": SETTINGS,
}

MEASUREMENT: Mapping[str, Kind] = {
    "implementation": Kind("an object", lambda x: isinstance(x, Mapping)),
    "version": WORD,
    "jax": WORD,
    "median_us": Kind("finite microseconds above 0", _is_time, optional=True),
    "sigma_us": Kind(
        "finite microseconds from 0 on",
        lambda x: _is_number(x) and 0 <= x <= MOST_US,
        optional=True,
    ),
    "runs": MAY_COUNT,
    "method": MAY_TEXT,
    "temp_bytes": MAY_COUNT,
    "problem": MAY_TEXT,
    "by_inputs": Kind(
        "finite microseconds above 0 by name", _by_name(_is_time), optional=True
    ),
    "note": MAY_TEXT,
    "clock_mhz": MAY_COUNT,
    "driver": MAY_TEXT,
}


# ------------------------------------------------------------------- verdicts
def wrong_key(data: Any, where: str = "key") -> str:
    """Returns what is wrong with a key's JSON, or ``""``.

    Example:
        >>> wrong_key([])
        'key is []; expected an object'
    """
    if problem := _wrong(data, KEY, where):
        return problem
    if data["op"] == PROGRAM and not _is_text(data["params"].get("digest")):
        return f"{where}.params of a whole program lacks 'digest'"
    if set(data["shapes"]) != set(data["dtypes"]):
        return f"{where}.dtypes names other operands than {where}.shapes"
    return ""


def wrong_measurement(data: Any, where: str = "measurement") -> str:
    """Returns what is wrong with a measurement's JSON, or ``""``.

    Example:
        >>> made = {"implementation": {"forward": "xla"}, "version": "xla", "jax": "0"}
        >>> wrong_measurement({**made, "median_us": -1.0})
        'measurement.median_us is -1.0; expected finite microseconds above 0'
    """
    return _wrong(data, MEASUREMENT, where) or _wrong(
        data["implementation"], IMPLEMENTATION, f"{where}.implementation"
    )


def _wrong(data: Any, fields: Mapping[str, Kind], where: str) -> str:
    if not isinstance(data, Mapping):
        return f"{where} is {shown(data)}; expected an object"
    for name, kind in fields.items():
        if name not in data:
            if not kind.optional:
                return f"{where} lacks {name!r}"
        elif not kind.holds(data[name]):
            return f"{where}.{name} is {shown(data[name])}; expected {kind.wanted}"
    for name in data:
        if name not in fields:
            return f"{where} has {shown(name)}, which no record has"
    return ""


def shown(value: Any) -> str:
    """Returns a value in a few characters, whatever it is.

    Example:
        >>> shown(10**400)
        '100000000000000000...0000000000000000000'
    """
    try:
        return _SHORT.repr(value)
    except ValueError:  # too many digits to be written
        return f"a huge {type(value).__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
