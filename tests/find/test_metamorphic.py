"""Random mutations: meaning kept, match kept; meaning changed, no wrong number.

Thirty of each by default, sixty where slow tests run. In full (about half an hour
on two cores):

    python -m tests.spellings.metamorphic --count 2000
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from tests import slow
from tests.spellings import metamorphic

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize("count", slow.first(1, [30, 60]))
def test_kept_meaning_keeps_the_match(count: int) -> None:
    outcome = metamorphic.run_keeping(count)
    assert all("found" in why for why in outcome.failures.values())  # no wrong number
    assert len(outcome.failures) <= count // 20  # a match rate of 95% or more


@pytest.mark.parametrize("count", slow.first(1, [30, 60]))
def test_changed_meaning_never_gives_a_wrong_number(count: int) -> None:
    outcome = metamorphic.run_changing(count)
    assert not outcome.failures


@pytest.mark.parametrize("count", slow.first(1, [20, 40]))
def test_kept_meaning_keeps_the_gradients(count: int) -> None:
    outcome = metamorphic.run_keeping(count, gradients=True)
    assert all("found" in why for why in outcome.failures.values())  # no wrong number
    assert len(outcome.failures) <= count // 20


@pytest.mark.parametrize("count", slow.first(1, [20, 40]))
def test_changed_gradients_never_give_a_wrong_number(count: int) -> None:
    outcome = metamorphic.run_changing(count, gradients=True)
    assert not outcome.failures
