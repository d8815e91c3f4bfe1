"""A recognised op: its place, its kernel, and why no other kernel was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewriter.measure.costs import UNKNOWN, Costs


@dataclass(frozen=True)
class Site:
    """One recognised op in the program, and the decision about it.

    Attributes:
        index: Its number in the report and in the picture.
        op: The op's name, such as ``"attention"``; for a special form, the general
            op's.
        where: Its line, such as ``"model.py:88 (Attention.__call__)"``.
        repeats: How often it runs: surrounding scan lengths multiplied.
        scope: The bodies around it: ``""``, ``"scan"``, ``"scan/remat"``.
        shapes: Its operands in text: ``"q f32[2,64,4,32] ..."``.
        params: The parameters read off the program.
        kernel: The kernel of both passes; ``"xla"`` means left as written.
        origin: Where the choice comes from: ``"forced"``, ``"tuned"``, ``"cached"``,
            ``"shipped"``, ``"nearest"``, ``"estimated"`` or ``"heuristic"``.
        replaced: Whether the program changed.
        not_chosen: ``(kernel, reason)`` for every other kernel.
        numerics: Differences in rounding, one sentence each.
        backward: Whether its gradient was found in the same program.
        config: The kernels' configs in words, where they were measured.
        again: Where a checkpoint runs its forward again for the gradients, such as
            ``"scan/remat"``; empty if it runs once.
        sharding: How it is split over devices, such as ``"b over data"``; empty on one
            device, and where it cannot be split.
        parts: The names of its parts' ops, if it is a composite.
        form: Its special form, such as ``"paged_attention"``; empty for the op itself.
        costs: Time and temporary memory of one run as written and as chosen, where
            known; of one device if it is split.
        called_from: The user's line that the site comes from, where `where` is a
            line of an installed library; else empty.
    """

    index: int
    op: str
    where: str
    repeats: int
    scope: str
    shapes: str
    params: Mapping[str, object]
    kernel: str
    origin: str
    replaced: bool
    not_chosen: tuple[tuple[str, str], ...] = ()
    numerics: tuple[str, ...] = ()
    backward: bool = False
    config: str = ""
    again: str = ""
    sharding: str = ""
    parts: tuple[str, ...] = ()
    form: str = ""
    costs: Costs = UNKNOWN
    called_from: str = ""

    def numbered(self, index: int) -> Site:
        """Returns the same site under another number.

        Programs have hundreds of equal sites; `dataclasses.replace` takes ten times as
        long.
        """
        made = object.__new__(Site)
        vars(made).update(vars(self), index=index)
        return made
