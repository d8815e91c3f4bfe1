"""One replacement at one place of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from rewriter.find.match import Match
from rewriter.gradients.backward import Backward
from rewriter.program.graph import Scope


@dataclass(frozen=True, eq=False)
class Splice:
    """One replacement at one place.

    Attributes:
        match: The replaced region.
        scope: The body that holds the equation of the result.
        position: That equation.
        call: ``call(**operands, **params)`` gives the op's result.
        label: The site's name in profiles.
        key: Splices with equal keys have equal code.
        backward: Gradients that are replaced together with it, in the same body.
    """

    match: Match
    scope: Scope
    position: int
    call: Callable[..., jax.Array]
    label: str = ""
    key: Any = None
    backward: Backward | None = None
