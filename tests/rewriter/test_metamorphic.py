"""Random mutations: meaning kept, match kept; meaning changed, no wrong number.

Sixty of each by default. In full (about half an hour on two cores):

    python -m tests.spellings.metamorphic --count 2000
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from tests.spellings import metamorphic


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Skip XLA's optimizations: compiling takes far longer than running here."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def test_kept_meaning_keeps_the_match() -> None:
    outcome = metamorphic.run_keeping(60)
    assert all("found" in why for why in outcome.failures.values())  # no wrong number
    assert len(outcome.failures) <= 3  # a match rate of 95% or more


def test_changed_meaning_never_gives_a_wrong_number() -> None:
    outcome = metamorphic.run_changing(60)
    assert not outcome.failures


def test_kept_meaning_keeps_the_gradients() -> None:
    outcome = metamorphic.run_keeping(40, gradients=True)
    assert all("found" in why for why in outcome.failures.values())  # no wrong number
    assert len(outcome.failures) <= 2


def test_changed_gradients_never_give_a_wrong_number() -> None:
    outcome = metamorphic.run_changing(40, gradients=True)
    assert not outcome.failures
