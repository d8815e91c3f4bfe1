"""Facts about one match beyond its reading: gradients, shards, repeats."""

from __future__ import annotations

from dataclasses import dataclass

from rewriter.find.match import Match
from rewriter.gradients.backward import Backward
from rewriter.program.graph import Scope
from rewriter.site.shards import Shards


@dataclass(frozen=True, eq=False)
class Facts:
    """A match and what later stages found out about it.

    Attributes:
        match: The match.
        backward: Its gradients in the same program; ``None`` if there are none that
            can be replaced.
        no_backward: Why its gradients cannot be told from other values, if so.
        home: The place whose residuals the gradients read, and the position in front
            of which the site then stands; ``None`` without gradients.
        shards: How it is spread over devices; text if it is left to XLA, and why;
            ``None`` on one device.
        times: How often its layer occurs, where equal layers were left out.
        read_on: Why its products are computed even if it is replaced; ``""`` if they
            are not.
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
