"""Maps each rewritten equation to the original equation that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Origins:
    """The original equations of the equations of a program with splices.

    Attributes:
        position: By the id of an equation, the position of its original in the program
            before. For a new equation, the position of the one before it.
        label: The label of a splice, by the id of its equations.
        instead: Replacements of variables of the program before.
    """

    position: Mapping[int, int]
    label: Mapping[int, str]
    instead: Mapping[Any, Any]
