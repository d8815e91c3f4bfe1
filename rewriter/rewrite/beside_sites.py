"""Passes that change equations beside the sites, and the records of what they change.

A module of such a pass exports one `PASS`, and a record derived from `Change`. The
record also words its row in the report. One line in `PASSES` adds it to the engine.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from jax.extend.core import ClosedJaxpr

from rewriter.ops.device import Device
from rewriter.program.bodies import map_bodies


@dataclass(frozen=True)
class Change(abc.ABC):
    """What a pass changed beside the sites.

    Attributes:
        by: The name of the pass.
        what: What it changed: an op, a function such as ``"tanh"``, ``"product"``, or
            ``"residuals"``.
        where: The user's line.
    """

    by: ClassVar[str]
    what: str
    where: str

    @classmethod
    @abc.abstractmethod
    def row(cls, same: Sequence[Self]) -> tuple[str, ...]:
        """Returns the words of a report: how many, what changed, and further lines.

        Args:
            same: Changes of this kind with the same `what` and `where`.
        """

    def as_dict(self) -> dict[str, Any]:
        """Returns the change as a plain dict."""
        return {"by": self.by, **asdict(self)}


Changed = tuple[Any, Sequence[Change]]
"""A body after a pass, and what changed; the same body if nothing did."""


@dataclass(frozen=True)
class BodyPass:
    """A pass over the bodies of a program, inner bodies first.

    Attributes:
        kind: The record of what it changes, which has its name.
        change: ``change(body, device)`` gives the body after it, and the changes. The
            first line of its docstring says what the pass does.
        platforms: Where it is measured to be faster; empty for everywhere.
    """

    kind: type[Change]
    change: Callable[[Any, Device], Changed]
    platforms: frozenset[str] = frozenset()

    def __call__(
        self, program: ClosedJaxpr, device: Device
    ) -> tuple[ClosedJaxpr, tuple[Any, ...]]:
        """Returns a program after the pass, and what changed.

        Args:
            program: A program; it is returned itself if nothing changes.
            device: Where it will run.
        """
        if self.platforms and device.platform not in self.platforms:
            return program, ()
        found: list[Change] = []

        def change(body: Any) -> Any:
            after, changes = self.change(body, device)
            found.extend(changes)
            return after

        return map_bodies(program, change), tuple(found)
