"""Facts about one match beyond its reading: gradients, shards, repeats."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.find.match import Match
from rewriter.gradients.backward import Backward
from rewriter.program.graph import Scope
from rewriter.site.shards import Shards


@dataclass(frozen=True, eq=False)
class Facts:
    """A match, with the facts that later passes add.

    Attributes:
        match: The match.
        backward: Its gradients in the same program; ``None`` if none can be replaced.
        no_backward: Why its gradients cannot be distinguished from other values, if so.
        home: The place whose residuals the gradients read, and the position before
            which the site then stands; ``None`` without gradients.
        shards: How it is split over devices; text that says why, if it is left to XLA;
            ``None`` on one device.
        times: How often its layer occurs, counting equal layers that were left out.
        read_on: Why its products stay computed although it is replaced; ``""`` if they
            do not.
    """

    match: Match
    backward: Backward | None = None
    no_backward: str = ""
    home: tuple[tuple[Scope, int], int] | None = None
    shards: Shards | str | None = None
    times: int = 1
    read_on: str = ""

    @property
    def differentiated(self) -> bool:
        """Whether its gradients are replaced with it."""
        return self.backward is not None
