"""Requirements of ``require=``: how many sites of an op are found, or replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALL = "all"
KINDS = ("found", "replaced")
FORM = (
    "an op's name, 'all', or a dict of op name to a count such as {'attention': 24}, "
    "or to counts such as {'attention': {'found': 24, 'replaced': 12}}"
)


@dataclass(frozen=True, order=True)
class Requirement:
    """The fewest sites that an op must have.

    Attributes:
        op: The op's name.
        replaced: The number of sites that a kernel replaces.
        found: The number of sites that are recognised, replaced or not.
    """

    op: str
    replaced: int = 0
    found: int = 0

    def shortfall(self, found: int, replaced: int) -> str:
        """Returns in words what is missing, or "".

        Example:
            >>> Requirement("attention", replaced=2).shortfall(2, 1)
            'attention: 1 of 2 replaced by a kernel, 2 found'
        """
        parts = []
        if replaced < self.replaced:
            parts.append(f"{replaced} of {self.replaced} replaced by a kernel")
        if found < self.found:
            parts.append(f"{found} of {self.found} found")
        elif parts:
            parts.append(f"{found} found")
        return f"{self.op}: {', '.join(parts)}" if parts else ""

    def __str__(self) -> str:
        """As the user would write it in a dict."""
        if not self.found:
            return f"{self.op!r}: {self.replaced}"
        counts = {k: getattr(self, k) for k in KINDS if getattr(self, k)}
        return f"{self.op!r}: {counts}"


Requirements = str | tuple[Requirement, ...]
"""``"all"``, or what is required of each op."""


def requirements(value: object) -> Requirements:
    """Returns the value of ``require=`` as records.

    Args:
        value: An op's name, which stands for one replaced site; ``"all"``; a mapping of
            op names to counts; or records.

    Raises:
        ValueError: If it is something else.

    Example:
        >>> requirements({"attention": 2, "rms_norm": {"found": 1}})[0]
        Requirement(op='attention', replaced=2, found=0)
    """
    if value == ALL:
        return ALL
    if isinstance(value, str):
        return (Requirement(value, replaced=1),)
    if isinstance(value, Mapping):
        return tuple(sorted(_one(op, count) for op, count in value.items()))
    if isinstance(value, Iterable):
        parts = tuple(value)
        if all(isinstance(p, Requirement) for p in parts):
            return parts
        if all(isinstance(p, tuple) and len(p) == 2 for p in parts):
            return requirements(dict(parts))
    raise ValueError(value)


def written(required: Requirements) -> str:
    """Returns the value of ``require=`` that means these.

    Example:
        >>> written(requirements("attention"))
        "{'attention': 1}"
    """
    if isinstance(required, str):
        return repr(required)
    return "{" + ", ".join(map(str, required)) + "}"


def _one(op: object, count: object) -> Requirement:
    if not isinstance(op, str):
        raise ValueError(op)
    if not isinstance(count, Mapping):
        return Requirement(op, replaced=_number(count))
    if not count or not set(count) <= set(KINDS):
        raise ValueError(count)
    return Requirement(op, **{k: _number(n) for k, n in count.items()})


def _number(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError(value)
