"""What tests of programs with few bits share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
