"""A choice: what computes a site on one platform, and why nothing else does."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewriter.measure.costs import UNKNOWN, Costs
from rewriter.site.implementation import RING, Implementation


@dataclass(frozen=True)
class Choice:
    """The kernels that compute a site on one platform, and why others do not.

    Attributes:
        implementation: The kernels of both passes.
        origin: ``"forced"``, ``"tuned"`` (given by the user), ``"cached"``,
            ``"shipped"``, ``"nearest"``, ``"simulated"`` (by the device's compiler,
            where nothing was measured), ``"estimated"`` (by a model of the device) or
            ``"heuristic"``.
        not_chosen: (name, reason) for everything else.
        ring: Whether it computes on parts of operands that devices pass around.
        costs: Time and temporary memory as written and as chosen, where known.
    """

    implementation: Implementation
    origin: str
    not_chosen: tuple[tuple[str, str], ...] = field(default=())
    ring: bool = False
    costs: Costs = UNKNOWN

    @property
    def kernel(self) -> str:
        """The kernels' names; ``"xla"`` leaves the program as written."""
        name = self.implementation.name
        return f"{RING} of {name}" if self.ring else name


AS_WRITTEN = Implementation()
