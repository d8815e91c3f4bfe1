"""Random programs give what they give as they are written, also their gradients.

Seeds are fixed: what fails here fails again, by the command that its text begins with.
`python -m tests.soundness.run` draws more.
"""

from __future__ import annotations

import pytest

from tests.soundness.check import FORWARD, WAYS, check
from tests.soundness.grammar import program

TOGETHER = 15
CASES = 20
WITH_GRADIENTS = 4
"""Cases whose gradients are compared, too: they take four times as long."""


@pytest.mark.parametrize("case", range(CASES))
def test_programs_compute_the_same(case: int) -> None:
    seeds = range(case * TOGETHER, (case + 1) * TOGETHER)
    ways = WAYS if case < WITH_GRADIENTS else (FORWARD,)
    outcome = check([program(seed) for seed in seeds], ways)
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    assert 3 * len(outcome.replaced) >= TOGETHER, "too few programs have a kernel"
