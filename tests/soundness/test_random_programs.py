"""Random programs give what they give as they are written, also their gradients.

Seeds are fixed: what fails here fails again, by the command that its text begins with.
`python -m tests.soundness.run` draws more.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.soundness.check import FORWARD, GRAD_OF_REWRITTEN, WAYS, Way, check
from tests.soundness.grammar import program

TOGETHER = 15
CASES = 20
KNOWN = {
    29: "a row that is NaN, as -inf was added to all its scores, passes 0 to queries",
    47: "exponentials overflow as written, in float64 too; rewritten they do not",
}
"""By seed what is allowed to differ, see docs/numerics.md."""
WITH_GRADIENTS = 4
"""Cases whose gradients are compared, too: they take four times as long."""


@pytest.mark.once
@pytest.mark.parametrize("case", range(CASES))
def test_programs_compute_the_same(case: int) -> None:
    seeds = range(case * TOGETHER, (case + 1) * TOGETHER)
    ways = WAYS if case < WITH_GRADIENTS else (FORWARD,)
    outcome = check([program(seed) for seed in seeds], ways)
    wrong = [f for f in outcome.findings if f.program.seed not in KNOWN]
    assert not wrong, "\n".join(map(str, wrong))
    assert 3 * len(outcome.replaced) >= TOGETHER, "too few programs have a kernel"


@pytest.mark.once
@pytest.mark.parametrize(
    "kind",
    [
        "loss",
        "lookup",
        "score",
        "quantized",
        "words",
        "complex",
        "group",
        "computed",
        "merge",
        "router",
        "cache",
        "latent",
        "triangle",
        "labels",
        "layer",
        "inside",
    ],
)
@pytest.mark.parametrize(("first", "ways"), [(0, (FORWARD,)), (15, WAYS)])
def test_kinds_that_are_asked_for(kind: str, first: int, ways: Sequence[Way]) -> None:
    """Kinds that take no turns among the others."""
    seeds = range(first, first + TOGETHER)
    outcome = check([program(seed, kind) for seed in seeds], ways)
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    share = 15 if kind == "merge" else 4  # merges are mostly what they must not be
    assert share * len(outcome.replaced) >= TOGETHER, "too few programs have a kernel"


FOUND = {
    "loss": (127, 258, 541),
    "operand": (3034,),
    "ragged": (251, 1763),
    "norm": (888,),
    "unit": (1123, 3175),
    "difference": (19, 20011, 60022),
}
"""Seeds that differed, by what is allowed but for these: units that chose in a branch,
labels that are promised to be classes, and labels of uint32 beyond int32."""


@pytest.mark.once
@pytest.mark.parametrize("kind", FOUND)
def test_seeds_that_differed(kind: str) -> None:
    outcome = check([program(seed, kind) for seed in FOUND[kind]], WAYS)
    assert not outcome.findings, "\n".join(map(str, outcome.findings))


ROUNDING_ALONE = {"loss": 541, "operand": 3034}
"""Seeds of which small gradients are rounding alone, by kind."""


@pytest.mark.once
@pytest.mark.parametrize("kind", ROUNDING_ALONE)
def test_what_is_wrong_beside_rounding_is_found(kind: str) -> None:
    """Gradients that are a twentieth too large differ by more than rounding."""
    larger = lambda results: [[x * 1.05 for x in of] for of in results]
    plain = GRAD_OF_REWRITTEN.original
    wrong = Way("wrong", plain, lambda programs: lambda v: larger(plain(programs)(v)))
    assert check([program(ROUNDING_ALONE[kind], kind)], [wrong]).findings
