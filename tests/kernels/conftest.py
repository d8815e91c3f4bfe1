"""Tests of kernels run once: in ``.ci/run``, on the newest version of JAX."""

from __future__ import annotations

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and of no other."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("once")
