"""Wrong arguments are answered with the argument, what it got, and what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import rewriter
from rewriter.errors import ConfigError, PatternError, TraceError


def double(x: Any) -> Any:
    return x + x


X = jnp.ones(3)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "patterns": (
        lambda: rewriter.optimize(double, patterns=5),
        ConfigError,
        "patterns=5",
    ),
    "grad": (lambda: rewriter.verify(double, grad="yes"), ConfigError, "grad='yes'"),
    "draws": (lambda: rewriter.verify(double, draws=-1), ConfigError, "draws=-1"),
    "no number": (lambda: rewriter.verify(double, draws="a"), ConfigError, "draws='a'"),
    "pattern": (lambda: rewriter.pattern(5), PatternError, "got 5"),
    "a text to verify": (lambda: rewriter.verify(double)("a"), TraceError, "str"),
    "an object to verify": (
        lambda: rewriter.verify(double)(object()),
        TraceError,
        "object",
    ),
    "a text to time": (lambda: rewriter.benchmark(double)("a"), TraceError, "str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match="(?s).*" + text.replace("(", r"\(")):
        call()
