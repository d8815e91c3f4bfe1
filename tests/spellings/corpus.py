"""All spellings of all operations in one list."""

from __future__ import annotations

from tests.spellings import (
    attention,
    cross_entropy,
    gated_linear_unit,
    normalization,
    ragged_dot,
)
from tests.spellings.spelling import Spelling

SPELLINGS: tuple[Spelling, ...] = (
    *attention.SPELLINGS,
    *normalization.SPELLINGS,
    *gated_linear_unit.SPELLINGS,
    *ragged_dot.SPELLINGS,
    *cross_entropy.SPELLINGS,
)
BY_NAME = {s.name: s for s in SPELLINGS}
assert len(BY_NAME) == len(SPELLINGS)
