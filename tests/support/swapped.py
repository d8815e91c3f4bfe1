"""Another program in place of the rewritten one, as if a rewrite were wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

from rewriter.rewrite.rewritten import Rewritten

ENGINE = importlib.import_module("rewriter.run.analysis")


def swapped(monkeypatch: pytest.MonkeyPatch, other: Callable[..., Any]) -> None:
    """Has the rewriter put another function in the program's place."""

    def rewrite(closed: Any, *rest: Any) -> Rewritten:
        del rest
        return Rewritten(jax.make_jaxpr(other)(*closed.in_avals))

    monkeypatch.setattr(ENGINE, "rewrite", rewrite)
